"""Any module as a classifier that returns logits [B, K], whatever it returns itself."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from smoothadv.base.devices import device_of
from smoothadv.base.errors import UserError, counted, first_line, is_out_of_memory
from smoothadv.datasets import DatasetDescription


def logits_in(output: Any) -> torch.Tensor:
    """The logits in a network's output: a tensor, or the ``logits`` of an object or mapping;
    UserError for others.
    """
    if isinstance(output, torch.Tensor):
        return output
    logits = (
        output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    )
    if isinstance(logits, torch.Tensor):
        return logits
    raise UserError(
        f"the classifier returns a {type(output).__name__}; it must return logits [B, K], or an "
        "object or dict with .logits"
    )


class LogitsOf(torch.nn.Module):
    """Calls a network that returns an object or a mapping with ``logits``, and returns the
    logits.
    """

    def __init__(self, network: torch.nn.Module, is_mapping: bool) -> None:
        super().__init__()
        self.network, self.is_mapping = network, is_mapping

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        output = self.network(images)
        return output["logits"] if self.is_mapping else output.logits


@contextmanager
def explained(network: Any, image: torch.Tensor) -> Iterator[None]:
    """Within this context, an error of a module that cannot be applied to images like this one
    [C, H, W] becomes ``probe``'s UserError.
    """
    try:
        yield
    except (RuntimeError, TypeError) as error:
        if isinstance(network, torch.nn.Module) and not is_out_of_memory(error):
            probe(network, image)
        raise


@torch.inference_mode()
def probe(
    network: torch.nn.Module, image: torch.Tensor, called: str = ""
) -> tuple[torch.nn.Module, int]:
    """The network as a module that returns logits, and how many it returns for an image [C, H, W].

    UserError, which has the name that the network is ``called`` by, unless it returns logits.
    """
    name, shape = called or type(network).__name__, list(image.shape)
    weight = next((value for value in network.parameters() if value.is_floating_point()), image)
    try:
        output = network(image.unsqueeze(0).to(device_of(network, image.device), copy=True))
    except (RuntimeError, ValueError, TypeError, AssertionError, IndexError) as error:
        is_other = weight.dtype not in (image.dtype, torch.float32)
        remedy = ": call its .float(); precision= of certify rounds it" if is_other else ""
        floats = str(image.dtype).removeprefix("torch.")
        raise UserError(
            f"{name} cannot be applied to images of shape {shape}, {floats} in [0, 1]: "
            f"{first_line(error)}{remedy}"
        ) from error
    logits = logits_in(output)
    if (
        logits.dim() != 2
        or len(logits) != 1
        or logits.layout != torch.strided
        or logits.is_complex()
        or logits.dtype is torch.bool
    ):
        raise UserError(
            f"{name} returns logits of shape {list(logits.shape)} for one image, {logits.dtype}, "
            f"{logits.layout}; expected floats [1, K]"
        )
    if logits.shape[1] == 1:
        raise UserError(
            f"{name} returns one logit; votes are for the largest of several: let it return two, "
            "0 and this one for a sigmoid"
        )
    if output is logits:
        return network, logits.shape[1]
    return LogitsOf(network, isinstance(output, Mapping)), logits.shape[1]


def logits_of(
    network: torch.nn.Module, description: DatasetDescription, called: str = ""
) -> torch.nn.Module:
    """``network``, in eval mode, as a module from images to logits; UserError where it does not fit
    the images.

    It must accept a grey image of the shape in ``description`` and return one logit for each class
    there.
    """
    network.eval()
    description.doubts()  # fewer than two classes are a fault of the images, not of the network
    classifier, classes = probe(network, torch.full(description.image_shape, 0.5), called)
    if classes != description.num_classes:
        raise UserError(
            f"{called or type(network).__name__} has {counted(classes, 'class')}, the images of "
            f"'{description.name}' have {description.num_classes}"
        )
    return classifier


@contextmanager
def frozen(model: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Inside, the model is in eval mode and its parameters need no gradients; all modes and flags
    are restored then. UserError where the model does not let itself be prepared so.
    """
    if not isinstance(model, torch.nn.Module):
        yield
        return
    modes = [(module, module.training) for module in model.modules()]
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        try:
            model.eval()
            model.requires_grad_(False)
        except (RuntimeError, ValueError) as error:  # of TorchScript, torch.export, lazy layers
            raise UserError(
                f"{type(model).__name__} cannot be put in eval mode without gradients: give the "
                "module of which it was made, or call its lazy layers once first "
                f"({first_line(error)})"
            ) from error
        yield
    finally:
        for module, training in modes:
            module.training = training
        changed = [(one, flag) for one, flag in flags if one.requires_grad != flag]
        # Those made in inference mode can be changed only in it.
        with torch.inference_mode(any(parameter.is_inference() for parameter, _ in changed)):
            for parameter, requires_grad in changed:
                parameter.requires_grad_(requires_grad)
