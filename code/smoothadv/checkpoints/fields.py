"""What the fields of a checkpoint must be, since a file can hold anything that PyTorch loads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from smoothadv.base.errors import UserError
from smoothadv.records.logs import TRAINING_COLUMNS

REQUIRED = ("epoch", "arch", "state_dict")
_MOST = 100_000


@dataclass(frozen=True)
class _Rule:
    """What a value must be; ``of`` is the rule for the entries of a list or a dict, ``key`` that
    for a dict's keys.
    """

    expected: str
    fits: Callable[[Any], bool]
    of: _Rule | None = None
    key: _Rule | None = None

    def require(self, path: Path, where: str, value: Any) -> None:
        """UserError, which names the checkpoint ``path``, unless ``value`` is as it must be."""
        if not self.fits(value):
            raise UserError(
                f"checkpoint {path}: its {where} is {_shown(value)}, expected {self.expected}"
            )
        if self.of is not None:
            for name, entry in value.items() if isinstance(value, dict) else enumerate(value):
                if self.key is not None:
                    self.key.require(path, f"key in {where}", name)
                self.of.require(path, f"{where}[{_shown(name)}]", entry)


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype}, {value.layout}, on {value.device}"
    if value is None or isinstance(value, (bool, float, str)) or _is_whole(value):
        return repr(value[:60] if isinstance(value, str) else value)
    size = f" of {len(value)}" if isinstance(value, (list, tuple, dict)) else ""
    return f"a {type(value).__name__}{size}"


def _is_whole(value: Any) -> bool:
    return type(value) is int and value.bit_length() < 64


def _is_finite(value: Any) -> bool:
    return _is_whole(value) or (type(value) is float and math.isfinite(value))


def _is_nan(value: Any) -> bool:
    return type(value) is float and math.isnan(value)


def _is_weight(value: Any) -> bool:
    if (
        type(value) not in (torch.Tensor, torch.nn.Parameter)
        or value.layout != torch.strided
        or value.is_nested
    ):
        return False
    if value.device.type != "cpu" or value.is_quantized:
        return False
    value = torch.Tensor.detach(value)  # without attributes, which the file may have set
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def _is_record(value: Any) -> bool:
    """Whether JSON can hold a dict; lists that hold the same list again and again can be beyond any
    memory.
    """
    rest, seen = [(0, value)], 0
    while rest:
        depth, one = rest.pop()
        parts = (
            [*one, *one.values()]
            if isinstance(one, dict)
            else one
            if isinstance(one, (list, tuple))
            else []
        )
        is_leaf = one is None or type(one) in (bool, float, str) or _is_whole(one)
        seen += len(parts)
        has_text_keys = not isinstance(one, dict) or all(isinstance(key, str) for key in one)
        if (
            depth > 40
            or seen > _MOST
            or not has_text_keys
            or not (is_leaf or isinstance(one, (dict, list, tuple)))
        ):
            return False
        rest += [(depth + 1, part) for part in parts]
    return isinstance(value, dict)


def _is_row(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _is_whole(value.get(column)) or type(value.get(column)) is float
        for column in TRAINING_COLUMNS
    )


def _is_optimizer(value: Any) -> bool:
    state = value.get("state") if isinstance(value, dict) else None
    return isinstance(state, dict) and all(
        type(number) is int
        and isinstance(one, dict)
        and all(part is None or _is_weight(part) for part in one.values())
        for number, one in state.items()
    )


def _list_of(rule: _Rule, fewest: int = 0, most: int = _MOST) -> _Rule:
    expected = f"a list of {most}" if fewest == most else f"a list of {fewest} to {most}"
    return _Rule(
        expected,
        lambda value: isinstance(value, (list, tuple)) and fewest <= len(value) <= most,
        rule,
    )


_TEXT = _Rule("text", lambda value: isinstance(value, str))
_COUNT = _Rule("a whole number from 0", lambda value: _is_whole(value) and value >= 0)
_NUMBER = _Rule("a finite number", _is_finite)
_AMOUNT = _Rule("a finite number from 0", lambda value: _is_finite(value) and value >= 0)
_POSITIVE = _Rule("a finite number above 0", lambda value: _is_finite(value) and value > 0)
_WEIGHT = _Rule(
    "a tensor: dense, not quantized, in memory, with a place for each value", _is_weight
)
_RECORD = _Rule(f"a dict of text, numbers, lists and dicts, {_MOST} in all at most", _is_record)
_WEIGHTS = _Rule("a dict", lambda value: isinstance(value, dict), _WEIGHT, _TEXT)
_FIELDS = {
    "epoch": _COUNT,
    "arch": _TEXT,
    "state_dict": _WEIGHTS,
    "dataset": _TEXT,
    "input_layer": _TEXT,
    "classes": _list_of(_TEXT),
    "image_shape": _list_of(_COUNT, 3, 3),
    "mean": _list_of(_NUMBER),
    "std": _list_of(_POSITIVE),
    "noise_sd": _AMOUNT,
    "recipe": _RECORD,
    "integer": _RECORD,
    "denoiser": _Rule("True or False", lambda value: isinstance(value, bool)),
}
_FIELDS_OF_A_RUN = {
    "optimizer": _Rule("a dict with a 'state' of tensors", _is_optimizer),
    "history": _list_of(_Rule(f"a dict with numbers for {', '.join(TRAINING_COLUMNS)}", _is_row)),
    "runs": _list_of(_RECORD, 1),
    "trained": _WEIGHTS,
    "step": _COUNT,
    "seconds": _AMOUNT,
    "sums": _list_of(_NUMBER, 5, 50),
    "image_weights": _WEIGHT,
}
# A denoiser without a classifier behind it has no accuracy.
_OF_DENOISERS = {
    "sums": _list_of(
        _Rule("a finite number or nan", lambda value: _is_finite(value) or _is_nan(value)), 5, 50
    )
}


def checked(content: Any, path: Path) -> dict[str, Any]:
    """The fields that any reader needs, and, unchecked, those of a run to be resumed; UserError if
    one is wrong.

    Fields that are None are left out; the weights are tensors without attributes.
    """
    given = (
        {name: value for name, value in content.items() if value is not None}
        if isinstance(content, dict)
        else {}
    )
    if missing := [name for name in REQUIRED if name not in given]:
        raise UserError(
            f"checkpoint {path} lacks {', '.join(missing)}; expected a dict with epoch, arch, "
            "state_dict and optimizer"
        )
    _require(_FIELDS, given, path)
    if ("mean" in given) != ("std" in given):
        raise UserError(f"checkpoint {path} has only one of mean and std, expected both or neither")
    given["state_dict"] = {
        name: torch.Tensor.detach(value) for name, value in given["state_dict"].items()
    }
    return {name: given[name] for name in (*_FIELDS, *_FIELDS_OF_A_RUN, "plugins") if name in given}


def require_resumable(content: dict[str, Any], path: Path) -> None:
    """UserError unless a checkpoint that is ``checked`` holds all that a run needs to be
    continued.
    """
    _require(_FIELDS_OF_A_RUN | (_OF_DENOISERS if content.get("denoiser") else {}), content, path)
    within_epoch = ("sums", "seconds") if content.get("step") else ()
    if missing := [
        name
        for name in ("history", "runs", "optimizer", "step", *within_epoch)
        if name not in content
    ]:
        raise UserError(
            f"checkpoint {path} lacks {', '.join(missing)}, so the run cannot be resumed"
        )
    if (rows := len(content["history"])) != content["epoch"]:
        raise UserError(
            f"checkpoint {path}: its history has {rows} entries, expected {content['epoch']}, its "
            "epoch"
        )


def _require(rules: dict[str, _Rule], content: dict[str, Any], path: Path) -> None:
    for name, rule in rules.items():
        if name in content:
            rule.require(path, name, content[name])
