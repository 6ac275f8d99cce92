"""Components declare their settings as dataclass fields; commands make an option of each.

A component (an attack, an objective) is a frozen dataclass. Each field made by ``setting`` becomes
one command-line option, so that the file of a new component also defines what commands offer, and
what values it may have: ``check_settings`` holds a value that was given in Python to the words that
a command would accept.
"""

import argparse
import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

from smoothadv.base.errors import UserError

Number = TypeVar("Number", int, float)


class SettingError(UserError, argparse.ArgumentTypeError, ValueError):
    """What is no value of a setting. The message, one line, names what was found and what would be
    accepted.
    """


def number(
    kind: type[Number], description: str, accept: Callable[[Number], bool]
) -> Callable[[str], Number]:
    """A parser of texts: ``kind(text)`` if finite and accepted; else SettingError "... is not
    ``description``".

    Digits of other scripts, which Python reads too, are none.
    """

    def parse(text: str) -> Number:
        try:
            value = kind(text)
            if text.isascii() and math.isfinite(value) and accept(value):
                return value
        except (ValueError, OverflowError):  # OverflowError: an integer too large for a float
            pass
        raise SettingError(f"'{text}' is not {description}")

    return parse


def one_of(names: Iterable[str]) -> Callable[[str], str]:
    """A parser of texts: one of ``names``."""
    known = tuple(names)

    def parse(text: str) -> str:
        if text not in known:
            raise SettingError(f"'{text}' is not known; known: {', '.join(known)}")
        return text

    return parse


_MOST = 4_000_000_000
positive_int = number(int, "a whole number from 1 to 4,000,000,000", lambda v: 1 <= v <= _MOST)
non_negative_int = number(int, "a whole number from 0 to 4,000,000,000", lambda v: 0 <= v <= _MOST)
any_seed = number(int, "a whole number from 0 to 2^128 - 1", lambda v: 0 <= v < 2**128)
"""Parses the seed of random numbers; all other whole numbers are counts, which a run could come to.
"""
positive_float = number(float, "a number above 0", lambda v: v > 0)
non_negative_float = number(float, "a number of at least 0", lambda v: v >= 0)
share_of_one = number(float, "a share from 0 to 1", lambda v: 0 <= v <= 1)
probability = number(float, "a probability strictly between 0 and 1", lambda v: 0 < v < 1)
batch_size = up_to_a_million = number(
    int, "a whole number from 1 to 1,000,000", lambda v: 1 <= v <= 1_000_000
)
momentum = number(float, "a number from 0 to below 1, like 0.9", lambda v: 0 <= v < 1)
noise_level = number(
    float,
    "a standard deviation between 0 and 10 on images in [0, 1], like 0.25",
    lambda v: 0 <= v <= 10,
)
"""Parses a standard deviation >= 0 on images in [0, 1]; the paper uses 0.12 to 1.0."""
_LARGEST_L2 = 32.0
_L2 = "an l2 norm: write a number like 0.25 or a fraction like 64/255"
l2_norm = number(float, _L2, lambda v: v >= 0)
_in_256ths = number(float, "a number of 1/256, like 64 for an l2 norm of 0.25", lambda v: v >= 0)


def positive_noise_level(text: str) -> float:
    """As ``noise_level``, but above 0, since a smoothed classifier needs noise."""
    value = noise_level(text)
    if value == 0:
        raise SettingError(
            "'0' would smooth nothing: give the sigma of the smoothed classifier, like 0.25"
        )
    return value


def perturbation_size(text: str) -> float:
    """Parses an l2 norm on images in [0, 1], as a decimal (0.25) or a fraction (64/255).

    A value like 64 comes from scripts that count in 1/255 or 1/256 units; it is refused with that
    hint.
    """
    numerator, slash, denominator = text.partition("/")
    try:
        value = float(numerator) / (float(denominator) if slash else 1.0)
    except (ValueError, ZeroDivisionError):
        value = math.nan
    if not (text.isascii() and math.isfinite(value) and value >= 0):
        raise SettingError(f"'{text}' is not {_L2}")
    if value > _LARGEST_L2:
        raise SettingError(
            f"'{text}' is {value:g}, far beyond the paper's largest l2 norm on images in [0, 1], "
            f"4: for {value:g} grey levels write {value:g}/255 (or {value:g}/256 to match the "
            "released SmoothAdv code)"
        )
    return value


def perturbation_size_in_256ths(text: str) -> float:
    """Parses an l2 norm in 1/256 of the range of images, as the released code counts: 64 is
    0.25.
    """
    number_of_256ths = _in_256ths(text)
    if 0 < number_of_256ths < 1:
        raise SettingError(
            f"'{text}' counts in 1/256 here, as in the released code: write 64 for 0.25"
        )
    value = number_of_256ths / 256
    if value > _LARGEST_L2:
        raise SettingError(
            f"'{text}' is {value:g} on images in [0, 1], far beyond the paper's largest, 4"
        )
    return value


def output_file(text: str) -> Path:
    """Parses the path of a file to write."""
    if os.path.basename(text) in ("", ".", ".."):
        raise SettingError(f"'{text}' names no file: give the path of the file to write")
    return Path(text)


def output_folder(text: str) -> Path:
    """Parses the path of a folder to write to."""
    if not text:
        raise SettingError("'' names no folder: write . for this one")
    return Path(text)


def setting(
    default: Any = MISSING,
    *,
    help: str,
    parse: Callable[[str], Any] | None = None,
    flag: str | None = None,
    many: bool = False,
    check: Callable[[str], Any] | None = None,
) -> Any:
    """A dataclass field that becomes an option: ``--field-name`` unless ``flag`` says otherwise.

    ``parse`` turns the text into the value and raises SettingError on a bad one; without it the
    setting is a switch (a bool, False by default). ``many`` takes one value or more, as a list.
    ``check`` reads what is given in Python (None: as ``parse``). A field without default is a
    required option. The result is Any, as for dataclasses.field: the annotation of the field is its
    type.
    """
    how = {"help": help, "parse": parse, "flag": flag, "many": many, "check": check or parse}
    return dataclasses.field(default=default, metadata=how)


def found_value(value: Any) -> str:
    """A value as a message names it; Python writes out no number of more than 4,300 digits."""
    bits = value.bit_length() if isinstance(value, int) else 0
    return f"found a number of {bits} bits" if bits > 1024 else f"found {value!r}"


def checked_field(
    parse: Callable[[str], Any] | None,
    default: Any = MISSING,
    *,
    name: str = "",
    kind: Any = bool,
    **further: Any,
) -> Any:
    """A dataclass field, which Python calls ``name``, that ``check_settings`` checks and that makes
    no option itself.

    ``parse`` and ``kind`` are those of ``checked``; ``further`` arguments those of
    dataclasses.field.
    """
    return dataclasses.field(
        default=default, metadata={"check": parse, "name": name, "kind": kind}, **further
    )


def checked(name: str, value: Any, parse: Callable[[str], Any] | None, kind: Any = bool) -> Any:
    """A ``value`` that was given in Python, as ``parse`` reads it from a command line; None: an
    object of a ``kind``.

    Numbers become Python's, of NumPy's or of a tensor with one entry; a whole number may be a float
    like 1e5. SettingError, which calls the value ``name``, where a command would accept no text for
    it.
    """
    plain = (
        value.item()
        if getattr(value, "shape", None) == () and not getattr(value, "mask", False)
        else value
    )
    is_number = isinstance(plain, (Real, Decimal)) and not isinstance(plain, bool)
    if parse is None:
        if isinstance(plain, kind):
            return plain
        expected = "True or False" if kind is bool else getattr(kind, "__name__", kind)
        raise SettingError(f"{name}: {found_value(value)}, expected {expected}")
    try:
        if is_number and not isinstance(plain, int):
            plain = float(plain)
            plain = int(plain) if plain.is_integer() else plain
        text = os.fspath(plain) if isinstance(plain, os.PathLike) else str(plain)
        parsed = parse(text)
    except SettingError as error:
        reason = str(error).replace(f"'{text}' is not known; known:", "expected one of")
        reason = reason.replace(f"'{text}' is not", "expected")
        raise SettingError(f"{name}: {found_value(value)}, {reason}") from None
    except (ValueError, OverflowError):
        raise SettingError(f"{name}: {found_value(value)}, expected a smaller one") from None
    wants_number = isinstance(parsed, (int, float))
    if not (is_number if wants_number else isinstance(plain, (str, os.PathLike))):
        raise SettingError(
            f"{name}: {found_value(value)}, expected {'a number' if wants_number else 'a name'}"
        )
    return parsed


def checked_list(name: str, values: Any, parse: Callable[[str], Any]) -> tuple[Any, ...]:
    """Several values, each as ``checked`` reads it; SettingError also where they are no list."""
    is_list = isinstance(values, Iterable) and not isinstance(values, (str, bytes, Mapping))
    if not is_list or getattr(values, "shape", None) == ():
        raise SettingError(f"{name}: {found_value(values)}, expected a list")
    return tuple(checked(name, value, parse) for value in values)


def check_settings(component: Any) -> None:
    """Replace the fields of a dataclass that have a parser by what ``checked`` makes of them, but
    for their defaults.

    To be called in ``__post_init__``. A field that may be None says so in its type.
    """
    for field in dataclasses.fields(component):
        value, how = getattr(component, field.name), field.metadata
        if (
            "check" not in how
            or value is field.default
            or (value is None and "None" in str(field.type))
        ):
            continue
        name, parse, kind = how.get("name") or field.name, how["check"], how.get("kind", bool)
        read = (
            checked_list(name, value, parse)
            if how.get("many")
            else checked(name, value, parse, kind)
        )
        object.__setattr__(component, field.name, read)


class Checked:
    """A frozen dataclass whose settings are checked when it is made, before its own
    ``__post_init__``.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if (own := vars(cls).get("__post_init__")) is not None:

            def checked_first(self: Any) -> None:
                check_settings(self)
                own(self)

            cls.__post_init__ = checked_first  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True)
class Setting:
    """One declared setting of a component, as a command sees it."""

    field: str
    flag: str
    help: str
    parse: Callable[[str], Any] | None
    default: Any
    many: bool
    check: Callable[[str], Any] | None

    @property
    def required(self) -> bool:
        return self.default is MISSING


def settings_of(component: type) -> list[Setting]:
    """The declared settings of a component class, in order of declaration, without fields not made
    by ``setting``.
    """
    found = []
    for field in dataclasses.fields(component):
        if "help" in field.metadata:
            flag = field.metadata["flag"] or "--" + field.name.replace("_", "-")
            found.append(
                Setting(field.name, default=field.default, **{**field.metadata, "flag": flag})
            )
    return found


def describe(component: Any) -> str:
    """A component and its settings as a person would read them, without those left at None or
    False.
    """

    def text(record: Any) -> str:
        if not isinstance(record, dict):
            return str(record)
        fields = [
            f"{field}={text(value)}"
            for field, value in record.items()
            if field != "name" and value is not None and value is not False
        ]
        return f"{record['name']}({', '.join(fields)})"

    return text(settings_record(component))


def settings_record(component: Any) -> dict[str, Any]:
    """A component's class and field values as plain JSON values, nested components included."""
    if dataclasses.is_dataclass(component):
        names = [field.name for field in dataclasses.fields(component)]
        return {
            "name": type(component).__name__,
            **{name: settings_record(getattr(component, name)) for name in names},
        }
    return component.__name__ if callable(component) else component
