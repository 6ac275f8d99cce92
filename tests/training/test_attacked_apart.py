"""Making the attacked form leaves the model unchanged; its own parameters need no gradients and are in its dtype."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from smoothadv.architectures import get_architecture
from smoothadv.attacks import ATTACKS
from smoothadv.training.attacked import attacked_form
from support import networks
from support.networks import settle_batch_norms


def as_if_trained(kind: type[nn.Module] | None = None) -> tuple[nn.Module, torch.Tensor]:
    """A residual network for digits, or a small one behind an input layer, in train mode; and images."""
    torch.manual_seed(0)
    if kind is None:
        model, images = get_architecture("digits_resnet8", "digits"), torch.rand(4, 1, 8, 8)
    else:
        model, images = nn.Sequential(nn.Identity(), kind()), torch.rand(4, 3, 8, 8)
    settle_batch_norms(model, images)
    return model.train(), images


def image_gradient(model: nn.Module, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits in eval mode, and the gradient of their loss with respect to the images."""
    points = images.clone().requires_grad_()
    logits = model.eval()(points)
    (gradient,) = torch.autograd.grad(F.cross_entropy(logits.float(), torch.arange(4) % 3, reduction="sum"), points)
    return logits.detach(), gradient


def flags(model: nn.Module) -> dict[str, object]:
    """Everything about a model that is not in its state dict."""
    hooks = [
        len(entries)
        for module in model.modules()
        for name, entries in vars(module).items()
        if name.endswith("_hooks") and isinstance(entries, dict)
    ]
    return {
        "modes": [(name, module.training) for name, module in model.named_modules()],
        "types": [type(module) for module in model.modules()],
        "parameters": [(name, id(value), value.requires_grad, value.grad) for name, value in model.named_parameters()],
        "buffers": [(name, id(value)) for name, value in model.named_buffers()],
        "hooks": hooks,
        "forwards": ["forward" in vars(module) for module in model.modules()],
        "layout": [value.stride() for value in model.parameters()],
    }


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "kind", [networks.Network, networks.TwoConsumers, networks.BranchOnShape, networks.BranchOnType]
)
def test_the_live_model_is_left_alone(kind, training):
    model, images = as_if_trained(kind)
    model.train(training)
    model[1].norm.training = not training
    model[1].second.weight.requires_grad_(False)
    state, before = copy.deepcopy(model.state_dict()), flags(model)
    form = attacked_form(model, images[:2])
    assert flags(model) == before
    if form is not None:
        form.refresh()
        ATTACKS["PGD"](0.5, 2)(form, images, torch.zeros(4, dtype=torch.int64))
        assert flags(model) == before
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_form_has_of_its_own_needs_no_gradients_and_shares_no_memory(dtype):
    model, images = as_if_trained()
    form = attacked_form(model, images[:2], dtype)
    live = {id(parameter) for parameter in model.parameters()}
    memory = {parameter.data_ptr() for parameter in model.parameters()}
    own = [parameter for parameter in form.parameters() if id(parameter) not in live]
    assert len(own) == 2 * sum(isinstance(layer, nn.BatchNorm2d) for layer in model.modules()), (
        "a weight and a bias for each"
    )
    assert not any(parameter.requires_grad or parameter.data_ptr() in memory for parameter in own)
    assert {parameter.dtype for parameter in own} == {dtype}
    weights = [parameter for parameter in own if parameter.dim() == 4]
    assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)
    # The others are the model's: they need no refreshing.
    assert len(list(form.parameters())) > len(own)


def test_bfloat16_works_under_autocast():
    model, images = as_if_trained()
    form = attacked_form(model, images[:2], torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, gradient = image_gradient(form, images)
    expected_logits, expected_gradient = image_gradient(model, images)
    assert gradient.dtype == torch.float32
    error = (logits.float() - expected_logits).abs().max() / expected_logits.std()
    # The error is that of bfloat16, which has 8 bits.
    assert 1e-4 < error < 0.1
    assert F.cosine_similarity(gradient.flatten(), expected_gradient.flatten(), dim=0) > 0.95
