"""Tables with a row per log: summary, table (as in the paper), parameters, and the distribution of
the bounds of p_A over the images, which an average radius hides.

And of the best log of each group at each radius: envelope, as in the paper's Tables 1 and 2;
held_out: chosen on some images, on the images that had no part in the choice; empirical: accuracy
under the strongest attack on each model, of the best model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from scipy import special

from smoothadv.analysis import ANALYSES, Analysis
from smoothadv.analysis.facts import FIELDS, display, path_without_attack
from smoothadv.analysis.logs import (
    Choosing,
    LabelBy,
    Log,
    Logs,
    are_alike,
    differ,
    group_by,
    grouping,
    groups_of,
    with_columns_of_logs,
)
from smoothadv.analysis.radii import AtRadii, Bands, Radius
from smoothadv.analysis.table_formats import (
    Annotated,
    Cell,
    Column,
    Table,
    columns_of,
    columns_of_ends,
)
from smoothadv.base.errors import UserError, warn
from smoothadv.base.settings import one_of, probability, setting
from smoothadv.records.logs import DENOISER
from smoothadv.statistics.accuracy import (
    abstention_rate,
    accuracy,
    average_certified_radius,
)
from smoothadv.statistics.bounds import binomial_interval, lower_confidence_bound
from smoothadv.statistics.exact import Exact

_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
_LEVELS = (0.5, 0.9, 0.99, 0.999)


@ANALYSES.register("summary")
@dataclass(frozen=True)
class Summary(LabelBy, AtRadii, Analysis):
    """a row per log: examples, clean accuracy, average certified radius, abstention rate, certified
    accuracies
    """

    def __call__(self, logs: Logs) -> Table:
        ordered = self.ordered(logs.certification)
        radii = self.chosen_radii(ordered)
        average = Column("average_certified_radius", "average certified radius (l2)", "number")
        on_grid = Column(f"{average.key}_on_the_grid", f"{average.title} on the grid", "number")
        averages = [average, on_grid] if any(log.is_on_grid for log in ordered) else [average]
        title = "log" if self.heading == "l2 radius" else f"log (at {self.heading})"
        if len(names := {log.procedure_name for log in ordered}) == 1 and ordered[0].top_k > 1:
            title += f", {names.pop()}"
        columns = [
            Column("log", title, "text"),
            Column("examples", "examples", "count"),
            Column("clean_accuracy", "clean accuracy", "fraction"),
            *averages,
            Column("abstention_rate", "abstention rate", "fraction"),
            *(radius.column(are_alike(ordered)) for radius in radii),
        ]
        rows: list[list[Cell]] = [
            [
                *(log.label, len(log.table), accuracy(log.table)),
                *(
                    average_certified_radius(log.table)
                    if log.is_on_grid == (one is on_grid)
                    else None
                    for one in averages
                ),
                *(abstention_rate(log.table), *self.accuracies(log, radii).tolist()),
            ]
            for log in ordered
        ]
        return with_columns_of_logs(Table(columns, rows), ordered, self.label_by)


@ANALYSES.register("table")
@dataclass(frozen=True)
class CertifiedAccuracyTable(LabelBy, Bands, AtRadii, Analysis):
    """a row per log: certified accuracy at each radius, the best of a column in bold"""

    def __call__(self, logs: Logs) -> Table:
        ordered = self.ordered(logs.certification)
        radii = self.chosen_radii_from_0(ordered)
        heading = self.heading
        at_once = {"dkw": "all radii", "clopper-pearson": "all these radii"}
        if self.confidence and self.bands in at_once:
            heading += f", {100 * self.confidence:g}% bands for {at_once[self.bands]} at once"
        first = Column("log", heading, "text")
        ends = () if self.confidence is None else ("_low", "_high")
        columns = [first, *(radius.column(are_alike(ordered), ends) for radius in radii)]
        rows = [[log.label, *self.cells(log, self.accuracies(log, radii))] for log in ordered]
        return with_columns_of_logs(Table(columns, rows), ordered, self.label_by)


@ANALYSES.register("parameters")
@dataclass(frozen=True)
class ParametersTable(Analysis):
    """a row per log: dataset, training, sigma and other hyper-parameters, and the source of each"""

    kinds: ClassVar[tuple[str, ...]] = ("certification", "prediction")

    def __call__(self, logs: Logs) -> Table:
        both = [*logs.certification, *logs.prediction]
        known = [name for name in FIELDS if any(log.facts.get(name) is not None for log in both)]
        columns = [
            *columns_of("text", log="log"),
            *columns_of("count", examples="examples"),
            *columns_of("text", **{name: FIELDS[name] for name in known}, sources="known from"),
        ]
        rows: list[list[Any]] = [
            [log.label, len(log.table), *map(log.facts.get, known), _sources(log)] for log in both
        ]
        people = [
            [*row[:2], *map(display, known, row[2:-1]), _sources(log, brief=True)]
            for row, log in zip(rows, both)
        ]
        return Table(columns, rows, Table(columns, people))


def _sources(log: Log, brief: bool = False) -> str:
    """ "path: dataset (cifar10), noise (noise_0.25); assumed: N, alpha"; in ``brief`` only what is
    assumed is listed: "path; assumed: N, alpha".
    """
    sources: dict[str, list[str]] = {}
    for name in FIELDS:
        if name in log.facts.sources:
            kind, _, part = log.facts.sources[name].partition(" ")
            sources.setdefault(kind, []).append(f"{name} ({part})" if part else name)
    return "; ".join(
        kind if brief and kind != "assumed" else f"{kind}: {', '.join(names)}"
        for kind, names in sources.items()
    )


@ANALYSES.register("probabilities")
@dataclass(frozen=True)
class Probabilities(Analysis):
    """a row per log: quantiles over the images of the lower bound of p_A, 0 if wrong, and shares of
    images above a few levels, beside the average certified radius"""

    def __call__(self, logs: Logs) -> Table:
        bounded = with_bounds(logs.certification)
        grids = ", of grids a lower bound" if any(log.is_on_grid for log, _ in bounded) else ""
        columns = [
            Column("log", "lower bound of p_A", "text"),
            Column("examples", "examples", "count"),
            Column("average_certified_radius", f"average certified radius (l2){grids}", "number"),
            *(
                Column(f"quantile_{share:g}", f"{100 * share:g}% quantile", "number")
                for share in _QUANTILES
            ),
            *(
                Column(f"at_least_{level:g}", f"at least {level:g}", "fraction")
                for level in _LEVELS
            ),
        ]
        rows: list[list[Cell]] = [
            [
                *(log.label, len(bounds), average_certified_radius(log.table)),
                *np.quantile(bounds, _QUANTILES, method="inverted_cdf").tolist(),
                *(float((bounds >= level).mean()) for level in _LEVELS),
            ]
            for log, bounds in bounded
        ]
        return with_columns_of_logs(Table(columns, rows), [log for log, _ in bounded])


def with_bounds(logs: Sequence[Log]) -> list[tuple[Log, np.ndarray]]:
    """Logs, each with the lower bounds of p_A of its images, float64 [examples], where these are
    known.

    p_A is the probability of the class selected. Of a fixed sample, the bounds are
    Clopper-Pearson's from the counts, at the share of alpha that the procedure spends on p_A. Where
    counting stopped at a fixed number of misses, as in ``exact``, the partial counts give one too;
    by another rule, the draws that were not made count as misses. Else, of one-sided procedures,
    they are Phi(R / sigma), and 0 for abstentions. An image classified wrongly has 0: nothing is
    proven of its true class. Warns of logs left out; UserError if none is left.
    """
    found = [(log, _bounds(log)) for log in logs]
    known = [(log, bounds) for log, bounds in found if bounds is not None]
    if len(known) < len(logs):
        paths = ", ".join(str(log.path) for log, bounds in found if bounds is None)
        reason = (
            "the bounds of p_A, which need one classifier and --sigma or counts of a fixed sample, "
            "cannot be told of"
        )
        if not known:
            raise UserError(f"{reason} {paths}")
        warn(f"{reason} {paths}")
    return known


def _bounds(log: Log) -> np.ndarray | None:
    table, facts, sigma = log.table, log.facts, log.facts.get("sigma")
    is_one_sided = log.procedure_type.certificate == Exact.certificate
    if "sigmas" in facts.settings:
        return None
    if log.radii_follow_from_counts:
        alpha = facts.alpha * facts.settings.get("alpha_share", 1)
        bound = np.vectorize(lower_confidence_bound, otypes=[float])
        trials = np.maximum(table["trials"], 1) if is_one_sided else facts.n
        bounds = bound(table["successes"], trials, alpha)
    elif is_one_sided and sigma is not None:
        bounds = np.where(
            table["predict"] >= 0, special.ndtr(table["radius"].to_numpy() / sigma), 0.0
        )
    else:
        return None
    return np.where((table["predict"] >= 0) & (table["correct"] == 0), 0.0, bounds)


_FACTS = ("certified_accuracy", "abstention_rate", "clean_accuracy")


@ANALYSES.register("envelope")
@dataclass(frozen=True)
class Envelope(Choosing, AtRadii, Analysis):
    """a row per group and image set: the best of its logs at each radius, with that log's clean
    accuracy as a superscript
    """

    group_by: Sequence[str] = grouping(
        "the groups, like sigma or epsilon (default: the groups of the command line: NAME=LOG, or "
        "each folder)"
    )
    show: str = setting(
        _FACTS[0],
        parse=one_of((*_FACTS, "model")),
        help=f"what markdown and latex show of the logs, one of {', '.join(_FACTS)}, model",
    )

    def __call__(self, logs: Logs) -> Table:
        part = self.taking_part(logs.certification)
        groups = groups_of(part, self.group_by)
        radii = self.chosen_radii(part)
        rows: list[list[Any]] = [
            [
                *(name, float(radius), share, abstention_rate(best.table), accuracy(best.table)),
                *(best.label, len(group), len(best.table)),
            ]
            for name, group in groups.items()
            for radius, (best, share) in zip(radii, self.select(group, radii))
        ]
        columns = [
            Column("group", "group", "text"),
            Column("radius", self.heading, "number"),
            *columns_of("fraction", **{name: name.replace("_", " ") for name in _FACTS}),
            Column("model", "model", "text"),
            *columns_of("count", models="models", examples="examples"),
        ]
        if self.show == "model":  # whose names are too long for a column per radius
            return Table(columns, rows)
        is_certified = self.show == _FACTS[0]
        compared = is_certified and are_alike([group[0] for group in groups.values()])
        title = self.heading + ("" if is_certified else f", {self.show.replace('_', ' ')}")
        columns_for_people = [
            Column("group", title, "text"),
            Column("models", "models", "count"),
            *(radius.column(compared) for radius in radii),
        ]
        place = [column.key for column in columns].index(self.show)
        shown = [
            (row[0], Annotated(row[2], raised=row[4]) if is_certified else row[place])
            for row in rows
        ]
        people = [
            [name, len(group), *(cell for of, cell in shown if of == name)]
            for name, group in groups.items()
        ]
        return Table(columns, rows, Table(columns_for_people, people))


@ANALYSES.register("held_out")
@dataclass(frozen=True)
class HeldOut(Choosing, AtRadii, Analysis):
    """the accuracy of the best model of each group at each radius, on the images that chose it and
    on other images. The images on which most models were certified choose; the other images are
    those of a further log of the chosen model"""

    confidence: float = setting(
        0.95,
        parse=probability,
        help="LEVEL of the difference's interval, as if the model had not been chosen",
    )

    def __call__(self, logs: Logs) -> Table:
        groups = group_by(self.taking_part(logs.certification), lambda log: log.group).values()
        choosing = [_of_most_models(group) for group in groups]
        radii = self.chosen_radii([log for some in choosing for log in some])
        rows = [row for pair in zip(groups, choosing) for row in self._rows(*pair, radii)]
        if all(row[3] == 1 or row[6] is None for row in rows):  # the columns models and held_out
            raise UserError(
                "held_out needs logs of several models, and a further log of a chosen one, of "
                "images beside those that chose it"
            )
        columns = [
            Column("group", "group", "text"),
            Column("radius", self.heading, "number"),
            Column("model", "chosen model", "text"),
            Column("models", "of", "count"),
            Column("chosen", "where chosen", "fraction"),
            Column("chosen_examples", "images", "count"),
            Column("held_out", "on other images", "fraction"),
            Column("held_out_examples", "other images", "count"),
            Column("difference", "difference", "difference"),
            *columns_of_ends("difference", self.confidence),
        ]
        return Table(columns, rows)

    def _rows(
        self, group: Sequence[Log], choosing: Sequence[Log], radii: Sequence[Radius]
    ) -> list[list[Cell]]:
        from statsmodels.stats import proportion  # takes a second to load

        rows: list[list[Cell]] = []
        of_choice = list({log.table["idx"].to_numpy().tobytes(): log for log in choosing}.values())
        for radius, (chosen, share) in zip(radii, self.select(choosing, radii)):
            count = len(chosen.table)
            row: list[Cell] = [
                chosen.group,
                float(radius),
                chosen.label,
                len(choosing),
                share,
                count,
            ]
            further = [
                _without(log, of_choice) for log in group if _compared(log) == _compared(chosen)
            ]
            other = max(further, key=lambda log: len(log.table))
            others = len(other.table)
            if others and share:
                accuracy = float(self.accuracies(other, [radius])[0])
                row += [accuracy, others]
                if self.high_probability is None:  # else each is lower by a deduction of its own
                    # Newcombe's interval (1998, method 10), as of independent samples of images.
                    counts = round(accuracy * others), others, round(share * count), count
                    low, high = proportion.confint_proportions_2indep(
                        *counts, method="newcomb", alpha=1 - self.confidence
                    )
                    row += [accuracy - share, float(low), float(high)]
            rows.append(row + [None] * (11 - len(row)))
        return rows


def _of_most_models(logs: Sequence[Log]) -> list[Log]:
    """The logs of the images, and procedure, of the most models; of equally many, those with fewer
    images.
    """

    def size(some: list[Log]) -> tuple[int, int]:
        return len({digest_of(log) or log.path for log in some}), -len(some[0].table)

    return max(group_by(logs, lambda log: (log.images, log.procedure)).values(), key=size)


def _compared(log: Log) -> tuple[object, ...]:
    """What must be equal where accuracies on two sets of images are compared."""
    return log.procedure, log.facts.get("dataset"), model_of(log)


def _without(log: Log, others: Sequence[Log]) -> Log:
    """The log without the images of the others, unless theirs are known to be of other data."""
    alike = [other for other in others if not differ(log, other, "split", "dataset_fingerprint")]
    seen = {idx for other in alike for idx in other.table["idx"]}
    return replace(log, table=log.table[~log.table["idx"].isin(seen)])


_ACCURACY, _ABSTENTION = _SHOWN = ("empirical_accuracy", "abstention_rate")


@ANALYSES.register("empirical")
@dataclass(frozen=True)
class Empirical(Choosing, Analysis):
    """a row per group and image set: the accuracy of its best attacked model at each radius, under
    the strongest attack
    """

    kinds: ClassVar[tuple[str, ...]] = ("prediction",)
    group_by: Sequence[str] = grouping("the groups, like num_noise_vec, N or gradient")
    confidence: float | None = setting(
        None,
        parse=probability,
        help="LEVEL of intervals (Clopper-Pearson) over the choice of images, like 0.95; they are "
        "those of the log shown and do not allow for its selection from several (default: none)",
    )
    show: str = setting(
        _ACCURACY,
        parse=one_of(_SHOWN),
        help=f"what markdown and latex show of the logs, {' or '.join(_SHOWN)}",
    )

    def __call__(self, logs: Logs) -> Table:
        groups = groups_of(self.taking_part(logs.prediction), self.group_by)
        curves = {name: empirical_curve(group) for name, group in groups.items()}
        rows: list[list[Any]] = [
            [
                *(name, radius, accuracy(best.log.table), best.log.label),
                *(best.models, best.attacks, len(best.log.table), abstention_rate(best.log.table)),
                *(best.interval(self.confidence) if self.confidence else ()),
            ]
            for name, curve in curves.items()
            for radius, best in curve.items()
        ]
        is_abstention = self.show == _ABSTENTION
        shown = {
            (name, radius): abstained
            if is_abstention
            else Annotated(share, interval=tuple(ends) or None)
            for name, radius, share, _, _, _, _, abstained, *ends in rows
        }
        columns = [
            Column("group", "group", "text"),
            Column("radius", "attack radius (l2)", "number"),
            Column(_ACCURACY, "empirical accuracy", "fraction"),
            Column("model", "model", "text"),
            *columns_of("count", models="models", attacks="attacks on it", examples="examples"),
            Column(_ABSTENTION, "abstention rate", "fraction"),
        ]
        if self.confidence is not None:
            columns += columns_of_ends("fraction", self.confidence)
        title = "attack radius (l2)" + ", abstention rate" * is_abstention
        radii = sorted({radius for _, radius in shown})
        people = Table(
            [Column("group", title, "text"), *(Radius(r).column(compared=False) for r in radii)],
            [[name, *(shown.get((name, radius)) for radius in radii)] for name in curves],
        )
        return Table(columns, rows, people)


@dataclass(frozen=True)
class Attacked:
    """The most accurate of ``models`` at an attack radius, under the strongest of ``attacks`` on
    it.
    """

    log: Log
    models: int
    attacks: int

    def interval(self, confidence: float) -> tuple[float, float]:
        """The Clopper-Pearson interval of the accuracy, over the choice of images."""
        return binomial_interval(int(self.log.table.correct.sum()), len(self.log.table), confidence)


def empirical_curve(logs: Sequence[Log]) -> dict[float, Attacked]:
    """By attack radius, ascending: the largest accuracy of all models, each under the strongest
    attack on it.

    Of each model only the logs with its largest n count: with fewer draws PREDICT abstains more
    often, which is not the attack's success. A log without an attack counts at radius 0. UserError
    where an attack's radius is unknown.
    """
    curve = {}
    for radius, some in sorted(group_by(logs, attack_radius).items()):
        models = group_by(some, model_of).values()
        strongest = []
        for attacks in models:
            draws = [log.facts.get("N") or 0 for log in attacks]
            precise = [log for log, n in zip(attacks, draws) if n == max(draws)]
            attacked = min(precise, key=lambda log: accuracy(log.table))
            strongest.append(Attacked(attacked, len(models), len(precise)))
        curve[radius] = max(strongest, key=lambda attacked: accuracy(attacked.log.table))
    return curve


def attack_radius(log: Log) -> float:
    """The l2 norm allowed to the attack of a prediction log, 0 without an attack; UserError if it
    is unknown.
    """
    radius = log.facts.get("epsilon")
    if radius is None and log.facts.get("attack") is not None:
        raise UserError(
            f"{log.path} was made under an attack of unknown radius: neither manifest nor path "
            "states it"
        )
    return float(radius or 0.0)


def model_of(log: Log) -> tuple[object, ...]:
    """What identifies a smoothed classifier: checkpoint and sigma, or the part of the path that
    describes no attack.
    """
    digest = digest_of(log)
    return (digest, log.facts.get("sigma")) if digest else path_without_attack(log.path)


def digest_of(log: Log) -> str:
    """The digest of the file with the weights, or of those of all members; "" where no manifest
    tells.
    """
    settings = log.facts.settings
    digest = str(settings.get("checkpoint_sha256") or settings.get("module_sha256") or "")
    return f"{settings[DENOISER]}{digest}" if DENOISER in settings else digest
