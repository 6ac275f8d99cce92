"""Which checkpoints a name stands for: one, or those of an ensemble, a classifier that is the mean
of its members. A checkpoint is a file or ``hf-hub:OWNER/NAME[@REVISION]``, on the Hugging Face hub.

An ensemble is named ``A.pth.tar+B.pth.tar``, which takes the mean of the logits, or by a TOML file:

    members = ["a.pth.tar", "b.pth.tar"]   # two or more; paths are relative to this file
    mean = "probabilities"                 # or "logits" (default)
    input_layer = "center"                 # of the members that do not record theirs
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smoothadv.base.cascades import STAGES, location
from smoothadv.base.errors import UserError
from smoothadv.base.files import read_toml

HUB = "hf-hub:"
MEANS = ("logits", "probabilities")
_SUFFIX = ".toml"
_EXPECTED = {
    "members": "a list of two or more paths of checkpoints",
    "mean": f"one of {', '.join(MEANS)}",
    "input_layer": "the name of an input layer",
}


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


def is_on_hub(name: str | Path) -> bool:
    """Whether a checkpoint is one on the Hugging Face hub, and no file."""
    return str(name).startswith(HUB)


def members_of(name: str | Path) -> Members:
    """The checkpoints that a name stands for, not yet read; a file whose name contains '+' is one
    checkpoint, and no member of an ensemble that is named by plus signs.

    UserError unless an ensemble has two or more members and none is an ensemble, or if its TOML
    file cannot be read or holds something else.
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
    for member in ensemble.paths:
        if member.suffix == _SUFFIX:
            raise UserError(f"ensemble {path}: {member} is an ensemble too: name its checkpoints")
    return ensemble


def _described(path: Path) -> Members:
    """The ensemble in a TOML file."""
    try:
        content = read_toml(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"ensemble {path} is no TOML file: {getattr(error, 'strerror', None) or error}"
        ) from None
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
