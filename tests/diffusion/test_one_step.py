"""One step of a diffusion model as a denoiser: against the best possible model and the package
diffusers; the step of a noise; and what is refused. OpenAI's U-Nets against a plain reading of
their files, tensor by tensor; the released names, shapes and steps.
"""

import math
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from smoothadv.base.errors import DoubtfulWarning, UserError
from smoothadv.diffusion.one_step import DiffusionModel, OneStepDenoiser, load_diffusion, noise_of
from smoothadv.diffusion.openai_unet import (
    GUIDED,
    IMPROVED,
    WITHOUT_SCALE,
    Family,
    OpenAIUNet,
    Shape,
    shape_of,
    unet_of,
)
from support.refusals import refusal

ALPHA_BARS = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0)
MEAN, SPREAD = (
    0.4,
    0.03,
)  # of the pixels of images, which are Gaussian: so narrow that none is clipped


def best_model(prediction: str, noisy: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """What the best possible diffusion model predicts for such images."""
    assert steps.dtype == torch.float32 and steps.shape == noisy.shape[:1]
    a, mean, variance = float(ALPHA_BARS[int(steps[0])]), 2 * MEAN - 1, (2 * SPREAD) ** 2
    image = mean + math.sqrt(a) * variance / (a * variance + 1 - a) * (noisy - math.sqrt(a) * mean)
    epsilon = (noisy - math.sqrt(a) * image) / math.sqrt(1 - a)
    v = math.sqrt(a) * epsilon - math.sqrt(1 - a) * image
    return {"sample": image, "epsilon": epsilon, "v_prediction": v}[prediction]


EPSILON = partial(best_model, "epsilon")


def posterior_mean(noisy: torch.Tensor, sigma: float) -> torch.Tensor:
    """E[x | x + noise] on [0, 1]: Gaussian images under Gaussian noise."""
    return MEAN + SPREAD**2 / (SPREAD**2 + sigma**2) * (noisy - MEAN)


def noisy_images(sigma: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    images, noise = torch.randn(2, 4, 3, 8, 8, generator=generator, dtype=torch.float64)
    return MEAN + SPREAD * images + sigma * noise


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize("step", [20, 250, 700])
def test_best_model_gives_the_posterior_mean(prediction, step):
    sigma = float(noise_of(ALPHA_BARS)[step])
    model = DiffusionModel(partial(best_model, prediction), ALPHA_BARS, prediction)
    noisy = noisy_images(sigma)
    assert model.step(sigma, "nearest") == model.step(sigma * (1 - 1e-9), "released") == step
    assert model.step(sigma, str(step)) == step
    denoised = OneStepDenoiser(model, step)(noisy)
    assert torch.allclose(denoised, posterior_mean(noisy, sigma), atol=1e-10)


def test_noise_on_the_wrong_scale_is_noticed():
    """The negative control: the step of sigma where 2 sigma is meant, and a model that gets its
    input unscaled.
    """
    sigma, unet = float(noise_of(ALPHA_BARS)[250]), EPSILON
    noisy = noisy_images(sigma)
    model = DiffusionModel(unet, ALPHA_BARS)
    of_half = OneStepDenoiser(model, model.step(sigma / 2, "nearest"))
    unscaled = DiffusionModel(
        lambda x, t: unet(x / math.sqrt(ALPHA_BARS[int(t[0])]), t), ALPHA_BARS
    )
    for wrong in (of_half, OneStepDenoiser(unscaled, 250)):
        assert (wrong(noisy) - posterior_mean(noisy, sigma)).abs().max() > 1e-3


@pytest.mark.parametrize("sigma", [0.12, 0.25, 0.5, 1.0])
def test_step_is_that_of_twice_the_noise(sigma):
    model = DiffusionModel(EPSILON, ALPHA_BARS)
    levels = [math.sqrt((1 - a) / a) for a in ALPHA_BARS.tolist()]
    nearest, released = model.step(sigma, "nearest"), model.step(sigma, "released")
    assert nearest == min(range(1000), key=lambda t: abs(levels[t] - 2 * sigma))
    assert released == next(t for t in range(1, 1000) if levels[t] >= 2 * sigma)
    alpha_bar = OneStepDenoiser(model, released).alpha_bar
    assert (1 - alpha_bar) / alpha_bar == pytest.approx(4 * sigma**2, rel=0.03)


@pytest.mark.parametrize(("sigma", "timestep"), [(99, "released"), (0.25, "1000")])
def test_step_that_the_model_has_not_is_refused(sigma, timestep):
    with pytest.raises(UserError, match=rf"^--timestep {timestep}: .* up to 999, with noise up to"):
        DiffusionModel(EPSILON, ALPHA_BARS).step(sigma, timestep)


def test_step_is_given_on_a_scale_of_a_thousand():
    """1158 of 4,000 steps as 289.5: OpenAI's CIFAR-10 model at sigma .25."""
    given = []
    model = DiffusionModel(lambda x, t: given.append(t) or x, torch.linspace(0.99, 0.01, 4000))
    OneStepDenoiser(model, 1158)(torch.rand(2, 1, 4, 4))
    assert torch.equal(given[0], torch.tensor([289.5, 289.5]))


def test_variance_that_a_model_learned_is_left_out():
    unet, noisy = EPSILON, noisy_images(0.25)
    both = DiffusionModel(lambda x, t: torch.cat([unet(x, t), torch.rand_like(x)], 1), ALPHA_BARS)
    alone = DiffusionModel(unet, ALPHA_BARS)
    assert torch.equal(OneStepDenoiser(both, 145)(noisy), OneStepDenoiser(alone, 145)(noisy))


def test_estimate_is_clipped_to_the_range_of_images():
    model = DiffusionModel(lambda x, t: torch.zeros_like(x), ALPHA_BARS)
    denoiser = OneStepDenoiser(model, 145)
    assert denoiser(
        torch.tensor([-3.0, 0.25, 3.0]).view(3, 1, 1, 1)
    ).flatten().tolist() == pytest.approx([0, 0.25, 1])


@pytest.fixture
def saved(tmp_path):
    """Saves a small random UNet2DModel as a pipeline; returns it, its scheduler and the folder."""
    diffusers = pytest.importorskip(
        "diffusers", reason="diffusers, which is optional, reads its own folders"
    )

    def save(prediction: str = "epsilon", **changes):
        torch.manual_seed(0)
        blocks = {
            "down_block_types": ("DownBlock2D",) * 2,
            "up_block_types": ("UpBlock2D",) * 2,
            "norm_num_groups": 8,
        }
        sizes = {
            "sample_size": 8,
            "in_channels": 1,
            "out_channels": 1,
            "block_out_channels": (16, 32),
        }
        unet = diffusers.UNet2DModel(**blocks, **sizes, layers_per_block=1, **changes).eval()
        scheduler = diffusers.DDPMScheduler(prediction_type=prediction)
        diffusers.DDPMPipeline(unet, scheduler).save_pretrained(tmp_path / "ddpm")
        return unet, scheduler, tmp_path / "ddpm"

    return save


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_estimate_is_that_of_the_scheduler_of_diffusers(saved, prediction):
    unet, scheduler, folder = saved(prediction)
    denoiser, facts = load_diffusion(f"diffusers:{folder}", (1, 8, 8), 0.25)
    step, noisy = facts["timestep"], torch.rand(3, 1, 8, 8) + 0.25 * torch.randn(3, 1, 8, 8)
    with torch.inference_mode():
        x_t = math.sqrt(facts["alpha_bar"]) * (2 * noisy - 1)
        expected = scheduler.step(unet(x_t, step).sample, step, x_t).pred_original_sample
        assert torch.allclose(denoiser(noisy), (expected + 1) / 2, atol=1e-5)
        assert torch.equal(denoiser(noisy), denoiser(noisy)), "it is a function"
    assert facts["arch"] == "diffusers:UNet2DModel" and len(facts["sha256"]) == 64
    assert facts["noise_sd"] == pytest.approx(0.25158, abs=1e-5), "the noise of the step"
    assert "noise_sd" not in load_diffusion(f"diffusers:{folder}", (1, 8, 8), 0.25, "nearest")[1]


def test_weights_and_schedule_decide_the_digest_and_a_lone_unet_is_read(saved):
    _, _, folder = saved()
    name = f"diffusers:{folder}"
    before = load_diffusion(name, (1, 8, 8), 0.25)[1]["sha256"]
    (folder / "README.md").write_text("no matter")
    assert load_diffusion(name, (1, 8, 8), 0.25)[1]["sha256"] == before
    config = folder / "scheduler/scheduler_config.json"
    config.write_text(config.read_text().replace("0.02", "0.03"))
    assert load_diffusion(name, (1, 8, 8), 0.25)[1]["sha256"] != before
    with pytest.warns(DoubtfulWarning, match="has no scheduler_config.json"):
        load_diffusion(f"{name}/unet", (1, 8, 8), 0.25)
    with pytest.warns(DoubtfulWarning, match="step 1 has noise of 0.0.*, not of 0.001"):
        load_diffusion(name, (1, 8, 8), 0.001)


def test_other_numbers_of_steps_are_told_and_schedulers_without_betas_refused(saved):
    _, _, folder = saved()
    config = folder / "scheduler/scheduler_config.json"
    usual = config.read_text()
    config.write_text(usual.replace('"num_train_timesteps": 1000', '"num_train_timesteps": 4000'))
    with pytest.warns(DoubtfulWarning, match="has 4,000 steps and is given them on a scale of"):
        load_diffusion(f"diffusers:{folder}", (1, 8, 8), 0.25)
    config.write_text('{"_class_name": "ScoreSdeVeScheduler", "num_train_timesteps": 2000}')
    words = "its scheduler, ScoreSdeVeScheduler, has no betas"
    refusal(load_diffusion, f"diffusers:{folder}", (1, 8, 8), 0.25, names=words)


def test_what_does_not_fit_a_damaged_folder_and_a_missing_package_are_one_line(
    saved, tmp_path, monkeypatch
):
    def refused(folder: Path, words: str, channels: int = 1) -> None:
        name = f"diffusers:{folder}"
        refusal(load_diffusion, name, (channels, 8, 8), 0.25, names=words)

    refused(saved(num_class_embeds=10)[2], "needs the class of an image")
    _, _, folder = saved()
    refused(folder, "takes images of 1 channels and returns 1", channels=3)
    (folder / "unet/diffusion_pytorch_model.safetensors").write_bytes(b"nothing")
    refused(folder, "cannot be read by diffusers")
    refused(tmp_path, "has no config.json")
    monkeypatch.setitem(sys.modules, "diffusers", None)
    refused(folder, "needs the package diffusers: pip install 'smoothadv[diffusers]'")


SMALL = {
    "improved": Shape(3, 6, 32, (32, 64), 2, (False, True), True, False),
    "guided": Shape(3, 6, 64, (64, 128, 128), 1, (False, True, False), True, True),
    "without scale": Shape(1, 2, 32, (32, 32, 64), 1, (False, False, True), False, False),
}
HEADS = {"improved": 4, "guided": 2, "without scale": 1}  # of the levels and the middle: 128 / 64


def random_weights(shape: Shape) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    unet = OpenAIUNet(shape)
    for weight in unet.parameters():
        nn.init.normal_(weight, 0, weight[0].numel() ** -0.5)
    return unet.state_dict()


def plain_unet(w: dict[str, torch.Tensor], x: torch.Tensor, t: float, heads: int) -> torch.Tensor:
    """The U-Net as Nichol and Dhariwal (2021) and Dhariwal and Nichol (2021) describe it, from the
    names of its weights alone.
    """

    def layer(name: str, x: torch.Tensor, stride: int = 1) -> torch.Tensor:
        weight, bias = w[f"{name}.weight"], w[f"{name}.bias"]
        if weight.dim() == 2:
            return x @ weight.T + bias
        return F.conv2d(x, weight, bias, stride, weight.shape[-1] // 2)

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.group_norm(x, 32, w[f"{name}.weight"], w[f"{name}.bias"], eps=1e-5)

    def twice(x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(2, 2).repeat_interleave(2, 3)

    def residual(name: str, x: torch.Tensor, resample=lambda x: x) -> torch.Tensor:
        h = layer(f"{name}.in_layers.2", resample(F.silu(norm(f"{name}.in_layers.0", x))))
        e = layer(f"{name}.emb_layers.1", F.silu(embedding))[:, :, None, None]
        if e.shape[1] == 2 * h.shape[1]:
            scale, shift = e[:, : h.shape[1]], e[:, h.shape[1] :]
            h = norm(f"{name}.out_layers.0", h) * (1 + scale) + shift
        else:
            h = norm(f"{name}.out_layers.0", h + e)
        h = layer(f"{name}.out_layers.3", F.silu(h))
        x = resample(x)
        return h + (
            layer(f"{name}.skip_connection", x) if f"{name}.skip_connection.weight" in w else x
        )

    def attention(name: str, x: torch.Tensor) -> torch.Tensor:
        flat = norm(f"{name}.norm", x).flatten(2)
        qkv = w[f"{name}.qkv.weight"][:, :, 0] @ flat + w[f"{name}.qkv.bias"][:, None]
        size = x.shape[1] // heads
        found = []
        for head in qkv.split(3 * size, dim=1):
            q, k, v = head.split(size, dim=1)
            scores = torch.einsum("bct,bcs->bts", q, k) / math.sqrt(size)
            found.append(torch.einsum("bts,bcs->bct", scores.softmax(2), v))
        joined = torch.cat(found, 1)
        out = w[f"{name}.proj_out.weight"][:, :, 0] @ joined + w[f"{name}.proj_out.bias"][:, None]
        return x + out.view_as(x)

    def stage(name: str, x: torch.Tensor, resample) -> torch.Tensor:
        """Its blocks; where a second or a lone residual block resamples, by ``resample``."""
        parts = sorted(
            {int(key[len(name) + 1 :].split(".")[0]) for key in w if key.startswith(f"{name}.")}
        )
        for number in parts:
            part = f"{name}.{number}"
            if f"{part}.qkv.weight" in w:
                x = attention(part, x)
            elif f"{part}.op.weight" in w:
                x = layer(f"{part}.op", x, stride=2)
            elif f"{part}.conv.weight" in w:
                x = layer(f"{part}.conv", twice(x))
            else:
                x = residual(part, x, resample(number))
        return x

    width = w["time_embed.0.weight"].shape[1]
    angles = t * 10_000.0 ** (-torch.arange(width // 2, dtype=x.dtype) / (width // 2))
    embedding = torch.cat([angles.cos(), angles.sin()])[None]
    embedding = layer("time_embed.2", F.silu(layer("time_embed.0", embedding)))
    same, halved = nn.Identity(), nn.AvgPool2d(2)
    inputs = 1 + max(int(key.split(".")[1]) for key in w if key.startswith("input_blocks"))
    x, kept = layer("input_blocks.0.0", x), []
    kept.append(x)
    for number in range(1, inputs):
        halves = number in halving_stages(w, inputs)
        x = stage(f"input_blocks.{number}", x, lambda _, halves=halves: halved if halves else same)
        kept.append(x)
    x = stage("middle_block", x, lambda _: same)
    for number in range(inputs):
        x = stage(
            f"output_blocks.{number}",
            torch.cat([x, kept.pop()], 1),
            lambda block: twice if block else same,
        )
    return layer("out.2", F.silu(norm("out.0", x)))


def halving_stages(w: dict[str, torch.Tensor], inputs: int) -> set[int]:
    """Those of the input that halve by a residual block: the mirror images of the output stages
    that double by one.
    """
    doubling = {
        int(key.split(".")[1])
        for key in w
        if key.startswith("output_blocks")
        and ".in_layers.2.weight" in key
        and key.split(".")[2] != "0"
    }
    return {inputs - 1 - number for number in doubling}


@pytest.mark.parametrize("kind", SMALL)
def test_output_is_that_of_a_plain_reading_of_the_file(kind):
    weights = random_weights(SMALL[kind])
    images = torch.randn(2, SMALL[kind].channels, 16, 8)
    unet, step = unet_of(weights), torch.full((2,), 289.5)
    whole = {name: tensor.double() for name, tensor in weights.items()}
    expected = plain_unet(whole, images.double(), 289.5, HEADS[kind])
    with torch.inference_mode():
        found = unet(images, step)
        of_integer = unet(images, step.long())
    scale = expected.abs().max()
    differences = (found - expected) / scale
    assert differences.square().mean().sqrt() < 1e-6 and differences.abs().max() < 1e-5
    assert ((of_integer - expected) / scale).abs().max() > 1e-5, "289 is not 289.5"


@pytest.mark.parametrize(
    ("shape", "tensors", "parameters", "stages", "family"),
    [
        (
            Shape(3, 6, 128, (128, 256, 256, 256), 3, (False, True, True, False), True, False),
            446,
            52_546_438,
            16,
            IMPROVED,
        ),
        (
            Shape(
                3,
                6,
                256,
                (256, 256, 512, 512, 1024, 1024),
                2,
                (False, False, False, True, True, True),
                True,
                True,
            ),
            566,
            552_814_086,
            18,
            GUIDED,
        ),
    ],
    ids=["cifar10_uncond_50M_500K.pt", "256x256_diffusion_uncond.pt"],
)
def test_released_files_have_these_tensors(shape, tensors, parameters, stages, family):
    with torch.device("meta"):
        unet = OpenAIUNet(shape)
    weights = unet.state_dict()
    assert (len(weights), sum(map(torch.Tensor.numel, weights.values()))) == (tensors, parameters)
    assert len(unet.input_blocks) == len(unet.output_blocks) == stages
    assert shape_of(weights) == shape and shape.family == family
    named = {name: list(tensor.shape) for name, tensor in weights.items()}
    if family == IMPROVED:
        halvings = [f"input_blocks.{number}.0.op.weight" for number in (4, 8, 12)]
        doublings = [f"output_blocks.{name}.conv.weight" for name in ("3.1", "7.2", "11.2")]
        assert all(named[name] == [256, 256, 3, 3] for name in [*halvings[1:], *doublings])
        assert named[halvings[0]] == [128, 128, 3, 3]
        assert named["input_blocks.5.1.qkv.weight"] == [768, 256, 1]
    else:
        assert not any(".op." in name or ".conv." in name for name in named)
        assert named["input_blocks.15.0.emb_layers.1.weight"] == [2048, 1024]
        assert named["output_blocks.2.2.in_layers.2.weight"] == [1024, 1024, 3, 3]
    assert named["out.2.weight"] == [6, shape.widths[0], 3, 3]
    assert named["output_blocks.0.0.skip_connection.bias"] == [shape.widths[-1]]


# By sigma: the first step from 1 on with that noise, what the U-Net gets, its noise; the nearest.
STEPS = {
    IMPROVED: {
        0.12: (573, 143.25, 0.12012, 572),
        0.25: (1158, 289.5, 0.25012, 1158),
        0.5: (1984, 496, 0.50031, 1983),
        1: (2809, 702.25, 1.00001, 2809),
    },
    GUIDED: {
        0.12: (70, 70, 0.12069, 70),
        0.25: (145, 145, 0.25158, 144),
        0.5: (259, 259, 0.50239, 258),
        1: (396, 396, 1.00024, 396),
    },
}


@pytest.mark.parametrize("family", STEPS, ids=["cosine", "linear"])
def test_schedule_has_the_released_steps(family):
    spread = ((1 - family.alpha_bars) / family.alpha_bars).sqrt() / 2
    for sigma, (released, given, of_step, nearest) in STEPS[family].items():
        first = next(step for step in range(1, family.steps) if spread[step] >= sigma)
        assert (first, first * 1000 / family.steps) == (released, given)
        assert round(float(spread[first]), 5) == of_step
        assert int((spread - sigma).abs().argmin()) == nearest
    assert family.alpha_bars.dtype == torch.float64 and len(family.alpha_bars) == family.steps


def test_cosine_schedule_is_the_published_one():
    """Each alpha_bar as a product of numbers of Python, betas at most 0.999."""
    found, product = Family(None, "cosine", 50).alpha_bars, 1.0
    for step in range(50):
        signal = [math.cos((at / 50 + 0.008) / 1.008 * math.pi / 2) ** 2 for at in (step, step + 1)]
        product *= 1 - min(1 - signal[1] / signal[0], 0.999)
        assert float(found[step]) == pytest.approx(product, rel=1e-12)
    assert WITHOUT_SCALE.alpha_bars.equal(GUIDED.alpha_bars)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_and_the_embedding_stay_in_float32(dtype):
    weights = random_weights(SMALL["guided"])
    unet = unet_of(weights).to(dtype)
    of_step = "time_embed", "emb_layers", "norm", "in_layers.0", "out_layers.0", "out.0"
    kept = {name for name, tensor in unet.state_dict().items() if tensor.dtype == torch.float32}
    assert kept == {name for name in weights if any(f"{part}." in name for part in of_step)}
    assert all(torch.equal(unet.state_dict()[name], weights[name]) for name in kept)
    images = torch.randn(2, 3, 8, 8)
    found = unet(images.to(dtype), torch.full((2,), 250.25))
    whole = unet_of(weights)(images, torch.full((2,), 250.25))
    assert found.dtype == dtype and (found.float() - whole).abs().max() < 0.1 * whole.abs().max()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: {**w, "label_emb.weight": torch.zeros(10, 128)}, "needs the class of an image"),
        (lambda w: {}, "is no U-Net of OpenAI's.* lacks"),
        (lambda w: {"conv1.weight": torch.zeros(3, 3)}, "is no U-Net of OpenAI's.* lacks"),
        (
            lambda w: {k: v for k, v in w.items() if k != "out.0.bias"},
            r"is no U-Net of .*: it lacks out\.0\.bias",
        ),
        (
            lambda w: {**w, "ema": torch.zeros(3)},
            r"^ema has the shape \[3\].* expected no such",
        ),
        (
            lambda w: {**w, "middle_block.1.qkv.weight": torch.zeros(3, 64, 1)},
            r"^middle_block\.1\.qkv\.weight has the shape \[3, 64, 1\].* expected \[192, 64, 1\]",
        ),
        (lambda w: dict(list(w.items())[:60]), "shape|lacks"),
    ],
    ids=["classes", "empty", "another", "truncated", "more", "shape", "half"],
)
def test_other_files_are_refused_with_the_first_name_that_does_not_fit(change, words):
    with pytest.raises(UserError, match=words):
        unet_of(change(random_weights(SMALL["improved"])))


def test_embedding_of_the_step_stays_in_float32_under_autocast():
    unet, kinds = unet_of(random_weights(SMALL[next(iter(SMALL))])), []
    for part in [unet.time_embed, *(m for m in unet.modules() if hasattr(m, "emb_layers"))]:
        layer = part if part is unet.time_embed else part.emb_layers
        layer.register_forward_hook(lambda module, given, found: kinds.append(found.dtype))
    images = torch.randn(1, unet.shape.channels, 16, 8)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        unet(images, torch.full((1,), 289.5))
    assert len(kinds) > 3 and set(kinds) == {torch.float32}
