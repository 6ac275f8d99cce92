"""Networks of the commands in this process are folded once: each command would do it again for the
same few checkpoints, which takes longer than the votes of most tests.
"""

import functools
from collections.abc import Callable
from unittest import mock

import torch
from torch import nn

from smoothadv.base.files import digest
from smoothadv.evaluation import voters
from smoothadv.voting.classifier import VotingClassifier, optimized_for_inference

_CPU = torch.device("cpu")
_FOLDED: dict[str, VotingClassifier] = {}
# Layers of which the text says all but parameters and buffers.
_PLAIN = (
    *(nn.Sequential, nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.Linear, nn.Flatten, nn.Identity),
    *(nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.MaxPool2d),
)
_OF_THE_PACKAGE = ("smoothadv.architectures.input_layers", "smoothadv.architectures.resnets")


def folding_once(main: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """A command that takes a network that was folded for an equal one."""

    @functools.wraps(main)
    def run(arguments: list[str]) -> int:
        with mock.patch.object(voters, "optimized_for_inference", _optimized_once):
            return main(arguments)

    return run


def _optimized_once(
    classifier: nn.Module,
    device: torch.device,
    example: torch.Tensor | None = None,
    precision: str = "fp32",
) -> VotingClassifier:
    given = classifier, device, example, precision
    if device != _CPU or example is None or not _is_told_by_its_text(classifier):
        return optimized_for_inference(*given)
    parts = [*classifier.named_parameters(), *classifier.named_buffers(), ("example", example)]
    texts = [f"{name} {part.dtype} {tuple(part.shape)}" for name, part in parts]
    values = [part.detach().reshape(-1).view(torch.uint8).numpy() for _, part in parts]
    key = digest([repr(classifier), precision, *texts, *values])
    if key not in _FOLDED:
        _FOLDED[key] = optimized_for_inference(*given)
    return _FOLDED[key]


def _is_told_by_its_text(classifier: nn.Module) -> bool:
    """Whether a network is that of its text, parameters and buffers: made of layers that are known
    here, and unaltered.
    """
    return all(
        (type(part) in _PLAIN or part.__module__ in _OF_THE_PACKAGE)
        and not (part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part))
        for part in classifier.modules()
    )
