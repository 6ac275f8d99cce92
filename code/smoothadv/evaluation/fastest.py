"""--fast: the precision and the compiling of a classifier that vote fastest here, by timed batches.

A log records both, as if they had been given: a lower precision is another classifier.
"""

import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch

from smoothadv.architectures.integers import is_of_integers
from smoothadv.base.errors import UserError, warn
from smoothadv.evaluation.specs import CertifySpec
from smoothadv.voting.classifier import (
    CompiledClassifier,
    VotingClassifier,
    default_batch,
    optimized_for_inference,
)

_WORTH_COMPILING = 600.0
"""Seconds of work for which a minute of compiling is spent."""
_WORTH_ANOTHER_CLASSIFIER = 1.25
"""How much faster a lower precision must be: its certificates are of another classifier."""
_ROUNDS = 3


def fastest(
    spec: CertifySpec,
    module: torch.nn.Module,
    image: torch.Tensor,
    device: torch.device,
    draws: int,
) -> dict[str, Any]:
    """The fields ``precision`` and ``compile`` that are fastest for ``draws`` noisy copies of
    images like ``image`` [C, H, W].
    """
    forms = {name: _form(module, image, device, name) for name in _precisions(module, device)}
    batch = spec.batch or default_batch(forms["fp32"], tuple(image.shape), device)
    images = image.to(device).expand(min(batch, max(draws, 1)), *image.shape)
    rates = _rates(forms, images)
    precision, plain = max(rates, key=lambda name: rates[name]), rates["fp32"]
    if rates[precision] < _WORTH_ANOTHER_CLASSIFIER * plain:
        precision = "fp32"
    rate, is_compiled = rates[precision], False
    if draws / rate > _WORTH_COMPILING:
        print("compiling the classifier, which may take a minute", file=sys.stderr)
        try:
            compiled = {precision: CompiledClassifier(forms[precision])}
            found = _rates({"plain": forms[precision], **compiled}, images)
            is_compiled = found[precision] > found["plain"]
            rate *= max(1.0, found[precision] / found["plain"])
        except UserError as error:  # there is no compiler
            warn(f"--fast goes on without compiling: {error}")
    print(
        f"--fast: {precision}{', compiled' * is_compiled}, {rate:,.0f} noisy images per second; "
        f"fp32 makes {plain:,.0f}"
        + f"; certificates are of the classifier in {precision}"
        * (precision != "fp32"),
        file=sys.stderr,
    )
    return {"precision": precision, "compile": is_compiled}


def _precisions(module: torch.nn.Module, device: torch.device) -> list[str]:
    """Those in which it can be computed; integers are exact in one alone."""
    if is_of_integers(module):
        return ["fp32"]
    return ["fp32", "bf16", *["fp16"] * (device.type == "cuda")]


def _form(
    module: torch.nn.Module, image: torch.Tensor, device: torch.device, precision: str
) -> VotingClassifier:
    voter = optimized_for_inference(module, device, image, precision)
    if (network := voter.integers) is not None:
        voter.use(network.fast_form(device))
    return voter


@torch.inference_mode()
def _rates(forms: Mapping[str, VotingClassifier], images: torch.Tensor) -> dict[str, float]:
    """How many of the images each form classifies in a second: the median of rounds in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(1 + _ROUNDS):  # the first round is slower
        for name, form in forms.items():
            begin = time.perf_counter()
            form.scores(images).argmax(1).cpu()
            seconds[name].append(time.perf_counter() - begin)
    return {name: len(images) / statistics.median(some[1:]) for name, some in seconds.items()}
