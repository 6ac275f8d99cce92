"""A network of integer layers, with the entrance that makes integers of an image; docs/integer.md
defines it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from smoothadv.base.digests import digest
from smoothadv.base.errors import first_line
from smoothadv.exact.layers import (
    EXACT,
    LAYERS,
    Convolution,
    IntegerLayer,
    in_float64,
    rounded,
)

DEFINITION = 1
"""The version of the definition in docs/integer.md."""
WHITE = 255
_MOST_STEPS, _PROBES = 10_000, 8
_MOST_VALUES = 2**24  # of an image in a map


@dataclass(frozen=True)
class Step:
    """A layer and the numbers of the values that it reads: 0 is the image, n the result of step
    n.
    """

    layer: IntegerLayer
    inputs: tuple[int, ...]


class IntegerNetwork(nn.Module):
    """Maps images [B, C, H, W] of the shape ``image_shape``, float32, to logits [B, K]: integers
    times a power of 2.

    An image is rounded to grey levels, clamped to -clip..255 + clip, and loses the ``mean`` [C],
    integers, of its channel. ``steps`` follow in order. ``probe`` is the digest of the logits of
    ``probe_images``, computed in float64. ValueError unless every sum is proven to be exact for all
    images.
    """

    mean: torch.Tensor
    probe: str
    layers: nn.ModuleList

    def __init__(
        self, image_shape: Sequence[int], clip: int, mean: torch.Tensor, steps: Sequence[Step]
    ) -> None:
        super().__init__()
        self.image_shape, self.clip = tuple(image_shape), clip
        self.layers = nn.ModuleList(step.layer for step in steps)
        self.inputs = [step.inputs for step in steps]
        self.register_buffer("mean", mean.to(torch.float32, copy=True).view(-1, 1, 1))
        last = {used: number for number, inputs in enumerate(self.inputs, 1) for used in inputs}
        self._unused_after = [
            [used for used in last if last[used] == number] for number in range(len(steps) + 1)
        ]
        self._prove()

        self.probe = ""

    def _steps(self) -> Iterator[tuple[int, IntegerLayer, tuple[int, ...]]]:
        """Each layer with its number and those of the values that it reads: 0 is the image, n the
        result of step n.
        """
        for number, (layer, inputs) in enumerate(zip(self.layers, self.inputs), 1):
            assert isinstance(layer, IntegerLayer)
            yield number, layer, inputs

    def _prove(self) -> None:
        """Sets ``sizes``: the largest size of each value, by number."""
        levels = [
            edge - float(value)
            for edge in (-self.clip, WHITE + self.clip)
            for value in self.mean.flatten()
        ]
        self.sizes = sizes = [max(map(abs, levels))]
        for number, layer, inputs in self._steps():
            if len(inputs) != layer.ARGUMENTS or not all(
                type(one) is int and 0 <= one < number for one in inputs
            ):
                raise ValueError(f"step {number} reads the values {inputs}")
            if getattr(layer, "is_last", False) != (number == len(self.layers)):
                raise ValueError(
                    f"the logits must come from the last step, and only there: found step {number}"
                )
            sizes.append(layer.bound(*(sizes[used] for used in inputs)))

    @classmethod
    def read(
        cls,
        record: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        image_shape: Sequence[int],
        num_classes: int,
    ) -> IntegerNetwork:
        """The network for which ``stored`` returned this, for images of this shape; ValueError
        where it is damaged.

        It is that, too, where its maps have more than 2^24 values, or where it has other than
        ``num_classes`` logits.
        """
        if (found := record.get("definition")) != DEFINITION:
            raise ValueError(
                f"it has definition {found!r} of integer networks, and this version knows "
                f"{DEFINITION}"
            )
        try:
            clip, steps = record["clip"], record["steps"]
            if (
                not 1 <= len(steps) <= _MOST_STEPS
                or type(clip) is not int
                or not 0 <= clip < EXACT // 4
            ):
                raise ValueError(f"{len(steps)} steps, clip {clip}")
            by_step: dict[str, dict[str, torch.Tensor]] = {}
            for name, tensor in tensors.items():
                step, _, kind = name.partition(".")
                by_step.setdefault(step, {})[kind] = tensor
            mean = by_step.pop("mean")[""]
            is_other = (
                mean.is_floating_point() or mean.is_complex() or mean.shape != (image_shape[0],)
            )
            if is_other or bool((mean.double().abs() > WHITE).any()):
                raise ValueError(f"its mean is no grey level for each of {image_shape[0]} channels")
            made = [
                Step(LAYERS[kind](settings, by_step.pop(str(number), {})), tuple(inputs))
                for number, (kind, inputs, settings) in enumerate(steps, 1)
            ]
            if by_step:
                raise ValueError(f"tensors of step {next(iter(by_step))}, which needs none")
            network, probe = cls(image_shape, clip, mean, made), record["probe"]
            if not isinstance(probe, str):
                raise ValueError(f"probe {probe!r:.80}")
            network.probe = probe
            logits = network._rehearse()
            if num_classes != logits:
                raise ValueError(f"it has {logits} logits, expected {num_classes}")
        except (
            LookupError,
            TypeError,
            AttributeError,
            RuntimeError,
            ValueError,
            OverflowError,
        ) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else first_line(error)
            raise ValueError(f"its integer network is damaged: {reason}") from error
        return network

    @torch.inference_mode()
    def _rehearse(self) -> int:
        """The number of logits; an exception where shapes do not fit, before memory is taken for
        maps.
        """

        def check(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            outputs = len(layer.weight) if isinstance(layer, Convolution) else 1
            padded = [2 * size for size in getattr(layer, "padding", (0, 0))]
            shape = [max(outputs, *(one.shape[1] for one in inputs))]
            shape += [
                more + max(one.shape[axis] for one in inputs) for axis, more in zip((2, 3), padded)
            ]
            if math.prod(shape) > _MOST_VALUES:
                raise ValueError(f"a map of {shape} values")

        hooks = [layer.register_forward_pre_hook(check) for layer in self.layers]
        try:
            return self(torch.zeros(1, *self.image_shape)).shape[1]
        finally:
            for hook in hooks:
                hook.remove()

    def stored(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """A record, as JSON can hold it, and tensors of integers and multipliers, which together
        are the network.
        """
        steps, tensors = [], {"mean": self.mean.flatten().to(torch.int16)}
        for number, layer, inputs in self._steps():
            settings, of_layer = layer.stored()
            steps.append([type(layer).__name__.lower(), list(inputs), settings])
            tensors |= {f"{number}.{name}": value for name, value in of_layer.items()}
        return {
            "definition": DEFINITION,
            "clip": self.clip,
            "probe": self.probe,
            "steps": steps,
        }, tensors

    def get_extra_state(self) -> str:
        """The record as text: a digest of the state covers it."""
        return json.dumps([self.stored()[0], self.image_shape], sort_keys=True)

    def set_extra_state(self, state: str) -> None:
        if state != self.get_extra_state():
            raise ValueError("the state is of another integer network")

    def entrance(self, images: torch.Tensor) -> torch.Tensor:
        """The integers [B, C, H, W] that stand for images."""
        return rounded(images * WHITE).clamp(-self.clip, WHITE + self.clip) - self.mean

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        values: dict[int, torch.Tensor] = {0: self.entrance(images)}
        for number, layer, inputs in self._steps():
            values[number] = layer(*(values[used] for used in inputs))
            for used in self._unused_after[number]:
                del values[used]
        return values[len(self.layers)].flatten(1)

    def probe_images(self) -> torch.Tensor:
        """Images [8, C, H, W] of random grey levels, float32: half of them in 0..255, half in the
        whole range.
        """
        count = math.prod(self.image_shape) * _PROBES
        levels = torch.from_numpy(_words(0, count).astype(np.int64)).view(
            _PROBES, *self.image_shape
        )
        inside, outside = (
            levels[: _PROBES // 2] % (WHITE + 1),
            levels[_PROBES // 2 :] % (WHITE + 2 * self.clip + 1),
        )
        return torch.cat([inside, outside - self.clip]).to(torch.float32) / WHITE

    @torch.inference_mode()
    def inexact_layer(self, images: torch.Tensor) -> int | None:
        """The number of a convolution that sums inexactly here, None if none does, in batches like
        ``images``.

        Each one is given what it reads of the images, and integers of random size up to the
        largest: sums near their bounds, which images rarely cause, show rounding first. Compared
        with float64 are the first and the last row.
        """
        inexact: list[int] = []

        def compare(number: int, layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            assert isinstance(layer, Convolution)
            (x,) = inputs
            for values in (
                x,
                random_integers(number, x, layer.smallest_input, layer.largest_input),
            ):
                ends = torch.stack([values[0], values[-1]])
                found = layer.total(values)
                if not torch.equal(
                    torch.stack([found[0], found[-1]]), layer.total(ends, in_float64=True)
                ):
                    inexact.append(number)

        hooks = [
            layer.register_forward_pre_hook(partial(compare, number))
            for number, layer, _ in self._steps()
            if isinstance(layer, Convolution)
        ]
        try:
            self(images)
        finally:
            for hook in hooks:
                hook.remove()
        return min(inexact, default=None)

    @torch.inference_mode()
    def set_probe(self) -> None:
        """Set ``probe``, from sums in float64 on the CPU."""
        with in_float64(self.layers):
            self.probe = digest_of_logits(self(self.probe_images()))


def _words(number: int, count: int) -> np.ndarray:
    """Random integers of 53 bits, uint64, the same with every version of NumPy."""
    return np.random.Philox(key=[DEFINITION, number]).random_raw(count) >> np.uint64(11)


def random_integers(number: int, x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Integers in low..high, the same in each run, of the shape, type and device of ``x``, channels
    last.
    """
    some = x[:_PROBES]  # random numbers for all of a large batch would take gigabytes
    words = torch.from_numpy(
        (_words(number, some.numel()) % np.uint64(high - low + 1)).astype(np.int64)
    ) + int(low)
    rows = torch.arange(len(x), device=x.device) % len(some)
    return words.view(some.shape).to(x)[rows].contiguous(memory_format=torch.channels_last)


def digest_of_logits(logits: torch.Tensor) -> str:
    """A SHA-256, in hexadecimal, of float32 logits."""
    return digest([logits.cpu().contiguous().numpy().astype("<f4")])
