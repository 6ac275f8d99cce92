"""Logs for analyses: the rows of a log, what is known of how they were made, and its names for
people; which logs are filtered, grouped and chosen by that, and which differ in what must be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, TypeVar

from smoothadv.analysis.facts import FIELDS, Facts, Value, display, unread_folders
from smoothadv.analysis.table_formats import Cell, Column, Label, Table
from smoothadv.base.errors import UserError, escape
from smoothadv.base.settings import SettingError, one_of, setting
from smoothadv.records.logs import CLASS, IMAGE_SET, SELECTION, images_of, numbered
from smoothadv.records.readers import DataFrame
from smoothadv.statistics import COUNT_COLUMNS, PROCEDURES, Procedure
from smoothadv.statistics.exact import Exact
from smoothadv.statistics.on_grid import GRID_COLUMNS, LABEL_AWARE
from smoothadv.statistics.top_k import RIVALS, TopK
from smoothadv.statistics.two_sided import RIVAL, TwoSided

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Log:
    """A log's ``table`` (see ``readers``), a ``name`` that is short yet unique, and its ``facts``.

    ``group`` is the name given on the command line (NAME=LOG: then ``group_is_named``), else the
    folder or glob in which the log was found, "" for a log that was named itself. ``notes`` are
    sentences that a reader of its numbers should know. ``images``, ``procedure`` and ``title`` are
    for display. ``images`` and ``procedure`` are "" if all logs that were read share them;
    ``procedure`` of a prediction log only says whether the log has sets of classes. A ``title``
    that is not "" stands in place of the name.
    """

    name: str
    path: Path
    group: str
    table: DataFrame
    facts: Facts = field(default_factory=Facts)
    notes: tuple[str, ...] = ()
    images: str = ""
    procedure: str = ""
    group_is_named: bool = False
    title: str = ""

    def value(self, name: str) -> Value:
        """A hyper-parameter by which logs are grouped: methods of unknown names are not one method,
        but told apart by their folders.
        """
        value = self.facts.get(name)
        if value is None and name in ("objective", "training"):
            return f"unknown ({unread_folders(self.path)})"
        return value

    @property
    def procedure_type(self) -> type[Procedure]:
        """The procedure that its manifest names; ``Exact`` where it names none, as of released
        logs.

        ``Procedure``, of which nothing is known, where the manifest names one that is not
        registered here, and of a log with rivals but no manifest.
        """
        method = self.facts.settings.get("method")
        if method is not None:
            return PROCEDURES.get(method, Procedure)
        has_rivals = RIVAL in self.table or numbered(self.table.columns, RIVALS)
        return Procedure if has_rivals else Exact

    @property
    def is_on_grid(self) -> bool:
        """Whether its radii are the largest of a grid that were certified, not the largest that
        could have been.
        """
        return self.procedure_type.on_grid or set(GRID_COLUMNS) <= set(self.table)

    @property
    def radii_follow_from_counts(self) -> bool:
        """Whether ``Procedure.radius_from`` the counts in each row must give its radius."""
        is_fixed = self.procedure_type.fixed_sample and not self.is_on_grid
        return is_fixed and set(COUNT_COLUMNS) <= set(self.table)

    @property
    def top_k(self) -> int:
        """Among how many of the most probable classes it certifies or predicts, by its manifest or
        else its columns.
        """
        columns = self.table.columns
        in_columns = numbered(columns, RIVALS) or numbered(columns, CLASS)
        return self.facts.settings.get("top_k") or len(in_columns) or 1

    @property
    def procedure_name(self) -> str:
        """What people call its procedure.

        Those that state p_A alone share a name, and so do those that also bound the rivals: on a
        grid or not, they prove the same of the same votes. Label-aware and top-k certificates have
        names of their own: accuracies under two names differ even where the classifier is one.
        """
        if self.top_k > 1:
            return f"{TopK.certificate}{self.top_k}"
        unknown = TwoSided.certificate if RIVAL in self.table else self.facts.settings.get("method")
        name = self.procedure_type.certificate or str(unknown)
        return f"{name}, label-aware" if LABEL_AWARE in self.table else name

    @property
    def selected(self) -> int | None:
        """The number of images that were selected for it; None where no manifest says so."""
        run = (self.facts.runs or [{}])[-1]
        return len(images_of(self.facts.settings, run)) if {*SELECTION} <= run.keys() else None

    @property
    def progress(self) -> str:
        """ "36 of 180, unfinished" if it is known to lack images that were selected for it, else
        "".
        """
        done, selected = len(self.table), self.selected
        if selected is None or done >= selected:
            return ""
        return f"{done:,} of {selected:,}, unfinished"

    @property
    def label(self) -> Label:
        """Its name; people see its ``title``, its progress, its images and its procedure."""
        progress = f" ({self.progress})" if self.progress else ""
        words = f"{self.title or self.name}{progress}", self.images, self.procedure
        return Label(self.name, ", ".join(filter(None, words)), str(self.path))


@dataclass(frozen=True)
class Logs:
    """The logs of each kind, in the order in which they were named, and the reasons why some were
    ``left_out``.
    """

    certification: list[Log] = field(default_factory=list)
    prediction: list[Log] = field(default_factory=list)
    training: list[Log] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def all(self) -> list[Log]:
        return [*self.certification, *self.prediction, *self.training]

    def where(self, condition: Callable[[Log], bool]) -> Logs:
        """The logs that meet a condition."""
        return Logs(
            [*filter(condition, self.certification)],
            [*filter(condition, self.prediction)],
            [*filter(condition, self.training)],
            self.left_out,
        )

    def by(self, fact: str) -> dict[str, Logs]:
        """The certification and prediction logs of the same ``images``, or the same ``procedure``,
        by its name.
        """
        both = [*self.certification, *self.prediction]
        return {
            name: Logs(
                [log for log in self.certification if getattr(log, fact) == name],
                [log for log in self.prediction if getattr(log, fact) == name],
            )
            for name in dict.fromkeys(getattr(log, fact) for log in both)
        }


def group_by(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """The items by their ``key``, in the order in which the keys occur first."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def sizes_of(logs: Iterable[Log]) -> str:
    """How many examples the logs have, like "180" or "36 to 180"."""
    sizes = {len(log.table) for log in logs}
    return " to ".join(f"{size:,}" for size in sorted({min(sizes), max(sizes)}))


_FEWEST_TO_RECOGNISE = 20  # fewer rows may be equal by chance
_SEVERAL_PROCEDURES = (
    "logs of several procedures are kept apart ({}): some certify more from the same votes"
)
_SEVERAL_SIZES = "predictions are kept apart by the number of classes that may hold the label ({})"

hyper_parameter = one_of(FIELDS)


def grouping(what: str) -> Any:
    """The setting of the hyper-parameters whose values separate ``what``, by default none."""
    return setting((), parse=hyper_parameter, help=f"hyper-parameters whose values separate {what}")


def condition(text: str) -> str:
    """Parses FIELD=VALUE, a hyper-parameter and a value of it."""
    name, _, value = text.partition("=")
    if not value or name not in FIELDS:
        raise SettingError(f"'{text}' is not FIELD=VALUE with a FIELD among {', '.join(FIELDS)}")
    return text


def matches(value: Value, wanted: str) -> bool:
    """Whether a hyper-parameter has the value written: numbers to the digits written, so that 0.5
    finds 127/256.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return value is not None and str(value) == wanted
    try:
        # At least two: 1 is to find 255/256 but not 1.125.
        digits = max(2, -int(Decimal(wanted).as_tuple().exponent))
    except (InvalidOperation, ValueError):
        return False
    return round(float(value), digits) == float(wanted)


def restrict(logs: Logs, conditions: Sequence[str]) -> Logs:
    """The logs whose hyper-parameters meet all ``conditions``, like "sigma=0.25"; UserError if none
    does.
    """
    pairs = [one.partition("=") for one in conditions]
    kept = logs.where(
        lambda log: all(matches(log.facts.get(name), value) for name, _, value in pairs)
    )
    if not kept.all:
        name, both = pairs[0][0], [*logs.certification, *logs.prediction]
        found = ", ".join(sorted({display(name, log.facts.get(name)) for log in both})[:12])
        wanted = " ".join(conditions)
        raise UserError(f"no log has {wanted}; {name} is {found or 'unknown in all of them'}")
    return kept


def comparison_warnings(logs: Logs, paired: bool = False) -> list[str]:
    """Reasons to hesitate before comparing the logs, if ``paired`` on common examples: sentences
    for people.
    """
    certification, prediction = logs.certification, logs.prediction
    sentences = [
        f"the {kind}logs are not all on the same test images ({sizes_of(some)} examples): "
        "they differ by chance too"
        for kind, some in (("", certification), ("prediction ", prediction))
        if different_examples(some, paired)
    ]
    rows = ["idx", "predict", "radius"]
    same_rows = group_by(certification, lambda log: (log.group, log.table[rows].values.tobytes()))
    sentences += [
        f"{first.path} and {log.path} hold the same rows: one model is counted twice"
        for first, *others in same_rows.values()
        for log in others
        if len(log.table) >= _FEWEST_TO_RECOGNISE
    ]
    sentences += [
        sentence.format(names)
        for sentence, some in ((_SEVERAL_PROCEDURES, certification), (_SEVERAL_SIZES, prediction))
        if (names := several(some, "procedure"))
    ]
    found = {
        name: sorted({log.facts.get(name) for log in certification} - {None}, key=_sortable)
        for name in ("dataset", "N", "alpha", "method")
    }
    sentences += [
        f"the logs differ in {FIELDS[name]}: {', '.join(display(name, one) for one in values)}"
        for name, values in found.items()
        if len(values) > 1
    ]
    both = [*certification, *prediction]
    progress = "; ".join(dict.fromkeys(log.progress for log in both if log.progress))
    named = dict.fromkeys(str(name) for log in both if (name := log.facts.get(IMAGE_SET)))
    chosen = f"images are chosen by name, --images {escape(', '.join(named), 100)}"
    begun = f"{progress}; analyses that choose the best log leave it out without --unfinished"
    noted = group_by(
        [
            *((begun, log.path) for log in both if log.progress),
            *((chosen, log.path) for log in both if log.facts.get(IMAGE_SET)),
            *((note, log.path) for log in logs.all for note in log.notes),
        ],
        lambda pair: pair[0],
    )
    return sentences + [
        f"{first}{f' and {len(others)} more' if others else ''}: {note}"
        for note, ((_, first), *others) in noted.items()
    ]


@dataclass(frozen=True)
class Choosing:
    """Which logs take part where the best of several is chosen."""

    unfinished: bool = setting(
        False,
        help="let unfinished logs take part where the best is chosen, each among logs of exactly "
        "its images",
    )

    def takes(self, log: Log) -> bool:
        """Whether the log takes part."""
        return self.unfinished or not log.progress

    def taking_part(self, logs: Sequence[Log]) -> list[Log]:
        """The logs from which the best is chosen; UserError if there are some, but none is
        finished.
        """
        part = [*filter(self.takes, logs)]
        if logs and not part:
            raise UserError(
                f"no log is finished, {logs[0].path}: {logs[0].progress}; --unfinished takes such "
                "logs too"
            )
        return part


def several(logs: Sequence[Log], fact: str) -> str:
    """What people call the ``images`` or the ``procedure`` of each log, "" unless there are
    several.
    """
    names = dict.fromkeys(getattr(log, fact) for log in logs)
    return "; ".join(names) if len(names) > 1 else ""


def are_alike(logs: Sequence[Log]) -> bool:
    """Whether all logs have the same images, as far as manifests tell, and the same procedure."""
    return not (several(logs, "images") or several(logs, "procedure"))


def refuse_several(logs: Sequence[Log], what: str, *facts: str) -> None:
    """UserError, which says how to select, where the logs have ``several`` of one of the ``facts``;
    ``what`` is to be made of them.
    """
    for fact in facts:
        if names := several(logs, fact):
            one = {"images": "set of images"}.get(fact, fact)
            raise UserError(
                f"{what} needs logs of one {one}, not of {names}; name those of one, or use --where"
            )


def refuse_other_images(logs: Sequence[Log], what: str) -> None:
    """UserError unless ``what``, the logs, can be on the same images: of one dataset, and with the
    same labels.
    """
    datasets = {log.facts.get("dataset") for log in logs} - {None}
    if len(datasets) > 1:
        raise UserError(
            f"{what} are not on the same images, but of {', '.join(sorted(map(str, datasets)))}"
        )
    labels: dict[int, int] = {}
    for log in logs:
        for idx, label in zip(log.table["idx"].tolist(), log.table["label"].tolist()):
            if (other := labels.setdefault(idx, label)) != label:
                raise UserError(
                    f"{what} are not on the same images: example {idx} has label {other} in one "
                    f"log and {label} in another"
                )


def differ(first: Log, second: Log, *names: str) -> bool:
    """Whether two logs are known to differ in one of these facts or settings."""
    known = (
        {log.facts.get(name) or log.facts.settings.get(name) for log in (first, second)}
        for name in names
    )
    return any(len(values - {None}) > 1 for values in known)


def different_examples(logs: Sequence[Log], paired: bool = False) -> bool:
    """Whether the logs are of different examples; if ``paired`` on those in both, by manifests, of
    other data.
    """
    if paired:
        return any(differ(logs[0], log, "split", "dataset_fingerprint") for log in logs[1:])
    indices = {log.table.idx.to_numpy().tobytes() for log in logs}
    return bool(several(logs, "images")) or len(indices) > 1


def with_columns_of_logs(table: Table, logs: Sequence[Log], by: Sequence[str] = ()) -> Table:
    """A table with a row per log, and for programs last columns that tell the logs apart: the
    hyper-parameters ``by``, the group if the user named one, ``selected`` if a log is unfinished,
    ``procedure`` if there are several.

    People see the group in the first column, the others in the log's label.
    """
    people = table.for_people or table
    added: dict[str, list[Cell]] = {name: [log.facts.get(name) for log in logs] for name in by}
    if any(log.group_is_named for log in logs):
        added["group"] = [log.group for log in logs]
        columns = [Column("group", "group", "text"), *people.columns]
        people = Table(columns, [[log.group, *row] for row, log in zip(people.rows, logs)])
    if any(log.progress for log in logs):
        added["selected"] = [log.selected for log in logs]
    if several(logs, "procedure"):
        added["procedure"] = [log.procedure for log in logs]
    return Table(
        [*table.columns, *(Column(name, name, "text") for name in added)],
        [[*row, *more] for row, *more in zip(table.rows, *added.values())],
        people,
    )


@dataclass(frozen=True)
class LabelBy:
    """The names of the rows."""

    label_by: Sequence[str] = setting(
        (),
        parse=hyper_parameter,
        help="hyper-parameters that order the rows of each group and, for people, name them in "
        "place of paths, like sigma epsilon; csv and json have columns of them",
    )

    def ordered(self, logs: Sequence[Log]) -> list[Log]:
        """The logs in the order of their groups and hyper-parameters, which are their titles, like
        "sigma = 0.12 | epsilon = 0.25"; after that the name where others of the group have the same
        ones. Without ``label_by``, the logs as they are."""
        if not self.label_by:
            return [*logs]
        titled = []
        for group in groups_of(logs, self.label_by, name_group=True).values():
            for log in group:
                known = [name for name in self.label_by if log.facts.get(name) is not None]
                words = " | ".join(_equation(name, log, set()) for name in known)
                if not words or len(group) > 1:
                    words = ": ".join(filter(None, (words, log.name)))
                titled.append(replace(log, title=words))
        return titled


def groups_of(
    logs: Sequence[Log], by: Sequence[str], name_group: bool = False
) -> dict[str, list[Log]]:
    """The logs by the names of their group, the hyper-parameters ``by``, numbers ascending, images
    and procedure.

    Without ``name_group``, the group's name is left out where all logs are of one group and ``by``
    distinguishes them.
    """
    order = [*dict.fromkeys(log.group for log in logs)]
    values = {name: {log.value(name) for log in logs} for name in by}
    has_group_name = name_group or not by or len(order) > 1

    def name_of(log: Log) -> str:
        equations = (_equation(name, log, values[name]) for name in by)
        words = [log.group if has_group_name else "", *equations, log.images, log.procedure]
        return ", ".join(filter(None, words)) or "all"

    def position(log: Log) -> tuple[Any, ...]:
        return order.index(log.group), *(_sortable(log.value(name)) for name in by)

    return group_by(sorted(logs, key=position), name_of)


def _equation(name: str, log: Log, values: set[Value]) -> str:
    """ "sigma = 0.50"."""
    value = log.value(name)
    if value is None and name == "num_noise_vec" and log.facts.get("gradient") == "base classifier":
        return "vanilla PGD (base classifier)"
    return f"{FIELDS[name]} = {display(name, value, values)}"


def _sortable(value: Value) -> tuple[bool, float, str]:
    if isinstance(value, (int, float)):
        return (False, float(value), "")
    return (value is None, 0.0, str(value))
