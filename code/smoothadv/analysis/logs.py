"""A log for analyses: its rows, what is known of how they were made, and its names for people."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from smoothadv.analysis.facts import Facts, Value, unread_folders
from smoothadv.analysis.table_formats import Label
from smoothadv.records.logs import CLASS, COUNT_COLUMNS, images_selected, numbered
from smoothadv.records.readers import DataFrame
from smoothadv.statistics import PROCEDURES, Procedure
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
    sentences that a reader of its numbers should know. ``images`` is what people call the images
    that it is about, "" where all logs that were read are about the same ones; likewise
    ``procedure``, of a prediction log only whether it is of the k most probable classes. People see
    its ``title`` in place of its name, unless that is "".
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
        return images_selected(self.facts.runs[-1]) if self.facts.runs else None

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
