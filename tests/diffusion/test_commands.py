"""A diffusion model of OpenAI's form before a classifier: logs, their verification, attacks, and
what is refused.
"""

import math
from pathlib import Path

import pytest
import torch
from scipy.stats import norm
from torch import nn

import smoothadv
from smoothadv.base.errors import DoubtfulWarning
from smoothadv.diffusion.one_step import load_diffusion
from smoothadv.diffusion.openai_unet import Family, OpenAIUNet, Shape
from smoothadv.evaluation.setup import prepare
from smoothadv.evaluation.specs import CertifySpec
from smoothadv.models.load import load, load_classifier
from smoothadv.models.spec import ModelSpec
from smoothadv.objectives.ft_cadis import FTCADIS
from smoothadv.statistics.bounds import lower_confidence_bound
from smoothadv.training import teacher as teachers
from support.commands import call, manifest_of, refused, rows, snapshot, succeed, timeless
from support.diffusion import small_unet
from support.verifier import script as script
from support.verifier import verdict

QUICK = ["--device", "cpu", "--N", 40, "--N0", 10, "--max", 3]


@pytest.fixture(scope="module")
def unet(tmp_path_factory) -> Path:
    return small_unet(tmp_path_factory.mktemp("unet"))


@pytest.mark.parametrize(
    ("options", "step", "draws_its_noise"),
    [
        (["--sound"], 1158, True),
        (["--timestep", 1300, "--resize", "8:bilinear", "--local-noise", "0.1:3"], 1300, False),
    ],
    ids=["sound", "number, resized"],
)
def test_log_says_which_step_and_is_repeated_verified_and_attacked(
    options, step, draws_its_noise, unet, checkpoint, workplace, capsys, script
):
    """False alarms of the attack, whatever the model: 0.001 of all runs."""
    behind = ["--denoiser", f"openai:{unet}"]
    outcome = call(
        capsys, "certify", "digits", checkpoint, 0.25, "log.tsv", *QUICK, *behind, *options
    )
    assert outcome.code == 0, outcome.err
    settings = manifest_of(Path("log.tsv"))["settings"]
    facts = settings["denoiser"]
    assert (facts["arch"], facts["timestep"], settings["sigma"]) == ("openai:UNet", step, 0.25)
    assert ("noise_sd" in facts) == draws_its_noise
    assert facts.get("noise_sd", 0.25) == pytest.approx(0.25, abs=0.0002)
    assert ("local_noise" in settings) == ("resize" in settings) == ("--resize" in options)
    outcome = call(capsys, "certify", "verify", "log.tsv", "--rows", 1, "--device", "cpu")
    assert outcome.code == 0 and "all are equal" in outcome.out
    assert verdict(script, Path("log.tsv"), capsys)[0]
    assert call(capsys, "analyze", "summary", "log.tsv").code == 0
    attack = ["digits", checkpoint, 0.25, "out", "--N", 40, "--num-steps", 2, "--device", "cpu"]
    attack += ["--num-noise-vec", 2, "--against", "log.tsv", *behind]
    attack += [word for word in options if word != "--sound"]
    outcome = call(capsys, "attack", *attack)
    assert outcome.code == 0, outcome.err
    assert any(float(row["attack_norm"]) > 0 for row in rows(Path("out/against.tsv")))
    if "--resize" in options:  # another function: its flips would refute nothing
        without = attack[: attack.index("--local-noise")]
        for changed, name in (
            ([*attack, "--resize", "8:bicubic"], "resize"),
            (without, "local_noise"),
        ):
            refusal = call(capsys, "attack", *changed, "--overwrite")
            assert refusal.code == 1
            assert f"log.tsv certifies something else: {name} was" in refusal.err


def test_noise_is_that_of_the_step_and_the_radius_that_of_sigma(unet, checkpoint, monkeypatch):
    """With a schedule whose first step that is noisy enough has 1.2 times the noise."""
    spec = CertifySpec(
        dataset="digits",
        model=checkpoint,
        sigma=0.25,
        n=20,
        limit=1,
        device="cpu",
        denoiser=f"openai:{unet}",
    )
    alpha_bars = torch.tensor([0.9999, 0.9, 1 / 1.36, 0.01])
    monkeypatch.setattr(Family, "alpha_bars", alpha_bars)
    with pytest.warns(DoubtfulWarning, match=r"step 2 has noise of 0\.3, not of 0\.25"):
        evaluation = prepare(spec, None)
    (voter,) = evaluation.voters
    assert (
        voter.noise.sigma == pytest.approx(0.3) and voter.base.settings["denoiser"]["timestep"] == 2
    )
    options = {"sigma": 0.25, "n0": 10, "n": 40, "limit": 4, "device": "cpu"}
    found = smoothadv.certify(checkpoint, "digits", denoiser=spec.denoiser, **options)
    certified = found[found.predict >= 0]
    assert len(certified) and all(
        0.25 * norm.ppf(lower_confidence_bound(row.successes, row.trials, 0.001)) >= row.radius > 0
        for row in certified.itertuples()
        if row.radius > 0
    )


def test_model_is_what_its_parts_make_together(unet, checkpoint):
    images = torch.rand(3, 1, 8, 8)
    spec = ModelSpec(
        model=str(checkpoint),
        dataset="digits",
        sigma=0.25,
        denoiser=f"openai:{unet}",
        resize="8:bicubic",
        local_noise="0.25:4",
    )
    base = load(spec)[1]
    denoiser, _ = load_diffusion(spec.denoiser, (1, 8, 8), 0.25)
    classifier = load_classifier(checkpoint, "digits")
    noise = 0.25 * torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(42))
    with torch.inference_mode():
        copies = denoiser(images)[:, None] + noise
        shares = torch.stack([classifier(each) for each in copies]).softmax(-1).mean(1)
        assert torch.allclose(base.module(images).exp(), shares, atol=1e-5)


def test_module_is_trained_and_certified_behind_it_on_resized_images(unet, workplace):
    """Where nothing tells how many classes there are but its logits of an image of that size."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(256, 3))
    images, labels = torch.rand(12, 1, 8, 8), torch.arange(12) % 3
    before = {"denoiser": f"openai:{unet}", "resize": "16", "device": "cpu"}
    objective = FTCADIS(noise_sd=0.25, num_noise_vec=2, noise_steps=1)
    smoothadv.train(
        module, images, labels, objective=objective, outdir="run", epochs=1, batch=6, **before
    )
    found = smoothadv.certify(module, images[:2], labels[:2], sigma=0.25, n0=10, n=20, **before)
    assert len(found) == 2 and set(found.predict) <= {-1, 0, 1, 2}
    train = ["digits", "digits_resnet8", "kept", "--noise", 0.25, "--steps-per-epoch", 1]
    train += ["--epochs", 1, "--evaluate-images", 1, "--resize", 12, "--device", "cpu"]
    succeed("train", *train, "--denoiser", f"openai:{unet}")
    succeed("push", "kept/checkpoint.pth.tar", "me/kept", "--to", "files")
    page = Path("files/README.md").read_text()
    assert "0.25 LOG --denoiser DENOISER --resize 12:bicubic" in page
    assert 'denoiser="DENOISER", resize="12:bicubic", sigma=0.25)' in page


@pytest.fixture
def faulty(unet, workplace) -> None:
    """Files that are no model of this kind, by what is wrong with them."""
    weights = torch.load(unet, weights_only=True)
    (workplace / "truncated").write_bytes(unet.read_bytes()[:5000])
    made = {
        "another": {"state_dict": weights},
        "more": {**weights, "ema.weight": torch.zeros(3)},
        "numbered": {0: torch.zeros(1)},
        "whole": {name: weight.long() for name, weight in weights.items()},
        "narrow": {
            name: weight[:30] if name.endswith("out_layers.3.weight") else weight
            for name, weight in weights.items()
        },
        "damaged": {**weights, "out.2.weight": weights["out.2.weight"] * math.nan},
        "flat": {**weights, "time_embed.0.weight": torch.zeros(128)},
        "colour": OpenAIUNet(Shape(3, 6, 32, (32, 32), 1, (False, True), True, False)).state_dict(),
        "odd": OpenAIUNet(Shape(1, 2, 32, (32,) * 5, 1, (False,) * 5, True, False)).state_dict(),
    }
    for name, content in made.items():
        torch.save(content, workplace / name)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["openai:nowhere.pt"], ["openai:nowhere.pt", "cannot be read", "No such file"]),
        (["openai:."], ["openai:.", "cannot be read"]),
        (["openai"], ["names no file: write openai:FILE.pt or diffusers:FOLDER"]),
        (["UNET.pt"], ["not the name of their architecture: --denoiser openai:"]),
        (["openai:damaged"], ["--denoiser openai:damaged makes an image with NaN"]),
        (["openai:truncated"], ["openai:truncated", "cannot be read"]),
        (["openai:another"], ["is no state dict of"]),
        (["openai:more"], ["ema.weight", "expected no such weight"]),
        (["openai:numbered"], ["is no state dict of"]),
        (["openai:whole"], ["is no state dict of"]),
        (["openai:narrow"], ["is no U-Net of OpenAI's", "divisible"]),
        (["openai:flat"], ["is no U-Net of OpenAI's", "number of dimensions"]),
        (["openai:colour"], ["takes images of 3 channels and returns 6; these have 1"]),
        (["openai:odd"], ["does not run on images of shape [1, 8, 8]"]),
        (["UNET", "--timestep", 4000], ["--timestep 4000", "steps up to 3999"]),
    ],
    ids=lambda value: str(value[0]) if value and str(value[0]).startswith("openai") else None,
)
def test_what_is_no_such_model_is_one_line(
    options, words, faulty, unet, checkpoint, workplace, capsys
):
    before = snapshot(workplace)
    given = {"UNET": f"openai:{unet}", "UNET.pt": unet}
    options = [given.get(one, one) for one in options]
    command = ["certify", "digits", checkpoint, 0.25, "log.tsv", *QUICK, "--denoiser", *options]
    assert refused(call(capsys, *command), *words)
    assert snapshot(workplace) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--timestep", "nearest"], ["--timestep is for a diffusion model"]),
        (
            ["--timestep", "soon", "--denoiser", "openai:x"],
            ["--timestep", "'soon' is not released, nearest or the number"],
        ),
        (["--timestep", -1, "--denoiser", "openai:x"], ["--timestep", "-1"]),
        (["--resize", "big"], ["--resize", "'big'"]),
        (["--resize", "0"], ["--resize", "'0'"]),
        (["--resize", "4000000000"], ["--resize", "4,096"]),
        (["--resize", "32:lanczos"], ["--resize", "lanczos", "bicubic"]),
        (["--local-noise", "0"], ["--local-noise"]),
        (["--local-noise", "0.25:1001"], ["--local-noise", "1,000"]),
        (["--local-noise", "0.25:none"], ["--local-noise", "'none'"]),
    ],
)
def test_words_that_mean_nothing_are_refused(options, words, checkpoint, workplace, capsys):
    command = ["certify", "digits", checkpoint, 0.25, "log.tsv", *QUICK, *options]
    assert refused(call(capsys, *command), *words, code=2)
    assert not Path("log.tsv").exists()


def test_log_of_another_step_size_or_noise_is_not_continued(unet, checkpoint, workplace, capsys):
    certify = ["certify", "digits", checkpoint, 0.25, "log.tsv", *QUICK, "--max", 1]
    certify += ["--denoiser", f"openai:{unet}"]
    options = ["--resize", "8", "--local-noise", "0.1"]
    assert call(capsys, *certify, *options).code == 0
    before = timeless(Path("log.tsv"))
    for changed, difference in [
        ([*options, "--timestep", "nearest"], "timestep was 'released', now 'nearest'"),
        (
            ["--resize", "8:bilinear", "--local-noise", "0.1"],
            "resize was '8:bicubic', now '8:bilinear'",
        ),
        (["--resize", "8"], "local_noise was '0.1:5', now None"),
    ]:
        text = f"log.tsv with other settings: {difference}; --overwrite"
        assert refused(call(capsys, *certify, *changed), text)
    assert call(capsys, *certify, *options).code == 0 and timeless(Path("log.tsv")) == before


BEHIND = ["train", "digits", "digits_resnet8", "behind", "--noise", 0.25, "--steps-per-epoch", 1]
BEHIND += ["--epochs", 1, "--evaluate-images", 1, "--batch", 16, "--device", "cpu", "--resize", 12]


@pytest.fixture
def behind(unet, workplace) -> Path:
    """A checkpoint that was trained behind the model, on images of another size."""
    succeed(*BEHIND, "--denoiser", f"openai:{unet}")
    return Path("behind/checkpoint.pth.tar")


def test_what_stands_before_a_network_is_compared_with_its_training(behind, unet, capsys):
    certify = ["certify", "digits", behind, 0.25, "log.tsv", *QUICK, "--max", 1, "--overwrite"]
    denoiser = ["--denoiser", f"openai:{unet}"]
    for options, words in (
        (["--resize", 12, *denoiser], ()),
        (["--resize", 12], ("trained behind a denoiser, and none",)),
        (["--resize", 12, *denoiser, "--timestep", 1200], ("another denoiser, or another step",)),
        (["--resize", "12:bilinear", *denoiser], ("--resize 12:bicubic, not 12:bilinear",)),
    ):
        outcome = call(capsys, *certify, *options)
        doubts = [word for word in ("behind", "--resize") if f"{word}" in outcome.err]
        assert outcome.code == 0 and all(word in outcome.err for word in words)
        assert bool(doubts) == bool(words), outcome.err
    outcome = call(capsys, *BEHIND, "--resume")
    assert refused(outcome, "another recipe: --denoiser was '") and outcome.err.count(" was ") == 1
    content = torch.load(behind, weights_only=True)
    torch.save({**content, "dataset": "mnist"}, behind)
    outcome = call(capsys, *certify, "--resize", 12, *denoiser)
    assert outcome.code == 0 and "was trained on 'mnist', not on 'digits'" in outcome.err
    torch.save({**content, "image_shape": [1, 8, 8]}, behind)
    refusal = call(capsys, "quantize", "digits", behind, 0.25, "q.pth.tar")
    assert refused(refusal, "behind a denoiser, which a network of integers cannot have")
    outcome = call(capsys, "certify", "cifar10", behind, 0.25, "o.tsv", "--device", "cpu")
    assert outcome.code and "--resize" not in outcome.err, "it would not help"


def test_teacher_that_was_trained_behind_it_stands_behind_it(behind, unet, capsys, monkeypatch):
    train = ["digits", "digits_resnet8", "taught", "--noise", 0.25, "--steps-per-epoch", 1]
    train += ["--objective", "distillation", "--teacher", behind, "--epochs", 1, "--device", "cpu"]
    train += ["--evaluate-images", 1, "--batch", 4]
    refusal = call(capsys, "train", *train)
    assert refused(refusal, "the teacher behind/checkpoint.pth.tar was trained behind a denoiser")
    stability = ["digits", "digits_dncnn", "d", "--noise", 0.25, "--objective", "stability"]
    refusal = call(capsys, "train_denoiser", *stability, "--classifier", behind, "--device", "cpu")
    assert refused(refusal, "--classifier behind/checkpoint.pth.tar was trained behind a denoiser")
    taught, load_of = [], teachers.load_teacher
    monkeypatch.setattr(
        "smoothadv.training.setup.load_teacher",
        lambda *given: taught.append(load_of(*given)) or taught[0],
    )
    outcome = call(capsys, "train", *train, "--denoiser", f"openai:{unet}", "--timestep", 1200)
    assert outcome.code == 0 and "the teacher: the model was trained behind another" in outcome.err
    taught.clear()
    capsys.readouterr()
    outcome = call(capsys, "train", *train, "--denoiser", f"openai:{unet}", "--overwrite")
    assert outcome.code == 0 and "the teacher" not in outcome.err
    images, spec = torch.rand(2, 1, 8, 8), {"model": str(behind), "dataset": "digits"}
    base = load(ModelSpec(**spec, sigma=0.25, denoiser=f"openai:{unet}", resize="12"))[1]
    with torch.inference_mode():
        assert torch.allclose(taught[0].network(images), base.module(images), atol=1e-4)
    assert taught[0].sha256 != base.settings["checkpoint_sha256"], "it keys the cache of votes"
