"""Selects logs: filters and groups by hyper-parameter, and says which differ in what must be
equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from smoothadv.analysis.shared.hyper_parameters import FIELDS, ParameterValue, display
from smoothadv.analysis.shared.logs import Log, Logs, grouped, sizes_of
from smoothadv.analysis.shared.table_formats import Cell, Column, Label, Table
from smoothadv.base.errors import UserError
from smoothadv.base.settings import one_of, setting

_FEWEST_TO_RECOGNISE = 20  # fewer rows may be equal by chance

hyper_parameter = one_of(FIELDS)


def grouping(what: str) -> Any:
    """The setting of the hyper-parameters whose values separate ``what``, by default none."""
    return setting(
        None,
        many=True,
        parse=hyper_parameter,
        help=f"hyper-parameters whose values separate {what}",
    )


def labelling() -> Any:
    """The setting of the hyper-parameters that name rows."""
    text = (
        "hyper-parameters that order the rows of each group and, for people, name them in place of "
        "paths, like sigma epsilon; csv and json have columns of them"
    )
    return setting(None, many=True, parse=hyper_parameter, help=text)


def matches(value: ParameterValue, wanted: str) -> bool:
    """Whether a hyper-parameter has the value written: numbers to the digits written, so that 0.5
    finds 127/256.
    """
    if value is None:
        return False
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            number = Decimal(wanted)
        except InvalidOperation:
            return False
        if not (wanted.isascii() and number.is_finite()):
            return False
        # At least two: 1 is to find 255/256 but not 1.125.
        digits = max(2, -int(number.as_tuple().exponent))
        return round(float(value), digits) == float(number)
    return str(value) == wanted


def restrict(logs: Logs, conditions: Sequence[tuple[str, str]]) -> Logs:
    """The logs whose hyper-parameters meet all (name, value) ``conditions``; UserError if none
    does.
    """
    if not conditions:
        return logs

    def kept(some: list[Log]) -> list[Log]:
        return [
            log
            for log in some
            if all(matches(log.parameters.get(name), value) for name, value in conditions)
        ]

    result = Logs(
        kept(logs.certification), kept(logs.prediction), kept(logs.training), logs.left_out
    )
    if not (result.certification or result.prediction or result.training):
        wanted = " ".join(f"{name}={value}" for name, value in conditions)
        name = conditions[0][0]
        there = sorted(
            {
                display(name, log.parameters.get(name))
                for log in [*logs.certification, *logs.prediction]
            }
        )
        raise UserError(
            f"no log has {wanted}; {name} is {', '.join(there[:12]) or 'unknown in all of them'}"
        )
    return result


def doubts(logs: Logs, paired: bool = False) -> list[str]:
    """Reasons to hesitate before comparing the logs, if ``paired`` on common examples: sentences
    for people.
    """
    sentences = []
    if len(logs.certification) > 1 and different_examples(logs.certification, paired):
        counts = sizes_of(logs.certification)
        sentences.append(
            f"the logs are not all on the same test images ({counts} examples): they differ by "
            "chance too"
        )
    if len(logs.prediction) > 1 and different_examples(logs.prediction, paired):
        sentences.append(
            "the prediction logs are not all on the same test images: they differ by chance too"
        )
    sentences += _copies(logs.certification)
    if names := _several(logs.certification, "procedure"):
        sentences.append(
            f"logs of several procedures are kept apart ({names}): some certify more from the same "
            "votes"
        )
    if names := _several(logs.prediction, "procedure"):
        sentences.append(
            f"predictions are kept apart by the number of classes that may hold the label ({names})"
        )
    for name in ("dataset", "N", "alpha", "method"):
        values = {log.parameters.get(name) for log in logs.certification} - {None}
        if len(values) > 1:
            shown = ", ".join(display(name, value) for value in sorted(values, key=_sortable))
            sentences.append(f"the logs differ in {FIELDS[name]}: {shown}")
    for log in [*logs.certification, *logs.prediction]:
        if log.progress:
            sentences.append(
                f"{log.path}: {log.progress}; the best log is chosen without it, unless by "
                "--unfinished"
            )
    everything = [*logs.certification, *logs.prediction, *logs.training]
    for note, some in grouped(
        [(log, note) for log in everything for note in log.notes], lambda pair: pair[1]
    ).items():
        more = f" and {len(some) - 1} more" if len(some) > 1 else ""
        sentences.append(f"{some[0][0].path}{more}: {note}")
    return sentences


def _copies(logs: Sequence[Log]) -> list[str]:
    """A sentence for each log with the same rows as another one of its group: it would count as
    another model.
    """
    seen: dict[tuple[str | bytes, ...], Log] = {}
    sentences = []
    for log in logs:
        if len(log.table) < _FEWEST_TO_RECOGNISE:
            continue
        arrays = (log.table[name].to_numpy().tobytes() for name in ("idx", "predict", "radius"))
        first = seen.setdefault((log.group, *arrays), log)
        if first is not log:
            sentences.append(
                f"{first.path} and {log.path} hold the same rows: one model is counted twice"
            )
    return sentences


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


def are_alike(logs: Sequence[Log], *facts: str) -> bool:
    """Whether all logs have the same ``images``, as far as manifests tell, or ``procedure``;
    without facts, both.
    """
    return all(
        len({getattr(log, fact) for log in logs}) < 2 for fact in facts or ("images", "procedure")
    )


def _several(logs: Sequence[Log], fact: str) -> str:
    """What people call the ``images`` or the ``procedure`` of each log, "" unless there are
    several.
    """
    names = dict.fromkeys(getattr(log, fact) for log in logs)
    return "; ".join(names) if len(names) > 1 else ""


def refuse_several(logs: Sequence[Log], what: str, *facts: str) -> None:
    """UserError, which says how to select, unless the logs ``are_alike``; ``what`` is to be made of
    them.
    """
    for fact in facts:
        if found := _several(logs, fact):
            one, whole = {
                "images": ("set", "the same images"),
                "procedure": ("procedure", "one procedure"),
            }[fact]
            raise UserError(
                f"{what} needs logs of {whole}, not of {found}; name those of one {one}, or use "
                "--where"
            )


def refuse_other_images(logs: Sequence[Log], what: str) -> None:
    """UserError unless ``what``, the logs, can be on the same images: of one dataset, and with the
    same labels.
    """
    datasets = {log.parameters.get("dataset") for log in logs} - {None}
    if len(datasets) > 1:
        raise UserError(
            f"{what} are not on the same images, but of {', '.join(sorted(map(str, datasets)))}"
        )
    labels: dict[int, int] = {}
    for log in logs:
        for idx, label in zip(log.table["idx"].tolist(), log.table["label"].tolist()):
            if (other := labels.setdefault(idx, label)) != label:
                both = f"example {idx} has label {other} in one log and {label} in another"
                raise UserError(f"{what} are not on the same images: {both}")


def with_facts(table: Table, logs: Sequence[Log], by: Sequence[str] = ()) -> Table:
    """A table with a row per log, and for programs last columns that tell the logs apart: the
    hyper-parameters ``by``, the group if the user named one, ``selected`` if a log is unfinished,
    ``procedure`` if there are several.

    People see the group in the first column, the others in the log's label.
    """
    shown = table.shown or table
    facts: dict[str, list[Cell]] = {name: [log.parameters.get(name) for log in logs] for name in by}
    if any(log.grouped for log in logs):
        facts["group"] = [log.group for log in logs]
        columns = [Column("group", "group", "text"), *shown.columns]
        shown = Table(columns, [[log.group, *row] for row, log in zip(shown.rows, logs)])
    if any(log.progress for log in logs):
        facts["selected"] = [log.selected for log in logs]
    if not are_alike(logs, "procedure"):
        facts["procedure"] = [log.procedure for log in logs]
    rows = [[*row, *more] for row, *more in zip(table.rows, *facts.values())]
    return Table([*table.columns, *(Column(name, name, "text") for name in facts)], rows, shown)


def labels_by(logs: Sequence[Log], by: Sequence[str]) -> list[tuple[Log, Label]]:
    """The logs in the order of their groups and hyper-parameters ``by``, each with these as its
    label, like "sigma = 0.12 | epsilon = 0.25"; after that its name where others of its group have
    the same ones. Without ``by``, the logs as they are."""
    if not by:
        return [(log, log.label) for log in logs]
    labelled = []
    for group in groups_of(logs, by, name_group=True).values():
        for log in group:
            words = " | ".join(
                _equation(name, log, set()) for name in by if log.parameters.get(name) is not None
            )
            whole = (
                words if words and len(group) == 1 else ": ".join(filter(None, (words, log.name)))
            )
            labelled.append((log, log.labelled(whole)))
    return labelled


def groups_of(
    logs: Sequence[Log], by: Sequence[str], name_group: bool = False
) -> dict[str, list[Log]]:
    """The logs by the names of their group, the hyper-parameters ``by``, numbers ascending, images
    and procedure.

    Without ``name_group``, the group's name is left out where all logs are of one group and ``by``
    distinguishes them.
    """
    keyed = (
        sorted(logs, key=lambda log: [_sortable(log.parameters.get(name)) for name in by])
        if by
        else logs
    )
    several = name_group or not by or len({log.group for log in logs}) > 1
    values = {name: {log.parameters.get(name) for log in logs} for name in by}

    def name_of(log: Log) -> str:
        equations = (_equation(name, log, values[name]) for name in by)
        words = [log.group if several else "", *equations, log.images, log.procedure]
        return ", ".join(filter(None, words)) or "all"

    order = {
        name: position for position, name in enumerate(dict.fromkeys(log.group for log in logs))
    }
    return dict(sorted(grouped(keyed, name_of).items(), key=lambda item: order[item[1][0].group]))


def _equation(name: str, log: Log, values: set[ParameterValue]) -> str:
    """ "sigma = 0.50"."""
    value = log.parameters.get(name)
    if (
        value is None
        and name == "num_noise_vec"
        and log.parameters.get("gradient") == "base classifier"
    ):
        return "vanilla PGD (base classifier)"
    return f"{FIELDS[name]} = {display(name, value, values)}"


def _sortable(value: ParameterValue) -> tuple[bool, float, str]:
    if isinstance(value, (int, float)):
        return (False, float(value), "")
    return (value is None, 0.0, str(value))


def different_examples(logs: Sequence[Log], paired: bool = False) -> bool:
    """Whether the logs are of different examples; if ``paired`` on those in both, by manifests, of
    other data.
    """
    if paired:
        stated = [log.parameters for log in logs if log.parameters.manifest]
        return (
            len(
                {
                    (some.get("split"), str(some.settings.get("dataset_fingerprint")))
                    for some in stated
                }
            )
            > 1
        )
    return (
        not are_alike(logs, "images")
        or len({log.table.idx.to_numpy().tobytes() for log in logs}) > 1
    )
