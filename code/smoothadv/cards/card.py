"""card: what is known of a certification log, in a small file, once all of its rows are verified.

A card is a JSON object of version 1:

card            the version
name, paper, url, extra_data    stated by who makes it: the method's name, what to cite, where to
                find it, data beyond the dataset's training images; null where nothing is stated
facts, sources  hyper-parameters by the names in ``facts.FIELDS``, and where each is known from
images          count, the first index, the step between indices (skip; null if it varies, or of
                facts.image_set), how many there were (of) and the most wanted (max), null if not
                known; sha256 of (index, label) as pairs of int64; the dataset's fingerprint
certificate     the kind of certificate; procedure: what found the radii
draws           noisy images that were classified, null if unknown
values          fractions with the ends of 95% intervals over the choice of images (Clopper and
                Pearson; of the average radius Student's): clean_accuracy, certified_accuracy by
                radius, average_certified_radius; and abstention_rate
radii           per image, in order of index, 0 where it is wrong or abstains, else 1 + its radius
                in hundredths, rounded down: uint16, low bytes before high bytes, zlib, base64
log_sha256, manifest_sha256, model_sha256
verified        by: RECOMPUTED if the counts of each row show its radius, else why nobody can tell;
                checked: what was checked; redrawn: the number of rows that ``certify verify`` drew
                again, and the seed that chose them; attacked: certificates that ``attack
                --against`` attacked and flipped; notes to keep in mind
"""

import base64
import binascii
import json
import math
import re
import subprocess
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
from scipy import special

from smoothadv.analysis.facts import FIELDS, Value, facts_of
from smoothadv.analysis.logs import Log, condition
from smoothadv.analysis.reading import paths, read_logs, rounding_notes
from smoothadv.base.errors import UserError, counted, escape
from smoothadv.base.files import digest, file_digest, read_json, refuse_to_replace, write_json
from smoothadv.base.settings import (
    Checked,
    any_seed,
    non_negative_int,
    number,
    output_folder,
    perturbation_size,
    positive_int,
    positive_noise_level,
    probability,
    refuse_any,
    setting,
    share_of_one,
    takes,
)
from smoothadv.records.logs import (
    IMAGE_SET,
    METHODS,
    MODEL,
    SETTINGS,
    differing_fields,
    expected,
    flat,
    manifest_path,
    read_manifest_file,
)
from smoothadv.records.readers import read_fields, read_prediction_log
from smoothadv.statistics import COUNT_COLUMNS, PROCEDURES, Procedure
from smoothadv.statistics.accuracy import abstention_rate
from smoothadv.statistics.bounds import binomial_interval, maximum_radius
from smoothadv.statistics.cascade import StagedProcedure

VERSION = 1
AVERAGE = "values.average_certified_radius"
PER_UNIT = 100
"""Radii of images are kept in hundredths."""
kept_radius = number(
    float,
    f"a multiple of {1 / PER_UNIT:g} from 0 to 100, as cards keep radii",
    lambda v: 0 <= v <= 100 and abs(PER_UNIT * v - round(PER_UNIT * v)) <= 1e-9,
)
"""Parses a radius at which hundredths tell which images are certified."""
LEVEL = 0.95
RECOMPUTED, NO_MANIFEST, NO_COUNTS = (
    *("all rows recomputed", "no manifest beside the log", "no counts in the log"),
)
_VERIFIER = Path(__file__).parents[3] / "scripts" / "verify_log.py"
"""The second witness, which a clone has."""
_CHECKED = [
    *("radii possible for n, alpha and sigma", "one row per image, in order"),
    "labels those of the dataset",
]
_RADII = {"imagenet": [0.5 * k for k in range(1, 8)]}
_OTHER_RADII = [0.25 * k for k in range(1, 10)]
_HALF = 0.5 / PER_UNIT
"""Released radii were rounded to nearest, large ones to hundredths."""
_DIGITS = 6
"""Decimals of the values: the last digits of a mean differ among machines."""
_PUBLISHED_N0 = 100
_LABELS = {
    ("cifar10", 0, 1, 10_000): "adf24feb6e994b04",
    ("cifar10", 0, 20, 500): "ff7a8b4e5c8f1bd2",
    ("cifar100", 0, 1, 10_000): "d0ef19f44a40a8c5",
    ("digits", 0, 1, 359): "d3a3453f5eaff867",
    ("fashion-mnist", 0, 1, 10_000): "f0c2db01b008b17c",
    # Indices count the images by class for Cohen et al., by file name for Salman et al.
    ("imagenet", 0, 100, 500): "04f3623724d7bc61 2f19019d03eeec26",
    ("mnist", 0, 1, 10_000): "d20b94fd7f55d75b",
}
"""Where digests of the test images' indices and labels begin, by dataset, first index, skip and
count: the released logs of several groups agree on them."""
_OWN_IMAGES = ("imagefolder", "npz")
"""Datasets whose place is a path of one machine: a card has their kind, or a stated name."""
_OR_NULL = (str, NoneType)
_A_NUMBER = number(float, "a number from -1e300 to 1e300", lambda v: abs(v) <= 1e300)
_FORMS: dict[str, Any] = {
    "card": number(int, f"{VERSION}, a card's version", lambda v: v == VERSION),
    **dict.fromkeys(("name", "images.sha256", "log_sha256"), str),
    **dict.fromkeys(("certificate", "procedure", "verified.by", "radii"), str),
    **dict.fromkeys(("paper", "url", "extra_data", "images.fingerprint"), _OR_NULL),
    **dict.fromkeys((f"facts.{name}" for name in FIELDS), (*_OR_NULL, bool, _A_NUMBER)),
    "facts.dataset": str,
    **{f"facts.{name}": SETTINGS[name] for name in ("sigma", "alpha", "N")},
    "images.count": number(int, "a whole number from 1 to 10000000", lambda v: 1 <= v <= 10**7),
    "images.first": non_negative_int,
    "images.skip": (positive_int, NoneType),
    "verified.notes": (NoneType, [str]),
    **dict.fromkeys(("images.of", "images.max"), (non_negative_int, NoneType)),
    **dict.fromkeys(
        ("verified.redrawn.rows", "verified.attacked.certificates", "verified.attacked.flipped"),
        (non_negative_int, NoneType),
    ),
    "values.clean_accuracy": [share_of_one],
    AVERAGE: [number(float, "a number from -100 to 100", lambda v: abs(v) <= 100)],
    "values.abstention_rate": (share_of_one, NoneType),
}
"""What a reader needs of a card, as ``records.logs`` states forms."""
_PARSERS: Mapping[str, Any] = {
    **dict.fromkeys(("sigma", "noise"), positive_noise_level),
    **dict.fromkeys(("N", "num_steps", "num_noise_vec"), positive_int),
    "epsilon": perturbation_size,
    "alpha": probability,
}
_REASONS = (KeyError, TypeError, ValueError, OSError, zlib.error, binascii.Error)


def _fact(text: str) -> str:
    """FIELD=VALUE of --fact, whose value must be one of that hyper-parameter."""
    name, _, value = condition(text).partition("=")
    _PARSERS.get(name, str)(value)
    return text


@dataclass(frozen=True, kw_only=True)
class CardSpec(Checked):
    """a card per certification log for the board: facts, values with intervals, and what was
    verified; a log of which a row does not hold gets none
    """

    logs: tuple[str, ...] = setting(
        parse=str,
        flag="logs",
        metavar="LOG",
        keyword=False,
        help="files, folders (searched throughout) or globs",
    )
    name: str | None = setting(
        None, parse=str, flag="--method-name", help="name of the method (default: its training's)"
    )
    paper: str | None = setting(None, parse=str, help="what to cite, like 'Cohen et al., 2019'")
    url: str | None = setting(None, parse=str, help="where the paper or the log is")
    extra_data: str | None = setting(
        None, parse=str, help="training data beyond the dataset's, like ImageNet"
    )
    fact: tuple[str, ...] = setting(
        (),
        parse=_fact,
        metavar="FIELD=VALUE",
        help=f"what logs do not say of themselves ({', '.join(FIELDS)})",
    )
    attacked: Path | None = setting(
        None, parse=Path, metavar="AGAINST", help="log of attack --against the only LOG"
    )
    redrawn: Path | None = setting(
        None, parse=Path, metavar="FILE", help="what certify verify --output wrote of the only LOG"
    )
    check: Path | None = setting(
        None,
        parse=Path,
        metavar="CARD",
        help="write nothing; fail unless CARD is the card of the only LOG, with what CARD states",
    )
    output: Path = setting(
        Path(),
        parse=output_folder,
        flag="-o --output",
        metavar="FILE",
        keyword=False,
        help="FILE.json of the only LOG, or the folder to write cards to (default: this folder)",
    )

    def made(self) -> list[tuple[Path, dict[str, Any]]]:
        """A log's path and its card, for each log; UserError if one of them gets none."""
        before = read_card(self.check).content if self.check else {}
        known = flat(before)
        stated = {
            name: known.get(f"facts.{name}")
            for name in FIELDS
            if known.get(f"sources.{name}") == "stated"
        }
        stated |= {
            name: _PARSERS.get(name, str)(value)
            for name, _, value in (text.partition("=") for text in self.fact)
        }
        texts = {
            one: before.get(one) if (text := getattr(self, one)) is None else text
            for one in ("name", "paper", "url", "extra_data")
        }
        logs = [log for text in self.logs for log in _read(text, stated)]
        of_one = self.check or self.attacked or self.redrawn
        if len(logs) > 1 and (of_one or self.output.suffix == ".json"):
            raise UserError(
                f"{' '.join(self.logs)}: {counted(len(logs), 'log')}, where one is to be named"
            )
        cards = [(log.path, _card_of(log, texts, self.attacked, self.redrawn)) for log in logs]
        if self.check:
            _refuse_other(self.check, before, *cards[0])
        return cards

    def write(self) -> Iterator[str]:
        """Write the cards, or check one; yields what was done, for people."""
        cards = self.made()
        if self.check:
            yield f"{self.check} is the card of {cards[0][0]}"
            return
        for _, card in cards:
            is_file = self.output.suffix == ".json"
            path = self.output if is_file else self.output / file_name(card)
            refuse_to_replace(path, "card", b'{\n  "card": ')
            write_json(path, card)
            yield f"wrote {path}"


@takes(CardSpec)
def card(*logs: Any, **keywords: Any) -> list[dict[str, Any]]:
    """A card per certification log for the board: facts, values with intervals, and what was
    verified.

    ``logs`` are files, folders (searched throughout) or globs, as strings or paths.

    Returns the cards, as ``json.dump`` takes them. UserError where a row of a log does not hold.
    """
    return [content for _, content in CardSpec(logs=paths(logs), **keywords).made()]


@dataclass(frozen=True)
class Card:
    """A card that was read, and per image 0 or 1 + its radius in hundredths: int64 [count]."""

    path: Path
    content: dict[str, Any]
    hundredths: np.ndarray

    def certifies(self, radius: float) -> np.ndarray:
        """Whether each image is certified at a multiple of 0.01: bool [count]."""
        return self.hundredths > round(radius * PER_UNIT)

    @property
    def values(self) -> dict[str, Any]:
        return self.content["values"]

    @property
    def floors(self) -> np.ndarray:
        """The radius of each image, rounded down to hundredths, 0 where it is wrong: float64
        [count].
        """
        return np.maximum(self.hundredths - 1, 0) / PER_UNIT

    def __getitem__(self, place: str) -> Any:
        """What it has at a place like "facts.sigma"; None if nothing."""
        return flat(self.content).get(place)


def file_name(card: dict[str, Any]) -> str:
    """The name of a card's file in a folder: method, dataset, sigma and the log's digest."""
    words = card["name"], card["facts"]["dataset"], f"{card['facts']['sigma']:g}"
    plain = [re.sub("[^A-Za-z0-9.]+", "-", word).strip("-") for word in words]
    return "_".join([*plain, card["log_sha256"][:8]]) + ".json"


def read_card(path: Path) -> Card:
    """A card; UserError unless its radii give the values that it states."""
    try:
        content = read_json(path)
        known = flat(content) if isinstance(content, dict) else {}
        for name, form in _FORMS.items():
            if wanted := expected(known.get(name), form):
                found = escape(json.dumps(known.get(name)), 60)
                raise ValueError(f"its {name} is {found}; expected {wanted}")
        halves = np.frombuffer(_unpacked(content), np.uint8).reshape(2, known["images.count"])
        card = Card(path, content, halves.T.astype(np.int64) @ [1, 256])
        refuse_any(
            {f"{path} contradicts itself: {one}": is_so for one, is_so in _faults(card).items()}
        )
    except _REASONS as error:
        raise UserError(f"{path} is no card of version {VERSION}: {error}") from error
    return card


def _unpacked(card: dict[str, Any]) -> bytes:
    """The radii of the images, and at most one byte more."""
    most = 2 * card["images"]["count"] + 1
    return zlib.decompressobj().decompress(base64.b64decode(card["radii"]), most)


def _faults(card: Card) -> dict[str, bool]:
    """Whether a card differs from what the radii of its images show, or from itself, by words for
    the difference.
    """
    stated = {"0": card.values["clean_accuracy"], **card.values["certified_accuracy"]}
    largest = maximum_radius(card["facts.N"], card["facts.sigma"], card["facts.alpha"])
    floors, average, error = card.floors, card[AVERAGE], 10.0**-_DIGITS
    right = card.hundredths > 0
    ceilings = np.where(right, np.minimum(floors + 1 / PER_UNIT, largest + _HALF), 0.0)
    least, most = floors.mean(), np.maximum(ceilings, floors).mean()
    fault = f"its average radius is {escape(str(average), 60)}, not a mean and ends around it"
    if len(average) != 3 or not average[1] <= average[0] <= average[2]:
        return {fault: True}
    # Radii differ from their floors by less than 1 / PER_UNIT, hence deviations by at most half.
    count, own = len(floors), mean_with_interval(floors)
    slack = interval_half(count, _HALF * math.sqrt(count / max(1, count - 1))) + 2 * error
    shifts = np.subtract(average, average[0]) - np.subtract(own, own[0])
    faults = {
        f"its accuracy at {radius}{'' if float(radius) else ', clean accuracy,'} is "
        f"{stated.get(radius)}, its radii give {found}": stated.get(radius) != found
        for radius, found in shares(card.hundredths, map(kept_radius, stated)).items()
    }
    return {
        **faults,
        f"it has a radius of {floors.max()}, the largest that N draws show is {largest:.4f}": (
            "top" not in card["certificate"] and floors.max() > largest + _HALF
        ),
        f"its average radius is {average[0]}, its radii give {least:.4f} to {most:.4f}": (
            not least - error <= average[0] <= most + error
        ),
        f"the interval of its average radius is {average[1:]}, which its radii do not give": (
            count > 1 and np.abs(shifts).max() > slack
        ),
        **_broken_rules(flat(card.content), int(right.sum())),
    }


def _broken_rules(known: Mapping[str, Any], right: int) -> dict[str, bool]:
    """What must hold of the numbers that the radii do not give: whether it does not, by words for
    that; ``right`` is the number of images whose class is certified.
    """
    count, first = known["images.count"], known["images.first"]
    skip = known["images.skip"]
    of, n, n0 = known.get("images.of"), known["facts.N"], known.get("facts.N0")
    abstains, draws = known.get("values.abstention_rate"), known.get("draws")
    redrawn = known.get("verified.redrawn.rows") or 0
    attacked = known.get("verified.attacked.certificates") or 0
    flipped = known.get("verified.attacked.flipped") or 0
    method, certificate = str(known.get("facts.method")), known["certificate"]
    procedure = PROCEDURES.get(method, Procedure)
    is_on_grid = not procedure.fixed_sample and known["procedure"] != method
    once = procedure.fixed_sample and not issubclass(procedure, StagedProcedure)
    key = known["facts.dataset"], first, skip, count
    labels = _LABELS.get(key, known["images.sha256"][:16])
    most = known.get("images.max")
    of_attack = [one for one in known if ".attacked." in one and known[one] is not None]
    selected = count if of is None or skip is None else len(range(first, of, skip))
    has_manifest = known.get("manifest_sha256") is not None
    rules = {
        f"it has {redrawn} redrawn rows of {count}": redrawn <= count,
        f"it has {attacked} attacked certificates of {count} images": attacked <= count,
        f"it has {flipped} flips of {attacked} attacked certificates": flipped <= attacked
        and len(of_attack) in (0, 2 * (attacked > 0)),
        "its verified.redrawn or verified.attacked holds no numbers": not known.keys()
        & {"verified.redrawn", "verified.attacked"}
        and ("verified.redrawn.seed" in known) == (known.get("verified.redrawn.rows") is not None),
        f"it abstains on {abstains} of its images, and {right} of {count} are right": (
            (abstains is None) == ("label-aware" in certificate)
            and (abstains or 0) <= 1 - right / count + 10.0**-_DIGITS
        ),
        f"its abstention rate is {abstains}, no share of {count} images": (
            abstains is None or abs(abstains * count - round(abstains * count)) < 2e-6 * count
        ),
        f"it has {count} of {selected} images": (
            count == selected if most is None else count <= min(selected, most)
        ),
        "its verified.checked is not what was checked": known.get("verified.checked")
        == _CHECKED[: 3 if key in _LABELS else 2],
        "its labels are not those of the test images": known["images.sha256"][:16] in labels,
        f"its certificate is {certificate}, its method {method}": certificate.startswith(
            procedure.certificate
        )
        and known["procedure"] == method + ", on a grid" * is_on_grid,
        f"it says '{known['verified.by']}'": known["verified.by"] in (NO_MANIFEST, NO_COUNTS)
        or (known["verified.by"] == RECOMPUTED and has_manifest),
        f"it took {draws} draws": draws is None
        or (draws == count * (n0 + n) if once else draws >= count),
    }
    return {fault: not holds for fault, holds in rules.items()}


def shares(hundredths: np.ndarray, radii: Iterable[float]) -> dict[str, list[float]]:
    """Certified accuracies at multiples of 0.01, each with the ends of its interval, by the radius
    as a text.
    """
    count = len(hundredths)
    found = {f"{one:g}": int((hundredths > round(PER_UNIT * one)).sum()) for one in radii}
    return {
        radius: _rounded(right / count, *binomial_interval(right, count, LEVEL))
        for radius, right in found.items()
    }


def mean_with_interval(values: np.ndarray) -> list[float]:
    """The mean of some values of images, float64 [count], and the ends of Student's interval."""
    several = len(values) > 1
    half = interval_half(len(values), float(values.std(ddof=1))) if several else 0.0
    mean = float(values.mean())
    return _rounded(mean, mean - half, mean + half)


def interval_half(count: int, deviation: float) -> float:
    """Half of Student's interval of a mean of ``count`` values with this standard deviation."""
    return float(special.stdtrit(max(1, count - 1), (1 + LEVEL) / 2)) * deviation / math.sqrt(count)


def _rounded(*values: float) -> list[float]:
    return [round(value, _DIGITS) for value in values]


def _read(text: str, stated: Mapping[str, Value]) -> list[Log]:
    def refuse(reason: str) -> None:
        raise UserError(reason.removesuffix("; it is left out"))

    try:
        return read_logs([text], stated=stated, warn=refuse).certification
    except UserError as error:
        raise UserError(f"no card: {error}") from error


def _card_of(
    log: Log, texts: dict[str, str | None], attacked: Path | None, redrawn: Path | None
) -> dict[str, Any]:
    """The card of a log; UserError, in one line with the row, unless every row is verified."""
    facts, table, settings = log.facts, log.table, log.facts.settings
    run, sha256 = (facts.runs or [{}])[-1], file_digest(log.path)
    missing = {
        f"no card: {log.path} says no {name}: add --fact {name}=...": facts.get(name) is None
        for name in ("dataset", "sigma")
    }
    of_training = f"no card: {log.path} certifies training images"
    refuse_any({**missing, of_training: facts.get("split") == "train"})
    own = facts_of("certification", log.path, {})
    kind, _, place = str(own.get("dataset")).partition(":")
    if place and kind in _OWN_IMAGES:
        if facts.sources["dataset"] == "manifest":
            facts = facts.replaced("dataset", kind, "manifest")
        own.values["dataset"] = facts.values["dataset"]
    for name, value in own.values.items():
        source = own.sources[name]
        if source in ("manifest", "path") and facts.get(name) != value:
            raise UserError(
                f"no card: {log.path}'s {source} says {name} {value}, --fact {facts.get(name)}"
            )
    idx, count = table.idx.to_numpy("<i8"), len(table)
    steps = {int(step) for step in np.diff(idx)} or {1}
    images = {
        "count": count,
        "first": int(idx[0]),
        "skip": steps.pop() if len(steps) == 1 and facts.get(IMAGE_SET) is None else None,
        "of": run.get("images"),
        "max": run.get("max"),
        "sha256": digest([table[["idx", "label"]].to_numpy("<i8").tobytes()]),
        "fingerprint": settings.get("dataset_fingerprint"),
    }
    verified = _verified(log, images)
    if attacked is not None:
        against = read_manifest_file(attacked)["settings"].get("against", {})
        if against.get("sha256") != sha256:
            raise UserError(f"{attacked} is no log of attack --against {log.path}")
        flips = read_prediction_log(attacked).flipped
        verified["attacked"] = {"certificates": len(flips), "flipped": int(flips.sum())}
    if redrawn is not None:
        verified["redrawn"] = _redrawn(redrawn, log.path, sha256, count)
    radius, right = table.radius.to_numpy(), table.correct.to_numpy()
    whole = np.floor(radius * PER_UNIT + 0.5).astype(np.int64)
    whole -= whole / PER_UNIT > radius
    hundredths = np.where(right == 1, 1 + whole, 0)
    packed = hundredths.astype("<u2").view(np.uint8).reshape(-1, 2).T.tobytes()
    rate = abstention_rate(table)
    n0 = settings.get("N0", _PUBLISHED_N0)
    draws = count * (n0 + facts.n) if "sigmas" not in settings else None
    accuracies = shares(hundredths, [0, *_RADII.get(str(facts.get("dataset")), _OTHER_RADII)])
    return {
        "card": VERSION,
        **texts,
        "name": texts["name"] or str(facts.get("training") or "unknown"),
        "facts": {**facts.values, "N": facts.n, "alpha": facts.alpha, "N0": n0},
        "sources": {**facts.sources, "N0": "manifest" if "N0" in settings else "assumed"},
        "images": images,
        "certificate": log.procedure_name + ", sound" * bool(settings.get("sound")),
        "procedure": str(facts.get("method")) + ", on a grid" * log.is_on_grid,
        "draws": int(table.samples.sum()) if "samples" in table else draws,
        "values": {
            "clean_accuracy": accuracies.pop("0"),
            "average_certified_radius": mean_with_interval(radius * right),
            "abstention_rate": rate if rate is None else _rounded(rate)[0],
            "certified_accuracy": accuracies,
        },
        "log_sha256": sha256,
        "manifest_sha256": file_digest(manifest_path(log.path)) if facts.manifest else None,
        "model_sha256": next((settings[name] for name in MODEL if name in settings), None),
        "verified": verified,
        "radii": base64.b64encode(zlib.compress(packed, 9)).decode(),
    }


def _verified(log: Log, images: dict[str, Any]) -> dict[str, Any]:
    """What was checked of a log's rows, which are there, and known to be read without a fault;
    UserError if one does not hold.
    """
    path, has_manifest = log.path, log.facts.manifest is not None
    key = (str(log.facts.get("dataset")), *(images[name] for name in ("first", "skip", "count")))
    known = _LABELS.get(key, "").split()
    unordered = {
        f"has a row out of order, idx {idx} below {before}": True
        for before, idx in pairwise(read_fields(path))
        if idx < before
    }
    faults = {
        f"is not finished: {log.progress}": bool(log.progress),
        "has a last row without an end: it may be cut off": (
            not path.read_bytes().endswith((b"\n", b"\r"))
        ),
        **unordered,
        f"has labels that are not those of {key[0]}'s test images": (
            bool(known) and images["sha256"][:16] not in known
        ),
        "is of a plug-in's procedure, which others cannot check": (
            has_manifest and log.facts.get("method") not in METHODS
        ),
    }
    refuse_any({f"no card: {path} {fault}": is_so for fault, is_so in faults.items()})
    by = RECOMPUTED  # by ``reading``
    if not has_manifest:
        by = NO_MANIFEST if {*COUNT_COLUMNS} <= {*log.table} else NO_COUNTS
    elif _VERIFIER.exists():
        _run_verifier(path)
    checked = _CHECKED[: 3 if known else 2]
    return {"by": by, "checked": checked, "notes": [*log.notes, *rounding_notes(log)]}


def _redrawn(path: Path, log: Path, sha256: str, rows: int) -> dict[str, Any]:
    """What ``certify verify --output`` wrote of a log with so many rows; UserError if it is of
    another one, or of more rows.
    """
    try:
        content = flat(read_json(path))
        if content["log_sha256"] != sha256:
            raise UserError(f"{path} is not of {log}: it was changed, or is another log")
        redrawn = {name: content[f"redrawn.{name}"] for name in ("rows", "seed")}
        count, seed = redrawn["rows"], redrawn["seed"]
        if expected([count, seed], [any_seed]) or count > rows:
            raise ValueError(f"it says that {json.dumps(redrawn)[:60]} of {rows} rows were redrawn")
        return redrawn
    except _REASONS as error:
        raise UserError(f"{path} is not from certify verify --output: {error}") from error


def _run_verifier(path: Path) -> None:
    """UserError, with the first fault, unless the script, which shares no statistics with this
    package, finds that all rows hold.
    """
    command = [sys.executable, str(_VERIFIER), str(path.absolute())]
    done = subprocess.run(command, capture_output=True, text=True, errors="backslashreplace")
    if done.returncode:
        lines = done.stdout.splitlines()[:1] or done.stderr.strip().splitlines()[-1:] or ["?"]
        raise UserError(f"no card: {lines[0].removeprefix('error: ')} ({_VERIFIER.name})")


def _refuse_other(path: Path, card: dict[str, Any], log: Path, made: dict[str, Any]) -> None:
    """UserError, with the first difference, unless a card is the one that was made of a log."""
    # Another zlib may pack the same radii otherwise.
    before, now = ({**one, "radii": list(_unpacked(one))} for one in (card, made))
    if difference := differing_fields(before, now):
        raise UserError(f"{path} is not the card of {log}: {escape(difference, 200)}")
