"""The base classifier in the form that votes: the same function, optimized for batches of one fixed
shape.

These changes affect only the rounding of the logits. But rounding decides which classifier exactly
is certified, so the changes are recorded in a log's settings.
"""

import copy
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

from smoothadv.architectures.ensemble import Ensemble
from smoothadv.architectures.integers import NetworkOfIntegers, is_of_integers
from smoothadv.base.devices import batch_that_suits, device_of, layout_on
from smoothadv.base.errors import UserError, first_line, warn
from smoothadv.noise import Noise, Purpose
from smoothadv.voting.folding import ConvolutionReLU, are_offered_on, fold, runs

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# The most images in a pass of an attack; the number of noisy images above which a CPU gains
# nothing.
_MOST_EXAMPLES, _ENOUGH_FOR_A_CPU = 64, 16
# Where the compiler is called: by a network, and by the backward pass.
_COMPILER = ("torch._dynamo.convert_frame", "torch._inductor.compile_fx")


class VotingClassifier(nn.Module):
    """Maps noisy images [B, C, H, W], float32, to logits [B, K], float32, in the given precision.

    The sum of image and noise is computed in float32 and then rounded: rounding the noise itself
    would certify another noise distribution. The classifier gets a copy, which it may overwrite.
    ``is_folded`` tells whether batch normalization was folded. Without gradients, ``fast``, the
    same function, takes the classifier's place, if there is one.
    """

    fast: nn.Module | None

    def __init__(self, classifier: nn.Module, dtype: torch.dtype, is_folded: bool) -> None:
        super().__init__()
        self.classifier, self.dtype, self.is_folded, self.fast = classifier, dtype, is_folded, None

    def forward(self, noisy_images: torch.Tensor) -> torch.Tensor:
        form = self.classifier if self.fast is None or torch.is_grad_enabled() else self.fast
        # Many networks normalize in place; those of integers change nothing.
        return form(noisy_images.to(self.dtype, copy=self.integers is None)).float()

    def use(self, form: nn.Module | None) -> None:
        """Make ``form`` the fast one."""
        self.fast = form

    def use_fast_form(self, check: Callable[[NetworkOfIntegers, Any], None]) -> None:
        """Make a faster form of a network of integers the fast one, if there is one and ``check``
        of network and form raises no UserError.

        Otherwise ``check``, given None as the form, is of the classifier itself.
        """
        if (network := self.integers) is None:
            return
        if self.fast is None:
            self.use(network.fast_form(device_of(network, torch.device("cpu"))))
        try:
            check(network, self.fast)
        except UserError:
            if self.fast is None:
                raise
            self.use(None)
            check(network, None)
            warn("the fast kernels for integers compute something else here: slower ones vote")

    @property
    def integers(self) -> NetworkOfIntegers | None:
        """The classifier where it is a network of integers; else None."""
        return self.classifier if isinstance(self.classifier, NetworkOfIntegers) else None

    @property
    def is_fused(self) -> bool:
        """Whether a convolution is one call with the ReLU behind it."""
        return any(isinstance(layer, ConvolutionReLU) for layer in self.classifier.modules())

    def scores(self, noisy_images: torch.Tensor, consensus: bool = True) -> torch.Tensor:
        """What votes, the largest of each row: float32 [B, K]; the logits, or the sum of an
        ensemble's probabilities.

        With ``consensus``, members that cannot change a row's vote are left out of its sum.
        """
        if isinstance(self.classifier, Ensemble) and self.classifier.mean == "probabilities":
            return self.classifier.summed_probabilities(noisy_images.to(self.dtype), consensus)
        return self(noisy_images)


def optimized_for_inference(
    classifier: nn.Module,
    device: torch.device,
    example: torch.Tensor | None = None,
    precision: str = "fp32",
) -> VotingClassifier:
    """A copy of ``classifier`` (maps images [B, C, H, W] to logits) on ``device``, in eval mode,
    optimized for speed.

    Batch normalization, and the input layer's division, are folded into convolutions, unless that
    changes the logits of ``example``, an image [C, H, W], by more than rounding. On a GPU, sums and
    ReLUs are computed with the convolution before them, where cuDNN can. Tensors have the memory
    format of ``layout_on``; ``precision`` of weights and activations is a name in PRECISIONS.
    """
    images = None if example is None else example.cpu().double().unsqueeze(0)
    dtype = PRECISIONS[precision]
    if precision != "fp32" and is_of_integers(classifier):
        raise UserError(
            f"a network of integers is computed exactly, in fp32, not in {precision}: leave "
            "--precision out"
        )
    for epilogues in (True, False) if are_offered_on(device, dtype) else (False,):
        # Folding in float64 on the CPU changes nothing within the digits of float32.
        original = copy.deepcopy(classifier).requires_grad_(False).cpu().double()
        original.eval()  # a user's own train() may return nothing
        folded = fold(original, images, epilogues)
        voting = VotingClassifier(
            folded.to(dtype).to(device), dtype, is_folded=folded is not original
        )
        voting = voting.eval().to(memory_format=layout_on(device, dtype))
        if voting.is_fused and (images is None or runs(voting, images.float().to(device))):
            break
    return voting


class CompiledClassifier(VotingClassifier):
    """A classifier compiled, at its first batch, for the shape of that batch, with its weights as
    constants.

    UserError at the first batch if there is no compiler.
    """

    def __init__(self, voting: VotingClassifier) -> None:
        import torch._inductor.config as inductor

        super().__init__(voting.classifier, voting.dtype, voting.is_folded)
        inductor.freezing = True
        # Otherwise each process would choose kernels by timing them, and round differently.
        if hasattr(inductor, "deterministic"):
            inductor.deterministic = True
        else:
            inductor.triton.autotune_pointwise = inductor.dynamic_scale_rblock = False
        # In a tuple: its weights are registered already, as those of ``classifier``.
        self._compiled = (torch.compile(voting, dynamic=False), voting)

    def forward(self, noisy_images: torch.Tensor) -> torch.Tensor:
        return call_compiled(self._compiled[0], noisy_images)

    def use(self, form: nn.Module | None) -> None:
        if isinstance(form, nn.Module):  # its operators are whole as they are
            vars(form)["forward"] = torch.compiler.disable(form.forward)
        super().use(form)
        self._compiled[1].use(form)

    def scores(self, noisy_images: torch.Tensor, consensus: bool = True) -> torch.Tensor:
        return self(noisy_images)  # all members in one graph


def call_compiled(
    compiled: Callable[[torch.Tensor], torch.Tensor], images: torch.Tensor
) -> torch.Tensor:
    """The output of a compiled network; UserError, at its first call, where no compiler can be
    found.
    """
    try:
        return compiled(images)
    except KeyboardInterrupt:
        end_compiling()
        raise
    except Exception as error:
        if not type(error).__module__.startswith(("torch._inductor", "torch._dynamo")):
            raise
        advice = "--compile failed: leave it out, or install a C++ compiler (on a GPU: Triton)"
        raise UserError(f"{advice}; {first_line(error)}") from error


def is_compiling(frame: FrameType | None) -> bool:
    """Whether the code at ``frame``, which a signal has interrupted, works for the compiler."""
    while frame is not None and frame.f_globals.get("__name__") not in _COMPILER:
        frame = frame.f_back
    return frame is not None


def end_compiling() -> None:
    """Give up the kernels that wait to be compiled, and wait for those that are: Python would let
    all of them be compiled before it exits.
    """
    if (module := sys.modules.get("torch._inductor.async_compile")) is None:
        return
    if (pool := module.AsyncCompile.pool).cache_info().currsize:
        pool().shutdown(cancel_futures=True)
        pool.cache_clear()  # so that another one can be made


def default_batch(
    classifier: nn.Module,
    image_shape: tuple[int, ...],
    device: torch.device,
    of_total: bool = False,
    with_gradient: bool = False,
    noise: Noise | None = None,
) -> int:
    """A batch of noisy images for ``classifier`` that suits the device: see
    ``base.devices.batch_that_suits``.

    ``with_gradient`` is for gradients with respect to the images, which keep activations in memory.
    ``noise`` is what is drawn for each batch, which takes several times the memory of the images.
    """

    @torch.inference_mode(not with_gradient)
    def work(images: torch.Tensor) -> None:
        if noise is not None:
            noise.stream(0, device, Purpose.SELF_CHECK).fill(images, torch.zeros_like(images[0]), 0)
        logits = classifier(images.requires_grad_(with_gradient))
        if with_gradient:
            torch.autograd.grad(logits.sum(), images)

    return batch_that_suits(work, image_shape, device, of_total)


def default_attack_batch(
    classifier: nn.Module,
    image_shape: tuple[int, ...],
    device: torch.device,
    copies: int,
    of_total: bool = False,
) -> int:
    """As ``default_batch``, for attacks on images with ``copies`` noisy copies each."""
    # With more images in a pass, an interruption loses more work and processes share the images
    # less evenly.
    batch = min(
        default_batch(classifier, image_shape, device, of_total, with_gradient=True),
        _MOST_EXAMPLES * copies,
    )
    # A CPU gains nothing from larger passes, and in a pass of one image no place can stay empty.
    return min(batch, max(copies, _ENOUGH_FOR_A_CPU)) if device.type == "cpu" else batch


def make_deterministic() -> None:
    """Make this process use only kernels whose results depend on nothing but their inputs and
    shapes.

    Call it before the first use of CUDA. An operation without such a kernel raises a RuntimeError
    later.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # As use_deterministic_algorithms(True), which loads the compiler to tell it, too: a second.
    torch.set_deterministic_debug_mode("error")
    # No code here reads memory before writing it. mypy does not see this attribute, which torch
    # sets at import.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
