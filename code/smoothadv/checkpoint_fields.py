"""What the fields of a checkpoint must be, since a file can hold anything that PyTorch loads."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from smoothadv.errors import UserError
from smoothadv.records import TRAINING_COLUMNS

REQUIRED = ("epoch", "arch", "state_dict")
_MOST = 100_000
# Raises a ValueError where a value, whose place comes first, is not as it must be.
_Check = Callable[[str, Any], None]


def _is(expected: str, fits: Callable[[Any], bool]) -> _Check:
    def check(where: str, value: Any) -> None:
        if not fits(value):
            raise ValueError(f"its {where} is {_shown(value)}, expected {expected}")

    return check


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype}, {value.layout}, on {value.device}"
    if value is None or isinstance(value, (bool, float, str)) or _is_whole(value):
        return repr(value[:40] if isinstance(value, str) else value)
    return f"a {type(value).__name__}{f' of {len(value)}' if isinstance(value, (list, tuple, dict)) else ''}"


def _list_of(check: _Check, fewest: int = 0, most: int = _MOST) -> _Check:
    def check_list(where: str, value: Any) -> None:
        size = f"a list of {most}" if fewest == most else f"a list of {fewest} to {most}"
        _is(size, lambda it: isinstance(it, (list, tuple)) and fewest <= len(it) <= most)(where, value)
        for number, entry in enumerate(value):
            check(f"{where}[{number}]", entry)

    return check_list


def _dict_of(check: _Check, key: _Check) -> _Check:
    def check_dict(where: str, value: Any) -> None:
        _dict(where, value)
        for name, entry in value.items():
            key(f"key in {where}", name)
            check(f"{where}[{_shown(name)}]", entry)

    return check_dict


def _record(where: str, value: Any) -> None:
    """A dict of what JSON can hold; in a file, lists that refer to each other can be beyond any memory."""
    _dict(where, value)
    rest, seen = [(0, value)], 0
    while rest:
        depth, one = rest.pop()
        parts = list(one.values() if isinstance(one, dict) else one if isinstance(one, (list, tuple)) else ())
        for key in one if isinstance(one, dict) else ():
            _text(f"key in {where}", key)
        if not isinstance(one, (dict, list, tuple)):
            _plain(f"entry in {where}", one)
        seen += len(parts)
        if depth > 40 or seen > _MOST:
            raise ValueError(f"its {where} has more than {_MOST} entries or 40 levels")
        rest += [(depth + 1, part) for part in parts]


def _optimizer(where: str, value: Any) -> None:
    _dict(where, value)
    buffers = _dict_of(_is("None or a tensor like a weight", lambda it: it is None or _is_own(it)), _text)
    _dict_of(buffers, _count)(f"{where}['state']", value.get("state"))


def _row(where: str, value: Any) -> None:
    _dict_of(_measure, _text)(where, value)
    if missing := [column for column in TRAINING_COLUMNS if column not in value]:
        raise ValueError(f"its {where} lacks {missing[0]}")


def _is_whole(value: Any) -> bool:
    return type(value) is int and value.bit_length() < 64


def _is_finite(value: Any) -> bool:
    return _is_whole(value) or (type(value) is float and math.isfinite(value))


def _is_own(value: Any) -> bool:
    """Whether a tensor has memory of its own for each of its values."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided or value.is_nested:
        return False
    if value.device.type != "cpu" or value.is_quantized:
        return False
    value = torch.Tensor.detach(value)  # without attributes, which the file may have set
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


_text = _is("text", lambda value: isinstance(value, str))
_count = _is("a whole number from 0", lambda value: _is_whole(value) and value >= 0)
_number = _is("a finite number", _is_finite)
_amount = _is("a finite number from 0", lambda value: _is_finite(value) and value >= 0)
_positive = _is("a finite number above 0", lambda value: _is_finite(value) and value > 0)
_measure = _is("a number", lambda value: _is_whole(value) or type(value) is float)
_plain = _is("text, a number or None", lambda it: it is None or type(it) in (bool, float, str) or _is_whole(it))
_dict = _is("a dict", lambda value: isinstance(value, dict))
_weight = _is("a tensor: dense, not quantized, in memory, with a place for each value", _is_own)

_FIELDS: dict[str, _Check] = {
    "epoch": _count,
    "arch": _text,
    "state_dict": _dict_of(_weight, _text),
    "dataset": _text,
    "input_layer": _text,
    "classes": _list_of(_text),
    "image_shape": _list_of(_count, 3, 3),
    "mean": _list_of(_number),
    "std": _list_of(_positive),
    "noise_sd": _amount,
    "recipe": _record,
}
_OF_A_RUN: dict[str, _Check] = {
    "optimizer": _optimizer,
    "history": _list_of(_row),
    "runs": _list_of(_record, 1),
    "step": _count,
    "seconds": _amount,
    "sums": _list_of(_number, 5, 5),
}


def checked(content: Any, path: Path) -> dict[str, Any]:
    """The fields that any reader needs, and, unchecked, those of a run to be resumed; UserError if one is wrong.

    Fields that are None are left out; the weights are tensors without attributes.
    """
    given = {name: value for name, value in content.items() if value is not None} if isinstance(content, dict) else {}
    if missing := [name for name in REQUIRED if name not in given]:
        raise UserError(
            f"checkpoint {path} lacks {', '.join(missing)}; expected a dict with epoch, arch, state_dict and optimizer"
        )
    _apply(_FIELDS, given, path)
    if ("mean" in given) != ("std" in given):
        raise UserError(f"checkpoint {path} has only one of mean and std, expected both or neither")
    given["state_dict"] = {name: torch.Tensor.detach(value) for name, value in given["state_dict"].items()}
    return {name: given[name] for name in (*_FIELDS, *_OF_A_RUN, "plugins") if name in given}


def require_resumable(content: dict[str, Any], path: Path) -> None:
    """UserError unless a checkpoint that is ``checked`` holds all that a run needs to be continued."""
    within_epoch = ("sums", "seconds") if content.get("step") else ()
    if missing := [name for name in ("history", "runs", "optimizer", *within_epoch) if name not in content]:
        raise UserError(f"checkpoint {path} lacks {', '.join(missing)}, so the run cannot be resumed")
    _apply(_OF_A_RUN, content, path)
    if content["epoch"] != len(content["history"]):
        raise UserError(
            f"checkpoint {path}: its epoch is {content['epoch']}, expected {len(content['history'])}, as its history "
            "has entries"
        )


def _apply(checks: dict[str, _Check], content: dict[str, Any], path: Path) -> None:
    try:
        for name in checks.keys() & content.keys():
            checks[name](name, content[name])
    except ValueError as error:
        raise UserError(f"checkpoint {path}: {error}") from error
