"""Denoisers: they keep the shape of images, fold, and load as they
were released.
"""

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
from smoothadv.base.errors import UserError
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
    monkeypatch.setattr(models_load, "_from_checkpoints", lambda spec, dataset: base)
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
