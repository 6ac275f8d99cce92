"""What a manifest may hold is said once, for the package and the stand-alone verifier; every wrong
type is refused.
"""

import json
import math
import re
import runpy
from fractions import Fraction
from pathlib import Path
from types import NoneType

import numpy as np
import pytest

from smoothadv.base.settings import settings_of
from smoothadv.evaluation.specs import CertifySpec, FalsifySpec, PredictSpec
from smoothadv.records.logs import (
    ARGUMENTS,
    CERTIFICATION_COLUMNS,
    METHODS,
    RUN,
    SETTINGS,
    certification_columns,
    expected,
    format_radius,
    log_fault,
    manifest_fault,
    manifest_path,
    read_manifest_file,
    training_record,
)
from smoothadv.records.rows import row_checks
from smoothadv.statistics import Smoothing
from support.certified_logs import MANIFEST
from support.refusals import refusal

REPOSITORY = Path(__file__).parents[2]
OF_KIND = {
    str: ["", "0.25", "٣"],
    bool: [True, False],
    dict: [{}, {"x": 1}],
    NoneType: [None],
    int: [-1, 2**140],
    float: [math.nan, math.inf, 0.5],
    list: [[[]], [{"x": [1]}, 2]],
}
SIGMA = MANIFEST["settings"]["sigma"]
ROUTER = {"method": "router", "alpha_share": 0.9}
OF_GRID = {"label_aware": False, "ladder": False, "tables_sha256": ""}
CASCADE = {"method": "cascade", "alpha_share": 0.9, "threshold": 0.7}


def with_value(part: str, key: str, value: object) -> dict:
    content = json.loads(json.dumps(MANIFEST))
    (content["settings"] if part == "settings" else content["runs"][-1])[key] = value
    return content


def test_stand_alone_verifier_has_what_the_package_writes_into_it():
    program = runpy.run_path(str(REPOSITORY / "scripts" / "write_schema.py"))
    text = (REPOSITORY / "scripts" / "verify_log.py").read_text()
    assert program["written"](text) == text and "def row_checks" in program["block"]()


def kinds(form: object) -> set[type]:
    """The types of values that may fit a form; a parser's are those that it makes of texts."""
    if isinstance(form, tuple):
        return set().union(*map(kinds, form))
    if isinstance(form, list):
        return {list}
    return {form} if form in OF_KIND else {int, float}


@pytest.mark.parametrize(
    ("part", "key"),
    [(part, key) for part, forms in (("settings", SETTINGS), ("runs", RUN)) for key in forms],
)
def test_every_key_refuses_every_wrong_type(part, key, tmp_path):
    form = (SETTINGS if part == "settings" else RUN)[key]
    wrong = [value for kind in OF_KIND.keys() - kinds(form) for value in OF_KIND[kind]]
    wrong += [value for value in (math.nan, math.inf, -(2**140)) if key not in ("mean", "std")]
    assert len(wrong) >= 8
    for value in wrong:
        fault = manifest_fault(with_value(part, key, value))
        assert re.match(f"says that {key} is [^;]+; expected .+$", fault), value
    manifest_path(tmp_path / "log").write_text(json.dumps(with_value(part, key, wrong[0])))
    assert f"says that {key} is " in refusal(
        read_manifest_file, tmp_path / "log", names=tmp_path / "log"
    )


@pytest.mark.parametrize("kind", [CertifySpec, PredictSpec, FalsifySpec])
def test_settings_of_a_specification_are_judged_by_its_own_parsers(kind):
    """But for names, which may be those of plug-ins, and what has several forms on a command
    line.
    """
    recorded = {one.records: one.check for one in settings_of(kind) if one.choices is None}
    numbers = recorded.keys() - {"", "sigma", "target", "N", "resize", "local_noise", "timestep"}
    assert len(numbers) >= 8
    for name in numbers:
        form = SETTINGS[name]
        assert recorded[name] is None or recorded[name] in (form if type(form) is tuple else [form])


@pytest.mark.parametrize(
    ("key", "value", "fits"),
    [
        *(("N", value, fits) for value, fits in ((0, 0), (1, 1), (4e9, 0), (10**18 + 1, 0))),
        *(("alpha", value, fits) for value, fits in ((0, 0), (1, 0), (5e-324, 1), (0.5, 1))),
        *(("sigma", value, fits) for value, fits in ((0, 0), (1, 1), (10, 1), (10.1, 0))),
        *(("radii", value, fits) for value, fits in (([], 1), ([0, 0.5], 1), ([-1], 0), (1, 0))),
        *(("mean", value, fits) for value, fits in (([-1e300, 2], 1), ([math.nan], 0), (["1"], 0))),
        *(("input_layer", value, fits) for value, fits in (([None, "x"], 1), ([1], 0), ("x", 1))),
        *(("target", value, fits) for value, fits in ((0, 1), ("random", 1), (-1, 0), (None, 1))),
    ],
)
def test_a_form_is_kept_to_its_limits(key, value, fits):
    assert (expected(value, SETTINGS[key]) == "") == fits


@pytest.mark.parametrize(
    ("settings", "run", "fault"),
    [
        ({}, {}, ""),
        ({}, {"skip": 4 * 10**9}, ""),
        ({"method": "mine"}, {}, "names no method"),
        ({"colour": 1}, {}, "states 'colour'"),
        ({"top_k": 3}, {}, "states 'top_k'"),
        ({"attack": None}, {}, "states 'attack'"),
        ({"method": "two-sided"}, {}, "lacks 'alpha_share'"),
        (
            {"method": "top-k", "alpha_share": 0.9, "top_k": 10},
            {},
            "top_k: found 10, expected less than",
        ),
        (CASCADE | {"sigmas": [0.1, SIGMA]}, {}, ""),
        (CASCADE | {"sigmas": [0.1]}, {}, "expected the largest one to be 0.5"),
        ({"method": "adaptive", "radii": [0.5, 0], **OF_GRID}, {}, "radii that do not ascend"),
        ({"method": "adaptive", "radii": [0, 0.5], **OF_GRID}, {}, ""),
        (ROUTER | {"sigmas": [SIGMA] * 3}, {}, ""),
        (ROUTER | {"sigmas": [SIGMA] * 2}, {}, "expected those of two stages or more"),
        ({"sound": True}, {}, "noise that is not that of its sound"),
        ({"noise": "RoundedGaussianNoise"}, {}, "noise that is not that of its sound"),
        ({"shard": {"index": 3, "count": 1, "examples": [0, 1797, 1]}}, {}, "or an impossible one"),
        ({"shard": {"index": 1, "count": 1, "examples": [0, 1797, 1]}}, {}, "or an impossible one"),
        ({"shard": {"index": 0, "count": 1, "examples": [0, 1797, 1]}}, {}, ""),
        ({"shard": {"index": 0, "count": 2}}, {}, "or an impossible one"),
        (
            {"shard": {"index": -1, "count": 2, "examples": [0, 1797, 1]}},
            {},
            "or an impossible one",
        ),
        (
            {"shard": {"index": 0, "count": 2, "examples": [0, 1796, 1]}},
            {},
            "a shard of other images",
        ),
        (
            {"shard": {"index": True, "count": 2, "examples": [0, 1797, 1], "x": 1}},
            {},
            "or an impossible one",
        ),
    ],
)
def test_contradictions_are_refused(settings, run, fault):
    content = {"settings": MANIFEST["settings"] | settings, "runs": [MANIFEST["runs"][0] | run]}
    assert manifest_fault(content) == "" and (
        fault in log_fault(content) if fault else log_fault(content) == ""
    )


@pytest.mark.parametrize("name", METHODS)
def test_logs_have_what_the_procedures_record(name):
    sigmas = {"sigmas": (1.0, 1.0, 1.0)} if "sigmas" in METHODS[name].recorded_names() else {}
    procedure = METHODS[name](Smoothing(1.0, 10, 100, 0.01), **sigmas)
    recorded = json.loads(json.dumps(procedure.record()))
    assert {*recorded} == {*procedure.recorded_names()}
    settings = {**MANIFEST["settings"], "sigma": 1.0, "N0": 10, "N": 100, "alpha": 0.01, **recorded}
    content = {**MANIFEST, "settings": {**settings, "method": name}}
    assert manifest_fault(content) == log_fault(content) == ""
    columns = certification_columns(content["settings"])
    assert columns == [*CERTIFICATION_COLUMNS, *procedure.columns]


@pytest.mark.parametrize(
    "text", ["{", "[]", "null", "3", '{"recipe": {}}', '{"recipe": 3, "runs": []}']
)
def test_a_record_of_a_training_that_is_none_says_nothing(text, tmp_path):
    (tmp_path / ARGUMENTS).write_text(text)
    assert training_record(tmp_path) == {"recipe": {}, "runs": []}


@pytest.mark.parametrize("part", ["settings", "runs"])
def test_each_needed_key_is_missed(part):
    for key in (MANIFEST["settings"] if part == "settings" else MANIFEST["runs"][0]).keys():
        content = with_value(part, key, None)
        del (content["settings"] if part == "settings" else content["runs"][-1])[key]
        assert log_fault(content).startswith(f"lacks {key!r}") or key == "method"
    assert log_fault({**MANIFEST, "runs": []}) == "lacks 'images'"


@pytest.mark.parametrize(
    ("method", "row", "radius", "holds"),
    [
        # 11 steps of 0.12 / 100 are in float64 less than the 0.0132 of the grid, which is not
        # certified.
        ("sequential", {"level": 0}, 0.12 * 11 / 100, True),
        ("sequential", {"level": 1}, 0.12 * 11 / 100, False),
        ("sequential", {"level": 1}, 0.0132, True),
        ("sequential", {"level": 0}, 0.0132, False),
        # Its square is 0 in float64.
        ("exact", {"squared_radius": 0}, 1e-300, True),
        ("exact", {"squared_radius": 1}, 1e-300, False),
    ],
)
def test_radii_are_compared_as_they_are_read(method, row, radius, holds):
    """By the package in float64, by the stand-alone verifier as fractions of what format_radius
    prints.
    """
    settings = {
        **MANIFEST["settings"],
        "sigma": 0.12,
        "method": method,
        "radii": [0.0, 0.0132],
        "label_aware": False,
    }
    if method == "exact":
        settings = {**MANIFEST["settings"], "sound": True}
    counts = {
        "idx": 0,
        "label": 1,
        "predict": 1,
        "correct": 1,
        "successes": 600,
        "trials": 1000,
        "rival": 400,
    }
    row = {**counts, "samples": 1100, "looks": 3, **row}
    arrays = {name: np.array([value]) for name, value in {**row, "radius": radius}.items()}
    for each in (arrays, {**row, "radius": Fraction(format_radius(radius))}):
        assert all(map(np.all, row_checks(each, settings, True).values())) == holds


OF_BOTH = {"method": "sequential-cascade", "sigmas": [0.5, 0.25, 0.4], "alpha_share": 0.9}
OF_BOTH |= {"radii": [0, 0.1], "label_aware": False, "N": 400, "num_classes": 4}
SHOWN = dict(idx=0, label=2, predict=2, radius=0.1, correct=1, level=1, looks=2)
SHOWN |= dict(successes=97, trials=100, samples=500, stage=2)
STAGES = {"stage_1_rival": 0, "stage_1_trials": 100, "stage_2_rival": 3, "stage_2_trials": 100}
STAGES |= {"stage_3_rival": 0, "stage_3_trials": 0}
ROUTER = {"rival": 3, "router_successes": 100, "router_rival": 0, "router_trials": 100}
OF_STAGES = "the counts of its stages are impossible"


@pytest.mark.parametrize(
    ("method", "changes", "fault"),
    [
        ("cascade", {}, None),
        ("cascade", {"stage_1_trials": 0}, OF_STAGES),
        ("cascade", {"stage_3_trials": 10, "samples": 600}, OF_STAGES),
        ("cascade", {"stage_1_rival": 101}, OF_STAGES),
        ("cascade", {"stage_2_rival": 4}, OF_STAGES),
        ("cascade", {"successes": 96, "trials": 99}, "trials are not those of its stage"),
        ("cascade", {"samples": 499}, "its stages have more draws than samples"),
        ("router", {"samples": 400}, None),
        (
            "router",
            {"router_trials": 401, "router_successes": 401, "samples": 800},
            "the counts of its router are impossible",
        ),
        ("router", {"samples": 399}, "its classifiers have more draws than samples"),
    ],
)
def test_counts_of_stages_must_agree(method, changes, fault):
    settings = {**MANIFEST["settings"], **OF_BOTH, "method": f"sequential-{method}"}
    settings |= {"threshold": 0.7} if method == "cascade" else {}
    row = {**SHOWN, **(STAGES if method == "cascade" else ROUTER), **changes}
    checks = row_checks(row, settings, True)
    assert [words for words, holds in checks.items() if not holds] == [fault] * bool(fault)
