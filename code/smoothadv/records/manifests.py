"""What a manifest may hold. No torch.

Parsers of the specifications judge numbers, and procedures their own settings. A form says what a
value must be: a type or a parser; a list of one form is that of all entries of a list, and a tuple
has forms of which one must fit.
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

from smoothadv.base.errors import escape
from smoothadv.base.files import digest
from smoothadv.base.settings import (
    SettingError,
    any_seed,
    batch_size,
    checked,
    found_value,
    non_negative_int,
    number,
    positive_int,
    positive_noise_level,
    probability,
    settings_of,
    up_to_a_million,
)
from smoothadv.statistics import COUNT_COLUMNS, PROCEDURES
from smoothadv.statistics.on_grid import OnGrid
from smoothadv.statistics.top_k import check_top_k

CERTIFICATION_COLUMNS = ("idx", "label", "predict", "radius", "correct", "time", *COUNT_COLUMNS)
"""The first six are the columns of released logs. The procedure's columns follow these."""
SQUARED_RADIUS = "squared_radius"
"""The last column of a log of --sound."""
IMAGE_SET = "image_set"
RANGE = "([0-9]{1,10})(?:-([0-9]{1,10}))?"
OF_CLASSES = "per-class:([1-9][0-9]{0,8})(?::([0-9]{1,9}))?"
"""Names of sets of images: a part of one, and a whole one."""
METHODS = {
    name: kind for name, kind in PROCEDURES.items() if kind.__module__.startswith("smoothadv.")
}
"""The procedures whose logs readers judge: those of plug-ins have rules of their own."""
_ANY_NUMBER = number(float, "a finite number", lambda value: True)
OF_OTHERS = ("attack", "against", "calibration", "at_least")
"""Settings that no certification log has."""
_TEXT_OR_NULL = (str, NoneType)
SETTINGS: dict[str, Any] = {
    **dict.fromkeys(
        "dataset precision arch library noise device torch cpu_capability".split(), str
    ),
    **dict.fromkeys("generator arch_given classifier_sha256 noise_kernel method".split(), str),
    **dict.fromkeys("tables_sha256 weights_given resize local_noise timestep".split(), str),
    **dict.fromkeys("split dataset_fingerprint logits_sha256".split(), _TEXT_OR_NULL),
    **dict.fromkeys("checkpoint_sha256 module_sha256".split(), (str, dict)),
    **dict.fromkeys("denoiser against plugins shard image_set".split(), dict),
    **dict.fromkeys("compiled pretrained folded fused tf32 sound".split(), bool),
    **dict.fromkeys("images_saved base_attack".split(), bool),
    **dict.fromkeys("N0 num_classes threads restarts".split(), positive_int),
    **dict.fromkeys("batch attack_batch".split(), batch_size),
    **dict.fromkeys("mean std".split(), [_ANY_NUMBER]),
    "input_layer": (*_TEXT_OR_NULL, [_TEXT_OR_NULL]),
    "attack": (dict, NoneType),
    "training": (dict, NoneType, [(dict, NoneType)]),
    "N": number(int, "a whole number from 1 to 10^18", lambda value: 1 <= value <= 10**18),
    "sigma": positive_noise_level,
    **dict.fromkeys("alpha calibration at_least".split(), probability),
    "seed": any_seed,
    "num_noise_vec": (up_to_a_million, NoneType),
    "target": (non_negative_int, *_TEXT_OR_NULL),
    **{
        one.field: [one.check] if one.many else one.check or one.kind
        for kind in METHODS.values()
        for one in settings_of(kind)
        if one.field in kind.recorded_names()
    },
}
"""The form of each setting of a log of examples, by its name."""
RUN: dict[str, Any] = {
    **dict.fromkeys("device started smoothadv python platform denoiser".split(), str),
    **dict.fromkeys("checkpoint git_commit logits_sha256".split(), _TEXT_OR_NULL),
    **dict.fromkeys("first_row images shard".split(), non_negative_int),
    **dict.fromkeys("skip torch_threads".split(), positive_int),
    **dict.fromkeys("batch attack_batch".split(), batch_size),
    "command": [str],
    "packages": dict,
    "plugins": [dict],
    "max": (positive_int, NoneType),
    "image_shape": [positive_int],
}
"""Likewise of what a manifest says of a run."""
NEEDED = (
    *("dataset", "split", "dataset_fingerprint", "arch", "input_layer", "num_classes", "sigma"),
    *("alpha", "seed", "noise", "N0", "N", "method", "sound"),
)
_NAMES = {str: "a text", bool: "true or false", dict: "an object", NoneType: "null"}


def expected(value: Any, form: Any) -> str:
    """What a form wants, in words, where a value does not fit it; "" if it does."""
    if isinstance(form, tuple):
        wanted = [expected(value, each) for each in form]
        return "" if "" in wanted else " or ".join(wanted)
    if isinstance(form, list):
        if not isinstance(value, list):
            return "a list"
        wrong = next(filter(None, (expected(each, form[0]) for each in value)), "")
        return wrong and f"a list of which each is {wrong}"
    if form in _NAMES:
        return "" if type(value) is form else _NAMES[form]
    try:
        read = checked("", value, form)
    except SettingError as error:
        return str(error).removeprefix(f": {found_value(value)}, ").removeprefix("expected ")
    return "" if isinstance(value, type(read) | int) else "a whole number"


def manifest_fault(manifest: Any) -> str:
    """What is impossible in a manifest: no settings and runs, or a value of another form; "" if
    nothing is.
    """
    content = manifest if isinstance(manifest, dict) else {}
    settings: Any = content.get("settings")
    runs: Any = content.get("runs")
    if expected(settings, dict) or expected(runs, [dict]):
        return "holds no settings and runs"
    for part, forms in [(settings, SETTINGS), *((run, RUN) for run in runs)]:
        for name, value in part.items():
            if name in forms and (wanted := expected(value, forms[name])):
                return f"says that {name} is {json.dumps(value)[:60]}; expected {wanted}"
    record = settings.get(IMAGE_SET, {})
    indices = [int(text) for text in re.findall("[0-9]{1,18}", str(record.get("indices")))]
    if IMAGE_SET in settings and (
        not indices or record != record_of(str(record.get("named")), indices)
    ):
        return f"says that {IMAGE_SET} has a count, sha256 and indices that are not of one set"
    return ""


def in_file(named: str) -> bool:
    """Whether a set of images with this name is the content of a file."""
    return not re.fullmatch(f"{RANGE}(?:,{RANGE})*|{OF_CLASSES}", named)


def record_of(named: str, indices: Iterable[int]) -> dict[str, Any]:
    """What a manifest records of a set of images that is ``named`` so: the ascending ``indices``,
    how many they are, and the SHA-256 of them, one a line, by which people compare sets.
    """
    texts = [str(index) for index in sorted({*indices})]
    file = Path(named).name  # without its folder, which is of one machine
    name = escape(escape(file, None), 60)
    if file != named and not in_file(name):
        name = f"./{name}"  # without which it names other images
    return {
        "named": name,
        "count": len(texts),
        "sha256": digest(f"{text}\n" for text in texts),
        "indices": ",".join(texts),
    }


def images_of(settings: dict[str, Any], run: dict[str, Any]) -> Sequence[int]:
    """The indices of the images that a run selects, ascending, or of those in a shard."""
    named = settings.get(IMAGE_SET, {}).get("indices", "")
    images = (
        [int(text) for text in named.split(",")]
        if named
        else range(0, run["images"], run["skip"])[: run["max"]]
    )
    part = settings.get("shard", {"index": 0, "count": 1})
    return images[part["index"] :: part["count"]]


def log_fault(manifest: dict[str, Any]) -> str:
    """What a certification log's settings, or its last run, lack, have too much or contradict; ""
    if nothing.
    """
    settings, run = manifest["settings"], (manifest["runs"] or [{}])[-1]
    kind = METHODS.get(settings.get("method"))
    if kind is None:
        return f"names no method, one of {', '.join(METHODS)}"
    own = kind.recorded_names()
    needed = [*NEEDED, "images", "skip", "max", "image_shape", *own]
    if lacking := [name for name in needed if name not in {**settings, **run}]:
        return f"lacks {lacking[0]!r}"
    of_others = {name for each in METHODS.values() for name in each.recorded_names()}
    allowed = {*SETTINGS}.difference(of_others, OF_OTHERS).union(own)
    if foreign := [name for name in settings if name not in allowed]:
        return f"states {foreign[0]!r}, which no such log has"
    try:
        procedure = kind.recorded(settings)
        check_top_k(settings.get("top_k", 1), max(2, settings["num_classes"]))
    except ValueError as error:
        return f"has an impossible setting, {error}"
    whole = images_of({**settings, "shard": {"index": 0, "count": 1}}, run)
    selection: Any = (
        [whole.start, whole.stop, whole.step] if isinstance(whole, range) else {"only": whole}
    )
    shard = settings.get("shard", {"index": 0, "count": 1, "examples": selection})
    place, count = shard.get("index"), shard.get("count")
    is_shard = not expected([place, count], [non_negative_int]) and place < count
    contradictions = {
        "noise that is not that of its sound": settings["noise"]
        != "Rounded" * settings["sound"] + "GaussianNoise",
        "radii that do not ascend from 0": isinstance(procedure, OnGrid)
        and [*procedure.radii] != settings["radii"],
        "images that its dataset has not": IMAGE_SET in settings and whole[-1] >= run["images"],
        "a shard of other images, or an impossible one": not is_shard
        or shard != {"index": place, "count": count, "examples": selection},
    }
    return next((f"has {fault}" for fault, holds in contradictions.items() if holds), "")


def certification_columns(settings: dict[str, Any]) -> list[str]:
    """The columns of a certification log of one of METHODS, in their order."""
    procedure = METHODS[settings["method"]].recorded(settings)
    further = [SQUARED_RADIUS] * settings["sound"]
    return [*CERTIFICATION_COLUMNS, *procedure.columns, *further]
