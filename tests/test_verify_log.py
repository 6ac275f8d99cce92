"""scripts/verify_log.py accepts what certify writes, of cascades and routers, too, and rejects each
single field by which a log claims too much.

"Too much" is a radius that the counts in the log do not support under the manifest beside it. More
successes, a smaller radius or a larger sigma leave every claim supported: nobody can tell them from
an honest log.
"""

import dataclasses
import itertools
import json
import math
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from statistics import NormalDist
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import smoothadv
from smoothadv.analysis.reading import read_logs
from smoothadv.api import dataset_of
from smoothadv.base.errors import UserError
from smoothadv.evaluation.certify import certify
from smoothadv.evaluation.shards import Shard, merge
from smoothadv.evaluation.specs import CertifySpec
from smoothadv.models.name import parse_model
from smoothadv.noise import RoundedGaussianNoise
from smoothadv.records.rows import row_checks
from smoothadv.statistics import PROCEDURES, Smoothing
from smoothadv.statistics.adaptive import Adaptive
from smoothadv.statistics.error_spending import look_schedule
from support.commands import header, manifest_of, rows, run_process, settings_of
from support.models import IntervalClassifier
from support.verifier import SCRIPT, Tampering, tampered, verdict
from support.verifier import script as script

SIGMA, N = 0.5, 200
GREY = [128, 140, 150, 160, 175, 195, 215, 50, 75, 95]
"""The first pixel: class 1 above 127.5 of 255, so that the certified radius grows with the distance
from it.
"""
IMAGES = torch.full((len(GREY), 1, 2, 2), 51 / 255)
IMAGES[:, 0, 0, 0] = torch.tensor(GREY) / 255
FOUR = (-0.8, 0.5, 1.8)
"""Thresholds between four classes: the strongest rival is the class beyond the middle one."""
NEAR = (-0.15, 0.5, 1.15)
"""Thresholds between four classes of which no two are certainly the most probable ones at some of
the images.
"""
LOGS = {
    "exact": {},
    "sound": {"sound": True},
    "shards": {"shards": 3},
    "named": {"image_set": f"0-{len(GREY) - 1}"},
    "adaptive": {"method": "adaptive", "radii": (0.02, 0.05, 0.1, 0.15, 0.2)},
    "ladder": {"method": "adaptive", "radii": (0.1,), "ladder": True},
    "sound-ladder": {"method": "adaptive", "radii": (0.05, 0.1), "ladder": True, "sound": True},
    "two-sided": {"method": "two-sided", "thresholds": FOUR},
    "two-sided-sound": {"method": "two-sided", "sound": True, "thresholds": FOUR},
    "top-k": {"method": "top-k", "top_k": 2, "thresholds": NEAR},
    "top-k-sound": {"method": "top-k", "top_k": 2, "sound": True, "thresholds": NEAR},
    "sequential": {"method": "sequential", "radii": (0.05, 0.1), "thresholds": FOUR, "n": 120},
    "sequential-sound": {
        "method": "sequential",
        "radii": (0.07, 0.313),
        "sound": True,
        "thresholds": FOUR,
    },
    "label-aware": {"method": "adaptive", "radii": (0.04, 0.1, 0.16), "label_aware": True},
}
FORGED = [name for name in LOGS if not name.endswith("-sound") and name not in ("shards", "ladder")]
OF_ALL = ("idx", "label", "correct", "time")
"""Columns that are checked in one way, whatever the procedure."""
ON_GRID = {"method": "sequential", "settings": {"radii": (0.05, 0.1, 0.2)}}
ROUTER = (IntervalClassifier(0.6), 0.4)
OF_STAGES = {
    "cascade": {"stages": (0.5, 0.2)},
    "cascade, three": {"stages": (0.5, 0.3, 0.2), "threshold": 0.6},
    "cascade, sound": {"stages": (0.5, 0.2), "sound": True},
    "cascade, sequential": {"stages": (0.5, 0.2), **ON_GRID},
    "router": {"stages": (0.5, 0.2), "router": ROUTER},
    "router, sound": {
        "stages": (0.5, 0.3, 0.2),
        "router": (IntervalClassifier(0.45, 0.6), 0.4),
        "sound": True,
    },
    "router, sequential": {
        "stages": (0.5, 0.2),
        "router": ROUTER,
        **ON_GRID,
        "settings": {"radii": (0.02, 0.05, 0.1)},
    },
}


@pytest.fixture(scope="module")
def logs(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("logs")
    for name, options in LOGS.items():
        written(folder / f"{name}.tsv", **options)
    for name, options in OF_STAGES.items():
        written_by_stages(folder / f"{name}.tsv", **options)
    return {name: folder / f"{name}.tsv" for name in (*LOGS, *OF_STAGES)}


def written(
    log: Path,
    method: str = "exact",
    sound: bool = False,
    shards: int = 0,
    thresholds: tuple[float, ...] = (0.5,),
    image_set: str | None = None,
    n: int = N,
    **settings: object,
) -> None:
    lower = thresholds.index(0.5)  # the last two will be wrong
    labels = torch.tensor([lower + int(grey > 127) for grey in GREY[:-2]] + [lower + 1] * 2)
    model = IntervalClassifier(*thresholds)
    spec = CertifySpec(
        model=model,
        dataset=dataset_of(parse_model(model), IMAGES, labels, None, "images"),
        seed=3,
        device="cpu",
        sigma=SIGMA,
        n=n,
        method=method,
        settings=settings,
        sound=sound,
        image_set=image_set,
        log=log,
    )
    parts = [Shard(number, shards) for number in range(shards)]
    for part in parts:
        certify(dataclasses.replace(spec, shard=part))
    merge(log, [part.path(log) for part in parts]) if parts else certify(spec)


def written_by_stages(log: Path, stages: tuple[float, ...], **options: object) -> None:
    # Confident at the first stage only far from the plane: certificates of both kinds.
    networks = [IntervalClassifier(-0.4, 0.5, 1.4), *[IntervalClassifier(-9, 0.5, 9)] * 2]
    labels = torch.full((len(GREY),), 2)
    options = {"n": 400, **options, "stages": [*zip(networks, stages)], "log": log}
    smoothadv.certify(images=IMAGES, labels=labels, device="cpu", **options)


def fields(number: int, **changed: object) -> Tampering:
    texts = {name: str(value) for name, value in changed.items()}
    return lambda table, manifest: table[number].update(texts)


def settings(**changed: object) -> Tampering:
    return lambda table, manifest: manifest["settings"].update(changed)


@pytest.mark.parametrize("name", [*LOGS, *OF_STAGES])
def test_honest_logs_are_accepted(script, logs, name, capsys):
    assert readers_that_accept(script, logs[name], capsys) == ["verify_log.py", "analyses"]
    said = verdict(script, logs[name], capsys)[1]
    assert f"{len(GREY)} of {len(GREY)} rows hold" in said
    assert ("label-aware" in said) == (name == "label-aware")
    claims = {row["radius"] for row in rows(logs[name]) if row["predict"] != "-1"}
    assert len(claims) >= 3 and len(rows(logs[name])) > len(claims), (
        "radii and abstentions, for this to say anything"
    )


def test_a_bound_that_is_not_shown_is_in_no_sum(script, logs, monkeypatch):
    """Whatever hypothesis on a rival is tried first: only if it is rejected does its bound count,
    alone or in sums.
    """
    manifest = manifest_of(logs["top-k"])
    procedure = script.Procedure({**manifest["settings"], "N": 300}, manifest["runs"][-1])
    counts, found = (script.Fraction(1, 100), 300, 80, 60, 5), procedure.just_rejected
    assert procedure.lacks_of_set(*counts) == ""
    monkeypatch.setattr(
        procedure, "just_rejected", lambda s, *which: 4 if s == 295 else found(s, *which)
    )
    assert procedure.lacks_of_set(*counts) != ""


def test_shards_are_accepted_one_by_one_and_unfinished_logs_are_not(script, logs, tmp_path, capsys):
    shards = [Shard(number, 3).path(logs["shards"]) for number in range(3)]
    assert all(verdict(script, shard, capsys)[0] for shard in shards)
    unfinished = tampered(shards[0], tmp_path / "x.tsv", lambda table, manifest: table.pop())
    assert "3 of 3 rows hold; unfinished: 1 of 4" in verdict(script, unfinished, capsys)[1]


def test_changes_that_leave_every_claim_supported_are_accepted(script, logs, tmp_path, capsys):
    number = next(i for i, row in enumerate(rows(logs["exact"])) if 0.1 < float(row["radius"]))
    successes = int(rows(logs["exact"])[number]["successes"])
    for tampering in [
        fields(number, successes=successes + 1),
        *(fields(number, radius=radius) for radius in ("0.05", f"{0:.400f}")),
        settings(sigma=SIGMA * 2),
        settings(alpha=0.002),
        settings(seed=4),
    ]:
        assert verdict(script, tampered(logs["exact"], tmp_path / "x.tsv", tampering), capsys)[0]


@pytest.mark.parametrize(
    ("n", "alpha", "radii"), [(3000, 1e-3, (0.25, 1.0)), (125_000, 1e-2, (1.25, 1.75))]
)
def test_looks_and_boundaries_are_those_of_the_package(script, n, alpha, radii):
    """In whole numbers here, in float64 there."""
    settings = {
        "sigma": SIGMA,
        "alpha": alpha,
        "N": n,
        "N0": 100,
        "method": "adaptive",
        "sound": False,
    }
    settings |= {
        "noise": "GaussianNoise",
        "radii": [0.0, *radii],
        "ladder": False,
        "label_aware": False,
    }
    ours = script.Procedure(settings, {"images": 1, "skip": 1, "max": None})
    theirs = Adaptive(Smoothing(SIGMA, 100, n, alpha), radii=radii)
    assert ours.looks == theirs.looks.tolist()
    found = [
        [*script.boundaries(ours.null(radius / ours.sigma), ours.looks, ours.allowances[0])]
        for radius in radii
    ]
    assert np.maximum.accumulate(found).tolist() == theirs._efficacy[1:].tolist()
    distance = script.noise_distance(ours.sigma, 3072) / script.ONE
    assert distance == pytest.approx(RoundedGaussianNoise(SIGMA, 0).distance(3072), rel=1e-9)
    rounded, run = (
        {"sound": True, "noise": "RoundedGaussianNoise"},
        {"images": 1, "skip": 1, "max": None},
    )
    sound = script.Procedure({**settings, **rounded}, {**run, "image_shape": [3, 32, 32]})
    assert all(sound.null(z) - ours.null(z) == sound.distance > 0 for z in (-1, 0, 1)), (
        "in each hypothesis's test"
    )
    ours.radii = []
    for ours.n in [*range(1, 600), 4_000_000_000]:
        assert ours.make_looks() == look_schedule([], ours.n, alpha, 0.5).tolist()


ARGUED = {
    "time": "nothing is computed from it",
    "label": "the data set has it, and a class that is wrong for one label is wrong for another",
    "predict": "which class got the votes is known to the model alone, and a wrong one stays wrong",
    "radius": "a smaller one; in analyses one larger by 1e-6, or another one of a grid that one "
    "look alone would show",
    "squared_radius": "a smaller one claims less",
    "label_aware": "of an image that was given up without a draw, the votes that selected a class "
    "are not logged",
    **dict.fromkeys(
        ("successes", "trials", "rival", "rival_1", "rival_2"),
        "other votes, which show the same radius",
    ),
}
"""Columns in which a change is accepted, if no reader without the model can see it: why."""
DESCRIBING = (
    "dataset split seed precision compiled dataset_fingerprint module_sha256 arch input_layer "
    "training folded"
)
DESCRIBING += (
    " device torch cpu_capability threads batch generator classifier_sha256 logits_sha256 "
    "tables_sha256 fused"
)
DESCRIBING += (
    " first_row checkpoint torch_threads started command smoothadv git_commit python platform "
    "packages plugins"
)
DESCRIBING += (
    " seeds noise_kernel tf32 denoiser checkpoint_sha256 library pretrained mean std images_saved "
    "target restarts"
)
DESCRIBING += " num_noise_vec attack_batch base_attack against"
"""Keys of a manifest that say how votes were counted, or by whom: no row depends on them but
through the votes.
"""
OF_SELECTION = {"images", "skip", "max", "image_set"}
"""Of the last run: other numbers may select the same images."""
OF_LEVEL = {
    "sigma",
    "alpha",
    "alpha_share",
    "N",
    "N0",
    "num_classes",
    "top_k",
    "radii",
    "ladder",
    "image_shape",
}
"""What the radii follow from: accepted where the same counts show as much, so that it may have been
so.
"""
ODD = ["", " 1", "1\x0b", *"x 1.5 nan inf 1e3 0x1 True \u0663 1_0 --1 0.0.1 -".split()]
WRONG = [
    None,
    True,
    False,
    -1,
    0,
    1e-10,
    0.5,
    1,
    2**31,
    2**70,
    1e301,
    math.nan,
    math.inf,
    "",
    "0.25",
    "\u0663",
]
WRONG += [[], [None], ["x"], [-1], [True], [[]], {}, {"x": 1}, [{"x": 1}]]


def other_fields(text: str) -> list[str]:
    """Ten and more other fields: numbers nearby and far away."""
    numbers = [int(float(text)) + more for more in (1, -1, 3, -3, 9, -9, 50, -50, 10**14, 2**70)]
    if "." in text:
        factors = (0, 0.99, 1 + 1e-7, 1.001, 1.5, 100)
        numbers = [f"{float(text) * factor:.20f}" for factor in factors]
        numbers += ["0.001", "0.05", "0.1", "0.4", "999999999.9", "-0.1"]
    return [other for other in map(str, numbers) if other != text]


def is_possible(row: dict[str, str], settings: dict[str, Any]) -> bool:
    """Whether votes exist that give the row, and would certify its radius at one look: by trying to
    hand them out.
    """
    counts = {
        name: int(row[name])
        for name in row
        if name in ("successes", "trials") or name.startswith("rival")
    }
    rivals = [count for name, count in counts.items() if name.startswith("rival")]
    classes, left = settings["num_classes"], counts["trials"] - counts["successes"] - sum(rivals)
    # Of the other classes, each gets as many votes as the last rival; those for the rest get none.
    each = min(rivals, default=left)
    for _ in range(min(classes - 1 - len(rivals), counts["trials"])):
        left -= min(max(left, 0), each)
    if (
        left
        or min(counts.values()) < 0
        or rivals != sorted(rivals, reverse=True)
        or counts["trials"] > settings["N"]
    ):
        return False
    name = "two-sided" if "alpha_share" in settings else "exact"
    if "top_k" in settings:
        name = "top-k"
    radius = PROCEDURES[name].radius_from(counts, settings) if int(row["predict"]) >= 0 else 0.0
    fits = 0 <= int(row["label"]) < classes and -1 <= int(row["predict"]) < classes
    hit = int(row["correct"]) == (int(row["label"]) == int(row["predict"]))
    return (
        fits and hit and radius is not None and float(row["radius"]) <= radius * (1 + 1e-6) + 1e-9
    )


def is_spelling(column: str, text: str, row: dict[str, str]) -> bool:
    """Whether the analyses, which read logs of other programs, may take a field for the row's."""
    is_none = column in ("predict", "radius") and text in ("", "-", "nan", "-0.1", "-1", "inf")
    return text.strip() == row[column] or (row["predict"] == "-1" and is_none)


def readers_that_accept(script: ModuleType, log: Path, capsys) -> list[str]:
    """Of the verifier and the analyses: which take a log for whole and possible."""
    verified = verdict(script, log, capsys)[0]
    try:
        (read,) = read_logs([str(log)]).certification
        return ["verify_log.py"] * verified + ["analyses"] * (not read.progress)
    except UserError as error:
        assert str(error).count("\n") == 0 and str(log) in str(error)
        return ["verify_log.py"] * verified


@pytest.mark.parametrize("name", [name for name in FORGED if name != "named"])
def test_forged_rows_are_refused_or_show_the_same(script, logs, name, tmp_path, capsys):
    """Each field of a certificate, and of an abstention, in ten ways and more; what is no number is
    read in one way in all logs that have the column.
    """
    table, settings = rows(logs[name]), settings_of(logs[name])
    places = [
        next(i for i, row in enumerate(table) if (row["predict"] == "-1") == abstains)
        for abstains in (False, True)
    ]
    columns = [each for each in header(logs[name]) if name == "exact" or each not in OF_ALL]
    for number, column in itertools.product(places, columns):
        before = table[number]
        others = other_fields("7" if column == "time" else before[column])
        assert len(others) >= 10
        if name == "exact" or column not in header(logs["exact"]):
            others += [text for text in ODD if text != before[column]]
        for text in others:
            accepting = readers_that_accept(
                script,
                tampered(logs[name], tmp_path / "x.tsv", fields(number, **{column: text})),
                capsys,
            )
            if accepting == ["analyses"] and is_spelling(column, text, before):
                continue
            if accepting:
                assert column in ARGUED, (column, before, text)
            if accepting and column != "time":
                assert is_possible({**before, column: text}, settings), (column, before, text)
                is_more = column in ("radius", "squared_radius") and float(text) > float(
                    before[column]
                )
                tolerated = "radii" in settings or float(text) < float(before[column]) * (1 + 1e-6)
                assert not is_more or (accepting == ["analyses"] and tolerated), (before, text)


@pytest.mark.parametrize("name", FORGED)
def test_forged_manifests_are_refused_or_show_the_same(script, logs, name, tmp_path, capsys):
    """Each key of the settings and of the last run in twenty ways and more, or left out: those
    that are read in one way, whatever the procedure, of one log; what the radii follow from once in
    all these ways, and in each log as a number nearby.
    """
    table, manifest = rows(logs[name]), manifest_of(logs[name])
    done = [manifest_of(logs[each]) for each in FORGED[: FORGED.index(name)]]
    places = [(part, key) for part in ("settings", "runs") for key in _part(manifest, part)]
    for part, key in places:
        if done and key in _part(done[0], part) and key not in OF_LEVEL:
            continue
        old = _part(manifest, part)[key]
        near = [not old, old * 2, old - 1, old * 0.999] if isinstance(old, (int, float)) else []
        is_done = key in OF_LEVEL and any(key in _part(each, part) for each in done)
        for value in [*near, ..., *([] if is_done else WRONG)]:
            forged = json.loads(json.dumps(manifest))
            _part(forged, part)[key] = value
            if value is ...:
                del _part(forged, part)[key]
            fault = script.manifest_fault(forged)
            describes = key in DESCRIBING.split() or (part, key) == ("runs", "shard")
            if fault or describes or value == old:
                continue
            log = tampered(
                logs[name],
                tmp_path / "x.tsv",
                lambda _, content, forged=forged: content.update(forged),
            )
            if accepting := readers_that_accept(script, log, capsys):
                run, settings = forged["runs"][-1], forged["settings"]
                assert key in (*OF_SELECTION, *OF_LEVEL), (key, value, accepting)
                # Where images are named, nothing else selects them.
                assert "image_set" in settings or {int(row["idx"]) for row in table} == {
                    *range(0, run["images"], run["skip"])[: run["max"]]
                }
                assert all(is_possible(row, settings) for row in table), (key, value, accepting)


def _part(manifest: dict[str, Any], part: str) -> dict[str, Any]:
    return manifest["settings"] if part == "settings" else manifest["runs"][-1]


def test_what_cannot_be_verified_is_one_line(tmp_path, logs):
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(SCRIPT), *map(str, arguments)]
        return run_process(command, tmp_path, PYTHONIOENCODING="ascii")

    def without_n(table: list[dict[str, str]], manifest: dict[str, Any]) -> None:
        del manifest["settings"]["N"]

    lacking = tampered(logs["exact"], tmp_path / "x.tsv", without_n)
    huge = tampered(logs["top-k"], tmp_path / "y.tsv", settings(top_k=10**12))
    small = tampered(logs["two-sided"], tmp_path / "z.tsv", settings(alpha=1e-40))
    for log, word in (
        (lacking, "lacks 'N'"),
        (small, "a share of its alpha is below 2^-100"),
        (huge, "says that top_k is 1000000000000, which cannot be"),
        (tmp_path / "released.tsv", "released.tsv.manifest.json"),
    ):
        answer = run(log)
        assert (answer.returncode, answer.stdout) == (1, "")
        assert answer.stderr.count("\n") == 1 and word in answer.stderr
    good = tampered(logs["exact"], tmp_path / "\u00e9.tsv", settings())  # named as one likes
    several = run(lacking, good)
    assert several.returncode == 1 and "rows hold" in several.stdout, "the others are verified, too"
    assert run(good, good).returncode == 0
    assert "python scripts/verify_log.py logs/" in run("--help").stdout


def claiming_more(row: dict[str, str], settings: dict[str, Any]) -> list[dict[str, object]]:
    """Changes of a row of several stages, each of which claims what its counts do not show."""
    counts = {name: int(text) for name, text in row.items() if text.removeprefix("-").isdigit()}
    of_router = [name for name in row if name.startswith("router_")]
    found: list[dict[str, object]] = [{"stage": len(settings["sigmas"]) + (not of_router)}]
    if row["predict"] == "-1":
        return [*found, {"predict": 2}, {"radius": "0.05"}]
    trials, radius = counts["trials"], float(row["radius"])
    larger = [*settings.get("radii", ()), radius * (1 + 1e-7), radius * 1.5, radius + 1e-3]
    found += [{"radius": repr(each)} for each in larger if each > radius]
    found += [{"successes": counts.get("rival", trials // 2)}, {"successes": trials + 1}]
    found += [{"stage": 0}, {"trials": trials - 1}]
    for name in counts:
        if name.endswith("rival"):
            found += [{name: trials}, {name: -1}]
        if name == "level" or name.endswith("_trials"):
            found += [{name: counts[name] + 1}]
    if of_router:
        halved = (counts["router_successes"] + counts["router_rival"]) // 2
        found += [{"router_successes": halved}, dict.fromkeys(of_router, 0)]
    if "radii" in settings:
        # More than a radius of the grid, and the same float.
        found += [{"samples": trials}, {"radius": f"{Decimal(radius) + Decimal('1e-25'):f}"}]
    return found


@pytest.mark.parametrize("name", OF_STAGES)
def test_fields_of_stages_that_claim_too_much_are_refused(script, logs, name, tmp_path, capsys):
    """By the analyses, which read floats, as well."""
    settings = settings_of(logs[name])
    changes = [
        (number, row, changed)
        for number, row in [*enumerate(rows(logs[name]))][::2]
        for changed in claiming_more(row, settings)
    ]
    assert len(changes) > 30
    for number, row, changed in changes:
        forged = tampered(logs[name], tmp_path / "x.tsv", fields(number, **changed))
        is_same = float(changed.get("radius", "nan")) == float(row["radius"])
        accepting = readers_that_accept(script, forged, capsys)
        assert accepting == ["analyses"] * is_same, (row, changed)


@pytest.mark.parametrize("stage", [1, 2])
def test_no_radius_exceeds_what_n_draws_of_its_stage_show(logs, stage):
    """Of n successes, the lower bound on p_A is alpha^(1/n) (Clopper and Pearson, 1934)."""
    row = dict(idx=0, label=2, predict=2, correct=1, successes=400, trials=400, stage=stage)
    row |= {"stage_1_rival": 0, "stage_2_rival": 0}
    most = (0.5, 0.2)[stage - 1] * NormalDist().inv_cdf(0.001 ** (1 / 400))
    for radius, holds in ((most * (1 - 1e-6), True), (most * (1 + 1e-6), False)):
        checks = row_checks({**row, "radius": radius}, settings_of(logs["cascade"]), True)
        assert checks["no draws show so large a radius"] == holds


OF_MANIFEST = {
    "a smaller alpha": {"alpha": 1e-9},
    "smaller noise": {"sigmas": [0.05, 0.02], "sigma": 0.05},
    "sigma is not the largest": {"sigma": 0.3},
    "one stage": {"sigmas": [0.5]},
    "a threshold below 1/2": {"threshold": 0.4},
    "another threshold": {"threshold": 0.5},
    "another procedure": {"method": "exact"},
    "more draws": {"N": 450},
}


@pytest.mark.parametrize("changed", OF_MANIFEST.values(), ids=OF_MANIFEST)
def test_settings_of_stages_under_which_the_counts_show_less_are_refused(
    script, logs, changed, tmp_path, capsys
):
    log = tampered(logs["cascade"], tmp_path / "x.tsv", settings(**changed))
    assert readers_that_accept(script, log, capsys) == []


@pytest.mark.parametrize("name", ["cascade, sound", "router, sound"])
def test_analyses_know_the_distance_of_grey_noise(logs, name, tmp_path):
    """It is proportional to the number of pixels: of 10^14, it is about .01."""

    def enlarge(table: list[dict[str, str]], manifest: dict[str, Any]) -> None:
        manifest["runs"][-1]["image_shape"] = [1, 10**7, 10**7]

    with pytest.raises(UserError, match="counts do not certify"):
        read_logs([str(tampered(logs[name], tmp_path / "x.tsv", enlarge))])
