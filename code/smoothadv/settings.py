"""Components declare their settings as dataclass fields; commands make an option of each.

A component (an attack, an objective) is a frozen dataclass. Each field made by ``setting`` becomes one
command-line option, so that the file of a new component also defines what commands offer.
"""

import argparse
import dataclasses
import math
import os
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, TypeVar

Number = TypeVar("Number", int, float)


class SettingError(argparse.ArgumentTypeError):
    """A text that is no value of a setting. The message, one line, names the text and what would be accepted."""


def number(kind: type[Number], description: str, accept: Callable[[Number], bool]) -> Callable[[str], Number]:
    """A parser of texts: ``kind(text)`` if finite and accepted; else SettingError "... is not ``description``".

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


_MOST = 4_000_000_000
positive_int = number(int, "a whole number from 1 to 4,000,000,000", lambda v: 1 <= v <= _MOST)
non_negative_int = number(int, "a whole number from 0 to 4,000,000,000", lambda v: 0 <= v <= _MOST)
any_seed = number(int, "a whole number from 0 to 2^128 - 1", lambda v: 0 <= v < 2**128)
"""Parses the seed of random numbers; all other whole numbers are counts, which a run could come to."""
positive_float = number(float, "a number above 0", lambda v: v > 0)
non_negative_float = number(float, "a number of at least 0", lambda v: v >= 0)
probability = number(float, "a probability strictly between 0 and 1", lambda v: 0 < v < 1)
batch_size = number(int, "a whole number from 1 to 1,000,000", lambda v: 1 <= v <= 1_000_000)
noise_level = number(
    float, "a standard deviation between 0 and 10 on images in [0, 1], like 0.25", lambda v: 0 <= v <= 10
)
"""Parses a standard deviation >= 0 on images in [0, 1]; the paper uses 0.12 to 1.0."""
_LARGEST_L2 = 32.0
_in_256ths = number(float, "a number of 1/256, like 64 for an l2 norm of 0.25", lambda v: v >= 0)


def positive_noise_level(text: str) -> float:
    """As ``noise_level``, but above 0, since a smoothed classifier needs noise."""
    value = noise_level(text)
    if value == 0:
        raise SettingError("'0' would smooth nothing: give the sigma of the smoothed classifier, like 0.25")
    return value


def perturbation_size(text: str) -> float:
    """Parses an l2 norm on images in [0, 1], as a decimal (0.25) or a fraction (64/255).

    A value like 64 comes from scripts that count in 1/255 or 1/256 units; it is refused with that hint.
    """
    numerator, slash, denominator = text.partition("/")
    try:
        value = float(numerator) / (float(denominator) if slash else 1.0)
    except (ValueError, ZeroDivisionError):
        value = math.nan
    if not (text.isascii() and math.isfinite(value) and value >= 0):
        raise SettingError(f"'{text}' is not an l2 norm: write a number like 0.25 or a fraction like 64/255")
    if value > _LARGEST_L2:
        raise SettingError(
            f"'{text}' is {value:g}, far beyond the paper's largest l2 norm on images in [0, 1], 4: for {value:g} "
            f"grey levels write {value:g}/255 (or {value:g}/256 to match the released SmoothAdv code)"
        )
    return value


def perturbation_size_in_256ths(text: str) -> float:
    """Parses an l2 norm in 1/256 of the range of images, as the released code counts: 64 is 0.25."""
    number_of_256ths = _in_256ths(text)
    if 0 < number_of_256ths < 1:
        raise SettingError(f"'{text}' counts in 1/256 here, as in the released code: write 64 for 0.25")
    value = number_of_256ths / 256
    if value > _LARGEST_L2:
        raise SettingError(f"'{text}' is {value:g} on images in [0, 1], far beyond the paper's largest, 4")
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
) -> Any:
    """A dataclass field that becomes an option: ``--field-name`` unless ``flag`` says otherwise.

    ``parse`` turns the text into the value and raises SettingError on a bad one; without it the setting is a switch (a
    bool, False by default). ``many`` takes one value or more, as a list. A field without default is a required option.
    The result is Any, as for dataclasses.field: the annotation of the field is its type.
    """
    return dataclasses.field(default=default, metadata={"help": help, "parse": parse, "flag": flag, "many": many})


@dataclass(frozen=True)
class Setting:
    """One declared setting of a component, as a command sees it."""

    field: str
    flag: str
    help: str
    parse: Callable[[str], Any] | None
    default: Any
    many: bool

    @property
    def required(self) -> bool:
        return self.default is MISSING


def settings_of(component: type) -> list[Setting]:
    """The declared settings of a component class, in order of declaration, without fields not made by ``setting``."""
    found = []
    for field in dataclasses.fields(component):
        if "help" in field.metadata:
            flag = field.metadata["flag"] or "--" + field.name.replace("_", "-")
            found.append(Setting(field.name, default=field.default, **{**field.metadata, "flag": flag}))
    return found


def describe(component: Any) -> str:
    """A component and its settings as a person would read them, without those left at None or False."""

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
        return {"name": type(component).__name__, **{name: settings_record(getattr(component, name)) for name in names}}
    return component.__name__ if callable(component) else component
