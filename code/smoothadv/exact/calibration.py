"""Ranges of values for integers of few bits, from what a float network computes on noisy images."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from smoothadv.exact.reading import FloatNetwork, Operation

_SAMPLE = 2**15  # values of each operation and batch
_STRIDE = 2_654_435_761  # a prime, so that the places are of all channels, rows and columns
_SHARES = (0.99, 0.999, 0.9999, 0.99999, 1.0)


@torch.inference_mode()
def largest_values(
    network: FloatNetwork, batches: Iterable[torch.Tensor], levels: int
) -> dict[Operation, float]:
    """For each rounded result the size above which values are best clamped, for ``levels`` levels
    from 0 to it.

    ``batches`` hold what the network's input layer returns, [B, C, H, W]. Of some quantiles of the
    sizes that is the one with the least mean squared error (as in Choukroun et al., 2019, without a
    grid).
    """
    nodes = {operation.node: operation for operation in network.operations if operation.is_settled}
    samples: dict[Operation, list[torch.Tensor]] = {operation: [] for operation in nodes.values()}

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if (operation := nodes.get(n)) is not None:
                flat = result.flatten().abs()
                places = torch.arange(min(len(flat), _SAMPLE)) * _STRIDE % len(flat)
                samples[operation].append(flat[places].float())
            return result

    recorder = Recorder(network.graph)
    for batch in batches:
        recorder.run(batch)
    return {
        operation: _best_clamp(torch.cat(parts), levels)
        for operation, parts in samples.items()
        if parts
    }


def _best_clamp(sizes: torch.Tensor, levels: int) -> float:
    """The quantile of ``sizes`` to clamp at; 1 where all are 0."""
    ascending = sizes.sort().values
    found = {
        float(ascending[min(len(sizes) - 1, int(share * len(sizes)))]) for share in _SHARES
    } - {0.0}

    def error(largest: float) -> float:
        step = largest / levels
        return float(((sizes / step).round().clamp(max=levels) * step - sizes).square().mean())

    return min(found, key=error, default=1.0)
