"""The analyses as functions of logs: the numbers of the command, in a DataFrame."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

import smoothadv
from smoothadv.analysis import ANALYSES
from smoothadv.base.errors import UserError
from support.commands import CODE, call
from support.golden_folder import golden_folder as golden_folder
from support.refusals import refusal

CERTIFIED = ("three", "cohen")
CALLS = {
    "cascade": (("cohen",), {"thresholds": [0.6, 0.7], "radii": [0, 0.25]}),
    "compare": (("sets/ten.tsv", "sets/ten2.tsv"), {"radii": [0, 0.25], "seed": 3}),
    "empirical": (("begun",), {}),
    "envelope": ((f"One={CERTIFIED[0]}", f"Two={CERTIFIED[1]}"), {"radii": [0.25]}),
    "examples": (CERTIFIED, {}),
    "gap": (("begun",), {}),
    "held_out": (("cohen", "ours"), {}),
    "parameters": (CERTIFIED, {"where": ["sigma=0.5"]}),
    "probabilities": (("plain.tsv",), {"sigma": 0.5, "n": 1000, "alpha": 0.001}),
    "summary": (CERTIFIED, {"norm": "linf", "dimension": 3072}),
    "table": (CERTIFIED, {"radii": [0, 0.25], "confidence": 0.95}),
}


@pytest.fixture
def here(golden_folder, monkeypatch) -> Path:
    monkeypatch.chdir(golden_folder)
    return golden_folder


@pytest.mark.filterwarnings("ignore::smoothadv.base.errors.DoubtfulWarning")
@pytest.mark.parametrize("name", [name for name, one in ANALYSES.items() if one.makes == "table"])
def test_function_gives_the_numbers_of_the_command(name, here, capsys):
    logs, keywords = CALLS[name]
    words = []
    for keyword, value in keywords.items():
        several = value if isinstance(value, list) else [value]
        words += ["--N" if keyword == "n" else f"--{keyword}", *several]
    printed = call(capsys, "analyze", name, *logs, *words, "--format", "json")
    function = getattr(smoothadv, name)
    if printed.code:
        assert refusal(function, *logs, **keywords) in printed.err
        return
    expected = json.loads(printed.out)
    for given in (logs, ([*logs],), ([*map(Path, logs)],)):
        found = function(*given, **keywords)
        assert isinstance(found, pd.DataFrame) and len(found) == len(expected)
        assert json.loads(found.to_json(orient="records", double_precision=15)) == [
            {key: pytest.approx(value, abs=1e-12) for key, value in row.items()} for row in expected
        ]


@pytest.mark.filterwarnings("ignore::smoothadv.base.errors.DoubtfulWarning")
def test_figures_and_pages_are_returned(here):
    assert isinstance(smoothadv.plot("cohen", title="of the test"), Figure)
    page = smoothadv.report("cohen")
    assert page.startswith("<!DOCTYPE html>") and page.rstrip().endswith("</html>")


def test_every_analysis_is_listed_and_says_what_it_takes():
    own = {name for name, one in ANALYSES.items() if one.__module__.startswith("smoothadv.")}
    assert own <= {*dir(smoothadv)}
    for name in own:
        text = getattr(smoothadv, name).__doc__
        assert "- ``where``: use only logs with" in text and "Returns " in text
    functions = {"Smooth", "certify", "predict", "attack", "falsify", "train", "plugins"}
    functions |= {
        "SmoothedModule",
        "certify_votes",
        "predict_votes",
        "card",
        "board",
        "conformal_sets",
    }
    assert {*dir(smoothadv)} - own == functions | {"__version__"}
    assert smoothadv.table is smoothadv.table
    with pytest.raises(AttributeError, match="has no attribute 'tables'"):
        _ = smoothadv.tables


@pytest.mark.parametrize(
    ("logs", "keywords", "error", "words"),
    [
        (("nosuch.tsv",), {}, UserError, "nosuch.tsv is no file"),
        ((), {}, UserError, "logs: found"),
        ((pd.DataFrame({"idx": [1]}),), {}, UserError, "found a DataFrame, expected files"),
        ((3,), {}, UserError, "logs: found .*expected strings or paths"),
        (([3],), {}, UserError, "logs: found .*expected strings or paths"),
        (
            ("cohen",),
            {"high_probability": 2},
            UserError,
            "high_probability: found 2, expected a prob",
        ),
        (("cohen",), {"norm": "l3"}, UserError, "norm: found .l3., expected one of l2, linf"),
        (("cohen",), {"titel": "x"}, TypeError, "do you mean title="),
        (("cohen",), {"where": ["x"]}, UserError, "where: found 'x', expected FIELD=VALUE"),
        (("cohen",), {"where": ["sigma=9"]}, UserError, "no log has sigma=9"),
        (("cohen",), {"of": "p_A", "norm": "linf"}, UserError, "of p_A draws no radii"),
    ],
)
def test_bad_input_is_one_line(here, logs, keywords, error, words):
    with pytest.raises(error, match=words) as caught:
        smoothadv.plot(*logs, **keywords)
    assert "\n" not in str(caught.value)


def test_analyses_need_no_torch(here):
    program = (
        "import sys, smoothadv; dir(smoothadv); smoothadv.table('cohen'); smoothadv.plot('cohen'); "
        "sys.exit('torch' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": str(CODE)}).returncode
        == 0
    )


@pytest.mark.parametrize("radii", [[0, 0.25], (0, 0.25), np.array([0, 0.25]), ["0", "1/4"], 0.25])
def test_radii_are_numbers_or_texts_in_any_sequence_or_one(here, radii):
    table = smoothadv.table(iter(["sets/ten.tsv"]), radii=radii)
    assert [float(value) for value in table.iloc[0, 1:]] == [0.7] * np.size(radii)
    for radius in ("a", float("nan"), -1):
        refusal(smoothadv.table, "sets/ten.tsv", radii=[radius], names="radii: ")


def test_a_dict_names_groups(here):
    named, written = smoothadv.table({"a": "cohen", "b": ["cohen"]}), smoothadv.table("a=cohen")
    assert [*named.group.unique()] == ["a", "b"] and len(named) == 2 * len(written)
    refusal(smoothadv.table, {"a": named}, names="logs: found a DataFrame")


def test_functions_can_be_pickled():
    assert pickle.loads(pickle.dumps(smoothadv.table)) is smoothadv.table
