"""Which values the arguments of this package's functions may have, by the arguments' names."""

import functools
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

import numpy as np

from smoothadv.base.settings import SettingError, found_value

Function = TypeVar("Function", bound=Callable[..., Any])
Range = tuple[tuple[type, ...], str, Callable[[Any], bool]]
# Python's own types first: to find that they are Integral or Real takes ten times as long.
_WHOLE = (int, Integral)
_REAL = (float, int, Real)
_MOST = 2**53  # float64 has all whole numbers up to it
_COUNT: Range = _WHOLE, "a whole number from 0 to 2^53", lambda v: 0 <= v <= _MOST
_SIZE: Range = _WHOLE, "a whole number from 1 to 2^53", lambda v: 1 <= v <= _MOST
_LEVEL: Range = _REAL, "a number strictly between 0 and 1", lambda v: 0 < v < 1
_SHARE: Range = _REAL, "a number from 0 to 1", lambda v: 0 <= v <= 1
_LENGTH: Range = (
    *(_REAL, "a finite number of at least 0"),
    lambda v: 0 <= v <= sys.float_info.max,
)
_ABOVE_0: Range = _REAL, "a finite number above 0", lambda v: 0 < v <= sys.float_info.max
RANGES: dict[str, Range] = {
    **dict.fromkeys("successes rival rivals top runner_up ahead behind".split(), _COUNT),
    **dict.fromkeys("statements votes last_boundaries".split(), _COUNT),
    **dict.fromkeys("trials n n_max examples batch step stages looks top_k k".split(), _SIZE),
    **dict.fromkeys("dimension most parts".split(), _SIZE),
    **dict.fromkeys("alpha false_alarm rho gamma confidence alpha_share".split(), _LEVEL),
    **dict.fromkeys("null nulls early allowance accuracies chance failure".split(), _SHARE),
    **dict.fromkeys("l2_radius linf_radius power tilt values".split(), _LENGTH),
    **dict.fromkeys("sigma patience".split(), _ABOVE_0),
    "share": (_REAL, "a number above 0 and at most 1", lambda v: 0 < v <= 1),
    "noise_distance": (
        _REAL,
        "a total variation distance from 0 to 0.05",
        lambda v: 0 <= v <= 0.05,
    ),
    "threshold": (_REAL, "a number from 0.001 to 0.999", lambda v: 0.001 <= v <= 0.999),
    "growth": (_REAL, "a finite number above 1", lambda v: 1 < v <= sys.float_info.max),
    "probability": (_REAL, "a number of at least 0", lambda v: v >= 0),
    "label": (_WHOLE, "a whole number", lambda v: True),
    **dict.fromkeys(
        "z_lower z_rival radii".split(), (_REAL, "a number", lambda v: not math.isnan(v))
    ),
    "radius": (_REAL, "a finite number", lambda v: abs(v) <= sys.float_info.max),
}
"""Of each name the type of number, what it must be, in words, and whether a value is that."""


def check(**values: Any) -> None:
    """SettingError, which is a ValueError, unless each value, or each number in a list or an array,
    is one that ``RANGES`` has for its name.
    """
    for name, value in values.items():
        kind, words, holds = RANGES[name]
        each = [value]
        if not isinstance(value, (int, float, str)) and isinstance(value, (Sequence, np.ndarray)):
            array = np.asarray(value)
            is_ordered = array.size and array.dtype.kind in "iuf"
            each = [array.min(), array.max()] if is_ordered else array.ravel().tolist()
        for one in each:
            if not isinstance(one, kind) or isinstance(one, bool) or not holds(one):
                raise SettingError(f"{name}: {found_value(one)}, expected {words}")


def within_ranges(function: Function) -> Function:
    """Decorator: all arguments of a function whose names ``RANGES`` has are checked first."""
    names = [*inspect.signature(function).parameters]

    @functools.wraps(function)
    def checked(*values: Any, **named: Any) -> Any:
        given = {**dict(zip(names, values)), **named}
        check(**{name: value for name, value in given.items() if name in RANGES})
        return function(*values, **named)

    return checked  # type: ignore[return-value]


def trusting(function: Function) -> Function:
    """A function without its ``within_ranges``: for numbers that are within them already."""
    return function.__wrapped__  # type: ignore[attr-defined, no-any-return]
