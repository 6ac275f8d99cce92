"""Logs and their manifests: names of files and columns, numbers as logs have them, what a manifest
may hold, and how logs differ. No torch.

Parsers of the specifications judge numbers, and procedures their own settings. A form says what a
value must be: a type or a parser; a list of one form is that of all entries of a list, and a tuple
has forms of which one must fit.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from decimal import ROUND_DOWN, Context, Decimal
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from types import NoneType
from typing import Any

from smoothadv.base.errors import UserError, counted, escape, warn
from smoothadv.base.files import digest, read_json
from smoothadv.base.settings import (
    SettingError,
    any_seed,
    batch_size,
    checked,
    found_value,
    non_negative_int,
    number,
    positive_int,
    positive_noise_level,
    probability,
    settings_of,
    up_to_a_million,
)
from smoothadv.statistics import COUNT_COLUMNS, PROCEDURES
from smoothadv.statistics.on_grid import OnGrid
from smoothadv.statistics.top_k import check_top_k

CHECKPOINT_FILE = "checkpoint.pth.tar"
TRAINING_LOG = "log.txt"
ARGUMENTS = "args.json"
FALSIFICATION_LOG = "against.tsv"
LOG = ("log", b"idx\t")
"""What ``files.refuse_to_replace`` takes for a log of examples."""
MODEL = ("module_sha256", "checkpoint_sha256")
"""The settings that say which model a log is of."""

EXAMPLE_COLUMNS = ("idx", "label", "predict", "correct")
"""The columns of every log with a row per example, also of the released logs."""
PREDICTION_COLUMNS = ("idx", "label", "predict", "basePredict", "correct", "time")


CLASS, SCORE = "class_", "score_"


def class_columns(top_k: int) -> tuple[str, ...]:
    """The columns of a prediction log for the k classes of a top-k prediction: none where there is
    one class.
    """
    return tuple(f"{CLASS}{number}" for number in range(1, top_k + 1)) if top_k > 1 else ()


def numbered(columns: Collection[str], prefix: str) -> list[str]:
    """Those of the ``columns`` that are named ``prefix`` and 1, 2, and so on, without a gap."""
    return list(
        takewhile(lambda name: name in columns, (f"{prefix}{number}" for number in count(1)))
    )


ATTACK_COLUMNS = (*PREDICTION_COLUMNS, "attack_norm", "epsilon", "abstain")
"""attack_norm is the l2 norm of the perturbation, epsilon its largest allowed l2 norm; abstain is 1
or 0. For targeted attacks ``TARGET_COLUMN`` follows, the class at which the attack aimed."""
TARGET_COLUMN = "target"
FALSIFICATION_COLUMNS = (*ATTACK_COLUMNS, "certified", "radius", "flipped")
"""certified is the class certified within radius; flipped is 1 where PREDICT returned another class
there.
"""
REAL_COLUMNS = frozenset({"radius", "attack_norm", "epsilon"})
"""The columns of logs of examples that hold real numbers, as those do whose names begin with
``SCORE``. All others, except time, hold whole numbers: ``readers`` refuse another field there, and
``WrittenLog.table`` makes int64 of them."""
TRAINING_COLUMNS = (
    *(
        "epoch",
        "time",
        "lr",
        "epsilon",
        "train_loss",
        "train_accuracy",
        "train_unattacked_accuracy",
    ),
    *(
        "test_loss",
        "test_accuracy",
        "test_clean_accuracy",
        "test_adversarial_accuracy",
        "test_images",
    ),
    "images_per_second",
)
"""epoch counts from 0; time is in seconds. Accuracies are fractions of noisy copies that are
classified correctly. train_accuracy is measured after the attack, train_unattacked_accuracy before
it, in eval mode. On test_images test images, test_accuracy is measured without an attack,
test_clean_accuracy also without noise, test_adversarial_accuracy under the attack of the training
at its full epsilon. nan where there is no attack or the epoch was not evaluated."""

LOGITS = "logits_sha256"
"""The setting that names the function which votes: a digest of the classifier's logits for a fixed
batch of images.
"""
CLASSIFIER = "classifier_sha256"
"""The setting that keys the noise, with dataset, sigma and seed."""

IMAGES = "images_saved"
"""The setting of logs beside which adversarial examples are saved."""
SELECTION = ("images", "skip", "max")
"""What a run says of the images that it selects: how many there are, every ``skip``-th, ``max``."""

DENOISER = "denoiser"
"""The setting, of logs with a denoiser before the classifier, that says which; a run says where it
lies.
"""

# What messages call the denoiser of a log, and that of a training.
_DENOISERS = {f"{DENOISER}.sha256": "--denoiser", "behind.sha256": "--denoiser"}
# The step of a denoiser, the training of a checkpoint, and the digest of all of a classifier.
_FOLLOWS = rf"({DENOISER}|behind)\.(?!sha256|library).*|training(\..*)?|{CLASSIFIER}"
_OTHER_PLACE = "another processor, instruction set, library or way to run the classifier"
MANIFEST = ".manifest.json"
SHARDS = ".shards"  # of folders, whose files are no logs of their own


def _beside(log: Path, *, ending: str, instead_of: str = "") -> Path:
    """The path beside a log that has the log's name with this ``ending``."""
    return log.parent / (log.name.removesuffix(instead_of) + ending)


manifest_path = partial(_beside, ending=MANIFEST)
examples_path = partial(_beside, ending=".npz", instead_of=".tsv")
"""The path of the adversarial examples of a finished log."""
spool_path = partial(_beside, ending=".examples")
"""The path of the adversarial examples while their log is written."""
pictures_folder = partial(_beside, ending=".pictures", instead_of=".tsv")
shard_folder = partial(_beside, ending=SHARDS)
"""The folder of a log's shards until they are merged."""
SHARD_NAME = re.compile(r"\d+-of-\d+\.tsv")
"""What a shard is called; what lies beside it has a longer name."""


def attacked_log(folder: Path, epsilon: float) -> Path:
    """The log of predictions under an attack of this size."""
    short = f"{epsilon:g}"
    return folder / f"epsilon_{short if float(short) == epsilon else repr(epsilon)}.tsv"


def shards_of(log: Path) -> list[Path]:
    """The existing shards of a log, in their order."""
    found = shard_folder(log).glob("*.tsv")
    return sorted(path for path in found if SHARD_NAME.fullmatch(path.name))


def recorded_settings(log: Path) -> dict[str, Any]:
    """The settings in a log's manifest; empty where there is none that can be read."""
    try:
        return read_manifest_file(log)["settings"]
    except UserError:
        return {}


def training_record(folder: Path) -> dict[str, Any]:
    """What the record of a training in ``folder`` says: its "recipe" and its "runs"; nothing of
    both if it cannot be read.
    """
    try:
        content = read_json(folder / ARGUMENTS)
        return {
            "recipe": {**content.get("recipe", {})},
            "runs": [run for run in content["runs"] if isinstance(run, dict)],
        }
    except (OSError, LookupError, TypeError, ValueError, AttributeError):
        return {"recipe": {}, "runs": []}


def read_manifest_file(log: Path) -> dict[str, Any]:
    """The manifest of a log: {"settings": ..., "runs": [...]}. UserError where it is missing or
    cannot be one.
    """
    manifest = manifest_path(log)
    try:
        content = read_json(manifest)
        if not (fault := manifest_fault(content)):
            return content
        reason = f"it {fault}"
    except (OSError, ValueError) as error:
        reason = str(getattr(error, "strerror", None) or error)
    if not (log.is_file() or manifest.exists()):
        raise UserError(f"{log} is missing, or no file: name a log")
    raise UserError(
        f"{log} is left in doubt: its manifest {manifest} is missing or unreadable ({reason}), so "
        "it is unknown how its rows were made"
    )


def manifest_beside(log: Path) -> dict[str, Any] | None:
    """The manifest of a log, None if it has none; UserError as above."""
    return read_manifest_file(log) if manifest_path(log).exists() else None


def format_radius(radius: float) -> str:
    """Decimal digits for ``radius`` >= 0 that never exceed it and that float() reads as the same
    number.
    """
    shortest, exact = Decimal(repr(float(radius))), Decimal(radius)
    is_close_below = exact * (1 - Decimal("2e-16")) <= shortest <= exact
    # 20 digits, rounded down, are nearer to this float than to any other.
    digits = (
        shortest if is_close_below else Context(prec=20, rounding=ROUND_DOWN).create_decimal(exact)
    )
    return f"{digits:f}" if radius else "0.0"


def tsv(columns: Iterable[str], rows: Iterable[dict[str, Any]]) -> str:
    """A header line and a line per row, tab-separated."""
    columns = list(columns)
    lines = ["\t".join(columns)] + [
        "\t".join(str(row[column]) for column in columns) for row in rows
    ]
    return "\n".join(lines) + "\n"


def differing_fields(before: dict[str, Any], now: dict[str, Any]) -> str:
    """ "sigma was 0.25, now 0.5; ..." for the fields in which two records differ, "" if none; of
    digests the beginnings. What only follows from others is left out, and another name of the same
    images is no difference.
    """
    images = _differing_images(before.get(IMAGE_SET), now.get(IMAGE_SET))
    # Through JSON, where a tuple is a list, since the earlier record may come from there.
    before, now = (
        flat(json.loads(json.dumps({**record, IMAGE_SET: None}))) for record in (before, now)
    )
    differing = [field for field in {**before, **now} if before.get(field) != now.get(field)]
    is_other_denoiser = not _DENOISERS.keys().isdisjoint(differing)
    follows = re.compile(_FOLLOWS + "|timestep" * is_other_denoiser)
    fields = (
        f"{_DENOISERS.get(field, field)} was {_brief(before.get(field))}, now "
        f"{_brief(now.get(field))}"
        for field in [one for one in differing if not follows.fullmatch(one)] or differing
    )
    return "; ".join([*fields, *images])


def _brief(value: Any) -> str:
    """A value of a manifest as messages show it."""
    is_digest = isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value)
    return repr(value[:12] + "..." if is_digest else value)


def _differing_images(*sets: dict[str, Any] | None) -> Iterator[str]:
    """How two records of images that a name chose (None: no name did) differ, if they do: in their
    names and counts, and in the first image that one of them alone has.
    """
    before, now = ({*each["indices"].split(",")} if each else set[str]() for each in sets)
    if before != now:
        was, is_now = (
            f"{each['named']} ({counted(each['count'], 'image')})"
            if each
            else "that of --skip and --max"
            for each in sets
        )
        yield f"the set of images was {was}, now {is_now}"
    if before != now and None not in sets:
        first = min(before ^ now, key=int)
        yield f"image {first} is {'left out' if first in before else 'new'}"


def differing_settings(before: dict[str, Any], now: dict[str, Any]) -> str:
    """As ``differing_fields``, for the settings of logs: only with --sound do other logits make
    another log.
    """
    if _are_other_logits(before, now) and (before.get("sound") or now.get("sound")):
        return f"{differing_fields(before, now)} (the logits are rounded by {_OTHER_PLACE})"
    return differing_fields({**before, LOGITS: None}, {**now, LOGITS: None})


def warn_of_other_logits(what: Path, before: dict[str, Any], *now: dict[str, Any]) -> None:
    """Warn if the logits behind ``what`` are not those of ``now``: the manifest has the digest of
    each run.
    """
    if any(_are_other_logits(before, each) for each in now):
        warn(
            f"{what} was made where the logits are rounded by {_OTHER_PLACE}: by slightly "
            "different classifiers"
        )


def _are_other_logits(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether the digests of the logits differ; None is that of a batch for which memory was too
    small.
    """
    digests = [record.get(LOGITS, "") for record in (before, now)]
    return None not in digests and digests[0] != digests[1]


def flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, with keys like ``objective.attack.epsilon``."""
    entries: dict[str, Any] = {}
    for key, value in record.items():
        nested = isinstance(value, dict)
        entries |= flat(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return entries


CERTIFICATION_COLUMNS = ("idx", "label", "predict", "radius", "correct", "time", *COUNT_COLUMNS)
"""The first six are the columns of released logs. The procedure's columns follow these."""
SQUARED_RADIUS = "squared_radius"
"""The last column of a log of --sound."""
IMAGE_SET = "image_set"
RANGE = "([0-9]{1,10})(?:-([0-9]{1,10}))?"
OF_CLASSES = "per-class:([1-9][0-9]{0,8})(?::([0-9]{1,9}))?"
"""Names of sets of images: a part of one, and a whole one."""
METHODS = {
    name: kind for name, kind in PROCEDURES.items() if kind.__module__.startswith("smoothadv.")
}
"""The procedures whose logs readers judge: those of plug-ins have rules of their own."""
OF_OTHERS = ("attack", "against", "calibration", "at_least")
"""Settings that no certification log has."""
_TEXT_OR_NULL = (str, NoneType)
SETTINGS: dict[str, Any] = {
    **dict.fromkeys(
        "dataset precision arch library noise device torch cpu_capability".split(), str
    ),
    **dict.fromkeys("generator arch_given classifier_sha256 noise_kernel method".split(), str),
    **dict.fromkeys("tables_sha256 weights_given resize local_noise timestep".split(), str),
    **dict.fromkeys("split dataset_fingerprint logits_sha256".split(), _TEXT_OR_NULL),
    **dict.fromkeys("checkpoint_sha256 module_sha256".split(), (str, dict)),
    **dict.fromkeys("denoiser against plugins shard image_set".split(), dict),
    **dict.fromkeys("compiled pretrained folded fused tf32 sound".split(), bool),
    **dict.fromkeys("images_saved base_attack".split(), bool),
    **dict.fromkeys("N0 num_classes threads restarts".split(), positive_int),
    **dict.fromkeys("batch attack_batch".split(), batch_size),
    **dict.fromkeys("mean std".split(), [number(float, "a finite number", lambda value: True)]),
    "input_layer": (*_TEXT_OR_NULL, [_TEXT_OR_NULL]),
    "attack": (dict, NoneType),
    "training": (dict, NoneType, [(dict, NoneType)]),
    "N": number(int, "a whole number from 1 to 10^18", lambda value: 1 <= value <= 10**18),
    "sigma": positive_noise_level,
    **dict.fromkeys("alpha calibration at_least".split(), probability),
    "seed": any_seed,
    "num_noise_vec": (up_to_a_million, NoneType),
    "target": (non_negative_int, *_TEXT_OR_NULL),
    **{
        one.field: [one.check] if one.many else one.check or one.kind
        for kind in METHODS.values()
        for one in settings_of(kind)
        if one.field in kind.recorded_names()
    },
}
"""The form of each setting of a log of examples, by its name."""
RUN: dict[str, Any] = {
    **dict.fromkeys("device started smoothadv python platform denoiser".split(), str),
    **dict.fromkeys("checkpoint git_commit logits_sha256".split(), _TEXT_OR_NULL),
    **dict.fromkeys("first_row images shard".split(), non_negative_int),
    **dict.fromkeys("skip torch_threads".split(), positive_int),
    **dict.fromkeys("batch attack_batch".split(), batch_size),
    "command": [str],
    "packages": dict,
    "plugins": [dict],
    "max": (positive_int, NoneType),
    "image_shape": [positive_int],
}
"""Likewise of what a manifest says of a run."""
NEEDED = (
    *("dataset", "split", "dataset_fingerprint", "arch", "input_layer", "num_classes", "sigma"),
    *("alpha", "seed", "noise", "N0", "N", "method", "sound"),
)
_NAMES = {str: "a text", bool: "true or false", dict: "an object", NoneType: "null"}


def expected(value: Any, form: Any) -> str:
    """What a form wants, in words, where a value does not fit it; "" if it does."""
    if isinstance(form, tuple):
        wanted = [expected(value, each) for each in form]
        return "" if "" in wanted else " or ".join(wanted)
    if isinstance(form, list):
        if not isinstance(value, list):
            return "a list"
        wrong = next(filter(None, (expected(each, form[0]) for each in value)), "")
        return wrong and f"a list of which each is {wrong}"
    if form in _NAMES:
        return "" if type(value) is form else _NAMES[form]
    try:
        read = checked("", value, form)
    except SettingError as error:
        return str(error).removeprefix(f": {found_value(value)}, ").removeprefix("expected ")
    return "" if isinstance(value, type(read) | int) else "a whole number"


def manifest_fault(manifest: Any) -> str:
    """What is impossible in a manifest: no settings and runs, or a value of another form; "" if
    nothing is.
    """
    content = manifest if isinstance(manifest, dict) else {}
    settings: Any = content.get("settings")
    runs: Any = content.get("runs")
    if expected(settings, dict) or expected(runs, [dict]):
        return "holds no settings and runs"
    for part, forms in [(settings, SETTINGS), *((run, RUN) for run in runs)]:
        for name, value in part.items():
            if name in forms and (wanted := expected(value, forms[name])):
                return f"says that {name} is {json.dumps(value)[:60]}; expected {wanted}"
    record = settings.get(IMAGE_SET, {})
    indices = [int(text) for text in re.findall("[0-9]{1,18}", str(record.get("indices")))]
    if IMAGE_SET in settings and (
        not indices or record != record_of(str(record.get("named")), indices)
    ):
        return f"says that {IMAGE_SET} has a count, sha256 and indices that are not of one set"
    return ""


def in_file(named: str) -> bool:
    """Whether a set of images with this name is the content of a file."""
    return not re.fullmatch(f"{RANGE}(?:,{RANGE})*|{OF_CLASSES}", named)


def record_of(named: str, indices: Iterable[int]) -> dict[str, Any]:
    """What a manifest records of a set of images that is ``named`` so: the ascending ``indices``,
    how many they are, and the SHA-256 of them, one a line, by which people compare sets.
    """
    texts = [str(index) for index in sorted({*indices})]
    file = Path(named).name  # without its folder, which is of one machine
    name = escape(escape(file, None), 60)
    if file != named and not in_file(name):
        name = f"./{name}"  # without which it names other images
    return {
        "named": name,
        "count": len(texts),
        "sha256": digest(f"{text}\n" for text in texts),
        "indices": ",".join(texts),
    }


def images_of(settings: dict[str, Any], run: dict[str, Any]) -> Sequence[int]:
    """The indices of the images that a run selects, ascending, or of those in a shard."""
    named = settings.get(IMAGE_SET, {}).get("indices", "")
    images = (
        [int(text) for text in named.split(",")]
        if named
        else range(0, run["images"], run["skip"])[: run["max"]]
    )
    part = settings.get("shard", {"index": 0, "count": 1})
    return images[part["index"] :: part["count"]]


def selection_of(images: Sequence[int]) -> Any:
    """What the manifest of a shard says of the images of all shards."""
    if isinstance(images, range):
        return [images.start, images.stop, images.step]
    return {"only": list(images)}


def log_fault(manifest: dict[str, Any]) -> str:
    """What a certification log's settings, or its last run, lack, have too much or contradict; ""
    if nothing.
    """
    settings, run = manifest["settings"], (manifest["runs"] or [{}])[-1]
    kind = METHODS.get(settings.get("method"))
    if kind is None:
        return f"names no method, one of {', '.join(METHODS)}"
    own = kind.recorded_names()
    needed = [*NEEDED, "images", "skip", "max", "image_shape", *own]
    if lacking := [name for name in needed if name not in {**settings, **run}]:
        return f"lacks {lacking[0]!r}"
    of_others = {name for each in METHODS.values() for name in each.recorded_names()}
    allowed = {*SETTINGS}.difference(of_others, OF_OTHERS).union(own)
    if foreign := [name for name in settings if name not in allowed]:
        return f"states {foreign[0]!r}, which no such log has"
    try:
        procedure = kind.recorded(settings)
        check_top_k(settings.get("top_k", 1), max(2, settings["num_classes"]))
    except ValueError as error:
        return f"has an impossible setting, {error}"
    whole = images_of({**settings, "shard": {"index": 0, "count": 1}}, run)
    selection = selection_of(whole)
    shard = settings.get("shard", {"index": 0, "count": 1, "examples": selection})
    place, count = shard.get("index"), shard.get("count")
    is_shard = not expected([place, count], [non_negative_int]) and place < count
    contradictions = {
        "noise that is not that of its sound": settings["noise"]
        != "Rounded" * settings["sound"] + "GaussianNoise",
        "radii that do not ascend from 0": isinstance(procedure, OnGrid)
        and [*procedure.radii] != settings["radii"],
        "images that its dataset has not": IMAGE_SET in settings and whole[-1] >= run["images"],
        "a shard of other images, or an impossible one": not is_shard
        or shard != {"index": place, "count": count, "examples": selection},
    }
    return next((f"has {fault}" for fault, holds in contradictions.items() if holds), "")


def certification_columns(settings: dict[str, Any]) -> list[str]:
    """The columns of a certification log of one of METHODS, in their order."""
    procedure = METHODS[settings["method"]].recorded(settings)
    return [*CERTIFICATION_COLUMNS, *procedure.columns, *[SQUARED_RADIUS] * settings["sound"]]
