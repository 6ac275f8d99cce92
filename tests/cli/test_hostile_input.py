"""Files of others: messages escape what steers a terminal, and no picture or grid is too large."""

import itertools
import json
import os
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageFile

from smoothadv.base.errors import escape
from support.commands import Outcome, call
from support.sweeping import write_grid

ESCAPES = "\x1b[2J\x07\u202e"
CERTIFY = "certify digits model.tar 0.25 out.tsv --N 20 --max 1 --device cpu".split()
LOG = "idx\tlabel\tpredict\tradius\tcorrect\ttime\n0\t1\t1\t0.1\t1\t0:00:01\n"
SETTINGS = {"dataset": "digits", "sigma": 0.25, "N": 20, "alpha": 0.001}


def assert_harmless(outcome: Outcome) -> None:
    text = (outcome.out + outcome.err).replace("\n", "")
    assert text.isprintable() and "Traceback" not in text
    assert max(map(len, [*outcome.out.splitlines(), *outcome.err.splitlines()])) < 2100
    assert outcome.err == "" or (outcome.err.count("\n") == 1 and outcome.err.startswith("error: "))


def doctored(source: Path, **entries: object) -> None:
    torch.save({**torch.load(source, weights_only=True), **entries}, "model.tar")


def write_log(settings: dict[str, object], runs: object = (), name: str = "log.tsv") -> None:
    Path(name).write_text(LOG)
    Path(f"{name}.manifest.json").write_text(json.dumps({"settings": settings, "runs": runs}))


ESCAPED = {
    "architecture": (lambda source: doctored(source, arch=ESCAPES), CERTIFY),
    "long architecture": (lambda source: doctored(source, arch="x" * 2**20), CERTIFY),
    "classes": (lambda source: doctored(source, classes=[ESCAPES] * 10), CERTIFY),
    "setting": (
        lambda source: write_log({"sigma": ESCAPES}, name="out.tsv"),
        [*CERTIFY, "--resume"],
    ),
    "sigma": (
        lambda source: write_log({**SETTINGS, "sigma": ESCAPES}),
        ["analyze", "summary", "log.tsv"],
    ),
    "column": (
        lambda source: Path("log.tsv").write_text(f"{ESCAPES}\t{LOG}"),
        ["analyze", "summary", "log.tsv"],
    ),
    "file name": (lambda source: None, ["analyze", "summary", f"a\n{ESCAPES}"]),
    "long file name": (lambda source: None, ["analyze", "summary", "x" * 2**20]),
    "bytes that are no text": (
        lambda source: None,
        ["analyze", "summary", os.fsdecode(b"\xff\xfe")],
    ),
    "command": (lambda source: None, ["analyze", ESCAPES, "log.tsv"]),
    "option": (lambda source: None, [*CERTIFY, f"--{ESCAPES}"]),
    "value": (lambda source: None, [*CERTIFY, "--N", ESCAPES]),
    "plug-in": (lambda source: None, [*CERTIFY, "--plugin", f"{ESCAPES}.py"]),
    "long plug-in": (lambda source: None, [*CERTIFY, "--plugin", "x" * 2**20]),
    "long plug-in file": (lambda source: None, [*CERTIFY, "--plugin", "x" * 2**20 + ".py"]),
    "page": (
        lambda source: write_log({**SETTINGS, "arch": "\ud800"}),
        ["analyze", "report", "log.tsv", "-o", "a"],
    ),
}


@pytest.mark.parametrize("name", ESCAPED)
def test_no_escape_code_reaches_the_terminal(name, checkpoint, workplace, capsys):
    prepare, command = ESCAPED[name]
    prepare(checkpoint)
    assert_harmless(call(capsys, *command))


def test_text_is_shown_as_it_is_but_for_what_steers_a_terminal():
    assert escape("aé–日本 '\\") == "aé–日本 '\\" and escape("٣", plain=True) == "\\u0663"
    assert escape("a\n\x1b[2J\x9b\u202e\u2028\ud800") == "a\\n\\x1b[2J\\x9b\\u202e\\u2028\\ud800"
    assert (
        escape("a" * 90 + "b" * 10, 40) == "a" * 27 + "..." + "b" * 10
        and escape("a" * 9999, None) == "a" * 9999
    )


TRAIN = ["train", "imagefolder:images", "digits_resnet8", "run", "--epochs", "1", "--noise", "0.25"]


@pytest.mark.parametrize("position", ["0.png", "1.png"])
def test_a_picture_of_144_megapixels_is_not_decoded(position, workplace, capsys, monkeypatch):
    """Whether it is the first or has another size than the first."""
    for split, name in itertools.product(("train", "test"), ("0.png", "1.png")):
        path = Path("images", split, "a", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("1", (12_000, 12_000) if name == position else (8, 8)).save(path)
    decoded, load = [], ImageFile.ImageFile.load
    monkeypatch.setattr(
        ImageFile.ImageFile, "load", lambda image: decoded.append(image.size) or load(image)
    )
    outcome = call(capsys, *TRAIN)
    assert_harmless(outcome)
    assert (
        outcome.code == 1 and "144000000 pixels" in outcome.err and (12_000, 12_000) not in decoded
    )
    assert position == "0.png" or set(decoded) == {(8, 8)}


MILLIONS = {"noise": 0.25, **{f"option-{number}": list(range(10)) for number in range(8)}}
FEW = {"noise": [0.25, 0.5, 1.0]}


@pytest.mark.parametrize(
    ("sweep", "bound", "words"),
    [
        (MILLIONS, [], ["more than 10,000 models", "--max-models"]),
        (FEW, ["--max-models", 2], ["more than 2 models"]),
        (FEW, ["--max-models", 3], []),
    ],
    ids=["millions", "a model too many", "just as many"],
)
def test_a_grid_of_more_models_than_may_be_is_refused_at_once(
    workplace, capsys, sweep, bound, words
):
    grid = write_grid(Path("mine.toml"), sweep)
    outcome = call(capsys, "sweep", "plan", grid, *bound)
    assert_harmless(outcome)
    assert outcome.code == bool(words) and all(word in outcome.err for word in words)
