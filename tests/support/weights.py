"""Comparing what two training runs learnt, bit by bit."""

from pathlib import Path
from typing import Any

import torch


def read(folder: Path) -> dict[str, Any]:
    """The checkpoint of a run folder, read the way a stranger would."""
    return torch.load(folder / "checkpoint.pth.tar", map_location="cpu", weights_only=True)


def same_state(one: Path, other: Path) -> bool:
    """Whether two run folders hold bit-identical weights and optimizer states."""
    first, second = read(one), read(other)
    return _equal(first["state_dict"], second["state_dict"]) and _equal(
        first["optimizer"], second["optimizer"]
    )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            _equal(value, other[key]) for key, value in one.items()
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    return one == other
