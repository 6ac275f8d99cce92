"""The base classifier as it votes: the same function, arranged to run fast, on batches of one fixed shape.

Everything here changes the rounding of the logits at most, and thereby which classifier exactly is certified: what was
done is part of a log's settings.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from smoothadv.errors import UserError
from smoothadv.graphs import call_compiled
from smoothadv.memory import batch_that_suits
from smoothadv.smoothing.folding import fold

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Images that share a pass of an attack; noisy images, above which a pass on a CPU takes in proportion longer.
_MOST_EXAMPLES, _ENOUGH_FOR_A_CPU = 64, 16


@dataclass(frozen=True)
class Arrangement:
    """How the classifier is run: ``precision`` of weights and activations, a name in PRECISIONS; whether compiled."""

    precision: str = "fp32"
    compile: bool = False


def logits_in(output: Any) -> torch.Tensor:
    """The logits in what a network returned: a tensor, or the ``logits`` of an object or mapping; else UserError."""
    if isinstance(output, torch.Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(logits, torch.Tensor):
        return logits
    raise UserError(
        f"the classifier returns a {type(output).__name__}; it must return logits [B, K], or an object or dict with "
        ".logits"
    )


class VotingClassifier(nn.Module):
    """Maps noisy images [B, C, H, W], float32, to logits [B, K], float32, in the given precision.

    The sum of image and noise, computed in float32, is what is rounded: rounding the noise alone would certify
    another noise.
    """

    def __init__(self, classifier: nn.Module, dtype: torch.dtype, is_folded: bool) -> None:
        super().__init__()
        self.classifier, self.dtype, self.is_folded = classifier, dtype, is_folded

    def forward(self, noisy_images: torch.Tensor) -> torch.Tensor:
        return self.classifier(noisy_images.to(self.dtype)).float()


def arrange(
    classifier: nn.Module, arrangement: Arrangement, device: torch.device, example: torch.Tensor | None = None
) -> VotingClassifier:
    """A copy of ``classifier`` (images [B, C, H, W] in, logits out) on ``device``, in eval mode, arranged for speed.

    ``example`` is one image [C, H, W] on which the copy must agree with the original up to rounding.

    Batch normalization, and the input layer's division, are folded into convolutions; tensors are channels-last.
    Compiled at the first batch: UserError there, where no compiler can be found.
    """
    # In float64 on the CPU, where all that folding may change is beyond the digits of float32.
    original = copy.deepcopy(classifier).eval().cpu().double()
    folded = fold(original, None if example is None else example.cpu().double().unsqueeze(0))
    dtype = PRECISIONS[arrangement.precision]
    voting = VotingClassifier(folded.to(dtype).to(device), dtype, is_folded=folded is not original)
    voting = voting.eval().requires_grad_(False).to(memory_format=torch.channels_last)
    return compiled(voting) if arrangement.compile else voting


def compiled(classifier: VotingClassifier) -> VotingClassifier:
    """The classifier, compiled at its first batch: UserError there, where no compiler can be found."""
    return _Compiled(classifier)


class _Compiled(VotingClassifier):
    """A classifier compiled, at its first batch, for the shape of that batch, with its weights as constants."""

    def __init__(self, voting: VotingClassifier) -> None:
        import torch._inductor.config as inductor

        super().__init__(voting.classifier, voting.dtype, voting.is_folded)
        inductor.freezing = True
        self._compiled = (torch.compile(voting, dynamic=False),)  # in a tuple: it has the weights of ``classifier``

    def forward(self, noisy_images: torch.Tensor) -> torch.Tensor:
        return call_compiled(self._compiled[0], noisy_images)


def default_batch(
    classifier: nn.Module, image_shape: tuple[int, ...], device: torch.device, alike: bool = False
) -> int:
    """A batch of noisy images for ``classifier`` that suits the device: see ``memory.batch_that_suits``."""

    @torch.inference_mode()
    def forward(images: torch.Tensor) -> None:
        classifier(images)

    return batch_that_suits(forward, image_shape, device, alike)


def default_gradient_batch(
    classifier: nn.Module, image_shape: tuple[int, ...], device: torch.device, alike: bool = False
) -> int:
    """The same where gradients with respect to the images are wanted, for which activations are kept."""

    def forward_and_backward(images: torch.Tensor) -> None:
        images = images.requires_grad_()
        torch.autograd.grad(classifier(images).sum(), images)

    return batch_that_suits(forward_and_backward, image_shape, device, alike)


def default_attack_batch(
    classifier: nn.Module, image_shape: tuple[int, ...], device: torch.device, copies: int, alike: bool = False
) -> int:
    """The same for attacks on images in ``copies`` noisy copies each."""
    # More images in a pass would be attacked for nothing where it is interrupted, or shared out among processes.
    batch = min(default_gradient_batch(classifier, image_shape, device, alike), _MOST_EXAMPLES * copies)
    # A CPU gains nothing from more, and a pass of one image has no place that could stay empty.
    return min(batch, max(copies, _ENOUGH_FOR_A_CPU)) if device.type == "cpu" else batch


def make_deterministic() -> None:
    """Let this process use kernels only whose results depend on nothing but their inputs and shapes.

    Before the first use of CUDA. RuntimeError, later, from an operation that has no such kernel.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Nothing here reads what it has not written. (The module makes this attribute when it is imported.)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
