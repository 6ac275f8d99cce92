"""One step of a diffusion model as a denoiser: against the best possible model and the package
diffusers; the step of a noise; and what is refused.
"""

import math
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from smoothadv.base.errors import DoubtfulWarning, UserError
from smoothadv.diffusion.one_step import (
    DiffusionModel,
    OneStepDenoiser,
    load_diffusion,
    noise_of,
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
