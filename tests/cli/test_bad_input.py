"""What users get wrong: one line that names the fault, the right exit code, and nothing left on the
disk.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from support.commands import call, refused, snapshot

USAGE, FAILURE = 2, 1
CERTIFY = ["certify", "digits", "model.tar", "0.25", "out.tsv", "--N", "10", "--max", "1"]
PREDICT = ["predict", "digits", "model.tar", "0.25", "out.tsv", "--N", "11", "--max", "1"]
TRAIN = ["train", "digits", "digits_resnet8", "run", "--epochs", "1", "--noise", "0.25"]
TRAIN_PGD = ["train_pgd", "digits", "digits_resnet8", "run", "--epochs", "1", "--noise", "0.25"]
ATTACK = ["--attack", "PGD", "--epsilon", "0.5", "--num-steps", "2"]
ATTACK_DDN = ["--attack", "DDN", "--epsilon", "0.5", "--num-steps", "2"]


def replaced(command: list[str], **positions: str) -> list[str]:
    """A command line with other positional arguments."""
    names = {
        "certify": ["dataset", "checkpoint", "sigma", "outfile"],
        "train": ["dataset", "arch", "outdir"],
    }
    names |= {"predict": names["certify"], "train_pgd": names["train"]}
    changed = list(command)
    for name, value in positions.items():
        changed[1 + names[command[0]].index(name)] = value
    return changed


CHECKPOINTS = [
    (replaced(CERTIFY, checkpoint="missing.tar"), FAILURE, ["missing.tar", "does not exist"]),
    (replaced(PREDICT, checkpoint="missing.tar"), FAILURE, ["missing.tar", "does not exist"]),
    (replaced(CERTIFY, checkpoint="corrupt.tar"), FAILURE, ["corrupt.tar", "damaged"]),
    (replaced(CERTIFY, checkpoint="folder"), FAILURE, ["folder", "checkpoint.pth.tar"]),
    (
        replaced(CERTIFY, checkpoint="unknown_arch.tar"),
        FAILURE,
        ["resnet_of_mine", "digits_resnet8"],
    ),
    (
        replaced(CERTIFY, dataset="imagefolder:images"),
        FAILURE,
        ["model.tar", "imagefolder:images", "fit"],
    ),
    ([*CERTIFY, "--input-layer", "center"], FAILURE, ["normalize", "center"]),
]
NUMBERS = [
    *(
        (replaced(CERTIFY, sigma=sigma), USAGE, ["SIGMA", sigma])
        for sigma in ("0", "-1", "nan", "inf", "a quarter")
    ),
    (replaced(PREDICT, sigma="0"), USAGE, ["SIGMA", "'0'"]),
    ([*TRAIN, "--noise", "-0.25"], USAGE, ["--noise", "-0.25"]),
    ([*TRAIN, "--noise", "nan"], USAGE, ["--noise", "nan"]),
    *(
        ([*PREDICT, *ATTACK, "--epsilon", size], USAGE, ["--epsilon", size])
        for size in ("-1", "1/0", "nan", "1/2/3")
    ),
    ([*TRAIN_PGD, *ATTACK, "--epsilon", "127"], USAGE, ["--epsilon", "127/255"]),
    *(
        ([*CERTIFY, "--alpha", alpha], USAGE, ["--alpha", alpha, "0 and 1"])
        for alpha in ("0", "1", "-0.5", "x")
    ),
    *(
        ([*CERTIFY, option, "0"], USAGE, [option, "'0'"])
        for option in ("--max", "--skip", "--N", "--N0", "--batch")
    ),
    ([*CERTIFY, "--N", "1e5"], USAGE, ["--N", "1e5", "whole number"]),
    ([*CERTIFY, "--seed", "-1"], USAGE, ["--seed", "-1"]),
    ([*CERTIFY, "--max", "-2"], USAGE, ["--max", "-2"]),
    ([*PREDICT, *ATTACK, "--num-steps", "0"], USAGE, ["--num-steps", "'0'"]),
    ([*PREDICT, *ATTACK_DDN, "--gamma-DDN", "1"], USAGE, ["--gamma-DDN", "'1'"]),
    *(
        ([*TRAIN, option, "0"], USAGE, [option, "'0'"])
        for option in ("--epochs", "--batch", "--lr", "--lr-step-size")
    ),
    ([*CERTIFY, "--device", "nonsense"], USAGE, ["--device", "nonsense"]),
    ([*CERTIFY, "--device", "cuda:99"], USAGE, ["--device", "cuda:99"]),
]
NAMES = [
    (
        replaced(CERTIFY, dataset="digit"),
        USAGE,
        ["'digit'", "did you mean 'digits'", "cifar10", "imagefolder"],
    ),
    (replaced(CERTIFY, dataset="imagefolder"), USAGE, ["imagefolder:PATH"]),
    (replaced(CERTIFY, dataset="digits:here"), USAGE, ["digits:here"]),
    (
        replaced(TRAIN, arch="resnet"),
        USAGE,
        ["'resnet'", "digits_resnet8", "cifar_resnet110", "resnet50"],
    ),
    ([*CERTIFY, "--method", "best"], USAGE, ["'best'", "exact"]),
    ([*TRAIN, "--objective", "trades"], USAGE, ["'trades'", "gaussian", "smoothadv"]),
    ([*CERTIFY, "--split", "validation"], USAGE, ["--split", "validation", "train", "test"]),
    ([*CERTIFY, "--input-layer", "none"], USAGE, ["--input-layer", "normalize", "center"]),
    (["analyze", "summaries", "log.tsv"], USAGE, ["summaries", "summary", "table", "plot"]),
    (
        [*CERTIFY, "--alph", "0.01"],
        USAGE,
        ["--alph"],
    ),  # an abbreviation may mean something else tomorrow
]
CONTRADICTIONS = [
    ([*TRAIN_PGD, *ATTACK, "--init-norm-DDN", "1"], USAGE, ["--init-norm-DDN", "PGD"]),
    ([*TRAIN_PGD, *ATTACK_DDN, "--random-start"], USAGE, ["--random-start", "DDN"]),
    ([*TRAIN, *ATTACK], USAGE, ["--attack", "gaussian"]),
    ([*TRAIN, "--epsilon", "0.5"], USAGE, ["--epsilon", "gaussian"]),
    ([*TRAIN, "--warmup", "5"], USAGE, ["--warmup", "gaussian"]),
    ([*TRAIN, "--num-noise-vec", "2"], USAGE, ["--num-noise-vec", "gaussian"]),
    (
        [*TRAIN_PGD, *ATTACK, "--noise", "0", "--no-grad-attack"],
        USAGE,
        ["--no-grad-attack", "noise"],
    ),
    ([*PREDICT, "--num-noise-vec", "2"], USAGE, ["--num-noise-vec", "--attack"]),
    ([*PREDICT, "--epsilon", "0.5"], USAGE, ["--epsilon", "--attack"]),
    ([*PREDICT, "--base-attack"], USAGE, ["--base-attack", "--attack"]),
    ([*PREDICT, *ATTACK, "--base-attack", "--no-grad-attack"], USAGE, ["--base-attack"]),
]
OMISSIONS = [
    (TRAIN[:-2], USAGE, ["--noise"]),
    ([*TRAIN_PGD[:-2], *ATTACK], USAGE, ["--noise"]),
    ([*TRAIN_PGD, "--attack", "PGD", "--num-steps", "2"], USAGE, ["--epsilon"]),
    ([*TRAIN_PGD, "--attack", "PGD", "--epsilon", "1"], USAGE, ["--num-steps"]),
    (TRAIN_PGD, USAGE, ["--attack", "PGD", "DDN"]),
    (CERTIFY[:3], USAGE, ["SIGMA", "OUTFILE"]),
    (["analyze"], USAGE, ["ANALYSIS"]),
]
FILES = [
    (replaced(CERTIFY, outfile="file/out.tsv"), FAILURE, ["file"]),
    (replaced(PREDICT, outfile="file/deep/out.tsv"), FAILURE, ["file"]),
    (replaced(TRAIN, outdir="file/run"), FAILURE, ["file"]),
    (replaced(TRAIN, outdir="file"), FAILURE, ["file"]),
    (replaced(CERTIFY, outfile="folder"), FAILURE, ["folder"]),
    (
        ["analyze", "summary", "log.tsv", "--sigma", "0.25", "-o", "file/table.md"],
        FAILURE,
        ["file"],
    ),
    (["analyze", "plot", "log.tsv", "--sigma", "0.25", "-o", "file/curves"], FAILURE, ["file"]),
    (replaced(TRAIN, dataset="imagefolder:mixed"), FAILURE, ["mixed", "8x8", "6x8", "one size"]),
    (replaced(TRAIN, dataset="imagefolder:torn"), FAILURE, ["1.png", "cannot be read"]),
    (replaced(TRAIN, dataset="imagefolder:nowhere"), FAILURE, ["nowhere"]),
    (replaced(TRAIN, dataset="imagefolder:folder"), FAILURE, ["folder", "train", "test"]),
    (replaced(TRAIN, arch="resnet50"), FAILURE, ["resnet50", "3 channels"]),
    (
        replaced(TRAIN, dataset="imagenet") + ["--data-dir", "nowhere"],
        FAILURE,
        ["imagenet", "nowhere"],
    ),
    (
        replaced(TRAIN, dataset="imagenet32") + ["--data-dir", "nowhere"],
        FAILURE,
        ["imagenet32", "nowhere"],
    ),
    (["analyze", "summary", "nothing/*.tsv"], FAILURE, ["nothing/*.tsv"]),
    (["analyze", "summary", "folder"], FAILURE, ["folder", "certification log"]),
    (["analyze", "summary", "file"], FAILURE, ["file"]),
    (["analyze", "summary", "corrupt.tar"], FAILURE, ["corrupt.tar"]),
    (["analyze", "summary", "binary"], FAILURE, ["binary"]),
    (["analyze", "summary", "header.tsv"], FAILURE, ["header.tsv", "no rows"]),
]
MANY = "1" + "0" * 25
ANALYZE = ["analyze", "plot", "log.tsv", "--sigma", "0.25", "-o"]
QUANTIZE = ["quantize", "digits", "model.tar", "0.25", "new.tar"]
NO_FILES = [
    *(
        ([*command, path], USAGE, ["OUTFILE", f"'{path}'", "the file to write"])
        for command in (
            CERTIFY[:4],
            PREDICT[:4],
            QUANTIZE[:4],
            ["certify", "merge"],
            ["quantize", "export", "model.tar"],
        )
        for path in ("", ".", "/", "..", "folder/", "folder/.")
    ),
    *(
        ([*ANALYZE, path], USAGE, ["-o", f"'{path}'", "the file to write"])
        for path in ("", ".", "/")
    ),
    (["analyze", "report", "log.tsv", "-o", ""], USAGE, ["-o", "''", "write . for this one"]),
    (["sweep", "report", "grid.toml", "-o", ""], USAGE, ["-o", "''", "the file to write"]),
    (replaced(TRAIN, outdir=""), USAGE, ["OUTDIR", "''", "write . for this one"]),
    (
        ["attack", *CERTIFY[1:4], "", "--epsilon", "0.5"],
        USAGE,
        ["OUTDIR", "''", "write . for this one"],
    ),
]
BEYOND_SENSE = [
    (
        ["analyze", "envelope", "log.tsv", "--decimals", "9223372036854775808"],
        USAGE,
        ["--decimals", "0 to 100"],
    ),
    (["analyze", "envelope", "log.tsv", "--decimals", "101"], USAGE, ["--decimals", "0 to 100"]),
    ([*PREDICT, *ATTACK, "--num-steps", MANY], USAGE, ["--num-steps", MANY, "4,000,000,000"]),
    ([*QUANTIZE, "--calibration", MANY], USAGE, ["--calibration", MANY, "4,000,000,000"]),
    ([*TRAIN, "--crop-padding", "20000"], USAGE, ["--crop-padding 20000", "0 to 7"]),
    ([*TRAIN, "--crop-padding", "8"], USAGE, ["--crop-padding 8", "0 to 7"]),
    ([*TRAIN, "--momentum", "7"], USAGE, ["--momentum", "'7'", "below 1"]),
    ([*TRAIN, "--momentum", "1"], USAGE, ["--momentum", "'1'", "below 1"]),
    (
        ["analyze", "table", "log.tsv", "--where", "sigma=\u0662"],
        FAILURE,
        ["no log has sigma=\u0662"],
    ),
    (replaced(TRAIN, dataset="imagefolder:images@\u0668"), FAILURE, ["images@\u0668"]),
]
OVER_INPUTS = [
    ([*QUANTIZE[:4], "model.tar", "--overwrite"], USAGE, ["model.tar"]),
    ([*QUANTIZE[:4], "./folder/../model.tar", "--overwrite"], USAGE, ["model.tar"]),
    ([*QUANTIZE[:4], "link.tar", "--overwrite"], USAGE, ["link.tar", "model.tar"]),
    (["quantize", "export", "model.tar", "model.tar", "--overwrite"], USAGE, ["model.tar"]),
    (["certify", "merge", "log.tsv", "other.tsv", "log.tsv", "--overwrite"], USAGE, ["log.tsv"]),
    (["certify", "merge", "log", "log.manifest.json", "--overwrite"], USAGE, ["log.manifest.json"]),
    ([*replaced(CERTIFY, outfile="model.tar"), "--overwrite"], USAGE, ["model.tar"]),
    ([*replaced(CERTIFY, outfile="file"), "--denoiser", "file"], USAGE, ["file"]),
    (
        [*replaced(PREDICT, checkpoint="log.tsv+model.tar", outfile="log.tsv")],
        USAGE,
        ["log.tsv+model.tar"],
    ),
    ([*replaced(PREDICT, dataset="npz:log.npz", outfile="log.tsv")], USAGE, ["log.npz"]),
    ([*replaced(PREDICT, checkpoint="net.py:net", outfile="net.py")], USAGE, ["net.py:net"]),
    (
        ["attack", *CERTIFY[1:4], "trained", "--against", "trained/against.tsv"],
        USAGE,
        ["trained/against.tsv"],
    ),
    (
        ["attack", "npz:trained/epsilon_1.npz", *CERTIFY[2:4], "trained", "--epsilon", "1"],
        USAGE,
        ["epsilon_1.npz"],
    ),
    *(
        (
            [*replaced(TRAIN, outdir="trained"), flag, f"trained/{name}", "--overwrite"],
            USAGE,
            [f"trained/{name}"],
        )
        for flag, name in (
            ("--pretrained-model", "checkpoint.pth.tar"),
            ("--teacher", "checkpoint.pth.tar"),
            ("--recipe", "args.json"),
            ("--use-unlabelled", "log.txt"),
        )
    ),
    (
        [
            "train_denoiser",
            "digits",
            "digits_dncnn",
            "trained",
            "--noise",
            "0.25",
            "--objective",
            "stability",
            "--classifier",
            "trained/checkpoint.pth.tar",
            "--overwrite",
        ],
        USAGE,
        ["trained/checkpoint.pth.tar"],
    ),
    (["analyze", "table", "log.tsv", "-o", "log.tsv"], USAGE, ["log.tsv"]),
    (["analyze", "plot_training", "a=curves.svg", "-o", "curves.svg"], USAGE, ["a=curves.svg"]),
    (["sweep", "report", "grid.toml", "-o", "grid.toml"], USAGE, ["grid.toml"]),
]
CASES = CHECKPOINTS + NUMBERS + NAMES + CONTRADICTIONS + OMISSIONS + FILES + NO_FILES + BEYOND_SENSE
CASES += [(command, code, [*words, "replaced"]) for command, code, words in OVER_INPUTS]


def write_images(folder: Path, *sizes: tuple[int, int]) -> None:
    """A dataset of two classes; image i of each class has sizes[i] (width, height)."""
    for split in ("train", "test"):
        for label in ("a", "b"):
            (folder / split / label).mkdir(parents=True)
            for number, (width, height) in enumerate(sizes):
                image = Image.fromarray(np.full((height, width), 100 + number, dtype=np.uint8))
                image.save(folder / split / label / f"{number}.png")


@pytest.fixture(scope="module")
def place(checkpoint, tmp_path_factory) -> Path:
    """Files of all sorts, good and bad; no case may change it."""
    place = tmp_path_factory.mktemp("place")
    good = torch.load(checkpoint, weights_only=True)
    (place / "model.tar").write_bytes(checkpoint.read_bytes())
    (place / "corrupt.tar").write_bytes(checkpoint.read_bytes()[:5000])
    torch.save({**good, "arch": "resnet_of_mine"}, place / "unknown_arch.tar")
    (place / "file").write_text("I am a file.\n")
    (place / "binary").write_bytes(bytes(range(256)))
    (place / "folder").mkdir()
    (place / "log.tsv").write_text(
        "idx\tlabel\tpredict\tradius\tcorrect\ttime\n0\t1\t1\t0.5\t1\t0:00:01\n"
    )
    (place / "header.tsv").write_text("idx\tlabel\tpredict\tradius\tcorrect\ttime\n")
    (place / "link.tar").symlink_to("model.tar")
    for name in (
        "grid.toml",
        "net.py",
        "log",
        "log.manifest.json",
        "log.npz",
        "other.tsv",
        "curves.svg",
    ):
        (place / name).touch()
    (place / "trained").mkdir()
    for name in ("checkpoint.pth.tar", "args.json", "log.txt", "against.tsv", "epsilon_1.npz"):
        (place / "trained" / name).touch()
    write_images(place / "images", (8, 8))
    write_images(place / "mixed", (8, 8), (6, 8))
    write_images(place / "torn", (8, 8), (8, 8))
    (place / "torn/train/a/1.png").write_bytes(b"\x89PNG\r\n")
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


@pytest.mark.parametrize(
    "command",
    [
        *(CERTIFY, PREDICT, [*PREDICT, *ATTACK, "--seed", str(2**128 - 1)]),
        [*TRAIN, "--crop-padding", "7", "--momentum", "0.999", "--seed", str(2**128 - 1)],
        *([*TRAIN_PGD, *ATTACK], [*TRAIN_PGD, *ATTACK_DDN]),
    ],
    ids=" ".join,
)
def test_commands_that_the_bad_ones_are_made_from_are_good(
    command, place, monkeypatch, capsys, tmp_path
):
    """Otherwise the cases above might fail for another reason than the tested one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.tar").write_bytes((place / "model.tar").read_bytes())
    assert call(capsys, *command, "--device", "cpu").code == 0


def test_debug_adds_the_traceback(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    outcome = call(capsys, *replaced(CERTIFY, checkpoint="missing.tar"), "--debug")
    assert outcome.code == FAILURE and "Traceback" in outcome.err
    assert outcome.err.splitlines()[-1].startswith("error: ")
