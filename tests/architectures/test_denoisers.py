"""Denoisers, trained or of a diffusion model: they keep the shape of images, fold, and load as they
were released.
"""

import math
import sys
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from smoothadv.architectures import get_architecture
from smoothadv.architectures.denoisers import (
    DENOISERS,
    Denoised,
    DnCNN,
    LocallySmoothed,
    Resized,
)
from smoothadv.architectures.diffusion import (
    DiffusionModel,
    OneStepDenoiser,
    load_diffusion,
    noise_of,
)
from smoothadv.base.errors import DoubtfulWarning, UserError
from smoothadv.base.settings import FILTERS
from smoothadv.datasets import describe_dataset
from smoothadv.integer.network import IntegerNetwork
from smoothadv.models import load as models_load
from smoothadv.models.checkpoint import read_checkpoint
from smoothadv.models.load import BaseClassifier, load_classifier, load_denoiser
from smoothadv.models.spec import ModelSpec
from smoothadv.voting.folding import fold
from support.released import randomise_batch_norms


def trained_looking(name: str) -> nn.Module:
    """A denoiser with random weights and statistics throughout, in eval mode."""
    torch.manual_seed(0)
    network = DENOISERS[name](describe_dataset("digits"))
    randomise_batch_norms(network)
    for weight in network.parameters():
        if not weight.any():
            nn.init.normal_(weight, 0, 0.05)
    return network.eval()


@pytest.mark.parametrize("name", DENOISERS)
def test_denoiser_keeps_the_shape_treats_images_alone_and_begins_as_the_identity(name):
    new, trained = DENOISERS[name](describe_dataset("digits")).eval(), trained_looking(name)
    for height, width in ((8, 8), (9, 13), (17, 8)):
        images = torch.randn(3, 1, height, width)
        assert torch.equal(new(images), images)
        denoised = trained(images)
        assert denoised.shape == images.shape and not torch.allclose(denoised, images)
        assert torch.allclose(trained(images[1:2]), denoised[1:2], atol=1e-5)


def test_dncnn_is_the_image_minus_a_chain_of_convolutions():
    network, images = trained_looking("digits_dncnn").double(), torch.randn(2, 1, 8, 8).double()
    layers = network.state_dict()
    hidden = F.relu(F.conv2d(images, layers["dncnn.0.weight"], layers["dncnn.0.bias"], padding=1))
    for number in range(2, 20, 3):
        hidden = F.conv2d(hidden, layers[f"dncnn.{number}.weight"], padding=1)
        names = "running_mean", "running_var", "weight", "bias"
        mean, variance, weight, bias = (
            layers[f"dncnn.{number + 1}.{name}"][:, None, None] for name in names
        )
        hidden = F.relu((hidden - mean) / (variance + 1e-4).sqrt() * weight + bias)
    hidden = F.conv2d(hidden, layers["dncnn.20.weight"], padding=1)
    assert torch.allclose(network(images), images - hidden, atol=1e-12)


def test_denoiser_and_classifier_are_folded_without_changing_the_function():
    classifier = get_architecture("digits_resnet8", "digits")
    randomise_batch_norms(classifier)
    whole = Denoised(trained_looking("digits_dncnn"), classifier).eval().double()
    images = torch.rand(4, 1, 8, 8).double()
    folded = fold(whole, images[:1])
    kinds = {type(module) for module in folded.modules()}
    assert folded is not whole and nn.BatchNorm2d not in kinds
    assert torch.allclose(folded(images), whole(images), atol=1e-9)
    assert torch.equal(whole(images), whole.classifier(whole.denoiser(images)))


@pytest.mark.parametrize(("arch", "prefix"), [("cifar_dncnn", ""), ("imagenet_dncnn", "module.")])
def test_released_checkpoint_is_read(arch, prefix, tmp_path):
    """By the names of the code of Salman et al. (2020)."""
    network, path = DnCNN(3, 17, 64), tmp_path / "checkpoint.pth.tar"
    randomise_batch_norms(network)
    weights = {prefix + name: value for name, value in network.state_dict().items()}
    torch.save({"epoch": 90, "arch": arch, "state_dict": weights, "optimizer": {}}, path)
    loaded, content = load_denoiser(path, describe_dataset("cifar10"))
    images = torch.rand(1, 3, 32, 32)
    assert content["arch"] == arch and torch.equal(loaded(images), network.eval()(images))
    with pytest.raises(UserError, match=r"is a denoiser: name it with --denoiser$"):
        load_classifier(path, "cifar10")
    with pytest.raises(UserError, match="is not a .*_dncnn for dataset 'digits'"):
        load_denoiser(path, describe_dataset("digits"))


@pytest.mark.parametrize(
    "given", [{"denoiser": "any.pth.tar"}, {"resize": "16"}, {"local_noise": "0.25"}], ids=str
)
def test_network_of_integers_takes_nothing_before_it(given, monkeypatch):
    integers = IntegerNetwork((1, 8, 8), 0, torch.zeros(1), ())
    base = BaseClassifier(nn.Sequential(integers), {}, [])
    monkeypatch.setattr(models_load, "_from_checkpoints", lambda spec: base)
    flag = "--" + next(iter(given)).replace("_", "-")
    with pytest.raises(UserError, match=f"whole grey levels: leave {flag} out$"):
        models_load.load(ModelSpec(model="any", dataset="digits", sigma=0.25, **given))


def test_classifier_is_no_denoiser_and_the_field_decides(tmp_path):
    path, content = tmp_path / "c.pth.tar", {"epoch": 1, "arch": "digits_resnet8", "state_dict": {}}
    torch.save(content, path)
    with pytest.raises(UserError, match="is no denoiser: train_denoiser makes one$"):
        read_checkpoint(path, denoiser=True)
    torch.save({**content, "arch": "gone", "denoiser": True}, path)
    with pytest.raises(UserError, match="unknown denoiser 'gone'"):
        read_checkpoint(path, denoiser=True)


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


def test_model_that_does_not_fit_is_refused(saved):
    for channels, changes, message in (
        (1, {"num_class_embeds": 10}, "needs the class of an image"),
        (3, {}, "takes images of 1 channels and returns 1"),
    ):
        _, _, folder = saved(**changes)
        with pytest.raises(UserError, match=message):
            load_diffusion(f"diffusers:{folder}", (channels, 8, 8), 0.25)


def test_damaged_folder_and_missing_package_are_one_line(saved, tmp_path, monkeypatch):
    _, _, folder = saved()
    (folder / "unet/diffusion_pytorch_model.safetensors").write_bytes(b"nothing")
    for name, message in (
        (folder, "cannot be read by diffusers"),
        (tmp_path, "has no config.json"),
    ):
        with pytest.raises(UserError, match=message) as refusal:
            load_diffusion(f"diffusers:{name}", (1, 8, 8), 0.25)
        assert "\n" not in str(refusal.value)
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(
        UserError, match=r"needs the package diffusers: pip install 'smoothadv\[diffusers\]'$"
    ):
        load_diffusion(f"diffusers:{folder}", (1, 8, 8), 0.25)


@pytest.mark.parametrize("name", FILTERS)
def test_images_are_resized_before_the_model_and_not_clipped(name):
    """As Pillow resizes floats, channel by channel: with antialiasing, where images shrink, too."""
    images = torch.rand(2, 3, 12, 9, generator=torch.Generator().manual_seed(0))
    for side in (24, 5):
        found = Resized(nn.Identity(), side, name)(images)
        for image, small in zip(images.flatten(0, 1), found.flatten(0, 1)):
            picture = Image.fromarray(image.numpy(), mode="F")
            expected = picture.resize((side, side), Image.Resampling[name.upper()])
            assert torch.allclose(small, torch.tensor(np.array(expected)), atol=1e-5)
    edge = torch.zeros(1, 1, 4, 4)
    edge[..., :2] = 1
    larger = Resized(nn.Identity(), 16, "bicubic")(edge)
    assert larger.min() < -0.01 and larger.max() > 1.01


def test_local_noise_is_the_mean_of_the_probabilities_of_fixed_copies():
    torch.manual_seed(0)
    network, noise = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), torch.randn(5, 1, 4, 4)
    images = torch.rand(7, 1, 4, 4)
    smoothed = LocallySmoothed(network, noise)
    for image, found in zip(images, smoothed(images)):
        copies = torch.stack([network((image + one)[None])[0].softmax(0) for one in noise])
        assert torch.allclose(found.exp(), copies.mean(0), atol=1e-6)
    assert torch.equal(smoothed(images)[2:3], smoothed(images)[2:3])
    assert not torch.allclose(found.exp(), network(images)[-1].softmax(0), atol=1e-3)
