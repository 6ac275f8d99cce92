"""Mutated files and arguments end in success or in one line; and the fuzzer notices every other
end.
"""

import gc
import importlib
import mmap
import os
import re
import signal
import sys

import pytest

from support.commands import CODE

BENCHMARKS = CODE.parent / "benchmarks"
ENDS = ["clean", "traceback", "crash", "hang", "memory", "untidy"]


@pytest.mark.parametrize("count", [48, pytest.param(2004, marks=pytest.mark.slow)])
def test_nothing_but_success_or_one_line(count, warm, tmp_path):
    command = [
        sys.executable,
        str(BENCHMARKS / "fuzzing.py"),
        "--count",
        str(count),
        "--seed",
        str(count),
    ]
    done = warm.run(command, tmp_path)
    rows = re.findall(r"^\| (\w+) " + r"\| (\d+) " * len(ENDS) + r"\|$", done.stdout, re.MULTILINE)
    table = {kind: numbers for kind, *numbers in rows}
    assert len(table) == 6 and done.returncode == 0, done.stdout + done.stderr
    assert table == {kind: [str(count // 6), *"00000"] for kind in table}, done.stdout


def end_as(words: list[str]) -> int:
    """In place of a command: ends in the way that its word says."""
    how = words[0]
    if how == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        signal.raise_signal(signal.SIGALRM)  # as when its time is over
    if how == "traceback":
        raise KeyError("a defect")
    # New memory for sure: an allocator may have some at hand that the tests before have freed.
    ballast = mmap.mmap(-1, (1 << 28) if how == "memory" else 1)
    for page in range(0, len(ballast), mmap.PAGESIZE):
        ballast[page] = 1
    lines = {
        "untidy": "error: one\nerror: two",
        "escape": "error: \x1b[2J",
        "fine": f"error: {len(ballast)}",
    }
    print(lines.get(how, lines["fine"]), file=sys.stderr)
    return 1


def test_each_end_is_noticed_and_told_from_the_others(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    fuzzing = importlib.import_module("fuzzing")
    for name, value in [("start", end_as), ("_MUCH_BYTES", 1 << 26)]:
        monkeypatch.setattr(fuzzing, name, value)
    (tmp_path / "place").mkdir()
    words = ["fine", "crash", "fine", "traceback", "hang", "memory", "untidy", "fine", "escape"]
    cases = [fuzzing.Case([word], {"log": b"content"}) for word in words]
    folders = [tmp_path / f"case-{number}" for number in range(len(words))]
    # what other tests have left would be freed in the forked processes, and hide what these take
    gc.collect()
    outcomes = fuzzing.run_cases(cases, tmp_path / "place", folders)
    expected = [{"fine": "clean", "escape": "untidy"}.get(word, word) for word in words]
    assert [outcome.end for outcome in outcomes] == expected
    assert all((folder / "log").read_bytes() == b"content" for folder in folders)


def test_a_case_depends_on_the_seed_alone(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    cases = importlib.import_module("hostile_cases")
    content, rng = b"a\tb\n1\t2\n3\t4\n", cases.random.Random
    made = [cases.doctored_table(content, rng(f"{seed}")) for seed in (1, 1, *range(2, 30))]
    assert made[0] == made[1] and len(set(made)) > 20 and made.count(content) < 5
