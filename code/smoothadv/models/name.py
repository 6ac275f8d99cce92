"""What the name of a model means: which kind of model it is, and which checkpoints an ensemble, a
classifier that is the mean of its members, or the stages of a cascade (``statistics.cascade``) or a
router (``statistics.router``) are. A checkpoint is a file or ``hf-hub:OWNER/NAME[@REVISION]``, on
the Hugging Face hub.

An ensemble is named ``A.pth.tar+B.pth.tar``, which takes the mean of the logits, or by a TOML file:

    members = ["a.pth.tar", "b.pth.tar"]   # two or more; paths are relative to this file
    mean = "probabilities"                 # or "logits" (default)
    input_layer = "center"                 # of the members that do not record theirs

A TOML file names the stages:

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

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from smoothadv.base import plugins
from smoothadv.base.errors import UserError
from smoothadv.base.files import read_toml
from smoothadv.base.settings import a_threshold, checked, positive_noise_level

HUB = "hf-hub:"
MEANS = ("logits", "probabilities")
_SUFFIX = ".toml"
_EXPECTED = {
    "members": "a list of two or more paths of checkpoints",
    "mean": f"one of {', '.join(MEANS)}",
    "input_layer": "the name of an input layer",
}
STAGES = "stages"
"""What stands in place of sigma where the model is a cascade or a router."""
_FORM = "threshold or [router], and two or more [[stage]] with checkpoint and sigma"


CHECKPOINT, LIBRARY, MODULE = "checkpoint", "library", "module"
_LIBRARY = re.compile(r"[A-Za-z][\w-]+:.+")


@dataclass(frozen=True)
class ModelName:
    """A model of some ``kind``: ``source`` is the path or the name of it, or the module.

    A CHECKPOINT may also be an ensemble, and its file need not be there yet. A LIBRARY has networks
    by name, like timm:resnet18. A MODULE is one itself.
    """

    source: Any
    kind: str

    def __str__(self) -> str:
        return type(self.source).__name__ if self.kind == MODULE else str(self.source)


def is_on_hub(name: str | Path) -> bool:
    """Whether a checkpoint lies on the Hugging Face hub."""
    return str(name).startswith(HUB)


def parse_model(given: Any) -> ModelName:
    """What a path or a name stands for, or a module; a file hides a network of its name."""
    if isinstance(given, ModelName):
        return given
    if not isinstance(given, (str, os.PathLike)):
        return ModelName(given, MODULE)
    path = Path(given)
    if path.exists() or is_on_hub(path):
        return ModelName(path, CHECKPOINT)
    plugins.refuse_code(str(path))
    return ModelName(path, LIBRARY if _LIBRARY.fullmatch(str(path)) else CHECKPOINT)


@dataclass(frozen=True)
class Members:
    """The checkpoints that ``name`` stands for; ``mean`` is one of MEANS, or None where it is a
    single checkpoint.

    ``input_layer`` is that of members that record none (None: unknown); ``contents`` is empty until
    they are read.
    """

    name: Path
    paths: tuple[Path, ...]
    mean: str | None = None
    input_layer: str | None = None
    contents: tuple[dict[str, Any], ...] = ()

    def described(self) -> str:
        """The text of the TOML file ``name`` that stands for this ensemble."""
        members = [os.path.relpath(path, self.name.parent) for path in self.paths]
        return f"members = {json.dumps(members)}\nmean = {json.dumps(self.mean)}\n"

    def input_layers(self, asked: str | None) -> list[str | None]:
        """The input layer to ask of each member, where the user asked for ``asked``.

        That is meant for members that record none, if there are any; else for all, where another
        one is a mistake.
        """
        are_recorded = [content.get("input_layer") is not None for content in self.contents]
        if all(are_recorded):
            return [asked] * len(are_recorded)
        return [None if is_recorded else asked or self.input_layer for is_recorded in are_recorded]


def members_of(name: str | Path) -> Members:
    """The checkpoints that a name stands for, not yet read; a file whose name contains '+' is one
    checkpoint, and no member of an ensemble that is named by plus signs.

    UserError unless an ensemble has two or more members, each once, and none is an ensemble, or if
    its TOML file cannot be read or holds something else.
    """
    path = Path(name)
    pieces = str(path).split("+")
    are_there = (is_on_hub(piece) or os.path.isfile(piece) for piece in pieces)
    if pieces[1:] and not path.exists() and any(are_there):
        ensemble = Members(path, tuple(map(Path, pieces)), MEANS[0])
    elif path.suffix == _SUFFIX:
        ensemble = _described(path)
    else:
        return Members(path, (path,))
    places = set[str]()
    for member in ensemble.paths:
        if member.suffix == _SUFFIX:
            raise UserError(f"ensemble {path}: {member} is an ensemble too: name its checkpoints")
        place = os.path.realpath(member) if member.exists() else str(member)
        if place in places:
            raise UserError(f"ensemble {path}: {member} is there twice: name each checkpoint once")
        places.add(place)
    return ensemble


def _described(path: Path) -> Members:
    """The ensemble in a TOML file."""
    content = _content(path, f"ensemble {path} is no TOML file")
    if "stage" in content:
        raise UserError(f"{path}: it is a cascade, or a router: write {STAGES} in place of sigma")
    members, mean = content.get("members", []), content.get("mean", MEANS[0])
    layer = content.get("input_layer")
    fits = {
        "members": isinstance(members, list)
        and len(members) > 1
        and all(isinstance(one, str) for one in members),
        "mean": mean in MEANS,
        "input_layer": layer is None or isinstance(layer, str),
    }
    for key in (*fits, *content):
        if not fits.get(key):
            expected = _EXPECTED.get(key, f"no other keys than {', '.join(_EXPECTED)}")
            raise UserError(f"ensemble {path}: {key} is {content.get(key)!r}, expected {expected}")
    return Members(path, tuple(location(path, member) for member in members), mean, layer)


class Stage(NamedTuple):
    """A base classifier, and the standard deviation ``sigma`` > 0 of its noise."""

    model: ModelName
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
    try:
        model, sigma = pair
    except (TypeError, ValueError):
        raise UserError(f"{called}: found {pair!r:.200}, expected a pair (model, sigma)") from None
    if model is None:
        raise UserError(f"{called}: found no model, expected a pair (model, sigma)")
    return Stage(parse_model(model), checked("sigma", sigma, positive_noise_level))


def sigma_names(sigmas: Iterable[float]) -> tuple[str, ...]:
    """What the classes of a router are called: the sigmas of its stages, like "0.25"."""
    return tuple(f"{sigma:g}" for sigma in sigmas)


def read_stages(path: Path) -> tuple[tuple[Stage, ...], Stage | None, float | None]:
    """The stages in a file, its router and its threshold (None: it has none); UserError where it is
    no such file.
    """
    content = _content(path, f"{path} is no TOML file with {_FORM}")
    tables = content.pop("stage", None)
    router = content.pop("router", None)
    unknown = content.keys() - {"threshold"}
    if not isinstance(tables, list) or unknown:
        found = ", ".join(sorted(unknown)) or f"stage = {tables!r:.100}"
        raise UserError(f"{path}: found {found}, expected {_FORM}")
    given, called = content.get("threshold"), f"{path}, [[stage]]"
    stages = [_stage(path, each, f"{called} {place}") for place, each in enumerate(tables, 1)]
    chooses = None if router is None else _stage(path, router, f"{path}, [router]")
    threshold = None if given is None else checked(f"{path}, threshold", given, a_threshold)
    return stages_of(stages, called), chooses, threshold


def _stage(path: Path, table: Any, called: str) -> Stage:
    """The stage that a table of a file describes, which messages call ``called``."""
    is_table = isinstance(table, dict) and table.keys() == {"checkpoint", "sigma"}
    if not (is_table and isinstance(table["checkpoint"], str)):
        raise UserError(f"{called}: found {table!r:.100}, expected checkpoint, a text, and sigma")
    sigma = checked(f"{called}, sigma", table["sigma"], positive_noise_level)
    return stage_of((location(path, table["checkpoint"]), sigma), called)


def location(path: Path, name: str) -> Path:
    """The checkpoint that a file names; a name like timm:resnet18 or hf-hub:OWNER/NAME stays as it
    is.
    """
    beside = path.parent / name
    return Path(name) if ":" in name and not beside.exists() else beside


def _content(path: Path, complaint: str) -> dict[str, Any]:
    """The content of a TOML file; UserError, which begins with ``complaint``, where it is none."""
    try:
        return read_toml(path)
    except (OSError, ValueError) as error:
        is_binary = isinstance(error, UnicodeDecodeError)
        reason = "it is no text" if is_binary else getattr(error, "strerror", None) or error
        raise UserError(f"{complaint}: {reason}") from None
