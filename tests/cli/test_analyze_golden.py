"""analyze prints, byte for byte, what tests/data/analyses.txt has.

There, a line ``$ ARGUMENTS`` is followed by the output of ``analyze ARGUMENTS`` in the folder that
support.golden_folder fills, by its warnings or its error after ``! ``, and by its exit status after
``= `` unless it is 0. Of a figure it has what ``support.drawn`` says of it.
``SMOOTHADV_WRITE_GOLDEN=1`` writes the outputs anew.
"""

import os
import shlex
from pathlib import Path

import pytest

from smoothadv.analysis import ANALYSES
from support.commands import call
from support.drawn import describe
from support.golden_folder import golden_folder as golden_folder

GOLDEN = Path(__file__).parents[1] / "data/analyses.txt"
SECTIONS = dict(part.split("\n", 1) for part in GOLDEN.read_text().split("\n$ ")[1:])


@pytest.mark.parametrize("command", SECTIONS)
def test_analyze_prints_what_is_stored(command, golden_folder, capsys, monkeypatch):
    monkeypatch.chdir(golden_folder)
    words, drawn = shlex.split(command), []
    is_figure = ANALYSES[words[0]].makes == "figure"
    monkeypatch.setattr("smoothadv.cli.analyze.save", lambda made, *_, **__: drawn.append(made))
    outcome = call(capsys, "analyze", *words, *(["-o", "figure.svg"] if is_figure else []))
    printed = "".join(map(describe, drawn)) if is_figure else outcome.out
    printed += "".join(f"! {line}\n" for line in outcome.err.splitlines())
    printed += f"= {outcome.code}\n" if outcome.code else ""
    if "SMOOTHADV_WRITE_GOLDEN" in os.environ:
        start = f"\n$ {command}\n"
        GOLDEN.write_text(
            GOLDEN.read_text().replace(start + SECTIONS[command].rstrip(), start + printed.rstrip())
        )
    assert printed.rstrip() == SECTIONS[command].rstrip()


def test_every_table_and_figure_is_stored():
    assert {*ANALYSES} - {"report"} <= {command.split()[0] for command in SECTIONS}
