"""certify verify: rows of a log drawn again. It finds every planted fault, and refuses where it
cannot know.
"""

import json
import re
from functools import partial
from pathlib import Path

import pytest

from smoothadv.voting.classifier import VotingClassifier
from support.commands import call, refused, snapshot, succeed

SIGMA, EXAMPLES, PLANTED = 0.25, 40, 20
KINDS = {
    "integers": ("--sound", "--method", "two-sided"),
    "ensemble": ("--sound",),
    "adaptive": ("--method", "adaptive", "--radii", 0, 0.25),
    "float": ("--batch", 32),
}


@pytest.fixture(scope="module")
def logs(checkpoint, integers, tmp_path_factory) -> dict[str, Path]:
    """A log of each kind: one that any machine can repeat, and two of a float network."""
    folder = tmp_path_factory.mktemp("logs")
    for kind, options in KINDS.items():
        model = {"integers": integers, "ensemble": f"{integers}+{checkpoint}"}.get(kind, checkpoint)
        number = ("--N", 200, "--max", EXAMPLES, "--device", "cpu")
        succeed("certify", "digits", model, SIGMA, folder / f"{kind}.tsv", *number, *options)
    return {kind: folder / f"{kind}.tsv" for kind in KINDS}


@pytest.fixture
def changed(logs, tmp_path):
    """A copy of the log of integers, changed by a function of its lines, and of its manifest by
    keys and values.
    """

    def change(edit=lambda lines: lines, run=(), **settings: object) -> Path:
        log = logs["integers"]
        manifest = json.loads(log.with_name(f"{log.name}.manifest.json").read_text())
        manifest["settings"] |= settings
        manifest["runs"][-1] |= dict(run)
        copy = tmp_path / "copy.tsv"
        copy.write_text("".join(edit(log.read_text().splitlines(keepends=True))))
        copy.with_name(f"{copy.name}.manifest.json").write_text(json.dumps(manifest))
        return copy

    return change


@pytest.mark.parametrize("kind", KINDS)
def test_all_rows_are_equal_where_the_log_was_made(logs, kind, capsys):
    before = snapshot(logs[kind].parent)
    outcome = call(capsys, "certify", "verify", logs[kind], "--rows", EXAMPLES, "--device", "cpu")
    assert outcome.code == 0 and f"{EXAMPLES} of {EXAMPLES} rows" in outcome.out
    denoised = call(
        capsys, "certify", "verify", logs[kind], "--denoiser", "/nonexistent", "--device", "cpu"
    )
    assert refused(denoised, logs[kind], "leave --denoiser out")
    assert snapshot(logs[kind].parent) == before, "the log and its folder stay as they were"


def planted(name: str, lines: list[str]) -> list[str]:
    """The lines with a vote for the rival instead, or one more digit, in each of twenty rows: none
    that a reader of the log can see.
    """
    rows = [line.split("\t") for line in lines]
    successes, rival, radius = map(rows[0].index, ("successes", "rival", "radius"))
    for fields in [row for row in rows[1:] if row[2] != "-1"][:PLANTED]:
        if name == "radius":
            fields[radius] += "1"
        else:
            fields[successes], fields[rival] = (
                str(int(fields[successes]) - 1),
                str(int(fields[rival]) + 1),
            )
    return ["\t".join(fields) for fields in rows]


@pytest.mark.parametrize("name", ["successes", "radius"])
def test_every_planted_fault_is_found(changed, capsys, name):
    copy = changed(partial(planted, name))
    before = [line for line in copy.read_text().splitlines()]
    outcome = call(capsys, "certify", "verify", copy, "--rows", EXAMPLES, "--device", "cpu")
    assert sum(line not in before for line in changed().read_text().splitlines()) == PLANTED
    assert outcome.code == 1 and outcome.out.count(f"{name} was") == PLANTED == outcome.out.count(
        "image "
    )
    assert f"{PLANTED} differ" in outcome.err and outcome.err.count("\n") == 1


def test_images_without_a_row_are_named_and_lines_end_as_for_all_readers(changed, capsys):
    """Line separators of Unicode and of typewriters are characters like others: here in a time."""
    command = ("certify", "verify", "--rows", EXAMPLES, "--device", "cpu")
    odd = changed(lambda lines: [line.replace("0:00:0", "0:\x0b00:\u20280", 1) for line in lines])
    assert "\u2028" in odd.read_text() and call(capsys, *command, odd).code == 0
    outcome = call(capsys, *command, changed(lambda lines: lines[:3] + lines[4:-1]))
    assert (
        outcome.code == 1
        and f"unfinished: 2 of {EXAMPLES} images are missing, 2, {EXAMPLES - 1}" in outcome.err
    )


def test_few_rows_are_chosen_at_random_and_by_the_seed_from_all(changed, logs, capsys):
    command = ("certify", "verify", logs["integers"], "--rows", 2, "--device", "cpu")
    chosen = {call(capsys, *command).out for _ in range(2)}
    assert len(chosen) == 2, "the seeds are equal with probability 2^-32"
    copy = changed(partial(planted, "radius"))
    command = ("certify", "verify", copy, "--rows", EXAMPLES // 2, "--device", "cpu", "--seed")
    named = [re.findall(r"image (\d+)", call(capsys, *command, seed).out) for seed in (3, 3, 4)]
    assert named[0] == named[1] != named[2]


def test_another_checkpoint_is_refused_before_any_pass(logs, checkpoints, capsys, monkeypatch):
    other = checkpoints["PGD"]
    monkeypatch.delattr(VotingClassifier, "forward")
    outcome = call(
        capsys, "certify", "verify", logs["float"], "--classifier", other, "--device", "cpu"
    )
    assert refused(outcome, "cannot be repeated here", "checkpoint_sha256")


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"cpu_capability": "of another machine"}, "cpu_capability was 'of another machine'"),
        ({"dataset_fingerprint": "0"}, "dataset_fingerprint"),
        ({"method": "unknown"}, "names no certification procedure"),
        (
            {"method": "unknown", "plugins": {"mine.py": "0" * 64}},
            "was made with mine.py, which is not loaded: add --plugin PATH/mine.py",
        ),
        ({"device": "a GPU"}, "device was 'a GPU', now None"),
        ({"split": None}, "images that a program handed over"),
        ({"N": "many"}, 'says that N is "many"; expected a whole number from 1 to 10^18'),
        *(
            ({"dataset": value}, f"says that dataset is {json.dumps(value)}; expected a text")
            for value in (1, True, None, [], {})
        ),
        *(
            (
                {"run": {"checkpoint": value}},
                f"says that checkpoint is {value}; expected a text or null",
            )
            for value in (1, [1])
        ),
        ({"run": {"checkpoint": "a\0b"}}, "a\\x00b"),
        ({"run": {"checkpoint": "moved.pth.tar"}}, "--classifier names the one of"),
        *(
            ({name: 2**70}, f"says that {name} is {2**70}; expected a whole number from")
            for name in ("N0", "batch", "num_classes")
        ),
        (
            {"sigma": None},
            "says that sigma is null; expected a standard deviation between 0 and 10",
        ),
        ({"dataset": "a\0b"}, "a\\x00b"),
    ],
)
def test_settings_that_cannot_be_had_are_refused(changed, settings, word, capsys):
    assert refused(call(capsys, "certify", "verify", changed(**settings), "--device", "cpu"), word)


def test_log_without_a_manifest_is_refused(changed, capsys):
    copy = changed()
    copy.with_name(f"{copy.name}.manifest.json").unlink()
    assert refused(call(capsys, "certify", "verify", copy, "--device", "cpu"), "manifest", copy)


@pytest.mark.parametrize(
    ("run", "words"), [({}, "idx 99999"), ({"images": 10**6, "max": None}, "row of image 99999")]
)
def test_row_of_no_image_is_refused(changed, capsys, run, words):
    """Also where the manifest tells of more images than there are."""
    copy = changed(
        lambda lines: [*lines, lines[-1].replace(lines[-1].split("\t")[0], "99999", 1)], run
    )
    assert refused(call(capsys, "certify", "verify", copy, "--device", "cpu"), words)
