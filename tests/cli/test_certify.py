"""certify from end to end: columns and numbers of logs, reproducibility, resuming, what it refuses;
adaptive on a grid of radii, sound in floating point, in other precisions, and top-k.

certify verify: rows of a log drawn again. It finds every planted fault, and refuses where it cannot
know.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from smoothadv.datasets.images import InMemoryImages
from smoothadv.voting.classifier import VotingClassifier
from support.commands import (
    Outcome,
    call,
    header,
    manifest_of,
    refused,
    rows,
    settings_of,
    snapshot,
    succeed,
)

N, ALPHA, SIGMA, EXAMPLES = 100, 0.001, 0.5, 16


@pytest.fixture(scope="module")
def log(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("logs") / "digits.tsv"
    succeed("certify", "digits", checkpoint, SIGMA, path, "--N", N, "--max", 2, "--device", "cpu")
    return path


@pytest.fixture
def certify(checkpoint, workplace, capsys):
    """Certify the shared classifier with few draws; returns what the command did."""

    few = ["--N", 20, "--N0", 10, "--device", "cpu"]
    return lambda outfile, *options, sigma=0.25, model=checkpoint: call(
        capsys, "certify", "digits", model, sigma, outfile, *few, *options
    )


@pytest.mark.parametrize(
    ("options", "indices"),
    [
        (["--skip", 50], range(0, 359, 50)),
        (["--skip", 7, "--max", 3], [0, 7, 14]),
        (["--skip", 100, "--max", -1], [0, 100, 200, 300]),
        (["--skip", 100, "--max", 99], [0, 100, 200, 300]),
        (["--split", "train", "--skip", 400], [0, 400, 800, 1200]),
    ],
)
def test_skip_is_a_stride_and_max_counts_examples(certify, workplace, options, indices):
    """In a log of any name."""
    assert certify("deep/er/log.tar", *options).code == 0
    assert [int(row["idx"]) for row in rows(workplace / "deep/er/log.tar")] == list(indices)


def test_manifest_says_what_made_the_log(log, checkpoint):
    manifest = manifest_of(log)
    digest = hashlib.sha256(checkpoint.read_bytes()).hexdigest()
    settings = {
        "dataset": "digits",
        "split": "test",
        "arch": "digits_resnet8",
        "input_layer": "normalize",
        "sigma": SIGMA,
        "N0": 100,
        "N": N,
        "alpha": ALPHA,
        "seed": 0,
        "method": "exact",
        "checkpoint_sha256": digest,
        "num_classes": 10,
    }
    assert settings.items() <= manifest["settings"].items()
    assert not {"plugins", "threads", "cpu_capability"} & manifest["settings"].keys()
    (run,) = manifest["runs"]
    assert {"started", "command", "git_commit", "python", "smoothadv", "packages"} <= run.keys()
    assert (run["skip"], run["max"], run["device"], run["first_row"]) == (1, 2, "cpu", 0)
    assert run["command"][:3] == ["smoothadv", "certify", "digits"]


@pytest.mark.parametrize(
    ("command", "options", "few", "enough", "advice"),
    [
        ("certify", [], 9, 10, "--N 10 "),
        ("predict", [], 10, 11, "--N 11 "),
        ("certify", ["--method", "adaptive"], 5, 600, "larger --N"),
    ],
)
def test_too_few_draws_are_warned_about(
    checkpoint, workplace, capsys, command, options, few, enough, advice
):
    """alpha^(1/n) >= 1/2 from n = 10 on at alpha = 0.001: with fewer draws every image abstains.

    The two-sided test of n equal votes has p = 2^(1-n) <= 0.001 from n = 11 on.
    """
    for draws, warning in ((few, advice), (enough, "")):
        usual = ["--max", 1, "--device", "cpu", "--N", draws, *options]
        outcome = call(capsys, command, "digits", checkpoint, 0.25, f"{draws}.tsv", *usual)
        assert outcome.code == 0 and warning in outcome.err
        assert outcome.err.startswith("warning: ") == bool(warning) == bool(outcome.err)


def test_another_sigma_than_in_training_is_warned_about(certify):
    outcome = certify("out.tsv", "--max", 1, sigma=1.0)
    assert outcome.code == 0 and outcome.err.startswith("warning: ") and "0.25" in outcome.err


def test_a_batch_that_no_memory_can_hold_is_refused(certify, workplace, monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda name: 1000)
    outcome = certify("large.tsv", "--max", 2, "--batch", 1000)
    assert refused(outcome, "--batch 1000: a pass needs at least", "GiB of memory, there are 0.0")
    assert not Path("large.tsv").exists()


def test_dry_run_says_what_is_left_and_writes_nothing(certify, workplace, monkeypatch):
    outcome = certify("log.tsv", "--max", 5, "--dry-run", "--batch", 10)
    assert outcome.code == 0 and not [*workplace.glob("log.tsv*")]
    begin = "5 of 5 images of 4 classes of digits are to be certified by exact: 10 + 20 draws"
    assert (
        outcome.out.startswith(f"{begin} each, 150 in all;")
        and " per second in batches of 10, " in outcome.out
    )
    assert certify("log.tsv", "--max", 2).code == 0
    # Measuring takes up to 200 batches.
    monkeypatch.setattr("smoothadv.evaluation.certify._draws_per_second", lambda *given: 1000.0)
    before = snapshot(workplace)
    outcome = certify("log.tsv", "--max", 5, "--dry-run")
    assert outcome.out.startswith("3 of 5 images of 4 classes of digits")
    assert "log.tsv has 2 rows" in certify("log.tsv", "--max", 2, "--dry-run").out
    assert certify("log.tsv", "--max", 2, "--dry-run", "--overwrite").out.startswith(
        "2 of 2 images"
    )
    outcome = certify("named.tsv", "--images", "per-class:2", "--dry-run")
    assert outcome.out.startswith("20 of 20 images of 10 classes of digits")
    outcome = certify("log.tsv", "--max", 5, "--dry-run", "--method", "sequential")
    assert refused(outcome, "cannot resume", "method was 'exact'")
    assert snapshot(workplace) == before
    outcome = certify(
        "other.tsv", "--max", 5, "--method", "sequential", "--shard", "1/2", "--dry-run"
    )
    assert outcome.out.startswith("2 of 2 images") and "at most 10 + 20 draws" in outcome.out


@pytest.mark.parametrize(
    "begun, now, words",
    [
        ([], ["--shard", "0/2"], "log.tsv exists already, as a whole"),
        (["--shard", "0/2"], [], "holds 1 shard of"),
        (["--shard", "0/2"], ["--shard", "1/2", "--N", "30"], "N was 20, now 30"),
        (["--shard", "0/2"], ["--shard", "0/2", "--max", "6"], "shard.examples was"),
        ([], ["--max", "3"], "holds example 3"),
        ([], ["--method", "two-sided"], "method was 'exact'"),
        (None, ["--overwrite"], "holds no log"),
        (None, [], "holds no log"),
    ],
)
def test_dry_run_refuses_what_the_run_would(certify, workplace, begun, now, words):
    if begun is None:
        Path("log.tsv").write_text("text\n")
    else:
        assert certify("log.tsv", "--max", 4, *begun).code == 0
    before = snapshot(workplace)
    rehearsed, run = (certify("log.tsv", "--max", 4, *now, *more) for more in (["--dry-run"], []))
    assert refused(rehearsed, words) and rehearsed.err == run.err
    assert snapshot(workplace) == before


METHODS = {
    "exact": ["--N", 30],
    "adaptive": ["--method", "adaptive", "--N", 200, "--radii", 0, 0.25, 0.5],
}
OTHER_SETTINGS = [
    ("exact", ["--seed", 1], "seed was 0, now 1"),
    ("exact", ["--N", 31], "N was 30, now 31"),
    ("exact", ["--N0", 11], "N0 was 10, now 11"),
    ("exact", ["--alpha", 0.01], "alpha was 0.001, now 0.01"),
    ("exact", ["--batch", 50], "batch was 200, now 50"),
    ("exact", ["--precision", "bf16"], "precision was 'fp32', now 'bf16'"),
    ("exact", ["--compile"], "compiled was False, now True"),
    ("exact", ["--split", "train"], "split was 'test', now 'train'"),
    ("exact", ["--method", "adaptive"], "method was 'exact', now 'adaptive'"),
    ("adaptive", ["--radii", 0.25], "radii was [0.0, 0.25, 0.5], now [0.0, 0.25]"),
    ("adaptive", ["--ladder"], "ladder was False, now True"),
    ("adaptive", ["--label-aware"], "label_aware was False, now True"),
]


def test_the_same_log_under_other_settings_is_refused_naming_them(certify, workplace, monkeypatch):
    """Without --resume too, and before any pass; a later option replaces an earlier one."""
    for method, options in METHODS.items():
        assert certify(f"{method}.tsv", "--max", 3, *options).code == 0
    before = snapshot(workplace)
    monkeypatch.delattr(VotingClassifier, "forward")
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    for method, change, field in OTHER_SETTINGS:
        options = [] if change[0] == "--method" else METHODS[method]
        outcome = certify(f"{method}.tsv", "--max", 5, *options, *change)
        last = outcome.err.splitlines()[-1]
        assert outcome.code == 1 and last.startswith("error: ") and field in last
    assert snapshot(workplace) == before


COLUMNS = ["idx", "label", "predict", "radius", "correct", "time", "successes", "trials"]
ADAPTIVE = ["samples", "level", "looks"]
DRAWS, IMAGES = 400, 20


@pytest.fixture
def run(checkpoint, workplace, capsys) -> Callable[..., Outcome]:
    """A command on twenty digits with few draws; options given later win."""
    usual = ["--N", DRAWS, "--max", IMAGES, "--device", "cpu"]
    return lambda command, outfile, *options, sigma=SIGMA: call(
        capsys, command, "digits", checkpoint, sigma, outfile, *usual, *options
    )


def test_adaptive_log_says_samples_level_and_looks(run, workplace):
    outcome = run("certify", "log.tsv", "--method", "adaptive")
    assert header(workplace / "log.tsv") == [*COLUMNS, *ADAPTIVE]
    found = rows(workplace / "log.tsv")
    average = np.mean([float(row["radius"]) * int(row["correct"]) for row in found])
    assert f"average certified radius on the grid of radii {average:.3f}\n" in outcome.out
    assert {-1, 0, 1} <= {int(row["level"]) for row in found}, "for this test to say anything"
    assert len({row["samples"] for row in found}) > 5


@pytest.mark.parametrize("method", ["exact", "adaptive"])
def test_sound_log_has_squared_radii_and_says_what_executed_it(run, workplace, method):
    assert run("certify", "log.tsv", "--sound", "--method", method, "--max", 8).code == 0
    adaptive = ADAPTIVE if method == "adaptive" else []
    assert header(workplace / "log.tsv") == [*COLUMNS, *adaptive, "squared_radius"]
    assert any(int(row["squared_radius"]) > 0 for row in rows(workplace / "log.tsv"))
    settings = settings_of(workplace / "log.tsv")
    assert settings["sound"] is True and settings["noise"] == "RoundedGaussianNoise"
    executed_by = {"torch": torch.__version__, "device": "cpu", "threads": torch.get_num_threads()}
    assert executed_by.items() <= settings.items() and "cpu_capability" in settings


@pytest.mark.parametrize("start", [0, 3])
def test_sound_is_refused_at_an_image_that_is_not_of_8_bits(run, workplace, monkeypatch, start):
    read = InMemoryImages.__getitem__

    def dimmed(images: InMemoryImages, index: int) -> tuple[torch.Tensor, int]:
        image, label = read(images, index)
        return (image * 0.9 if index >= start else image), label

    monkeypatch.setattr(InMemoryImages, "__getitem__", dimmed)
    outcome = run("certify", "log.tsv", "--sound", sigma=0.25)
    assert refused(outcome, "8-bit")
    if start == 0:
        assert outcome.err.startswith(
            "error: --sound certifies 8-bit images only: example 0 of dig"
        )
        assert list(workplace.iterdir()) == []
        assert run("certify", "log.tsv", "--max", 2).code == 0, "without --sound they may be"


def test_a_log_holds_the_label_and_the_counts_behind_each_radius(run, workplace, capsys):
    assert run("certify", "one.tsv", "--method", "two-sided").code == 0
    made = run("certify", "three.tsv", "--method", "top-k", "--top-k", 3)
    assert "examples, certified top-3 accuracy " in made.out
    assert header(workplace / "three.tsv") == [*COLUMNS, "rival_1", "rival_2", "rival_3"]
    settings = settings_of("three.tsv")
    assert (settings["method"], settings["top_k"], settings["alpha_share"]) == ("top-k", 3, 0.9)
    one, three = rows(workplace / "one.tsv"), rows(workplace / "three.tsv")
    assert sum(row["correct"] == "1" for row in three) > sum(row["correct"] == "1" for row in one)
    both = [
        (one, three) for one, three in zip(one, three) if one["predict"] == three["predict"] != "-1"
    ]
    assert len(both) > 8 and all(
        float(three["radius"]) > float(one["radius"]) for one, three in both
    )
    summary = call(capsys, "analyze", "summary", "one.tsv", "three.tsv")
    assert summary.code == 0 and {"two-sided", "top-3"} <= set(
        summary.out.replace("|", " ").split()
    )
    assert call(capsys, "analyze", "summary", "three.tsv").out.startswith("| log, top-3 | ")


@pytest.mark.parametrize("attack", [[], ["--attack", "PGD", "--epsilon", 1.5, "--num-steps", 4]])
def test_a_prediction_is_a_set_of_classes(run, workplace, attack, capsys):
    outcomes = run("predict", "one.tsv", *attack), run("predict", "two.tsv", "--top-k", 2, *attack)
    assert [outcome.code for outcome in outcomes] == [0, 0]
    reason = "%, where no 2 classes lead all others significantly\n"
    assert [outcome.out.endswith(reason) for outcome in outcomes] == [False, True]
    assert header(workplace / "two.tsv") == [*header(workplace / "one.tsv"), "class_1", "class_2"]
    one, two = rows(workplace / "one.tsv"), rows(workplace / "two.tsv")
    sets = [{int(row["class_1"]), int(row["class_2"])} for row in two]
    for row, classes in zip(two, sets):
        assert int(row["predict"]) == (
            int(row["label"]) if int(row["label"]) in classes else int(row["class_1"])
        )
        assert (classes == {-1}) == (row["predict"] == "-1") and len(classes) == 2 - (
            classes == {-1}
        )
        assert row["correct"] == str(int(int(row["label"]) in classes))
    assert all(
        int(row["predict"]) in classes
        for row, classes in zip(one, sets)
        if row["predict"] != "-1" and classes != {-1}
    )
    hits = [{row["idx"] for row in table if row["correct"] == "1"} for table in (one, two)]
    if attack:
        assert len(hits[1]) > len(hits[0]), (
            "among two is easier, even where abstentions are more frequent"
        )
        outcome = call(capsys, "analyze", "empirical", "one.tsv", "two.tsv", "--format", "json")
        best = {record["group"]: record["empirical_accuracy"] for record in json.loads(outcome.out)}
        assert best == {f"top-{k}": len(found) / IMAGES for k, found in zip((1, 2), hits)}, (
            "neither hides the other"
        )
        assert (
            "kept apart by the number of classes that may hold the label (top-1; top-2)"
            in outcome.err
        )
    assert "top_k" not in settings_of("one.tsv")


def test_attacks_on_top_k_certificates_look_for_the_class_in_the_set(
    run, workplace, checkpoint, capsys
):
    run("certify", "log.tsv", "--method", "top-k", "--top-k", 2)
    few = "--N 300 --num-steps 4 --num-noise-vec 4 --against".split()
    attack = ["attack", "digits", checkpoint, SIGMA]
    outcome = call(capsys, *attack, "out", *few, "log.tsv")
    assert outcome.code == 0, f"more flips than one of 1,000 runs would have: {outcome.err}"
    table = rows(workplace / "out" / "against.tsv")
    assert len(table) > 10
    found = [row for row in table if row["predict"] != "-1"]
    assert all(row["certified"] in (row["class_1"], row["class_2"]) for row in found)
    assert any(row["certified"] != row["class_1"] for row in found), (
        "a single class would call these false"
    )
    forged = [line.split("\t") for line in (workplace / "log.tsv").read_text().splitlines()]
    forged = [[*line[:3], "1.7" if line[2].isdigit() else line[3], *line[4:]] for line in forged]
    (workplace / "forged.tsv").write_text("".join("\t".join(line) + "\n" for line in forged))
    false = call(capsys, *attack, "false", *few, "forged.tsv", "--max", 12)
    assert re.search(
        r"flipped: .* certified as (\d) within 1.7, is predicted as (?!\1)\d, (?!\1)\d at",
        false.out,
    )


PLANTED = 8
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
        number = ("--N", 100, "--N0", 20, "--max", EXAMPLES, "--device", "cpu")
        succeed("certify", "digits", model, 0.25, folder / f"{kind}.tsv", *number, *options)
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
    """The lines with a vote for the rival instead, or one more digit, in each of eight rows: none
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
