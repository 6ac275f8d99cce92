"""Denoisers keep the shape of images, begin as the identity, fold, and load from checkpoints as
they were released.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from smoothadv.architectures import get_architecture
from smoothadv.architectures.denoisers import DENOISERS, Denoised, DnCNN
from smoothadv.base.errors import UserError
from smoothadv.checkpoints import load_classifier, read_checkpoint
from smoothadv.checkpoints.denoisers import denoised_classifier, load_denoiser
from smoothadv.datasets import describe_dataset
from smoothadv.exact.network import IntegerNetwork
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
        denoised_classifier(
            nn.Sequential(integers), "any.pth.tar", describe_dataset("digits"), 0.25
        )


def test_classifier_is_no_denoiser_and_the_field_decides(tmp_path):
    path, content = tmp_path / "c.pth.tar", {"epoch": 1, "arch": "digits_resnet8", "state_dict": {}}
    torch.save(content, path)
    with pytest.raises(UserError, match="is no denoiser: train_denoiser makes one$"):
        read_checkpoint(path, denoiser=True)
    torch.save({**content, "arch": "gone", "denoiser": True}, path)
    with pytest.raises(UserError, match="unknown denoiser 'gone'"):
        read_checkpoint(path, denoiser=True)
