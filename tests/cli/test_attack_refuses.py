"""What users of attack get wrong: one line that names the fault, the right exit code, and nothing
left on the disk.
"""

import json
from pathlib import Path

import pytest
import torch

from support.attack_runs import SIGMA
from support.commands import call, refused, rows, snapshot, succeed
from support.sharding import manifest_of

USAGE, FAILURE = 2, 1
ATTACK = [
    "attack",
    "digits",
    "model.tar",
    "0.25",
    "out",
    "--N",
    "11",
    "--max",
    "1",
    "--num-steps",
    "1",
]
SIZED = [*ATTACK, "--epsilon", "0.5", "--num-noise-vec", "2"]
AGAINST = [*ATTACK, "--max", "4", "--against", "log.tsv", "--num-noise-vec", "2"]
BASE = [*ATTACK, "--epsilon", "0.5", "--gradient", "base"]
ONLY = ["attack", "digits", "model.tar", "0.25", "out", "--N", "11", "--epsilon", "0.5", "--only"]
ONLY_AGAINST = [
    "attack",
    "digits",
    "model.tar",
    "0.25",
    "out",
    "--N",
    "11",
    "--against",
    "log.tsv",
    "--only",
]
USAGES = [
    (ATTACK, ["--epsilon", "--against"]),
    ([*SIZED, "--against", "log.tsv"], ["--epsilon", "--against"]),
    ([*SIZED, "--fraction", "0.9"], ["--fraction", "--against"]),
    ([*SIZED, "--false-alarm", "0.1"], ["--false-alarm", "--against"]),
    ([*ATTACK, "--epsilon", "64"], ["--epsilon", "64/255"]),
    ([*ATTACK, "--epsilon", "0.5", "1/2"], ["--epsilon", "twice"]),
    ([*ATTACK, "--epsilon", "0.5", "0.25", "0.50"], ["--epsilon", "twice"]),
    ([*ATTACK, "--epsilon"], ["--epsilon"]),
    *(([*ATTACK, "--epsilon", size], ["--epsilon", size]) for size in ("-1", "nan", "inf", "1/0")),
    ([*BASE, "--num-noise-vec", "4"], ["--num-noise-vec", "--gradient base"]),
    ([*SIZED, "--base-attack"], ["--num-noise-vec", "--base-attack"]),
    ([*BASE, "--base-attack"], ["--base-attack", "--gradient"]),
    ([*BASE, "--no-grad-attack"], ["--no-grad-attack"]),
    ([*SIZED, "--gradient", "stein", "--no-grad-attack"], ["--gradient", "--no-grad-attack"]),
    (
        [*SIZED, "--gradient", "plug-in", "--hard-no-grad-attack"],
        ["--gradient", "--hard-no-grad-attack"],
    ),
    ([*SIZED, "--gradient", "best"], ["'best'", "plug-in", "stein", "base"]),
    (
        [*SIZED, "--gradient", "expected-loss", "--beta", "4"],
        ["--beta", "--gradient expected-loss", "plug-in"],
    ),
    ([*SIZED, "--no-grad-attack", "--beta", "1"], ["--beta", "--no-grad-attack", "plug-in"]),
    *(
        ([*SIZED, "--beta", beta], ["--beta", f"'{beta}'", "above 0"])
        for beta in ("0", "-1", "nan", "inf", "1e999")
    ),
    ([*SIZED, "--attack", "FGSM"], ["'FGSM'", "PGD", "DDN"]),
    ([*SIZED, "--gamma-DDN", "0.1"], ["--gamma-DDN"]),
    ([*SIZED, "--target", "10"], ["--target 10", "0 to 9"]),
    ([*SIZED, "--target", "second"], ["--target", "'second'", "runner-up", "every"]),
    ([*SIZED, "--target=-1"], ["--target", "'-1'"]),
    *(
        ([*SIZED, flag, "0"], [flag, "'0'"])
        for flag in ("--restarts", "--png", "--num-noise-vec", "--attack-batch")
    ),
    *(
        ([*AGAINST, "--fraction", value], ["--fraction", value])
        for value in ("0", "1", "1.5", "nan", "x")
    ),
    *(([*AGAINST, "--false-alarm", value], ["--false-alarm", value]) for value in ("0", "1", "x")),
    ([*SIZED, "--only", "0"], ["--only", "--max"]),
    ([*ONLY, "0", "--skip", "2"], ["--only", "--skip"]),
    ([*ONLY, "-1"], ["--only", "-1"]),
    ([*SIZED, "--shard", "0/2", "--png", "2"], ["--png", "--shard"]),
    ([*AGAINST, "--shard", "0/2", "--false-alarm", "0.1"], ["--false-alarm", "--shard"]),
    ([*SIZED, "--shard", "2/2"], ["--shard", "'2/2'"]),
    ([*SIZED, "--resume", "--overwrite"], ["--resume", "--overwrite"]),
]
FAILURES = [
    ([*ONLY, "0", "359"], ["--only 359", "no image 359"]),
    ([*ONLY_AGAINST, "3", "9"], ["--only 9", "log.tsv", "no image 9"]),
    ([*ATTACK, "--against", "nowhere.tsv"], ["nowhere.tsv"]),
    ([*ATTACK, "--against", "."], [".", "name one certification log"]),
    (
        [*ATTACK, "--against", "prediction.tsv"],
        ["prediction.tsv", "prediction log", "certification"],
    ),
    ([*ATTACK, "--against", "against.tsv"], ["against.tsv", "falsification log", "certification"]),
    ([*ATTACK, "--against", "nothing.tsv"], ["nothing.tsv", "radius above 0"]),
    ([*ATTACK, "--against", "torn.tsv"], ["torn.tsv", "no rows"]),
    ([*ATTACK, "--against", "model.tar"], ["model.tar"]),
    ([*ATTACK, "--against", "bad_manifest.tsv"], ["bad_manifest.tsv", "manifest"]),
    ([*ATTACK, "--against", "too_large.tsv"], ["too_large.tsv", "radius"]),
]
CASES = [(command, USAGE, words) for command, words in USAGES]
CASES += [(command, FAILURE, words) for command, words in FAILURES]
CASES += [(["attack", "digits", "model.tar", "0.25", "file/out", *SIZED[5:]], FAILURE, ["file"])]
CASES += [(["attack", "digits", "model.tar", "0.25", "file", *SIZED[5:]], FAILURE, ["file"])]
CASES += [
    (["attack", "digits", "missing.tar", "0.25", "out", *SIZED[5:]], FAILURE, ["missing.tar"])
]
CASES += [
    (
        ["attack", "digits", "model.tar", "0.5", "out", *AGAINST[5:]],
        FAILURE,
        ["log.tsv", "sigma was 0.25"],
    )
]
CASES += [([*AGAINST, "--split", "train"], FAILURE, ["log.tsv", "split was 'test', now 'train'"])]
CASES += [
    ([*AGAINST, "--precision", "bf16"], FAILURE, ["log.tsv", "precision was 'fp32', now 'bf16'"])
]
CASES += [
    (
        ["attack", "digits", "other.tar", "0.25", "out", *AGAINST[5:]],
        FAILURE,
        ["log.tsv", "checkpoint_sha256"],
    )
]
HEADER = "idx\tlabel\tpredict\tradius\tcorrect\ttime\n"


@pytest.fixture(scope="module")
def place(checkpoint, tmp_path_factory) -> Path:
    """Files of all sorts, good and bad; no case may change it."""
    place = tmp_path_factory.mktemp("place")
    (place / "model.tar").write_bytes(checkpoint.read_bytes())
    content = torch.load(checkpoint, weights_only=True)
    torch.save({**content, "epoch": 99}, place / "other.tar")
    succeed(
        "certify",
        "digits",
        checkpoint,
        SIGMA,
        place / "log.tsv",
        "--N",
        300,
        "--max",
        4,
        "--device",
        "cpu",
    )
    assert rows(place / "log.tsv")[3]["predict"] != "-1"
    command = [
        "digits",
        checkpoint,
        SIGMA,
        place / "prediction.tsv",
        "--N",
        11,
        "--max",
        1,
        "--device",
        "cpu",
    ]
    succeed("predict", *command)
    columns = (
        "idx\tlabel\tpredict\tbasePredict\tcorrect\ttime\tattack_norm\tepsilon\tabstain\tcertified"
        "\tradius\tflipped"
    )
    (place / "against.tsv").write_text(
        f"{columns}\n0\t8\t8\t8\t1\t0:00:01\t0.1\t0.1\t0\t8\t0.1\t0\n"
    )
    (place / "nothing.tsv").write_text(
        HEADER + "0\t8\t-1\t0.0\t0\t0:00:01\n1\t8\t8\t0.0\t1\t0:00:01\n"
    )
    (place / "torn.tsv").write_text(HEADER)
    (place / "bad_manifest.tsv").write_text(HEADER + "0\t8\t8\t0.1\t1\t0:00:01\n")
    (place / "bad_manifest.tsv.manifest.json").write_text("{")
    (place / "too_large.tsv").write_text(HEADER + "0\t8\t8\t10\t1\t0:00:01\n")
    (place / "file").write_text("I am a file.\n")
    return place


@pytest.mark.parametrize(
    ("command", "code", "words"), [pytest.param(*case, id=" ".join(case[0][4:])) for case in CASES]
)
def test_bad_input_gets_one_line_and_leaves_nothing(
    command, code, words, place, monkeypatch, capsys
):
    monkeypatch.chdir(place)
    before = snapshot(place)
    outcome = call(capsys, *command, "--device", "cpu")
    assert snapshot(place) == before
    assert refused(outcome, *words, code=code) and outcome.out == "", outcome


def copy_files(place: Path, workplace: Path) -> None:
    for path in filter(Path.is_file, place.iterdir()):
        (workplace / path.name).write_bytes(path.read_bytes())


@pytest.mark.parametrize(
    "command", [SIZED, AGAINST, BASE, [*ONLY, "0"], [*ONLY_AGAINST, "3"]], ids=" ".join
)
def test_commands_that_the_bad_ones_are_made_from_are_good(command, place, workplace, capsys):
    """Otherwise the cases above might fail for another reason than the tested one."""
    copy_files(place, workplace)
    assert call(capsys, *command, "--device", "cpu").code == 0


@pytest.fixture
def attack(place, workplace, capsys):
    copy_files(place, workplace)
    usual = [
        "digits",
        "model.tar",
        SIGMA,
        "out",
        *"--N 11 --num-steps 1 --num-noise-vec 2 --device cpu".split(),
    ]
    return lambda log, *options: call(capsys, "attack", *usual, "--against", log, *options)


def test_log_without_a_manifest_is_attacked_with_a_warning(attack, workplace):
    """As released logs: it is unknown which model they certify."""
    (workplace / "log.tsv.manifest.json").unlink()
    outcome = attack("log.tsv")
    assert outcome.code == 0 and outcome.err.count("\n") == 1
    assert outcome.err.startswith("warning: log.tsv has no manifest")


@pytest.mark.parametrize(
    ("row", "word"),
    [("5000\t8\t8\t0.1\t1\t0:00:01\n", "5000"), ("0\t8\t500\t0.1\t0\t0:00:01\n", "500")],
    ids=["image", "class"],
)
def test_log_of_another_dataset_is_refused_by_the_image_or_class_that_is_not_there(
    attack, workplace, row, word
):
    """A log of cifar10 without a manifest looks like any other."""
    (workplace / "foreign.tsv").write_text(HEADER + "1\t8\t8\t0.1\t1\t0:00:01\n" + row)
    before = snapshot(workplace)
    outcome = attack("foreign.tsv")
    line = outcome.err.splitlines()[-1]
    assert (
        outcome.code == 1 and line.startswith("error: ") and "foreign.tsv" in line and word in line
    )
    assert snapshot(workplace) == before


@pytest.mark.parametrize("alpha", [0.5, 0.9])
def test_statements_that_may_all_be_false_cannot_be_falsified(attack, workplace, alpha):
    """Where the alphas of certificate and prediction sum to 1 or more, any number of flips is
    credible.
    """
    manifest = manifest_of(workplace / "log.tsv")
    manifest["settings"]["alpha"] = 0.5
    (workplace / "log.tsv.manifest.json").write_text(json.dumps(manifest))
    (workplace / "log.tsv").write_text(HEADER + "0\t8\t8\t0.05\t1\t0:00:01\n")
    outcome = attack("log.tsv", "--alpha", alpha)
    assert outcome.code in (0, 1) and outcome.err.count("\n") <= 1
