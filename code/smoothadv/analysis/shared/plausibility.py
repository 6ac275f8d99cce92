"""Whether the radii of a certification log can be true: compared with its counts and with the
largest that n allows.
"""

import dataclasses
import math
from pathlib import Path
from typing import cast

import numpy as np

from smoothadv.analysis.shared.hyper_parameters import Parameters
from smoothadv.analysis.shared.procedure import is_on_grid, procedure_of, radii_follow_from_counts
from smoothadv.base.errors import UserError
from smoothadv.records.manifests import METHODS
from smoothadv.records.readers import DataFrame
from smoothadv.statistics import ABSTAIN, Procedure, Smoothing
from smoothadv.statistics.adaptive import LADDER
from smoothadv.statistics.bounds import maximum_radius
from smoothadv.statistics.exact import Exact
from smoothadv.statistics.on_grid import GRID_COLUMNS, LABEL_AWARE, GridProcedure
from smoothadv.statistics.two_sided import RIVAL, TwoSided

_OTHER_ALPHA = 0.01
_FEWEST_TO_JUDGE = 20
_DISTANCE = 1e-6  # far more than noise in grey levels has from a Gaussian, on any image
_MATCH = (
    1e-6  # relative: our radii agree with their counts to 1e-8, another sigma or alpha does not
)


def check_certificates(
    path: Path, table: DataFrame, parameters: Parameters
) -> tuple[Parameters, list[str]]:
    """UserError, naming the log and the fault, if its radii cannot be certificates for its sigma, n
    and alpha.

    ``table`` is that of ``readers.read_certification_log``. Returns the parameters, with another
    alpha where the radii show that the assumed one was not used, and notes: sentences on tolerated
    faults and on what could not be checked.
    """
    notes = [*table.attrs.get("notes", []), *_notes(table, parameters)]
    counted = radii_follow_from_counts(table, parameters)
    if counted:
        parameters = _check_counts(path, table, parameters)
    elif parameters.settings.get("method") in METHODS and set(GRID_COLUMNS) <= set(table):
        _check_looks(path, table, parameters)
    sigma, n, alpha = parameters.number("sigma"), parameters.n, parameters.alpha
    if sigma is None:
        notes.append("its sigma is unknown, so its radii could not be checked: --sigma states it")
    elif _other_alpha(table, parameters, sigma):
        parameters = parameters.replaced("alpha", _OTHER_ALPHA, "inferred from the largest radius")
        notes.append(
            f"its largest radius, {table.radius.max():g}, is impossible for alpha = {alpha:g} at n "
            f"= {n:,}; it is what alpha = {_OTHER_ALPHA:g} gives, so each of its certificates may "
            "be false with that probability"
        )
    elif not counted:
        # Every procedure spends alpha or a part of it, so that none exceeds this.
        cap, sources = maximum_radius(n, sigma, alpha), parameters.sources
        known = ", ".join(
            f"{name} {sources[name]}" for name in ("sigma", "N", "alpha") if name in sources
        )
        # A published radius may be rounded up.
        above = table[table.radius > cap + _tolerance(table)]
        if len(above):
            raise UserError(
                f"{path} holds a radius that cannot be certified, first at idx "
                f"{above.idx.iloc[0]}: {above.radius.iloc[0]:g} is above {cap:.6g}, the largest "
                f"for sigma {sigma:g}, n = {n:,} and alpha = {alpha:g} ({known}); --sigma, --N and "
                "--alpha state others"
            )
    return parameters, notes


def _other_alpha(table: DataFrame, parameters: Parameters, sigma: float) -> bool:
    """Whether several radii are the largest that alpha = 0.01 allows, where alpha and n were merely
    assumed.

    Some logs released with Cohen et al. have such radii; a single one is a fault like any other.
    """
    if not {parameters.sources.get("N"), parameters.sources.get("alpha")} == {"assumed"}:
        return False
    largest, tolerance = table.radius.max(), _tolerance(table).max()
    usual, other = (
        maximum_radius(parameters.n, sigma, alpha) for alpha in (parameters.alpha, _OTHER_ALPHA)
    )
    return (
        largest > usual + tolerance
        and abs(largest - other) <= tolerance
        and (table.radius == largest).sum() > 1
    )


def _notes(table: DataFrame, parameters: Parameters) -> list[str]:
    """What a reader of the numbers must know of the procedure, and of a classifier that ignores its
    input.
    """
    notes, classes, labels = [], table["predict"].unique(), table["label"].unique()
    if len(table) >= _FEWEST_TO_JUDGE and len(classes) == 1 and len(labels) > 1:
        collapsed = f"it predicts class {classes[0]} for every example: the model has collapsed"
        notes.append("it abstains on every example" if classes[0] == ABSTAIN else collapsed)
    if is_on_grid(table, parameters):
        notes.append(
            "its radii were decided on a grid: an average certified radius on the grid is a lower "
            "bound"
        )
    if LABEL_AWARE in table:
        notes.append(
            f"{int(table[LABEL_AWARE].sum())} of its images were given up because the class "
            "selected was not the label: its accuracies are true, its abstentions mean nothing"
        )
    return notes


def _check_counts(path: Path, table: DataFrame, parameters: Parameters) -> Parameters:
    """UserError unless one n and one sigma explain all counts and radii; returns parameters with
    both.
    """
    n = int(table["trials"].max())
    if n < 1:
        raise UserError(f"{path} holds certificates of no trials at all")
    if parameters.sources.get("N") == "assumed" and (table.predict >= 0).any():
        parameters = parameters.replaced("N", n, "column trials")
    if n != parameters.n and ((table.predict >= 0).any() or n > parameters.n):
        source = parameters.sources["N"]
        raise UserError(f"{path} holds {n} trials per example where n = {parameters.n} ({source})")
    if parameters.sources.get("N") != "assumed":
        _check_partial_counts(path, table, parameters)
    sigma = parameters.number("sigma")
    if sigma is None:
        sigma = _sigma_of_counts(path, table, parameters)
        if sigma is None:
            return parameters
        parameters = parameters.replaced("sigma", sigma, "column radius and its counts")
    _check_radii_of_counts(path, table, parameters, sigma)
    return parameters


def _radii_of_counts(
    path: Path,
    table: DataFrame,
    parameters: Parameters,
    sigma: float,
    procedure: type[Procedure] | None = None,
) -> np.ndarray:
    """The radius that the counts of each row certify, nan if none: float64 [rows]; computes one per
    distinct counts.

    By the log's procedure, where none is given.
    """
    procedure = procedure or cast(type[Procedure], procedure_of(table, parameters))
    settings = {**parameters.settings, "sigma": sigma, "alpha": parameters.alpha}
    try:
        columns = procedure.counts(settings)
        counts, inverse = np.unique(table[[*columns]].to_numpy(), axis=0, return_inverse=True)
        radii = [
            procedure.radius_from(dict(zip(columns, row)), settings) for row in counts.tolist()
        ]
    except (KeyError, TypeError, ValueError) as error:
        reason = f"its counts or the settings in its manifest are impossible ({error!r})"
        raise UserError(f"{path} is left in doubt: {reason}") from error
    return np.array([math.nan if radius is None else radius for radius in radii], dtype=float)[
        inverse.reshape(-1)
    ]


def _check_looks(path: Path, table: DataFrame, parameters: Parameters) -> None:
    """UserError unless rows on a grid have the looks of their procedure, and counts that would
    certify without others.

    A procedure that looks several times needs at each look as many votes as one that looks there
    alone, or more.
    """
    settings, procedure = (
        parameters.settings,
        cast(type[GridProcedure], procedure_of(table, parameters)),
    )
    fields = {field.name for field in dataclasses.fields(procedure)} & settings.keys()
    drawn, decided = (table.samples - settings["N0"]).to_numpy(), np.zeros(len(table), bool)
    for distance in (
        (0.0, _DISTANCE) if settings["sound"] else (0.0,)
    ):  # looks change little with it, if at all
        try:
            smoothing = Smoothing(
                settings["sigma"], settings["N0"], settings["N"], settings["alpha"], distance
            )
            looks = np.array(
                [0, *procedure(smoothing, **{name: settings[name] for name in fields}).looks, -1]
            )
        except ValueError as error:
            raise UserError(
                f"{path} is left in doubt: its manifest has settings that cannot be: {error}"
            ) from error
        decided |= (np.take(looks, table.looks, mode="clip") == drawn) & np.isin(
            table.trials, looks
        )
    is_fine, beyond = (
        RIVAL in table or settings["ladder"],
        table.radius.to_numpy() * LADDER / settings["sigma"] % 1,
    )
    decided &= np.isin(table.radius, settings["radii"]) | (
        is_fine & (np.minimum(beyond, 1 - beyond) < _MATCH)
    )
    _check_radii_of_counts(
        path, table, parameters, settings["sigma"], TwoSided if RIVAL in table else Exact
    )
    if not decided.all():
        raise UserError(
            f"{path} holds counts of no look, or a radius not on the grid, first at idx "
            f"{table.idx[~decided].iloc[0]}"
        )


def _check_partial_counts(path: Path, table: DataFrame, parameters: Parameters) -> None:
    """UserError unless every row has n trials, or fewer, after which not even further successes
    alone would certify.

    Nor do those of an abstention.
    """
    n, fewer = parameters.n, table[(table.trials < parameters.n) | (table.predict < 0)]
    at_best = fewer.assign(successes=n - (fewer.trials - fewer.successes), trials=n)
    wrong = fewer[
        (fewer.predict >= 0) | ~np.isnan(_radii_of_counts(path, at_best, parameters, 1.0))
    ]
    if len(wrong):
        trials = wrong.trials.iloc[0]
        what = (
            "mixes certificates of different n"
            if trials < n
            else "abstains although its counts certify"
        )
        raise UserError(
            f"{path} {what}: {trials} trials at idx {wrong.idx.iloc[0]} where others have {n}"
        )


def _sigma_of_counts(path: Path, table: DataFrame, parameters: Parameters) -> float | None:
    """The sigma at which the counts of the largest radius certify it; None if they certify nothing
    or it is 0.
    """
    largest = table.loc[[table["radius"].idxmax()]]
    (unit,) = _radii_of_counts(path, largest, parameters, 1.0)
    if not unit > 0 or not largest.radius.item():
        return None
    sigma = float(largest.radius.item() / unit)
    rounded = float(f"{sigma:.6g}")
    return rounded if math.isclose(sigma, rounded, rel_tol=1e-9) else sigma


def _check_radii_of_counts(
    path: Path,
    table: DataFrame,
    parameters: Parameters,
    sigma: float,
    at_most: type[Procedure] | None = None,
) -> None:
    """UserError unless each radius is the one that its counts certify, or no larger than they do by
    ``at_most``.
    """
    certified = table[table.predict >= 0]
    expected = _radii_of_counts(path, certified, parameters, sigma, at_most)
    smaller = (certified.radius.to_numpy() <= expected) & (at_most is not None)
    wrong = ~(smaller | np.isclose(certified.radius.to_numpy(), expected, rtol=_MATCH, atol=1e-9))
    if wrong.any():
        row = certified[wrong].iloc[0]
        raise UserError(
            f"{path} holds a radius that its counts do not certify at sigma {sigma:g} and alpha "
            f"{parameters.alpha:g}, first at idx {int(row.idx)}: {row.radius:g}, not "
            f"{expected[wrong][0]:g} (rows of another sigma?)"
        )


def _tolerance(table: DataFrame) -> np.ndarray:
    """By how much each radius may exceed what was certified: it was rounded, or 1e-9 relative."""
    radii = table["radius"].to_numpy()
    return np.maximum(rounded_by(radii), 1e-9 * radii)


def rounded_by(radii: np.ndarray) -> np.ndarray:
    """By how much each of a log's radii may have been rounded up, float64: released ones were
    rounded to nearest.
    """
    some = np.unique(radii[radii > 0])
    if len(some) and all(float(f"{radius:.3g}") == radius for radius in some):
        magnitudes = np.floor(np.log10(np.where(radii > 0, radii, 1.0)))
        return np.where(radii > 0, 0.5 * 10.0 ** (magnitudes - 2), 0.0)
    if len(some) and np.array_equal(some, np.round(some, 4)):
        return np.where(radii > 0, 0.5e-4, 0.0)
    return np.zeros(len(radii))


def coarse_digits(table: DataFrame) -> list[str]:
    """A note on radii that were rounded to nearest, as the released ones, hence about half of them
    up.
    """
    largest = rounded_by(table["radius"].to_numpy()).max(initial=0.0)
    return (
        [f"its radii were rounded to nearest, some of them up, by at most {largest:g}"]
        if largest
        else []
    )
