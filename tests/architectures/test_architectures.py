"""Base classifiers: the published sizes, keys and initialisation, and the input layer in front of
them.
"""

import itertools

import pytest
import torch
from scipy.stats import kstest
from torch import nn
from torch.nn import functional as F

from smoothadv.architectures import ARCHITECTURES, get_architecture
from smoothadv.base.errors import UserError
from smoothadv.checkpoints import load_classifier
from smoothadv.datasets import describe_dataset
from support.networks import settle_batch_norms
from support.released import CIFAR_MEAN, CIFAR_STD, CifarResNet


@pytest.mark.parametrize(
    "arch, dataset, parameters, entries",
    [
        ("cifar_resnet110", "cifar10", 1_730_714, 668),
        ("imagenet32_resnet110", "imagenet32", 1_795_064, 668),
        ("cifar_resnet20", "cifar10", 272_474, 128),
        ("cifar100_resnet110", "cifar100", 1_736_564, 668),
        ("resnet50", "imagenet", 25_557_032, 320),
        ("wide_resnet28_10", "cifar10", 36_479_194, 155),
        ("lenet", "mnist", 431_080, 8),
    ],
)
def test_sizes_are_the_published_ones(arch, dataset, parameters, entries):
    model = get_architecture(arch, dataset)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert len(model.state_dict()) == entries


@pytest.mark.parametrize("depth", [20, 56, 110])
def test_state_dict_has_the_released_keys_and_shapes(depth):
    released = {
        f"1.{key}": tuple(value.shape) for key, value in CifarResNet(depth, 10).state_dict().items()
    }
    ours = get_architecture(f"cifar_resnet{depth}", "cifar10").state_dict()
    assert {key: tuple(value.shape) for key, value in ours.items()} == released
    assert {"1.conv1.weight", "1.layer2.0.downsample.0.weight", "1.fc.bias"} <= ours.keys()


@pytest.mark.parametrize(
    ("input_layer", "constants"),
    [("normalize", (CIFAR_MEAN, CIFAR_STD)), ("center", (CIFAR_MEAN, (1, 1, 1))), ("none", ())],
)
def test_input_layer_comes_first_and_its_constants_are_buffers_of_no_file(input_layer, constants):
    model = get_architecture("cifar_resnet20", "cifar10", input_layer).double()
    images = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    mean, std = torch.tensor(constants or ((0, 0, 0), (1, 1, 1)))[:, :, None, None]
    torch.testing.assert_close(model[0](images), (images - mean) / std, check_dtype=False)
    buffers = {name: value.dtype for name, value in model[0].named_buffers()}
    names = {"normalize": ["mean", "std"], "center": ["mean"], "none": []}[input_layer]
    assert buffers == dict.fromkeys(names, torch.float64), "which follow the model"
    assert not list(model[0].parameters())


def test_convolutions_start_normal_with_variance_2_over_kernel_area_times_outputs():
    """Kolmogorov-Smirnov tests of 111 layers, each with a false alarm in a million, of a fixed
    seed.
    """
    torch.manual_seed(0)
    model = get_architecture("cifar_resnet110", "cifar10")
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert len(layers) == 111
    for layer in layers:
        weights, area = layer.weight.detach().flatten(), layer.weight[0, 0].numel()
        assert kstest(weights * (area * layer.out_channels / 2) ** 0.5, "norm").pvalue > 1e-6
        # Negative control: the other convention, of inputs, where they differ.
        other = weights * (area * layer.in_channels / 2) ** 0.5
        is_alike = layer.in_channels == layer.out_channels or len(weights) < 1000
        assert is_alike or kstest(other, "norm").pvalue < 1e-6


# Others are for images of any size.
FITTING = {"lenet": "mnist", "resnet50": "imagenet"}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_trains_on_a_dataset_that_it_fits(arch):
    description = describe_dataset(FITTING.get(arch, "digits"))
    model = get_architecture(arch, description)
    images = torch.rand(2, *description.image_shape, generator=torch.Generator().manual_seed(0))
    logits = model(images)
    assert model.training
    assert logits.shape == (2, description.num_classes) and logits.isfinite().all()
    nn.functional.cross_entropy(logits, torch.tensor([0, 1])).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(
        gradient is not None and gradient.isfinite().all() for gradient in gradients.values()
    )
    assert all(
        gradient.abs().max() > 0 for name, gradient in gradients.items() if name.startswith("1.fc")
    )
    assert next(iter(gradients.values())).abs().max() > 0  # the first layer learns too


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("cifar_resnet11 cifar10", "'cifar_resnet11'.*did you mean 'cifar_resnet110'.*resnet50"),
        ("cifar_resnet20 cifar10 normalise", "'normalise'.*normalize, center"),
        ("lenet digits", r"digits are \[1, 8, 8\]"),
        ("lenet cifar10", r"cifar10 are \[3, 32, 32\]"),
        ("resnet50 digits", "3 channels; digits has 1"),
    ],
)
def test_what_is_unknown_or_does_not_fit_the_images_is_refused(words, message):
    with pytest.raises(UserError, match=message):
        get_architecture(*words.split())


LENET = {"conv1": (20, 1, 5, 5), "conv2": (50, 20, 5, 5), "fc1": (500, 800), "fc2": (10, 500)}


def test_released_lenet_is_loaded_without_an_input_layer(tmp_path):
    random = torch.Generator().manual_seed(0)
    state = {}
    for name, shape in LENET.items():
        state[f"1.{name}.weight"] = 0.1 * torch.randn(shape, generator=random)
        state[f"1.{name}.bias"] = torch.randn(shape[0], generator=random)
    path = tmp_path / "checkpoint.pth.tar"
    torch.save({"epoch": 90, "arch": "lenet", "state_dict": state, "optimizer": {}}, path)
    images = torch.rand(2, 1, 28, 28, generator=random)
    x = images
    for name in ("1.conv1", "1.conv2"):
        x = F.conv2d(x, state[f"{name}.weight"], state[f"{name}.bias"]).relu()
        x = x.unfold(2, 2, 2).unfold(3, 2, 2).amax((4, 5))
    x = F.linear(x.reshape(2, 800), state["1.fc1.weight"], state["1.fc1.bias"]).relu()
    expected = F.linear(x, state["1.fc2.weight"], state["1.fc2.bias"])
    torch.testing.assert_close(load_classifier(path, "mnist", "none")(images), expected)


def plain_wide_resnet(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """WRN-16-k in eval mode, with weights by their usual names."""

    def activated(x: torch.Tensor, name: str) -> torch.Tensor:
        of = [weights[f"{name}.{part}"] for part in ("running_mean", "running_var")]
        return F.batch_norm(x, *of, weights[f"{name}.weight"], weights[f"{name}.bias"]).relu()

    x = F.conv2d(x, weights["conv1.weight"], padding=1)
    for stage, block in itertools.product((1, 2, 3), (0, 1)):
        name, stride = f"block{stage}.layer.{block}", 2 if (stage > 1 and block == 0) else 1
        first = activated(x, f"{name}.bn1")
        out = F.conv2d(first, weights[f"{name}.conv1.weight"], None, stride, 1)
        out = F.conv2d(activated(out, f"{name}.bn2"), weights[f"{name}.conv2.weight"], padding=1)
        if block == 0:
            x = F.conv2d(first, weights[f"{name}.convShortcut.weight"], None, stride)
        x = x + out
    x = activated(x, "bn1").mean((2, 3))
    return F.linear(x, weights["fc.weight"], weights["fc.bias"])


def test_wide_resnet_is_the_published_function_of_its_weights():
    torch.manual_seed(0)
    model = get_architecture("wide_resnet16_4", "cifar10", "none").double()
    images = torch.rand(4, 3, 32, 32, dtype=torch.float64)
    settle_batch_norms(model, images)
    expected = plain_wide_resnet(model[1].state_dict(), images)
    torch.testing.assert_close(model.eval()(images), expected)
