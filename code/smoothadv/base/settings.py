"""Frozen dataclasses describe runs and components. Each field, made by ``setting``, describes
itself.

A field says what it means, which values it takes, what a command calls it, whether Python has it as
a keyword, and whether it decides the numbers; its type says the rest. This one place makes the
options of a command (``cli.runner``), the keywords and the documentation of a Python function
(``takes``), the checks of values (``Checked``) and the manifest's record of a run (``identity``):

    @dataclass(frozen=True, kw_only=True)
    class ShoutSpec(Checked):
        text: str = setting(flag="text", help="what to shout")
        volume: float = setting(
            1.0, parse=positive_float, flag="--volume --loudness", group="sound", unit="decibels",
            records="volume", help="how loud",
        )
        echo: bool = setting(False, help="repeat it")
        log: Path | None = setting(None, parse=output_file, flag="", help="log to write")

        def __post_init__(self) -> None:
            super().__post_init__()  # checks the values
            if self.echo and self.volume < 1:
                raise UsageError("--echo needs a --volume of at least 1")

    add_settings(parser, options_of(ShoutSpec))  # TEXT, --volume (or --loudness) and --echo
    spec = ShoutSpec(**given_settings(ShoutSpec, vars(parser.parse_args())))
    identity(spec)  # {"volume": 1.0}

    @takes(ShoutSpec)
    def shout(**keywords): ...  # help(shout) lists text, volume, echo and log
"""

import dataclasses
import difflib
import functools
import inspect
import math
import os
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from decimal import Decimal
from numbers import Real
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from smoothadv.base.errors import UsageError, UserError

INPUT_LAYER_NAMES = ("normalize", "center", "half", "none")
"""Of ``architectures.INPUT_LAYERS``, which imports torch: a help text must not wait for that."""
FILTERS = ("bicubic", "bilinear")
"""How images may be resized."""
RELEASED, NEAREST = "released", "nearest"
"""How the step of a diffusion model may be chosen."""
EXISTING = ("resume", "overwrite", "refuse")
"""What to do with a log, or a training run, that exists already."""
PRECISION_NAMES = ("fp32", "bf16", "fp16")
"""Of ``voting.classifier.PRECISIONS``, likewise."""
Number = TypeVar("Number", int, float)


class SettingError(UserError, ValueError):
    """What is no value of a setting. The message, one line, names what was found and what would be
    accepted.
    """


def refuse_any(faults: Mapping[str, object], error: type[Exception] = UserError) -> None:
    """Raise the error with the first of these texts whose value is true."""
    for fault, is_so in faults.items():
        if is_so:
            raise error(fault)


def refuse_twice(name: str, sizes: Collection[float]) -> None:
    """UsageError where a size is there twice; ``name`` is that of the setting."""
    if len({*sizes}) < len(sizes):
        raise UsageError(f"{name}: found {[*sizes]}, which names a size twice")


def number(
    kind: Callable[[str], Number], description: str, accept: Callable[[Number], bool]
) -> Callable[[str], Number]:
    """A parser of texts: ``kind(text)`` if finite and accepted; else SettingError "... is not
    ``description``". A whole number may be written like 1e4.

    Digits of other scripts, which Python reads too, are none.
    """

    def parse(text: str) -> Number:
        digits = text
        try:
            if kind is int and abs(float(text)) < 2**53 and float(text).is_integer():
                digits = str(int(float(text)))
            value = kind(digits)
            if text.isascii() and math.isfinite(value) and accept(value):
                return value
        except (ValueError, ArithmeticError):  # of an integer too large for a float, and of 1/0
            pass
        raise SettingError(f"'{text}' is not {description}")

    return parse


def one_of(names: Collection[str]) -> Callable[[str], str]:
    """A parser of texts: one of ``names``, to which plug-ins may add."""

    def parse(text: str) -> str:
        if text not in names:
            raise SettingError(f"'{text}' is not known; known: {', '.join(names)}")
        return text

    return parse


_MOST = 4_000_000_000
positive_int = number(int, "a whole number from 1 to 4,000,000,000", lambda v: 1 <= v <= _MOST)
non_negative_int = number(int, "a whole number from 0 to 4,000,000,000", lambda v: 0 <= v <= _MOST)
any_seed = number(int, "a whole number from 0 to 2^128 - 1", lambda v: 0 <= v < 2**128)
"""Parses the seed of random numbers; all other whole numbers are counts that a run could reach."""
positive_float = number(float, "a number above 0", lambda v: v > 0)
non_negative_float = number(float, "a number of at least 0", lambda v: v >= 0)
share_of_one = number(float, "a share from 0 to 1", lambda v: 0 <= v <= 1)
a_threshold = number(float, "a probability from 0.5 to 0.999", lambda v: 0.5 <= v <= 0.999)
probability = number(float, "a probability strictly between 0 and 1", lambda v: 0 < v < 1)
batch_size = up_to_a_million = number(
    int, "a whole number from 1 to 1,000,000", lambda v: 1 <= v <= 1_000_000
)
momentum = number(float, "a number from 0 to below 1, like 0.9", lambda v: 0 <= v < 1)


def _quotient(text: str) -> float:
    numerator, slash, denominator = text.partition("/")
    return float(numerator) / (float(denominator) if slash else 1.0)


noise_level = number(
    _quotient,
    "a standard deviation between 0 and 10 on images in [0, 1], like 0.25 or 64/255",
    lambda v: 0 <= v <= 10,
)
"""Parses a standard deviation >= 0 on images in [0, 1]; the paper uses 0.12 to 1.0."""
_LARGEST_L2 = 32.0
l2_norm = number(
    _quotient,
    "an l2 norm: write a number like 0.25 or a fraction like 64/255",
    lambda v: v >= 0,
)
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
    value = l2_norm(text)
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
    return perturbation_size(f"{number_of_256ths}/256")


def output_file(text: str) -> Path:
    """Parses the path of a file to write."""
    if os.path.basename(text) in ("", ".", ".."):
        raise SettingError(f"'{text}' names no file: give the path of the file to write")
    return Path(text)


def output_folder(text: str) -> Path:
    """Parses the path of a folder to write to, which may be there and may not look like a file."""
    is_file_name = re.search(r"\.(pdf|png|svg|tex|md|[ct]sv|txt|npz|pth?|tar|zip)$", text.lower())
    if not text or (is_file_name and not os.path.isdir(text)):
        raise SettingError(
            f"'{text}' names no folder: write . for this one, or it without the ending of a file"
        )
    return Path(text)


@dataclass(frozen=True)
class Setting:
    """What a field says of itself; ``setting`` says what most entries mean.

    The rest is in the ``field``'s type. ``kind`` are the classes whose objects need no reading,
    (bool,) is a switch. ``many`` is tuple or list where there are several values, else None.
    """

    default: Any
    help: str | Callable[[], str]
    parse: Callable[[str], Any] | None
    choices: Collection[str] | None
    check: Callable[[str], Any] | None
    flags: tuple[str, ...]
    metavar: str | None
    constants: Mapping[str, str]
    group: str
    unit: str
    keyword: bool
    records: str
    field: str = ""
    kind: tuple[Any, ...] = ()
    many: type | None = None
    may_be_none: bool = False

    @property
    def flag(self) -> str:
        """The main flag, or the name of a positional argument; "" if commands have no option."""
        return "".join(self.flags[:1])

    @property
    def description(self) -> str:
        """The help text, with the names to choose from and the unit."""
        text = self.help() if callable(self.help) else self.help
        if self.choices is not None and hasattr(self.choices, "require"):
            text = f"{text}, one of {', '.join(self.choices)}"
        return f"{text} ({self.unit})" if self.unit else text

    def read(self, value: Any) -> Any:
        """A value that was given in Python, as ``checked`` reads it; several as a tuple, where a
        single one stands for a list of it.
        """
        if value is self.default or (value is None and self.may_be_none):
            return value
        if self.many is None:
            return checked(self.field, value, self.check, self.kind)
        is_list = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
        values = value if is_list and getattr(value, "shape", None) != () else [value]
        read = tuple(checked(self.field, one, self.check, self.kind) for one in values)
        if not read and self.default != ():
            raise SettingError(f"{self.field}: found {value!r}, expected a list of one or several")
        return read


def setting(
    default: Any = MISSING,
    *,
    help: str | Callable[[], str] = "",
    parse: Callable[[str], Any] | None = None,
    choices: Collection[str] | None = None,
    check: Callable[[str], Any] | None = None,
    flag: str | None = None,
    metavar: str | None = None,
    constants: Mapping[str, str] = MappingProxyType({}),
    group: str = "",
    unit: str = "",
    keyword: bool = True,
    records: str = "",
    **further: Any,
) -> Any:
    """A field of a frozen dataclass, required if it has no default.

    Its type says whether it may be None, and whether it takes several values, a tuple or a list,
    which may be empty if the default is. A bool is a switch. Texts and paths are taken as they are.

    ``parse`` turns a text into a number or another value, and raises SettingError for a bad text;
    an object of the type needs none. ``choices`` lists texts instead; it may be a Registry.
    ``check``, in place of ``parse``, reads in Python what a command would not take. ``help`` is a
    text, or a function that returns one; ``unit`` is the unit of the value. ``records`` is the name
    in the manifest of a field that decides the numbers.

    In commands, ``flag`` holds one flag or several, separated by spaces, the main one first. A name
    without dashes makes a positional argument, "" makes no option. By default a field with ``help``
    has the flag ``--field-name``. One flag takes one value of a list, and all values of a tuple or
    Sequence. Of several flags the last one counts; a tuple that is empty by default collects the
    values of all.
    The flag of a switch that is True by default turns it off, and ``help`` says what that does; a
    switch that is None by default has ``--x`` and ``--no-x``. ``constants`` makes a switch
    ``--value`` of each value, with its help text. ``group`` is the title above the option in the
    command's help.

    In Python, functions have the field as a keyword, if ``keyword``.

    ``further`` arguments are those of dataclasses.field. The result is Any, as there: the
    annotation of the field is its type.
    """
    if parse is None and choices is not None:
        parse = getattr(choices, "require", None) or one_of(choices)
    is_option = bool(help) if flag is None else bool(flag)
    flags = tuple((flag or "").split()) or (("",) if is_option else ())
    described = metavar, constants, group, unit, keyword, records
    how = Setting(default, help, parse, choices, check, flags, *described)
    return dataclasses.field(default=default, metadata={"setting": how}, **further)


def _members(hint: Any) -> list[Any]:
    """The types in a union, or a type alone; that of None is None."""
    types = get_args(hint) if get_origin(hint) in (Union, UnionType) else [hint]
    return [None if one is type(None) else one for one in types]


def _settings_of(spec: type) -> tuple[Setting, ...]:
    hints, settings = get_type_hints(spec), list[Setting]()
    for field in dataclasses.fields(spec):
        if (how := field.metadata.get("setting")) is None:
            continue
        types = _members(hints[field.name])
        lists = [one for one in types if get_origin(one) in (tuple, list, Sequence)]
        single = _members(get_args(lists[0])[0]) if lists else types
        parse = how.parse or next((one for one in single if one in (str, Path)), None)
        plain = (str, int, float, Path, None)
        kind = [get_origin(one) or one for one in single if one not in plain]
        if Any in kind:
            kind = [] if parse else [object]
        settings.append(
            dataclasses.replace(
                how,
                field=field.name,
                flags=tuple(flag or "--" + field.name.replace("_", "-") for flag in how.flags),
                parse=parse,
                check=how.check or parse,
                kind=tuple(kind),
                many=get_origin(lists[0]) if lists else None,
                may_be_none=None in types,
            )
        )
    return tuple(settings)


settings_of: Callable[[type], tuple[Setting, ...]] = functools.cache(_settings_of)
"""The settings that a dataclass declares, in order of declaration, each completed by the name and
the type of its field.
"""


def options_of(spec: type) -> list[Setting]:
    """The settings of which commands make options."""
    return [one for one in settings_of(spec) if one.flags]


def found_value(value: Any) -> str:
    """A value as a message names it; Python writes out no number of more than 4,300 digits, and
    arrays and tensors in many lines.
    """
    if getattr(value, "shape", ()) and hasattr(value, "dtype"):
        return f"found a {type(value).__name__} of {value.dtype}, {list(value.shape)}"
    bits = value.bit_length() if isinstance(value, int) else 0
    return f"found a number of {bits} bits" if bits > 1024 else f"found {value!r}"


def checked(name: str, value: Any, parse: Callable[[str], Any] | None, kind: Any = ()) -> Any:
    """A ``value`` that was given in Python: an object of the ``kind``, a class or several, or what
    ``parse`` reads from a command line; with neither, True or False.

    Numbers become Python's, of NumPy's or of a tensor with one entry; a whole number may be a float
    like 1e5. SettingError, which calls the value ``name``, where a command would accept no text for
    it.
    """
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if parse is None and not kinds:
        kinds = (bool,)
    plain = (
        value.item()
        if getattr(value, "shape", None) == () and not getattr(value, "mask", False)
        else value
    )
    is_number = isinstance(plain, (Real, Decimal)) and not isinstance(plain, bool)
    if isinstance(plain, kinds):
        return plain
    if parse is None:
        known = getattr(kinds[0], "EXAMPLE", getattr(kinds[0], "__name__", kinds[0]))
        expected = "True or False" if kinds == (bool,) else known
        raise SettingError(f"{name}: {found_value(value)}, expected {expected}")
    try:
        if is_number and not isinstance(plain, int):
            plain = float(plain)
            plain = int(plain) if plain.is_integer() else plain
        text = os.fspath(plain) if isinstance(plain, os.PathLike) else str(plain)
        parsed = parse(text)
    except UserError as error:
        reason = str(error).replace(f"'{text}' is not known; known:", "expected one of")
        reason = reason.replace(f"'{text}' is not", "expected")
        raise SettingError(f"{name}: {found_value(value)}, {reason}") from None
    except (ValueError, OverflowError):
        raise SettingError(f"{name}: {found_value(value)}, expected a smaller one") from None
    wants_number = isinstance(parsed, (int, float))
    is_text = isinstance(plain, (str, os.PathLike, type(parsed)))
    # What has a type or a grammar of its own, like a radius or a step, may be a number or a text.
    is_own = isinstance(parsed, kinds) or (
        isinstance(parsed, str) and is_number and parse is not str
    )
    is_meant = is_number if wants_number else is_text or is_own
    if not is_meant:
        raise SettingError(
            f"{name}: {found_value(value)}, expected {'a number' if wants_number else 'a name'}"
        )
    return parsed


class Checked:
    """A frozen dataclass whose settings are checked when it is made; a ``__post_init__`` of its own
    first calls this one.
    """

    def __post_init__(self) -> None:
        """Replace the settings by what they read; SettingError where one has no such value."""
        for one in settings_of(type(self)):
            object.__setattr__(self, one.field, one.read(getattr(self, one.field)))


_FLAG = re.compile(r"(?<![\w-])--[A-Za-z][\w-]*")
_MEANT = {"noise": "sigma", "noise_sd": "sigma", "std": "sigma", "samples": "n", "num_samples": "n"}
"""What other libraries call a keyword."""


def _in_python(text: str, settings: Iterable[Setting]) -> str:
    """A message about these settings, with keywords in place of flags."""
    keywords = dict[str, str]()
    for one in settings:
        value = f"={not one.default}" * (one.kind == (bool,))
        keywords |= dict.fromkeys(one.flags, f"{one.field}{value}")
        keywords |= {f"--{value}": f'{one.field}="{value}"' for value in one.constants}
    return _FLAG.sub(lambda flag: keywords.get(flag[0], flag[0]), text)


def _meant(name: str, settings: Iterable[Setting], keywords: Iterable[str]) -> str:
    """Which of the ``keywords`` is probably meant by another name, as a question."""
    known = dict(zip(keywords, keywords))
    for one in settings:
        others = (*one.constants, *(flag.lstrip("-") for flag in one.flags))
        known |= dict.fromkeys(others, one.field)
    known |= {other: meant for other, meant in _MEANT.items() if meant in known}
    if near := difflib.get_close_matches(name, known, 1, 0.65):
        return f": do you mean {known[near[0]]}=?"
    return f': is it one of the method, settings={{"{name}": ...}}?' * ("settings" in known)


Function = TypeVar("Function", bound=Callable[..., Any])


def takes(*specs: type) -> Callable[[Function], Function]:
    """Decorator: a function with ``**keywords`` takes the keywords of the specs.

    Its signature and its docstring then list them, and another one is a TypeError, as Python's. The
    function gets the keywords that were given, by field. A UserError that it raises names keywords
    in place of flags.
    """
    every = [one for spec in specs for one in settings_of(spec)]

    def decorate(function: Function) -> Function:
        own = inspect.signature(function)
        fixed = {n: p for n, p in own.parameters.items() if p.kind is not p.VAR_KEYWORD}
        settings = [one for one in every if one.keyword and one.field not in fixed]
        signature = own.replace(parameters=[*fixed.values(), *map(_parameter, settings)])
        lines = [
            f"- ``{one.field}{'=False' * (one.default is True)}``: "
            + _in_python(one.description, every)
            for one in settings
        ]
        listed = "\n".join(textwrap.fill(line, 100, subsequent_indent="  ") for line in lines)

        @functools.wraps(function)
        def with_keywords(*arguments: Any, **given: Any) -> Any:
            try:
                signature.bind(*arguments, **given)
            except TypeError as error:
                unknown = [name for name in given if name not in signature.parameters]
                hints = [_meant(name, settings, signature.parameters) for name in unknown]
                raise TypeError(f"{function.__name__}() {error}{''.join(hints[:1])}") from None
            try:
                return function(*arguments, **given)
            except UserError as error:
                error.args = (_in_python(str(error), every), *error.args[1:])
                raise

        with_keywords.__signature__ = signature  # type: ignore[attr-defined]
        with_keywords.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\n{listed}\n"
        return with_keywords  # type: ignore[return-value]

    return decorate


def _parameter(one: Setting) -> inspect.Parameter:
    """The keyword of a function that a setting is."""
    default = inspect.Parameter.empty if one.default is MISSING else one.default
    return inspect.Parameter(one.field, inspect.Parameter.KEYWORD_ONLY, default=default)


def identity(spec: Any) -> dict[str, Any]:
    """What a manifest records of a run: the settings that decide the numbers, but those at None."""
    values = {one.records: getattr(spec, one.field) for one in settings_of(type(spec))}
    return {
        name: settings_record(value) for name, value in values.items() if name and value is not None
    }


def describe(component: Any) -> str:
    """A component and its settings as a person would read them, without those left at None or
    False.
    """

    record: Any = settings_record(component)
    if not isinstance(record, dict):
        return str(record)
    fields = [
        f"{field}={describe(getattr(component, field))}"
        for field, value in record.items()
        if field != "name" and value is not None and value is not False
    ]
    return f"{record['name']}({', '.join(fields)})"


def settings_record(component: Any) -> dict[str, Any]:
    """A component's class and field values as plain JSON values, nested components included."""
    if dataclasses.is_dataclass(component):
        names = [field.name for field in dataclasses.fields(component)]
        return {
            "name": type(component).__name__,
            **{name: settings_record(getattr(component, name)) for name in names},
        }
    return component.__name__ if callable(component) else component
