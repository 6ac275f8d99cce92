"""Whether the radii of a certification log can be true: compared with its counts and with the
largest that n allows.
"""

import math
from dataclasses import replace

import numpy as np

from smoothadv.analysis.logs import Log
from smoothadv.base.errors import UserError
from smoothadv.records.logs import COUNT_COLUMNS
from smoothadv.records.manifests import METHODS
from smoothadv.records.readers import DataFrame
from smoothadv.statistics import ABSTAIN, Procedure
from smoothadv.statistics.bounds import maximum_radius
from smoothadv.statistics.grey_noise import grey_noise_distance
from smoothadv.statistics.on_grid import GRID_COLUMNS, LABEL_AWARE, GridProcedure

_OTHER_ALPHA = 0.01
_FEWEST_TO_JUDGE = 20
_MOST_ON_GRID = 10**8
"""The most draws of which the boundaries at all looks fit into memory."""
_TOO_SMALL, _TOO_LARGE = 1e-6, 1e-8
"""Relative: how far a radius may be from the one of its counts, where a quantile is computed, which
other versions of SciPy round otherwise. Radii of a grid are exact."""


def check_certificates(log: Log) -> Log:
    """UserError, naming the log and the fault, if its radii cannot be certificates for its sigma, n
    and alpha.

    Returns the log with the n of its counts where n was assumed, and with another alpha where the
    radii show that the assumed one was not used; with notes: sentences on tolerated faults and on
    what could not be checked.
    """
    log = replace(log, notes=(*log.notes, *_notes(log)))
    if log.radii_follow_from_counts:
        log = _check_trials(log)
    sigma, method = log.facts.get("sigma"), log.facts.settings.get("method")
    if sigma is None:
        note = "its sigma is unknown, so its radii could not be checked: --sigma states it"
        return replace(log, notes=(*log.notes, note))
    is_on_grid = method in METHODS and {*GRID_COLUMNS} <= {*log.table}
    if not log.radii_follow_from_counts and not is_on_grid:
        return _check_largest(log, sigma)
    _check_radii_of_counts(log, sigma)
    return log


def _check_largest(log: Log, sigma: float) -> Log:
    """UserError if a radius is above the largest that any counts certify.

    Every procedure spends alpha or a part of it, so that none exceeds this. A published radius may
    be rounded up. Some logs released with Cohen et al. have several radii that are the largest at
    alpha = 0.01: they get this alpha where alpha and n were merely assumed. A single such radius is
    a fault like any other.
    """
    radii, facts, sources = log.table.radius, log.facts, log.facts.sources
    largest = maximum_radius(facts.n, sigma, facts.alpha)
    tolerance = np.maximum(rounded_by(log.table), 1e-9 * radii)
    above = log.table[radii > largest + tolerance]
    if above.empty:
        return log
    is_other = abs(radii.max() - maximum_radius(facts.n, sigma, _OTHER_ALPHA)) <= tolerance.max()
    is_assumed = sources.get("N") == sources.get("alpha") == "assumed"
    if is_assumed and is_other and radii.eq(radii.max()).sum() > 1:
        note = (
            f"its largest radius, {radii.max():g}, is impossible for alpha = {facts.alpha:g} "
            f"at n = {facts.n:,}; it is what alpha = {_OTHER_ALPHA:g} gives, so each of its "
            "certificates may be false with that probability"
        )
        facts = facts.replaced("alpha", _OTHER_ALPHA, "inferred from the largest radius")
        return replace(log, facts=facts, notes=(*log.notes, note))
    known = [f"{name} {sources[name]}" for name in ("sigma", "N", "alpha") if name in sources]
    raise UserError(
        f"{log.path} holds a radius that cannot be certified, first at idx "
        f"{above.idx.iloc[0]}: {above.radius.iloc[0]:g} is above {largest:.6g}, the largest "
        f"for sigma {sigma:g}, n = {facts.n:,} and alpha = {facts.alpha:g} ({', '.join(known)}); "
        "--sigma, --N and --alpha state others"
    )


def _notes(log: Log) -> list[str]:
    """What a reader of the numbers must know of the procedure, and of a classifier that ignores its
    input.
    """
    notes, classes, labels = [], log.table["predict"].unique(), log.table["label"].unique()
    if len(log.table) >= _FEWEST_TO_JUDGE and len(classes) == 1 and len(labels) > 1:
        collapsed = f"it predicts class {classes[0]} for every example: the model has collapsed"
        notes.append("it abstains on every example" if classes[0] == ABSTAIN else collapsed)
    if log.is_on_grid:
        notes.append(
            "its radii were decided on a grid: an average certified radius on the grid is a lower "
            "bound"
        )
    if LABEL_AWARE in log.table:
        notes.append(
            f"{int(log.table[LABEL_AWARE].sum())} of its images were given up because the class "
            "selected was not the label: its accuracies are true, its abstentions mean nothing"
        )
    return notes


def _check_trials(log: Log) -> Log:
    """UserError unless every row has n trials, or fewer, after which not even further successes
    alone would certify. Nor may the counts of an abstention.

    Returns the log with the n of its counts among its facts where n was assumed.
    """
    table, n = log.table, int(log.table["trials"].max())
    is_certified, is_assumed = table.predict >= 0, log.facts.sources.get("N") == "assumed"
    if is_assumed and not is_certified.any():
        return log
    if is_assumed:
        log = replace(log, facts=log.facts.replaced("N", n, "column trials"))
    if is_certified.any() and n != log.facts.n:
        stated = f"n = {log.facts.n} ({log.facts.sources['N']})"
        raise UserError(f"{log.path} holds {n} trials per example where {stated}")
    fewer = table[(table.trials < log.facts.n) | (table.predict < 0)]
    at_best = fewer.assign(
        successes=log.facts.n - (fewer.trials - fewer.successes), trials=log.facts.n
    )
    radii = _radii_of_counts(log, _recorded(log, 1.0), at_best)
    wrong = fewer[is_certified[fewer.index] | ~np.isnan(radii)]
    if len(wrong):
        trials, fault = wrong.trials.iloc[0], "abstains although its counts certify"
        if trials < log.facts.n:
            fault = "mixes certificates of different n"
        raise UserError(
            f"{log.path} {fault}: {trials} trials at idx {wrong.idx.iloc[0]} where others have "
            f"{log.facts.n}"
        )
    return log


def _recorded(log: Log, sigma: float) -> Procedure:
    """The procedure of a log, with the settings in its manifest, if there is one; UserError where
    they are impossible.
    """
    settings = {"N0": 1, **log.facts.settings, "N": log.facts.n, "alpha": log.facts.alpha}
    if log.is_on_grid and settings["N"] > _MOST_ON_GRID:
        raise UserError(f"{log.path} is left in doubt: its N is above {_MOST_ON_GRID:,}")
    try:
        sigmas = settings.get("sigmas", [sigma])
        settings["sigma"] = max(sigmas)
        if settings.get("sound"):
            dimension = math.prod(log.facts.runs[-1]["image_shape"])
            distances = tuple(grey_noise_distance(each, dimension) for each in sigmas)
            settings |= {"noise_distance": distances[0], "noise_distances": distances}
        return log.procedure_type.recorded(settings)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"its manifest has settings that cannot be: {error!r}"
        raise UserError(f"{log.path} is left in doubt: {reason}") from error


def _radii_of_counts(log: Log, procedure: Procedure, table: DataFrame) -> np.ndarray:
    """The radius that the counts of each row of ``table`` certify, nan if none: float64 [rows];
    computes one per distinct counts.
    """
    columns = [*COUNT_COLUMNS, *procedure.columns]
    try:
        counts, inverse = np.unique(table[columns].to_numpy(), axis=0, return_inverse=True)
        radii = [procedure.shown(dict(zip(columns, row))) for row in counts.tolist()]
    except (KeyError, TypeError, ValueError) as error:
        reason = f"its counts or the settings in its manifest are impossible ({error!r})"
        raise UserError(f"{log.path} is left in doubt: {reason}") from error
    found = np.array([math.nan if radius is None else radius for radius in radii], dtype=float)
    return found[inverse.reshape(-1)]


def _check_radii_of_counts(log: Log, sigma: float) -> None:
    """UserError unless each radius is the one that its counts certify, and, where the votes are
    looked at several times, the draws of each row are those of its looks.
    """
    procedure, table = _recorded(log, sigma), log.table
    if isinstance(procedure, GridProcedure):
        looks = np.array([0, *procedure.looks, -1])
        drawn = table.samples - procedure.smoothing.n0
        wrong = table.idx[np.take(looks, table.looks, mode="clip") != drawn]
        if len(wrong):
            raise UserError(f"{log.path} holds counts of no look, first at idx {wrong.iloc[0]}")
    certified = table[table.predict >= 0]
    radii, expected = certified.radius.to_numpy(), _radii_of_counts(log, procedure, certified)
    too_large = _TOO_LARGE if procedure.fixed_sample else 0.0
    least, most = expected * (1 - _TOO_SMALL) - 1e-9, expected * (1 + too_large)
    right = (least <= radii) & (radii <= most)
    if not right.all():
        row = certified[~right].iloc[0]
        raise UserError(
            f"{log.path} holds a radius that its counts do not certify at sigma {sigma:g} and "
            f"alpha {log.facts.alpha:g}, first at idx {int(row.idx)}: {row.radius:g}, not "
            f"{np.nan_to_num(expected[~right][0]):g} (rows of another sigma?)"
        )


def rounded_by(table: DataFrame) -> np.ndarray:
    """By how much each of a log's radii may have been rounded up, float64 [rows]: released ones
    were rounded to nearest, those of logs with counts never are.
    """
    radii = table["radius"].to_numpy()
    some, units = np.unique(radii[radii > 0]), np.zeros(len(radii))
    if {*COUNT_COLUMNS} <= {*table}:
        return units
    if all(float(f"{radius:.3g}") == radius for radius in some):
        units = 10.0 ** (np.floor(np.log10(np.where(radii > 0, radii, 1.0))) - 2)
    elif np.array_equal(some, np.round(some, 4)):
        units = np.full(len(radii), 1e-4)
    return np.where(radii > 0, 0.5 * units, 0.0)


def rounding_notes(log: Log) -> list[str]:
    """A note on radii that were rounded to nearest, as the released ones, hence about half of them
    up.
    """
    largest = rounded_by(log.table).max(initial=0.0)
    if not largest:
        return []
    return [f"its radii were rounded to nearest, some of them up, by at most {largest:g}"]
