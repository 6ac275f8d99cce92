"""smoothadv.certify, predict, attack, falsify and train: on modules and images of all kinds,
resumable, and checked; without a file, Python gets the rows that it would read from one.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, StackDataset, TensorDataset

import smoothadv
from smoothadv.architectures.ensemble import Ensemble
from smoothadv.attacks.estimators import ESTIMATORS
from smoothadv.attacks.pgd import PGD
from smoothadv.attacks.smoothed_attack import SmoothedAttack
from smoothadv.base.errors import UserError
from smoothadv.core import Smooth
from smoothadv.noise import GaussianNoise
from smoothadv.objectives.stability import Stability
from smoothadv.records.readers import read_examples
from support.commands import call, rows, timeless
from support.evaluations import key_of_log

SIGMA, COUNT, CLASSES = 0.5, 6, 4
# One batch for all that is compared: another size may round a logit, and decide a vote, in another
# way.
BATCH = 16
QUICK = {"sigma": SIGMA, "n0": 20, "n": 200, "device": "cpu", "batch": BATCH}


def network() -> nn.Sequential:
    """A small network with batch normalization, whose classes differ from image to image."""
    torch.manual_seed(3)
    layers = [
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 64, CLASSES),
    ]
    return nn.Sequential(*layers)


class Output:
    """What libraries of transformers return."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


class Returning(nn.Module):
    """A network whose logits are wrapped."""

    def __init__(self, wrap) -> None:
        super().__init__()
        self.network, self.wrap = network(), wrap

    def forward(self, images: torch.Tensor):
        return self.wrap(self.network(images))


IMAGES = np.random.default_rng(0).random((COUNT, 3, 8, 8), dtype=np.float32)
LABELS = np.arange(COUNT) % CLASSES


SAME = {
    "logits": (network, (IMAGES, LABELS)),
    "object": (lambda: Returning(Output), (IMAGES, LABELS)),
    "dict": (
        lambda: Returning(lambda logits: {"logits": logits, "features": None}),
        (IMAGES, LABELS),
    ),
    "training": (lambda: network().train(), (IMAGES, LABELS)),
    "dataset": (network, (StackDataset(IMAGES, LABELS),)),
    "dataset of tensors": (network, (TensorDataset(torch.tensor(IMAGES), torch.tensor(LABELS)),)),
}


def expected_in(log: Path) -> pd.DataFrame:
    """What a log should hold: each image certified by itself, with the noise that is its own."""
    smooth = Smooth(network(), CLASSES, SIGMA)
    noise = GaussianNoise(SIGMA, 0, key=key_of_log(log))
    numbers = (QUICK["n0"], QUICK["n"], 0.001, BATCH)
    found = [
        smooth.certificate(image, *numbers, stream=noise.stream(index, torch.device("cpu")))
        for index, image in enumerate(torch.tensor(IMAGES))
    ]
    columns = {"idx": range(COUNT), "label": LABELS, "predict": [one.prediction for one in found]}
    counts = {name: [getattr(one, name) for one in found] for name in ("radius", "successes")}
    return pd.DataFrame({**columns, **counts})


def assert_expected(found: pd.DataFrame, expected: pd.DataFrame) -> None:
    assert len(expected) == COUNT and 0 < (expected.radius > 0).sum(), (
        "there is something to compare"
    )
    for name in expected:
        assert found[name].tolist() == expected[name].tolist(), name
    assert found.correct.tolist() == (expected.predict == expected.label).astype(int).tolist()


@pytest.mark.parametrize("kind", SAME)
def test_modules_and_datasets_of_all_kinds_get_the_certificates_of_smooth(kind, tmp_path):
    log, (make, images) = tmp_path / "log.tsv", SAME[kind]
    assert_expected(smoothadv.certify(make(), *images, **QUICK, log=log), expected_in(log))


def test_the_module_is_left_as_it_was():
    model = network().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    smoothadv.certify(model, IMAGES, LABELS, **QUICK)
    smoothadv.predict(model, IMAGES, LABELS, sigma=SIGMA, n=20, attack=PGD(0.5, 1))
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(
        parameter.requires_grad and parameter.grad is None for parameter in model.parameters()
    )


class Reading(nn.Module):
    """A network that leaves nothing of its images, if it ``overwrites`` them."""

    def __init__(self, overwrites: bool) -> None:
        super().__init__()
        self.network, self.overwrites = network(), overwrites

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits = self.network(images.clone())
        if self.overwrites:
            images.sub_(1).zero_()
        return logits


def _as_classified(model: nn.Module, images: torch.Tensor) -> list[list[float]]:
    attack = SmoothedAttack(PGD(0.5, 2), SIGMA, 2, batch=4)
    moved = attack(model, images, torch.arange(COUNT) % CLASSES)
    return Ensemble([model, model], "logits")(moved).tolist()


def _trained(model: nn.Module, images: torch.Tensor) -> list:
    with TemporaryDirectory() as outdir:
        about = {"objective": Stability(noise_sd=SIGMA), "outdir": outdir, "device": "cpu"}
        history = smoothadv.train(model, images, LABELS, **about, epochs=1, quiet=True).history
    columns = [name for name in history[0] if name.startswith(("train_", "test_"))]
    return [history[0][name] for name in columns if "time" not in name]


USES = {
    "certify": lambda model, images: smoothadv.certify(model, images, LABELS, **QUICK),
    "sound": lambda model, images: smoothadv.certify(model, images, LABELS, **QUICK, sound=True),
    "predict": lambda model, images: smoothadv.predict(model, images, LABELS, sigma=SIGMA, n=99),
    **{
        f"attack {gradient}": lambda model, images, gradient=gradient: smoothadv.attack(
            model,
            images,
            LABELS,
            sigma=SIGMA,
            n=99,
            num_noise_vec=4,
            attack=PGD(0.5, 2, ESTIMATORS[gradient][0](SIGMA)),
            restarts=2,
        )
        for gradient in ESTIMATORS
    },
    "cascade": lambda model, images: smoothadv.certify(
        None, images, LABELS, stages=[(model, 1.0), (model, 0.25)], n0=20, n=99
    ),
    "ensemble": lambda model, images: smoothadv.predict(
        Ensemble([model, model, model], "probabilities"), images, LABELS, sigma=SIGMA, n=99
    ),
    "arrays of the caller": _as_classified,
    "training": _trained,
}


@pytest.mark.parametrize("use", USES)
def test_a_network_may_overwrite_its_images(use):
    images = torch.tensor(IMAGES).mul(255).round().div(255)
    before, found = images.clone(), []
    for overwrites in (False, True):
        found.append(USES[use](Reading(overwrites), images))
        assert torch.equal(images, before)
    assert str(found[0]) == str(found[1])


def test_a_log_is_what_the_commands_write_and_read(tmp_path, capsys):
    log = tmp_path / "logs" / "mine.tsv"
    found = smoothadv.certify(network(), IMAGES, LABELS, **QUICK, log=log, name="noise")
    expected = expected_in(log)
    assert_expected(found, expected)
    assert [row["idx"] for row in rows(log)] == [str(index) for index in range(COUNT)]
    manifest = json.loads(log.with_name("mine.tsv.manifest.json").read_text())
    assert (
        manifest["settings"]["dataset"] == "noise"
        and len(manifest["settings"]["module_sha256"]) == 64
    )
    assert manifest["runs"][0]["image_shape"] == [3, 8, 8]
    assert manifest["runs"][0]["command"][0] == "smoothadv.certify"
    table = call(capsys, "analyze", "table", log, "--radii", 0, "--format", "csv")
    assert table.code == 0 and float(table.out.splitlines()[1].split(",")[-1]) == pytest.approx(
        (expected.predict == expected.label).mean()
    )
    linf = call(
        capsys, "analyze", "table", log, "--norm", "linf", "--radii", "1/255", "--format", "csv"
    )
    assert (linf.code, linf.err) == (0, ""), "the manifest tells the dimension of the images"


def test_a_log_is_continued_only_by_the_same_call(tmp_path):
    log = tmp_path / "mine.tsv"

    def certified(model: nn.Module, images: np.ndarray = IMAGES, **changed: object):
        return smoothadv.certify(model, images, LABELS, **{**QUICK, **changed}, log=log)

    assert len(certified(network(), limit=2)) == len(rows(log)) == 2
    assert_expected(certified(network()), expected_in(log))
    other, moved = network(), IMAGES.copy()
    with torch.no_grad():
        other[4].bias[0] += 1e-6
    moved[3, 0, 0, 0] = 0.5
    for model, images, changed, word in [
        (other, IMAGES, {}, "module_sha256 was"),
        (network(), moved, {}, "dataset_fingerprint was"),
        (network(), IMAGES, {"sigma": 0.25}, "sigma was 0.5"),
        (network(), IMAGES, {"existing": "refuse"}, "exists already"),
    ]:
        with pytest.raises(UserError, match=word):
            certified(model, images, **changed)
    assert len(certified(other, existing="overwrite")) == COUNT


HANDED_OVER = {
    "array": lambda images, path: (images, [*range(10)]),
    "dataset": lambda images, path: (TensorDataset(images, torch.arange(10)),),
    "loader": lambda images, path: (DataLoader(TensorDataset(images, torch.arange(10))),),
    "file": lambda images, path: (
        np.savez(path, images=images, labels=[*range(10)]),
        f"npz:{path}",
    )[1:],
}


@pytest.mark.parametrize(
    ("kind", "model"), [*((kind, "checkpoint") for kind in HANDED_OVER), ("array", "integers")]
)
def test_images_of_8_bits_are_the_same_however_they_were_divided(kind, model, request, tmp_path):
    # By 255, or as GPUs do, by a product with the rounded 1/255.
    model, sound, found = request.getfixturevalue(model), model == "integers", []
    levels = torch.arange(64).view(1, 1, 8, 8) + 21 * torch.arange(10).view(10, 1, 1, 1)
    quick, attack = {"sigma": 0.25, "n": 50, "device": "cpu"}, PGD(0.0, 2)
    for name, images in {"a": levels / 255, "b": levels * torch.tensor(1 / 255)}.items():
        handed, log = HANDED_OVER[kind](images, tmp_path / f"{name}.npz"), tmp_path / f"{name}.tsv"
        smoothadv.certify(model, *handed, **quick, n0=10, sound=sound, log=log)
        smoothadv.falsify(
            model, *handed, **quick, against=log, outdir=tmp_path / name, attack=attack
        )
        found.append([timeless(log), timeless(tmp_path / name / "against.tsv")])
    assert found[0] == found[1]
    with pytest.raises(UserError, match="only: example 0 of (images|npz:.*off.npz) is not of 8 b"):
        smoothadv.certify(
            model,
            *HANDED_OVER[kind](images * (1 + 2**-21), tmp_path / "off.npz"),
            **quick,
            sound=True,
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sigma": 0}, "sigma: found 0"),
        ({"alpha": 1}, "alpha: found 1"),
        ({"n": 0}, "n: found 0"),
        ({"n0": 0}, "n0: found 0"),
        ({"batch": 0}, "batch: found 0"),
        ({"skip": 0}, "skip: found 0"),
        ({"precision": "fp8"}, "precision: found 'fp8', expected one of fp32"),
        ({"existing": "append"}, "existing: found 'append'"),
        ({"method": "exakt"}, "did you mean 'exact'"),
        ({"method": "adaptive", "settings": {"radii": "0.1"}}, "radii: found '0.1', expected a"),
        ({"method": "adaptive", "settings": {"radii": [-1]}}, "radii"),
        ({"settings": {"radi": 1}}, "settings of method 'exact': found 'radi'"),
        ({"device": "abacus"}, "'abacus' is no device"),
        ({"sound": True}, "8-bit images only"),
        ({"sgma": 1}, "certify\\(\\) got an unexpected keyword argument 'sgma'"),
        ({"top_k": 3}, 'one of the method, settings={"top_k": ...}'),
        ({"num_classes": 5}, "has 4 classes, the images of 'images' have 5"),
    ],
)
def test_choices_that_make_no_sense_are_refused(options, message):
    with pytest.raises((UserError, TypeError), match=message):
        smoothadv.certify(network(), IMAGES, LABELS, **{**QUICK, **options})


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Flatten(0), "returns logits of shape \\[192\\]"),
        (
            Returning(lambda logits: logits > 0),
            "for one image, torch.bool, torch.strided; expected",
        ),
        (Returning(torch.Tensor.to_sparse), "torch.sparse_coo; expected floats"),
        (Returning(torch.Tensor.cfloat), "torch.complex64, torch.strided; expected floats"),
        (Returning(lambda logits: [logits]), "returns a list; it must return logits"),
        (Path("nowhere.pth.tar"), "nowhere.pth.tar does not exist"),
    ],
)
def test_models_that_are_no_classifiers_are_refused(model, message):
    with pytest.raises(UserError, match=message):
        smoothadv.certify(model, IMAGES, LABELS, **QUICK)


def test_a_training_without_gradients_is_refused(tmp_path):
    with pytest.raises(UserError, match="Returning computes its loss without gradients"):
        smoothadv.train(
            Returning(torch.Tensor.detach),
            IMAGES,
            LABELS,
            objective=Stability(noise_sd=SIGMA),
            outdir=tmp_path / "run",
        )


def test_prediction_is_that_of_smooth(tmp_path):
    log = tmp_path / "log.tsv"
    found = smoothadv.predict(network(), IMAGES, LABELS, sigma=SIGMA, n=200, batch=BATCH, log=log)
    smooth, noise = Smooth(network(), CLASSES, SIGMA), GaussianNoise(SIGMA, 0, key=key_of_log(log))
    for index, image in enumerate(torch.tensor(IMAGES)):
        stream = noise.stream(index, torch.device("cpu"))
        assert found.predict[index] == smooth.predict(image, 200, 0.001, BATCH, stream=stream)


def test_attacks_of_all_sizes_are_returned_and_saved(tmp_path):
    sizes = [0.5, 4.0]
    options = {"sigma": SIGMA, "n": 100, "attack": PGD(0.5, 4), "num_noise_vec": 4}
    found = smoothadv.attack(network(), IMAGES, LABELS, **options, epsilons=sizes, outdir=tmp_path)
    assert found.epsilon.tolist() == [0.5] * COUNT + [4.0] * COUNT
    assert (found.attack_norm <= found.epsilon * (1 + 1e-5)).all()
    for size in sizes:
        saved = read_examples(tmp_path / f"epsilon_{size:g}.npz")
        distances = np.linalg.norm(
            (saved["adversarial"] - saved["image"]).reshape(COUNT, -1), axis=1
        )
        assert np.allclose(distances, found.attack_norm[found.epsilon == size], atol=1e-5)
        assert np.array_equal(saved["image"], IMAGES)
    one = smoothadv.attack(network(), IMAGES, LABELS, **options)
    assert one.drop(columns="epsilon").equals(found.iloc[:COUNT].drop(columns="epsilon"))
    same = smoothadv.predict(network(), IMAGES, LABELS, **options)
    assert same.predict.tolist() == one.predict.tolist()


def test_certificates_of_a_module_are_attacked_and_others_are_refused(tmp_path):
    log = tmp_path / "mine.tsv"
    smoothadv.certify(network(), IMAGES, LABELS, **QUICK, log=log)
    options = {"against": log, "sigma": SIGMA, "n": 100, "attack": PGD(0.5, 3), "num_noise_vec": 2}
    verdict = smoothadv.falsify(network(), IMAGES, LABELS, **options)
    assert not verdict.refutes and len(verdict.flips) <= verdict.tolerated
    assert verdict.sentence.startswith(f"{log}: "), "no file that is gone"
    other = network()
    with torch.no_grad():
        other[4].bias += 1
    with pytest.raises(UserError, match="certifies something else: module_sha256"):
        smoothadv.falsify(other, IMAGES, LABELS, **options)


SEVERAL_CALLS = """
import os
import numpy as np, torch, smoothadv
from smoothadv.attacks.pgd import PGD
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 2))
images = np.random.default_rng(0).random((20, 1, 6, 6), dtype=np.float32)
given = (model, images, [0, 1] * 10)
common = dict(sigma=0.25, n=100, device="cpu")
one = smoothadv.certify(*given, n0=10, seed=0, log="0.tsv", **common)
two = smoothadv.certify(*given, n0=10, seed=1, log="1.tsv", **common)
attack = dict(attack=PGD(0.5, 1), num_noise_vec=2)
verdict = smoothadv.falsify(*given, against="0.tsv", outdir="against", **attack, **common)
with open(f"rank{os.environ['RANK']}", "w") as file:
    same = one.successes.equals(two.successes)
    print(len(one), len(two), same, len(verdict.flips), verdict.sentence, file=file)
"""


def test_a_program_does_several_jobs_under_torchrun_and_each_process_gets_all_rows(warm, tmp_path):
    (tmp_path / "program.py").write_text(SEVERAL_CALLS)
    done = warm.run_workers(2, [sys.executable, "program.py"], tmp_path)
    assert [each.returncode for each in done] == [0, 0], done
    found = [(tmp_path / f"rank{rank}").read_text() for rank in range(2)]
    assert found[0] == found[1] and found[0].startswith("20 20 False "), found
    assert not list(tmp_path.glob("*.shards")), "merged"


def test_what_the_package_has_not_is_no_attribute():
    with pytest.raises(AttributeError, match="no attribute 'certfy'"):
        smoothadv.certfy  # noqa: B018


FEWER = {"sigma": SIGMA, "n": 60, "device": "cpu", "batch": BATCH}
ATTACK = {"attack": PGD(0.5, 2), "num_noise_vec": 2}
CALLS = {
    "exact": (smoothadv.certify, {}, "log"),
    "adaptive": (smoothadv.certify, {"method": "adaptive"}, "log"),
    "sequential": (smoothadv.certify, {"method": "sequential"}, "log"),
    "top-k": (smoothadv.certify, {"method": "top-k", "settings": {"top_k": 2}}, "log"),
    "predict": (smoothadv.predict, {"top_k": 2}, "log"),
    "targeted": (smoothadv.predict, {**ATTACK, "target": "random"}, "log"),
    "attack": (smoothadv.attack, {**ATTACK, "epsilons": [0.25, 0.5]}, "outdir"),
}


@pytest.mark.filterwarnings("ignore::smoothadv.base.errors.DoubtfulWarning")
@pytest.mark.parametrize("kind", CALLS)
def test_rows_in_memory_are_those_of_a_file(tmp_path, kind):
    function, options, place = CALLS[kind]
    given = {**FEWER, **options}
    in_memory = function(network(), IMAGES, LABELS, **given)
    from_file = function(network(), IMAGES, LABELS, **given, **{place: tmp_path / "new"})
    pd.testing.assert_frame_equal(in_memory, from_file, rtol=0, atol=0)
    assert in_memory.attrs == from_file.attrs


@pytest.mark.filterwarnings("ignore::smoothadv.base.errors.DoubtfulWarning")
@pytest.mark.parametrize("kind", ["exact", "top-k", "predict"])
def test_images_without_labels_have_rows_without_what_labels_say(kind):
    function, options = CALLS[kind][0], {**FEWER, **CALLS[kind][1], "sigma": 0.25, "num_classes": 3}
    images = torch.rand(5, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    module = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    rows = function(module, images, **options)
    zeros = function(module, images, np.zeros(5, int), **options)
    assert [*rows] == [name for name in zeros if name not in ("label", "correct")]
    if kind == "exact":  # the others choose the class 0 where it is among the first ones
        pd.testing.assert_frame_equal(rows, zeros[[*rows]], rtol=0, atol=0)
    elif kind == "predict":
        assert (rows.predict == rows.class_1).all() and (zeros.predict != zeros.class_1).any()


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (smoothadv.certify, {"log": "log.tsv"}),
        (smoothadv.certify, {"method": "adaptive", "settings": {"label_aware": True}}),
        (smoothadv.predict, ATTACK),
        (smoothadv.attack, ATTACK),
    ],
)
def test_what_needs_labels_is_refused_without_them(function, options):
    with pytest.raises(UserError, match="images without labels: .* only certify and predict do"):
        function(network(), IMAGES, **FEWER, **options)
