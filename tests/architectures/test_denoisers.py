"""Denoisers, trained or of a diffusion model: they keep the shape of images, fold, and load as they
were released.
"""

import math
import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from smoothadv.architectures import get_architecture
from smoothadv.architectures.denoisers import DENOISERS, Denoised, DnCNN
from smoothadv.architectures.diffusion import (
    OneStepDenoiser,
    load_diffusion,
    noise_of,
)
from smoothadv.base.errors import DoubtfulWarning, UserError
from smoothadv.datasets import describe_dataset
from smoothadv.integer.network import IntegerNetwork
from smoothadv.models.checkpoint import read_checkpoint
from smoothadv.models.load import BaseClassifier, denoised, load_classifier, load_denoiser
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


@pytest.mark.parametrize("name", ["digits_dncnn", "unet"])
def test_denoiser_and_classifier_are_folded_without_changing_the_function(name):
    classifier = get_architecture("digits_resnet8", "digits")
    randomise_batch_norms(classifier)
    whole = Denoised(trained_looking(name), classifier).eval().double()
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


def test_network_of_integers_takes_no_denoiser():
    integers = IntegerNetwork((1, 8, 8), 0, torch.zeros(1), ())
    with pytest.raises(UserError, match="whole grey levels: leave --denoiser out$"):
        denoised(
            BaseClassifier(nn.Sequential(integers), {}, []),
            ModelSpec(model="any", dataset="digits", sigma=0.25, denoiser="any.pth.tar"),
        )


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


def best_model(prediction: str, noisy: torch.Tensor, timestep: int) -> torch.Tensor:
    """What the best possible diffusion model predicts for such images."""
    a, mean, variance = float(ALPHA_BARS[timestep]), 2 * MEAN - 1, (2 * SPREAD) ** 2
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
    denoiser, noisy = (
        OneStepDenoiser(partial(best_model, prediction), ALPHA_BARS, sigma, prediction),
        noisy_images(sigma),
    )
    assert denoiser.timestep == step
    assert torch.allclose(denoiser(noisy), posterior_mean(noisy, sigma), atol=1e-10)


@pytest.mark.parametrize("sigma", [0.12, 0.25, 0.5, 1.0])
def test_step_is_that_of_twice_the_noise(sigma):
    denoiser = OneStepDenoiser(EPSILON, ALPHA_BARS, sigma)
    step, alpha_bar = denoiser.timestep, denoiser.alpha_bar
    levels = [math.sqrt((1 - a) / a) for a in ALPHA_BARS.tolist()]
    assert step == min(
        range(1000), key=lambda t: abs(levels[t] - 2 * sigma)
    ) and alpha_bar == float(ALPHA_BARS[step])
    assert (1 - alpha_bar) / alpha_bar == pytest.approx(4 * sigma**2, rel=0.03)


def test_variance_that_a_model_learned_is_left_out():
    unet, noisy = EPSILON, noisy_images(0.25)
    both = OneStepDenoiser(
        lambda x, t: torch.cat([unet(x, t), torch.rand_like(x)], 1), ALPHA_BARS, 0.25
    )
    assert torch.equal(both(noisy), OneStepDenoiser(unet, ALPHA_BARS, 0.25)(noisy))


def test_estimate_is_clipped_to_the_range_of_images():
    denoiser = OneStepDenoiser(lambda x, t: torch.zeros_like(x), ALPHA_BARS, 0.25)
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
    with pytest.warns(DoubtfulWarning, match="has no step with noise of 0.001"):
        load_diffusion(name, (1, 8, 8), 0.001)


def test_model_that_does_not_fit_is_refused(saved):
    _, _, folder = saved(num_class_embeds=10)
    for channels, message in (
        (1, "needs the class of an image"),
        (3, "takes images of 1 channels and returns 1"),
    ):
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
