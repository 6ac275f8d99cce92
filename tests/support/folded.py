"""Networks of the commands in this process are folded once: each command would do it again for the
same few checkpoints, which takes longer than the votes of most tests.
"""

import torch
from torch import nn

from smoothadv.base.files import digest
from smoothadv.evaluation import voters
from smoothadv.voting.classifier import VotingClassifier, optimized_for_inference

_CPU = torch.device("cpu")
_FOLDED: dict[str, VotingClassifier] = {}


def fold_once() -> None:
    """Let evaluations in this process take a network that was folded for an equal one."""
    voters.optimized_for_inference = _optimized_once


def _optimized_once(
    classifier: nn.Module,
    device: torch.device,
    example: torch.Tensor | None = None,
    precision: str = "fp32",
) -> VotingClassifier:
    given = classifier, device, example, precision
    if device != _CPU or example is None or not _is_told_by_its_text(classifier):
        return optimized_for_inference(*given)
    weights = [weight.contiguous().numpy() for weight in classifier.state_dict().values()]
    key = digest([repr(classifier), precision, example.contiguous().numpy(), *weights])
    if key not in _FOLDED:
        _FOLDED[key] = optimized_for_inference(*given)
    return _FOLDED[key]


def _is_told_by_its_text(classifier: nn.Module) -> bool:
    """Whether a network is that of its weights and its text: one of the package's, unaltered."""
    return type(classifier) is nn.Sequential and all(
        part.__module__.startswith(("torch.nn.", "smoothadv.architectures."))
        and not (part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part))
        for part in classifier.modules()
    )
