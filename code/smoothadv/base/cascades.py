"""Files that name the stages of a cascade (``statistics.cascade``) or of a router
(``statistics.router``):

threshold = 0.7                # p0 of a cascade (default: 0.7)
[router]                       # or the router, in the form of a stage
checkpoint = "router.pth.tar"
sigma = 1.0
[[stage]]                      # two or more, in the order in which they are asked
checkpoint = "a.pth.tar"       # as certify takes it; a path is relative to this file
sigma = 1.0
[[stage]]
checkpoint = "b.pth.tar"
sigma = 0.5
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smoothadv.base.errors import UserError
from smoothadv.base.files import read_toml
from smoothadv.base.settings import checked, number, positive_noise_level

STAGES = "stages"
"""What stands in place of sigma where the model is a cascade or a router."""
a_threshold = number(float, "a probability from 0.5 to 0.999", lambda v: 0.5 <= v <= 0.999)
_FORM = "threshold or [router], and two or more [[stage]] with checkpoint and sigma"


@dataclass(frozen=True)
class Stage:
    """A base classifier, and the standard deviation ``sigma`` > 0 of its noise."""

    model: Any
    sigma: float


def stages_of(pairs: Any, called: str = STAGES) -> tuple[Stage, ...]:
    """The stages that pairs of a model and a sigma describe; UserError unless there are two or
    more.
    """
    try:
        stages = [stage_of(pair, called) for pair in pairs]
    except TypeError:
        raise UserError(f"{called}: found {pairs!r:.200}, expected pairs (model, sigma)") from None
    if len(stages) < 2:
        raise UserError(f"{called}: found {len(stages)}, expected two or more")
    return tuple(stages)


def stage_of(pair: Any, called: str) -> Stage:
    """The stage, or the router, that a pair of a model and a sigma describes; UserError where it is
    none.
    """
    if isinstance(pair, Stage):
        return pair
    try:
        model, sigma = pair
    except (TypeError, ValueError):
        raise UserError(f"{called}: found {pair!r:.200}, expected a pair (model, sigma)") from None
    if model is None:
        raise UserError(f"{called}: found no model, expected a pair (model, sigma)")
    source = Path(model) if isinstance(model, str) else model
    return Stage(source, checked("sigma", sigma, positive_noise_level))


def sigma_names(sigmas: Iterable[float]) -> tuple[str, ...]:
    """What the classes of a router are called: the sigmas of its stages, like "0.25"."""
    return tuple(f"{sigma:g}" for sigma in sigmas)


def read_stages(path: Path) -> tuple[tuple[Stage, ...], Stage | None, float | None]:
    """The stages in a file, its router and its threshold (None: it has none); UserError where it is
    no such file.
    """
    try:
        content = read_toml(path)
    except (OSError, ValueError) as error:
        is_binary = isinstance(error, UnicodeDecodeError)
        reason = "it is no text" if is_binary else getattr(error, "strerror", None) or error
        raise UserError(f"{path} is no TOML file with {_FORM}: {reason}") from None
    tables = content.pop("stage", None)
    router = content.pop("router", None)
    unknown = content.keys() - {"threshold"}
    if not isinstance(tables, list) or unknown or not all(map(_is_stage, tables)):
        found = ", ".join(sorted(unknown)) or f"stage = {tables!r:.100}"
        raise UserError(f"{path}: found {found}, expected {_FORM}")
    if router is not None and not _is_stage(router):
        raise UserError(f"{path}: found router = {router!r:.100}, expected {_FORM}")
    threshold = content.get("threshold")
    if threshold is not None:
        threshold = checked(f"{path}, threshold", threshold, a_threshold)
    named = [*tables, *([] if router is None else [router])]
    pairs = [(location(path, each["checkpoint"]), each["sigma"]) for each in named]
    chooses = None if router is None else stage_of(pairs.pop(), f"{path}, router")
    return stages_of(pairs, str(path)), chooses, threshold


def _is_stage(table: Any) -> bool:
    is_table = isinstance(table, dict) and table.keys() == {"checkpoint", "sigma"}
    return is_table and isinstance(table["checkpoint"], str)


def location(path: Path, name: str) -> Path:
    """The checkpoint that a file names; a name like timm:resnet18 or hf-hub:OWNER/NAME stays as it
    is.
    """
    beside = path.parent / name
    return Path(name) if ":" in name and not beside.exists() else beside
