"""analyze prints, byte for byte, what tests/data/analyses.txt has.

There, a line ``$ ARGUMENTS`` is followed by the output of ``analyze ARGUMENTS`` in the folder that
support.golden_folder fills, by its warnings or its error after ``! ``, and by its exit status after
``= `` unless it is 0. ``SMOOTHADV_WRITE_GOLDEN=1`` writes the outputs anew.
"""

import os
import shlex
from pathlib import Path

import pytest

from smoothadv.analysis import ANALYSES
from support import golden_folder
from support.commands import call

GOLDEN = Path(__file__).parents[1] / "data/analyses.txt"
SECTIONS = dict(part.split("\n", 1) for part in GOLDEN.read_text().split("\n$ ")[1:])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        golden_folder.fill()
    return folder


@pytest.mark.parametrize("command", SECTIONS)
def test_analyze_prints_what_is_stored(command, folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    outcome = call(capsys, "analyze", *shlex.split(command))
    printed = outcome.out + "".join(f"! {line}\n" for line in outcome.err.splitlines())
    printed += f"= {outcome.code}\n" if outcome.code else ""
    if "SMOOTHADV_WRITE_GOLDEN" in os.environ:
        start = f"\n$ {command}\n"
        stored = GOLDEN.read_text()
        GOLDEN.write_text(
            stored.replace(start + SECTIONS[command].rstrip(), start + printed.rstrip())
        )
    assert printed.rstrip() == SECTIONS[command].rstrip()


def test_every_table_is_stored():
    tables = {name for name in ANALYSES if ANALYSES[name].makes == "table"}
    assert tables <= {command.split()[0] for command in SECTIONS}
