"""Progress of long work: a bar on a terminal, a line a minute elsewhere."""

import io
import re
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
from tqdm import tqdm

from smoothadv.base.errors import UserError
from smoothadv.base.progress import Progress, warn_of_hours
from smoothadv.training.trackers import TrainingProgress
from support.commands import call, command_main

# Runs a command whose progress makes a line at each update, and ends without writing out what is
# buffered.
OFTEN = """
import os, sys
import smoothadv.base.progress
from smoothadv.cli import main
smoothadv.base.progress.SECONDS_BETWEEN_LINES = 0.0
code = main(sys.argv[1:])
sys.stderr.flush()
os._exit(code)
"""
LINE = re.compile(
    r"certifying: \d of 3 \(\d+%\), ([\d.]+s/example|[\d.?]+ example/s), [\d:]+ so far, "
    r"[\d:?]+ left(, .* draws/s)?"
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """The time, which passes by adding to ``now``."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr("smoothadv.base.progress.monotonic", lambda: clock.now)
    return clock


def test_line_has_what_how_many_share_rate_and_time_left(clock, capsys):
    with Progress(total=120, desc="looking", unit=" images") as bar:
        bar.update(10)
        clock.now += 61
        bar.start_t -= 60  # as tqdm counts, too
        bar.set_postfix_str("all\x1b[1m fine", refresh=False)
        bar.update(20)
    line = "looking: 30 of 120 (25%), 2.00s/images, 01:00 so far, 03:00 left, all\\x1b[1m fine\n"
    assert re.sub(r"2\.0\ds", "2.00s", capsys.readouterr().err) == line, "and nothing else"


@pytest.mark.parametrize(
    ("updates", "seconds", "counts"), [(300, 1, [60, 120, 180, 240, 300]), (3, 600, [1, 2, 3])]
)
def test_line_a_minute_however_many_updates(updates, seconds, counts, clock, capsys):
    for _ in Progress(range(updates), "counting", leave=True):
        clock.now += seconds
    assert [line.split(" (")[0] for line in capsys.readouterr().err.splitlines()] == [
        f"counting: {count} of {updates}" for count in counts
    ]


@pytest.mark.parametrize(("images", "lines"), [(3_600_000_000, 1), (3_599_999_999, 0)])
def test_work_of_hours_says_so_before_it_begins(images, lines, recwarn):
    warn_of_hours("2 epochs", images)
    for done, silent in ((0, False), (10**12, False), (0, True)):  # what is left counts
        TrainingProgress(images + done, done, 2, print, silent).close()
    said = ["2 epochs, take 1.0 hours even at 1,000,000 noisy images per second"]
    assert [str(one.message) for one in recwarn][:lines] == said * lines and len(
        recwarn
    ) == 3 * lines


@pytest.mark.parametrize(
    ("module", "words", "times"),
    [
        ("certify", ["certify", "log.tsv", "--N", 10, "--N0", 4_000_000_000], "4,000,000,010"),
        ("predict", ["predict", "log.tsv", "--N", 4_000_000_000], "4,000,000,000"),
        (
            "predict",
            [
                *("attack", "out", "--epsilon", 1, "--N", 10, "--num-steps", 4),
                *("--num-noise-vec", 5, "--restarts", 10**9),
            ],
            "20,000,000,010",
        ),
    ],
)
def test_evaluation_of_hours_says_so_before_it_begins(
    module, words, times, checkpoint, workplace, capsys, monkeypatch
):
    stop = mock.Mock(side_effect=UserError("begun"))
    monkeypatch.setattr(f"smoothadv.evaluation.{module}.write_log", stop)
    done = call(
        capsys, words[0], "digits", checkpoint, 0.25, *words[1:], "--max", 2, "--device", "cpu"
    )
    assert (
        f"warning: 2 images, each {times} times with noise, take " in done.err
        and done.err.endswith("begun\n")
    )


def test_search_of_folders_says_where(workplace, capsys, monkeypatch):
    monkeypatch.setattr("smoothadv.base.progress.SECONDS_BETWEEN_LINES", 0.0)
    (workplace / "logs/a").mkdir(parents=True)
    assert command_main("analyze")(["summary", "logs"]) == 1
    assert "searching logs: 2 of ?" in capsys.readouterr().err


def test_terminal_gets_the_bar_of_tqdm(monkeypatch, clock):
    monkeypatch.setattr(sys, "stderr", Terminal())
    for _ in Progress(range(10), "counting", ncols=60):
        clock.now += 100
    shown, sys.stderr = sys.stderr, Terminal()
    for _ in tqdm(range(10), "counting", ncols=60, file=sys.stderr):
        pass
    # The bar is as long as the time that follows it, in brackets, leaves room.
    ours, theirs = (
        re.sub(r"\|[^|]*\||\[.*?\]", "||", stream.getvalue()).split("\r")
        for stream in (shown, sys.stderr)
    )
    assert (ours[1], ours[-1]) == (theirs[1], theirs[-1]) and "100%||" in ours[-1]


def test_work_outlives_a_full_disk(clock, monkeypatch):
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(sys.stderr, "write", mock.Mock(side_effect=full))
    for _ in Progress(range(3)):
        clock.now += 100


def test_certify_without_a_terminal_prints_lines_in_one_process(checkpoint, warm, tmp_path):
    words = ["certify", "digits", str(checkpoint), "0.25", *"log.tsv --N 1000 --max 3".split()]
    command = [sys.executable, "-c", OFTEN, *words, "--device", "cpu"]
    done = warm.run(command, tmp_path)
    lines = done.stderr.splitlines()
    assert done.returncode == 0 and len(lines) > 5 and "\r" not in done.stderr
    assert [line for line in lines if not LINE.fullmatch(line)] == []
    assert {int(re.search(r"(\d) of 3", line)[1]) for line in lines} == {0, 1, 2, 3}
    assert done.stdout.startswith("log.tsv: 3 examples"), (
        "though nothing wrote out what was buffered"
    )
    (tmp_path / "log.tsv").unlink()
    first, other = warm.run_workers(2, command, tmp_path)
    assert first.returncode == other.returncode == 0
    assert "of 2 (" in first.stderr, "its share"
    assert " of " not in other.stderr
