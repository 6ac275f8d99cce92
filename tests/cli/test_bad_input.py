"""What users get wrong: one line that names the fault, the right exit code, and nothing left on the
disk.
"""

from pathlib import Path

import pytest

from support.bad_input import CASES, CERTIFY, FAILURE, GOOD, replaced, write_files
from support.commands import call, refused, rows, snapshot


@pytest.fixture(scope="module")
def place(checkpoint, tmp_path_factory) -> Path:
    """Files of all sorts; no case may change them."""
    place = tmp_path_factory.mktemp("place")
    write_files(place, checkpoint)
    assert rows(place / "certified.tsv")[3]["predict"] != "-1", "the good commands attack image 3"
    return place


@pytest.mark.parametrize(
    ("command", "code", "words"), [pytest.param(*case, id=" ".join(case[0])) for case in CASES]
)
def test_bad_input_gets_one_line_and_leaves_nothing(
    command, code, words, place, monkeypatch, capsys
):
    monkeypatch.chdir(place)
    before = snapshot(place)
    outcome = call(capsys, *command)
    assert snapshot(place) == before
    assert refused(outcome, *words, code=code) and outcome.out == "", outcome


@pytest.mark.parametrize("command", GOOD, ids=" ".join)
def test_commands_that_the_bad_ones_are_made_from_are_good(command, place, workplace, capsys):
    """Otherwise the cases above might fail for another reason than the tested one."""
    for path in filter(Path.is_file, place.iterdir()):
        (workplace / path.name).write_bytes(path.read_bytes())
    assert call(capsys, *command, "--device", "cpu").code == 0


def test_debug_adds_the_traceback(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    outcome = call(capsys, *replaced(CERTIFY, checkpoint="missing.tar"), "--debug")
    assert outcome.code == FAILURE and "Traceback" in outcome.err
    assert outcome.err.splitlines()[-1].startswith("error: ")
