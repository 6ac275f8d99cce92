"""Finds, reads and judges logs: files, folders, globs and named groups become logs with names,
unless radii cannot be true, compared with their counts and with the largest that n allows.
``LogsSpec`` says which logs an analysis reads.
"""

import glob
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from smoothadv.analysis.facts import FIELDS, Facts, Value, facts_of
from smoothadv.analysis.logs import (
    Log,
    Logs,
    comparison_warnings,
    condition,
    group_by,
    restrict,
    sizes_of,
)
from smoothadv.base.errors import UserError, counted, escape, warn
from smoothadv.base.files import kept_rows
from smoothadv.base.progress import Progress
from smoothadv.base.settings import (
    Checked,
    positive_int,
    positive_noise_level,
    probability,
    setting,
)
from smoothadv.records.logs import DENOISER, IMAGE_SET, MANIFEST, METHODS, SHARDS
from smoothadv.records.readers import READERS, DataFrame, kind_of_log, resembles_log
from smoothadv.statistics import ABSTAIN, COUNT_COLUMNS, Procedure
from smoothadv.statistics.bounds import maximum_radius
from smoothadv.statistics.error_spending import rows_of
from smoothadv.statistics.exact import Exact
from smoothadv.statistics.grey_noise import grey_noise_distance
from smoothadv.statistics.on_grid import GRID_COLUMNS, LABEL_AWARE, GridProcedure

_STATED = "for logs that do not state it, or state it wrongly"
_USUAL_SIGMAS = 0.06, 0.12, 0.125, 0.25, 0.5, 0.75, 1.0, 2.0
_FEWEST_TO_JUDGE = 20
_READ_BY = {
    "prediction": "; for predictions there are empirical and compare",
    "training": "; for training plot_training",
    "scores": "; for scores sets",
}


class _Found(NamedTuple):
    path: Path
    group: str
    group_is_named: bool  # as NAME=LOG
    is_named: bool = False  # it is a fault if it is no log; a file that a search found is skipped


@dataclass(frozen=True, kw_only=True)
class LogsSpec(Checked):
    """Which logs an analysis reads."""

    logs: tuple[str, ...] = setting(
        parse=str,
        flag="logs",
        metavar="LOG",
        group="logs",
        keyword=False,
        help="files, folders (searched throughout) or globs; NAME=LOG puts them into the group "
        "NAME",
    )
    where: tuple[str, ...] = setting(
        (),
        parse=condition,
        metavar="FIELD=VALUE",
        group="logs",
        help=f"use only logs with these hyper-parameters ({', '.join(FIELDS)})",
    )
    sigma: float | None = setting(
        None, parse=positive_noise_level, metavar="S", group="logs", help=f"sigma, {_STATED}"
    )
    n: int | None = setting(
        None, parse=positive_int, flag="--N", group="logs", help=f"N, {_STATED}"
    )
    alpha: float | None = setting(
        None, parse=probability, metavar="A", group="logs", help=f"alpha, {_STATED}"
    )
    dimension: int | None = setting(
        None,
        parse=positive_int,
        metavar="D",
        group="logs",
        help=f"number of coordinates of an image, for l_inf radii, {_STATED}",
    )

    def read(self, kinds: Collection[str], paired: bool) -> Logs:
        """The logs of these kinds, with warnings about differences between them, if ``paired`` on
        common examples; UserError where there are none.
        """
        names = {"sigma": self.sigma, "N": self.n, "alpha": self.alpha, "dimension": self.dimension}
        logs = restrict(read_logs(self.logs, kinds, names, warn), self.where)
        for note in comparison_warnings(logs, paired):
            warn(note)
        return logs


def paths(given: tuple[Any, ...]) -> tuple[str, ...]:
    """Files, folders and globs that were given one by one, as a list, or as a dict from NAME to one
    or several, which stand for NAME=LOG.
    """
    several = len(given) == 1 and not isinstance(given[0], (str, os.PathLike))
    logs: Any = given[0] if several else given
    groups = logs if isinstance(logs, Mapping) else {"": logs}
    found = list[str]()
    for name, those in groups.items():
        if hasattr(those, "iloc"):
            raise UserError("logs: found a DataFrame, expected files: certify(log=...) writes one")
        try:
            listed = [those] if isinstance(those, (str, os.PathLike)) else those
            found += [f"{name}={os.fspath(log)}" if name else os.fspath(log) for log in listed]
        except TypeError:
            raise UserError(f"logs: found {those!r:.200}, expected strings or paths") from None
    return tuple(found)


def read_logs(
    arguments: Sequence[str],
    kinds: Collection[str] = ("certification",),
    stated: Mapping[str, Value] | None = None,
    warn: Callable[[str], None] = lambda message: None,
) -> Logs:
    """The logs of the given ``kinds`` that files, folders (searched throughout) and globs name.

    ``NAME=LOG`` puts the logs that LOG names into the group NAME. ``stated`` hyper-parameters win
    over all others. A log that is damaged or cannot be true is left out; ``warn`` gets the reason.
    UserError if no log is left.
    """
    found: dict[tuple[str, str | None], _Found] = {}
    logs, other_kinds = Logs(), set[str]()
    for argument in arguments:
        for entry in _find(argument, logs.left_out):
            # A log may belong to several named groups, else it is read once.
            group = entry.group if entry.group_is_named else None
            found.setdefault((os.path.realpath(entry.path), group), entry)
    for entry in Progress(found.values(), "reading logs", unit="log", delay=1):
        try:
            kind = kind_of_log(entry.path)
            if kind is None:
                # Of a file that only looks like a log, the reader reports the fault.
                if entry.is_named or resembles_log(entry.path):
                    logs.certification.append(_read(entry, "certification", stated or {}))
            elif kind in kinds:
                getattr(logs, kind).append(_read(entry, kind, stated or {}))
            elif entry.is_named:
                raise UserError(
                    f"{entry.path} is a {kind} log; what is needed here is a "
                    f"{' or '.join(sorted(kinds))} log{_READ_BY.get(kind, '')}"
                )
            else:
                other_kinds.add(kind)
        except UserError as error:
            logs.left_out.append(str(error))
    # Certificates of training images must not look like test accuracy beside others.
    by_split = group_by(logs.certification, lambda log: log.facts.get("split") == "train")
    if len(by_split) > 1:
        logs = replace(logs, certification=by_split[False])
        logs.left_out.extend(
            f"{log.path} certifies training images, the others do not" for log in by_split[True]
        )
    if not logs.all and len(logs.left_out) == 1:
        raise UserError(logs.left_out[0])
    for reason in logs.left_out:
        warn(f"{reason}; it is left out")
    if not logs.all:
        where = " ".join(arguments)
        if logs.left_out:
            raise UserError(f"{where}: none of {counted(len(logs.left_out), 'log')} can be used")
        others = ", ".join(f"{kind}{_READ_BY.get(kind, '')}" for kind in sorted(other_kinds))
        like = f", but others: {others}" if others else " (a file that starts with idx, label, ...)"
        raise UserError(f"{where}: holds no {' or '.join(kinds)} log{like}")
    return _named(logs)


def _find(argument: str, left_out: list[str]) -> list[_Found]:
    """What an argument names; ``left_out`` gets the reasons why folders cannot be listed."""
    group, equals, place = argument.partition("=")
    if not equals or not group or os.path.exists(argument) or glob.glob(argument, recursive=True):
        group, place = "", argument
    if os.path.isfile(place):
        return [_Found(Path(place), group, bool(group), is_named=True)]
    matches = [place] if os.path.isdir(place) else sorted(glob.glob(place, recursive=True))
    if not matches:
        raise UserError(f"{place} is no file, no folder and matches nothing")
    files = [
        path
        for match in map(Path, matches)
        for path in (_files_below(match, left_out) if match.is_dir() else [match])
    ]
    if matches == [place]:
        place = os.path.normpath(place)
    return [
        _Found(path, group or place, bool(group))
        for path in files
        if not (path.name.endswith(MANIFEST) or any(part.endswith(SHARDS) for part in path.parts))
    ]


def _files_below(folder: Path, left_out: list[str]) -> list[Path]:
    """All files that are not hidden, also behind links, each folder once."""
    files, visited, refused = [], set(), list[OSError]()
    found = os.walk(folder, followlinks=True, onerror=refused.append)
    for place, folders, names in Progress(
        found, f"searching {escape(str(folder), 80)}", unit="folder", delay=1
    ):
        real = os.path.realpath(place)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(place, name) for name in names if not name.startswith(".")]
    left_out += [f"{error.filename} cannot be listed: {error.strerror}" for error in refused]
    # A file that cannot be asked what it is stays: reading it gives the reason.
    return sorted(path for path in files if os.path.isfile(path) or not os.path.exists(path))


def _read(entry: _Found, kind: str, stated: Mapping[str, Value]) -> Log:
    """The log, without its name; UserError if it is damaged or cannot be true."""
    table = READERS[kind](entry.path)
    facts = Facts() if kind == "training" else facts_of(kind, entry.path, stated)
    notes = (*table.attrs["notes"], *(() if kind == "training" else _notes_on_labels(table)))
    if kind == "prediction" and facts.manifest is None and facts.get("attack") is None:
        notes += ("its path names no attack: it is treated as predictions on clean images",)
    log = Log("", entry.path, entry.group, table, facts, notes, group_is_named=entry.group_is_named)
    if kind != "certification":
        return log
    if facts.get("method") is None and log.procedure_type is Exact and not log.is_on_grid:
        log = replace(log, facts=facts.replaced("method", "exact", "assumed"))
    if log.procedure_type is Exact and not (log.is_on_grid or set(COUNT_COLUMNS) <= set(table)):
        log = _with_sigma(log)
    return check_certificates(log)


def _with_sigma(log: Log) -> Log:
    """The log with the usual sigma whose largest radius its own largest one is, to the digits
    written, where its sigma is unknown; with a note where another is known.

    Several images must have that radius, since a single one may have it by chance.
    """
    radii, facts, known = log.table["radius"], log.facts, log.facts.get("sigma")
    tolerance = rounded_by(log.table).max() + 1e-9
    largest = {sigma: maximum_radius(facts.n, sigma, facts.alpha) for sigma in _USUAL_SIGMAS}
    found = [one for one, radius in largest.items() if abs(radii.max() - radius) <= tolerance]
    if not found or known in found or radii.eq(radii.max()).sum() < 2:
        return log
    if known is None:
        return replace(
            log, facts=facts.replaced("sigma", found[0], "inferred from the largest radius")
        )
    note = (
        f"its sigma is {known:g} ({facts.sources['sigma']}), but several of its radii are "
        f"{radii.max():g}, the largest for sigma {found[0]:g}: is that its sigma?"
    )
    return replace(log, notes=(*log.notes, note))


def _notes_on_labels(table: DataFrame) -> list[str]:
    """A note where most predictions would be right if the labels began one earlier or later."""
    label, right = table["label"], table["correct"].mean()
    for shift, word in ((-1, "smaller"), (1, "larger")):
        share = table["predict"].eq(label + shift).mean()
        if len(label) >= _FEWEST_TO_JUDGE and label.nunique() > 2 and share > max(0.25, 3 * right):
            return [
                f"{right:.0%} of its predictions are right, but {share:.0%} would be if each label "
                f"were one {word}: do labels and classes begin at the same number?"
            ]
    return []


def _named(logs: Logs) -> Logs:
    """The logs with their names, and with those of their images and procedures where they
    differ.
    """
    count = len(logs.certification)
    both = [*_with_names(logs.certification), *_with_names(logs.prediction)]
    certified = _if_several(log.procedure_name for log in both[:count])
    top_k = _if_several(f"top-{log.top_k}" for log in [*both[count:], *both[:count]])
    both = [
        replace(log, images=images, procedure=procedure)
        for log, images, procedure in zip(both, _image_set_names(both), [*certified, *top_k])
    ]
    return Logs(both[:count], both[count:], _with_names(logs.training), logs.left_out)


def _if_several(names: Iterable[str]) -> list[str]:
    """The names; each is "" if all are equal."""
    names = [*names]
    return names if len(set(names)) > 1 else [""] * len(names)


def _with_names(logs: list[Log]) -> list[Log]:
    """The logs with their names: paths without .tsv and without folders that all share."""
    paths = [
        Path(escape(str(log.path.absolute()), None).removesuffix(".tsv")).parts for log in logs
    ]
    in_all = set.intersection(*map(set, paths)) if logs else set[str]()
    start = len(os.path.commonprefix([*paths, *(parts[:-1] for parts in paths)]))
    attempts = (
        ["/".join(part for part in parts if part not in in_all) for parts in paths],
        ["/".join(parts[start:]) for parts in paths],
    )
    are_unique = (names for names in attempts if len(set(names)) == len(names) and all(names))
    # Else the same names in several groups, or one log in several.
    names = next(are_unique, [escape(f"{log.group}: {log.path}", None) for log in logs])
    return [replace(log, name=name) for log, name in zip(logs, names)]


def _image_set_names(logs: Sequence[Log]) -> list[str]:
    """What people call the image set of each log, like "digits, 180 images"; "" if all are of one
    set.

    Logs are of one set if dataset, split, fingerprint and indices are equal. A log whose manifest
    states no dataset is of the set that has its dataset and indices; all others of a dataset are
    one set, as the paper pools its logs. Accuracies on other images differ by chance too, so the
    best is chosen per set.
    """
    keys: list[tuple[object, ...]] = []
    for log in logs:
        settings, indices = log.facts.settings, log.table["idx"].to_numpy().tobytes()
        data = log.facts.get("split"), settings.get("dataset_fingerprint")
        keys.append((log.facts.get("dataset"), indices, *(data if "dataset" in settings else ())))
    stated = {key[:2]: key for key in keys if len(key) > 2}
    keys = [key if len(key) > 2 else stated.get(key, key[:1]) for key in keys]
    names, found = dict[tuple[object, ...], str](), list[str]()
    for key in dict.fromkeys(keys):
        of_set = [log for log, its in zip(logs, keys) if its == key]
        named = (f" ({name})" for log in of_set if (name := log.facts.get(IMAGE_SET)))
        found.append(f"{key[0] or 'unknown dataset'}, {sizes_of(of_set)} images{next(named, '')}")
        alike = found.count(found[-1])
        names[key] = found[-1] + f" (set {alike})" * (alike > 1)
    return _if_several(names[key] for key in keys)


_OTHER_ALPHA = 0.01
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
    table, is_aware = log.table, LABEL_AWARE in log.table
    only = table["predict"].iloc[0] if table["predict"].nunique() == 1 else None
    is_judged = len(table) >= _FEWEST_TO_JUDGE and table["label"].nunique() > 1
    notes = {
        "it abstains on every example": is_judged and only == ABSTAIN,
        f"it predicts class {only} for every example: the model has collapsed": (
            is_judged and only not in (None, ABSTAIN)
        ),
        "its radii were decided on a grid: an average certified radius on the grid is a lower "
        "bound": log.is_on_grid,
        f"{int(table[LABEL_AWARE].sum()) if is_aware else 0} of its images were given up because "
        "the class selected was not the label: its accuracies are true, its abstentions mean "
        "nothing": is_aware,
    }
    return [note for note, is_so in notes.items() if is_so]


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
        trials = wrong.trials.iloc[0]
        abstains = "abstains although its counts certify"
        fault = "mixes certificates of different n" if trials < log.facts.n else abstains
        raise UserError(
            f"{log.path} {fault}: {trials} trials at idx {wrong.idx.iloc[0]} where others have "
            f"{log.facts.n}"
        )
    return log


def _recorded(log: Log, sigma: float) -> Procedure:
    """The procedure of a log, with the settings in its manifest, if there is one; UserError where
    they are impossible.
    """
    rows_of.set(kept_rows)
    settings = {"N0": 1, **log.facts.settings, "N": log.facts.n, "alpha": log.facts.alpha}
    if log.is_on_grid and settings["N"] > _MOST_ON_GRID:
        raise UserError(f"{log.path} is left in doubt: its N is above {_MOST_ON_GRID:,}")
    try:
        sigmas = settings.get("sigmas", [sigma])
        settings["sigma"] = max(sigmas)
        if settings.get("sound"):
            dimension = math.prod(log.facts.runs[-1]["image_shape"])
            drawn = settings.get(DENOISER, {}).get("noise_sd")
            noises = sigmas if drawn is None else [drawn]
            distances = tuple(grey_noise_distance(each, dimension) for each in noises)
            settings |= {"noise_distance": distances[0], "noise_distances": distances}
        return log.procedure_type.recorded(settings)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{log.path} is left in doubt: its manifest has settings that cannot be: {error!r}"
        ) from error


def _radii_of_counts(log: Log, procedure: Procedure, table: DataFrame) -> np.ndarray:
    """The radius that the counts of each row of ``table`` certify, nan if none: float64 [rows];
    computes one per distinct counts.
    """
    columns = [*COUNT_COLUMNS, *procedure.columns]
    try:
        counts, inverse = np.unique(table[columns].to_numpy(), axis=0, return_inverse=True)
        radii = [procedure.shown(dict(zip(columns, row))) for row in counts.tolist()]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{log.path} is left in doubt: its counts or the settings in its manifest are "
            f"impossible ({error!r})"
        ) from error
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
    note = f"its radii were rounded to nearest, some of them up, by at most {largest:g}"
    return [note] if largest else []
