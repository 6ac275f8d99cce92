"""The file that describes a sweep: fixed options, swept options, ensembles, and the evaluations
that follow.

docs/sweeps.md shows all that a grid can hold. "{noise}" in a text is replaced by the value of that
option of the same model, written as in the names of folders.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

from smoothadv.base.errors import UserError
from smoothadv.base.files import read_toml
from smoothadv.base.plugins import is_file_name
from smoothadv.base.registry import did_you_mean
from smoothadv.base.settings import refuse_any
from smoothadv.models.name import MEANS

Options = dict[str, Any]
# An installed package has in it what a clone has in scripts/grids.
_FOLDERS = Path(__file__).parents[1] / "grids", Path(__file__).parents[3] / "scripts" / "grids"
MOST_MODELS = 10_000
"""So many models a grid may describe, unless its reader allows more."""
_KINDS: dict[str, type] = {
    **dict.fromkeys(("about", "models", "logs"), str),
    **dict.fromkeys(("processes", "threads"), int),
    "fixed": dict,
}
_KINDS_IN_LISTS: dict[str, type] = {
    "plugins": str,
    **dict.fromkeys(("sweep", "ensemble", "certify", "attack"), dict),
}
_WORDS = {str: "text", int: "whole number from 1", dict: "table"}
# Options that the sweep itself, or its command line, gives to every command.
_NEVER = tuple(
    "outdir outfile checkpoint resume overwrite data-dir device shard debug help plugin "
    "version".split()
)
_NEVER_IN_EVALUATIONS = ("dataset", "against", "only", "png")
NAMED_OPTIONS = {
    *("dataset", "arch", "objective", "noise", "attack", "epsilon", "num-steps", "num-noise-vec"),
    *("base-attack", "unlabelled-weight"),
}
"""The options whose values the released names of folders hold."""


@dataclass(frozen=True)
class Model:
    """One model of a grid: the ``options`` of its training, the names of the ``swept`` ones, and
    its ``group``.

    ``source`` says where in the file the model is described, for messages.
    """

    options: Options
    swept: tuple[str, ...]
    group: str
    source: str


@dataclass(frozen=True)
class EnsembleTable:
    """An [[ensemble]] table: the models of the group ``of`` that differ in nothing but options in
    ``over`` are members.

    ``mean`` is one of smoothadv.models.name.MEANS. ``group`` and ``source`` as in ``Model``.
    """

    of: str
    over: tuple[str, ...]
    mean: str
    group: str
    source: str


@dataclass(frozen=True)
class EvaluationTable:
    """A [[certify]] or [[attack]] table: the ``options`` of an evaluation that is made at each of
    the ``sigmas``.

    A sigma of None stands for the noise of the training. ``name`` is a part of the names of its
    logs. It is for the models of ``groups`` or, if another table is given as ``best``, for the best
    of them by the logs of that table. ``source`` says where in the file the table is, for messages.
    """

    command: str
    options: Options
    sigmas: tuple[Any, ...]
    name: str
    groups: tuple[str, ...]
    source: str
    best: EvaluationTable | None = None


@dataclass(frozen=True)
class Grid:
    """A sweep as its file describes it: ``models`` and ``logs`` are folders, ``trained`` lists the
    models.

    ``plugins`` are what --plugin takes: modules, and files relative to the working folder.
    ``formula`` explains the number of models, like "2 noise x 3 epsilon + 2 noise".
    """

    path: Path
    about: str
    models: Path
    logs: Path
    processes: int
    threads: int | None
    trained: list[Model]
    evaluations: list[EvaluationTable] = field(default_factory=list)
    ensembles: list[EnsembleTable] = field(default_factory=list)
    plugins: tuple[str, ...] = ()
    formula: str = ""

    @property
    def name(self) -> str:
        return self.path.stem


def shipped_grids() -> dict[str, Path]:
    """The files of this project's grids, by name."""
    return {path.stem: path for folder in _FOLDERS for path in sorted(folder.glob("*.toml"))}


def read_grid(path: Path, most_models: int = MOST_MODELS) -> Grid:
    """The grid in a file or, where there is no such file, this project's grid of that name.

    UserError if that is missing, no TOML or no grid, or describes more than ``most_models``.
    """
    shipped = shipped_grids()
    path = path if path.is_file() else shipped.get(str(path), path)
    try:
        content = read_toml(path)
    except FileNotFoundError:
        hint = did_you_mean(path.stem, shipped)
        raise UserError(
            f"grid {path} does not exist{hint}; this project has {', '.join(shipped)}"
        ) from None
    except ValueError as error:
        raise UserError(f"grid {path} is no TOML: {error}") from None
    _check_keys(path, content)
    trained = list(_models(path, content, most_models))
    groups = tuple(dict.fromkeys(model.group for model in trained))
    ensembles = list(_ensemble_tables(path, content, groups))
    groups = tuple(dict.fromkeys([*groups, *(ensemble.group for ensemble in ensembles)]))
    return Grid(
        path=path,
        about=content.get("about", path.stem),
        models=Path(content.get("models", Path("models") / path.stem)),
        logs=Path(content.get("logs", Path("logs") / path.stem)),
        processes=content.get("processes", 1),
        threads=content.get("threads"),
        trained=trained,
        evaluations=_evaluation_tables(path, content, groups),
        ensembles=ensembles,
        formula=" + ".join(
            _product({**content.get("fixed", {}), **table}) for table in content["sweep"]
        ),
        plugins=tuple(
            str(path.parent / name) if is_file_name(name) else name
            for name in content.get("plugins", [])
        ),
    )


def read_grids(paths: Sequence[Path], most_models: int = MOST_MODELS) -> list[Grid]:
    """The grids in files, as ``read_grid``; UserError if two have the same folder."""
    grids = [read_grid(path, most_models) for path in paths]
    for kind in ("models", "logs"):
        folders = ((getattr(grid, kind).resolve(), grid.path) for grid in grids)
        refuse_shared(f"grids ({kind})", folders, "name another folder in one of them")
    return grids


def refuse_shared(what: str, places: Iterable[tuple[str | Path, str | Path]], advice: str) -> None:
    """UserError if two of ``places`` are the same: each is where something is written, and who says
    so.
    """
    sources: dict[str, str | Path] = {}
    for place, source in places:
        shown = os.path.relpath(place)
        if shown in sources:
            raise UserError(
                f"{source}: two {what} would write {shown}, the other is of {sources[shown]}: "
                f"{advice}"
            )
        sources[shown] = source


def _check_keys(path: Path, content: Options) -> None:
    kinds = {**_KINDS, **_KINDS_IN_LISTS}
    for key, value in content.items():
        if key not in kinds:
            raise UserError(f"grid {path}: '{key}' is no part of a grid; known: {', '.join(kinds)}")
        values = value if key in _KINDS_IN_LISTS else [value]
        fits = isinstance(values, list) and all(type(one) is kinds[key] for one in values)
        if not fits or (kinds[key] is int and value < 1):
            word = _WORDS[kinds[key]]
            kind = f"list of {word}s" if key in _KINDS_IN_LISTS else word
            raise UserError(f"grid {path}: '{key}' is to be a {kind}, found {value!r}")
    if not content.get("sweep"):
        raise UserError(f"grid {path}: has no [[sweep]], so there is nothing to train")


def _models(path: Path, content: Options, most: int) -> Iterator[Model]:
    fixed, total = content.get("fixed", {}), 0
    _check_options(f"grid {path}, [fixed]", fixed, _NEVER)
    for number, table in enumerate(content["sweep"], start=1):
        source = f"grid {path}, [[sweep]] {number}"
        group = _group(table, path.stem.replace("=", "-"), source)
        swept_here = {key: value for key, value in table.items() if key != "group"}
        _check_options(source, swept_here, _NEVER)
        combined = {**fixed, **swept_here}
        axes = {key: _listed(value) for key, value in combined.items()}
        for key in ("dataset", "arch"):
            if key not in axes:
                raise UserError(f"{source}: names no '{key}'; give one here or under [fixed]")
        total += math.prod(map(len, axes.values()))
        if total > most:  # a few short lists describe millions of models
            raise UserError(f"{source}: more than {most:,} models: --max-models raises this bound")
        swept = tuple(key for key, values in combined.items() if isinstance(values, list))
        for values in itertools.product(*axes.values()):
            model = dict(zip(axes, values))
            yield Model(fill_placeholders(model, model, source), swept, group, source)


def _product(table: Options) -> str:
    return (
        " x ".join(f"{len(value)} {key}" for key, value in table.items() if isinstance(value, list))
        or "1"
    )


def _group(table: Options, default: str, source: str) -> str:
    group = table.get("group", default)
    if not isinstance(group, str) or not group or "=" in group:
        raise UserError(
            f"{source}: 'group' is to be a text, not empty and without '=', found {group!r}"
        )
    return group


def _known_group(named: Any, groups: tuple[str, ...], source: str) -> str:
    if named not in groups:
        raise UserError(f"{source}: there is no group {named!r}; there are {', '.join(groups)}")
    return named


def _ensemble_tables(
    path: Path, content: Options, groups: tuple[str, ...]
) -> Iterator[EnsembleTable]:
    for number, table in enumerate(content.get("ensemble", []), start=1):
        source = f"grid {path}, [[ensemble]] {number}"
        if unknown := [key for key in table if key not in ("of", "over", "group", "mean")]:
            raise UserError(
                f"{source}: {unknown[0]!r} is no part of an ensemble; known: of, over, group, mean"
            )
        of, mean = _known_group(table.get("of"), groups, source), table.get("mean", MEANS[0])
        group = _group(table, f"{of} ensemble", source)
        over = tuple(map(str, _listed(table.get("over", "seed"))))
        named = ", ".join(option for option in over if option in NAMED_OPTIONS - {"arch"})
        refuse_any(
            {
                f"{source}: the group {group!r} is that of single models: name another": (
                    group in groups
                ),
                f"{source}: members cannot differ in {named}, which is in the name of a folder": (
                    named
                ),
                f"{source}: 'mean' is to be one of {', '.join(MEANS)}, found {mean!r}": (
                    mean not in MEANS
                ),
            }
        )
        yield EnsembleTable(of, over, mean, group, source)


def _evaluation_tables(
    path: Path, content: Options, groups: tuple[str, ...]
) -> list[EvaluationTable]:
    tables: list[EvaluationTable] = []
    for command in ("certify", "attack"):
        for number, table in enumerate(content.get(command, []), start=1):
            source = f"grid {path}, [[{command}]] {number}"
            _check_options(source, table, (*_NEVER, *_NEVER_IN_EVALUATIONS))
            options = {
                key: value
                for key, value in table.items()
                if key not in ("sigma", "name", "group", "best")
            }
            best = _chooser(table["best"], tables, source) if "best" in table else None
            known = best.groups if best else groups
            named = _listed(table.get("group", list(known)))
            tables.append(
                EvaluationTable(
                    command,
                    options,
                    tuple(_listed(table.get("sigma", [None]))),
                    str(table.get("name", "")),
                    tuple(_known_group(group, known, source) for group in named),
                    source,
                    best,
                )
            )
    return tables


def _chooser(name: Any, tables: Sequence[EvaluationTable], source: str) -> EvaluationTable:
    """The table whose logs choose the best models, a log of each: that of this name, or, for True,
    the only one.
    """
    known = [
        table
        for table in tables
        if table.command == "certify" and not table.best and len(table.sigmas) == 1
    ]
    found = [table for table in known if name is True or table.name == name]
    if len(found) == 1:
        return found[0]
    names = ", ".join(repr(table.name) for table in known) or "none"
    raise UserError(
        f"{source}: 'best' is {name!r}, expected the name of an earlier [[certify]] that makes a "
        f"log of every model ({names}), or true where there is one"
    )


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _check_options(source: str, table: Mapping[str, Any], never: tuple[str, ...]) -> None:
    """UserError if a key is one of ``never``, or a value is none that a grid can hold."""
    for key, value in table.items():
        values = _listed(value)
        are_plain = all(isinstance(single, (str, int, float)) for single in values)
        refuse_any(
            {
                f"{source}: '{key}' is set by the sweep itself, or on its command line: leave it "
                "out": key in never,
                f"{source}: '{key}' is to be a text, a number, true, false or a list of some, "
                f"found {value!r}": not values or not are_plain,
            }
        )


def format_value(value: Any) -> str:
    """A value as text in the name of a folder: numbers with four significant digits, without an
    exponent.
    """
    text = str(value)
    if re.fullmatch("[0-9]+", text):
        return text
    try:
        # Not by a Fraction of any text: that of 1e999999999 would fill the memory.
        number = float(Fraction(text) if "/" in text else text) + 0.0  # -0.0 is 0.0
    except (ValueError, ArithmeticError):
        number = math.nan
    if not math.isfinite(number):
        return re.sub(r"[^\w.+-]+", "_", text).strip("_") or "_"
    return f"{Decimal(f'{number:.4g}'):f}".removesuffix(".0")


def format_decimal(value: Any) -> str:
    """An epsilon or a standard deviation as the released folders write it: two decimals, or more if
    needed.
    """
    text = format_value(value)
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        return text
    whole, _, decimals = text.partition(".")
    return f"{whole}.{decimals.ljust(2, '0')}"


def fill_placeholders(
    table: Mapping[str, Any], values: Mapping[str, Any], source: str
) -> dict[str, Any]:
    """``table`` with every "{name}" in a text replaced by that value in ``values``; UserError for
    an unknown name.

    Values are written as in the names of folders.
    """

    def formatted(place: re.Match[str]) -> str:
        name = place[1]
        if name not in values:
            known = ", ".join(values)
            raise UserError(f"{source}: '{place.string}' asks for {{{name}}}; known: {known}")
        write = format_decimal if name in ("noise", "epsilon") else format_value
        return write(values[name])

    def replaced(value: Any) -> Any:
        if isinstance(value, list):
            return list(map(replaced, value))
        return re.sub(r"\{([^{}]*)\}", formatted, value) if isinstance(value, str) else value

    return {key: replaced(value) for key, value in table.items()}
