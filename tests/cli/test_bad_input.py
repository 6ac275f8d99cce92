"""What users get wrong: one line that names the fault, the right exit code, and nothing left on the
disk. A table of command lines, exit codes and words of the line.
"""

import os
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from support.commands import call, refused, rows, snapshot, succeed
from support.image_files import save_image
from support.plugin_page import GRID, SHAPES

USAGE, FAILURE = 2, 1
CERTIFY = "certify digits model.tar 0.25 out.tsv --N 10 --max 1".split()
PREDICT = "predict digits model.tar 0.25 out.tsv --N 11 --max 1".split()
TRAIN = "train digits digits_resnet8 run --epochs 1 --noise 0.25".split()
TRAIN_PGD = ["train_pgd", *TRAIN[1:]]
ATTACK = "attack digits model.tar 0.25 out --N 11 --device cpu".split()
QUANTIZE = "quantize digits model.tar 0.25 new.tar".split()
ANALYZE = "analyze plot log.tsv --sigma 0.25 -o".split()
PGD = "--attack PGD --epsilon 0.5 --num-steps 2".split()
DDN = "--attack DDN --epsilon 0.5 --num-steps 2".split()
ONE_STEP = [*ATTACK, "--max", "1", "--num-steps", "1"]
SIZED = [*ONE_STEP, "--epsilon", "0.5", "--num-noise-vec", "2"]
AGAINST = [*ONE_STEP, "--max", "4", "--against", "certified.tsv", "--num-noise-vec", "2"]
BASE = [*ONE_STEP, "--epsilon", "0.5", "--gradient", "base"]
ONLY = [*ATTACK, "--epsilon", "0.5", "--only"]
ONLY_AGAINST = [*ATTACK, "--against", "certified.tsv", "--only"]
# The commands that the bad ones are made from.
GOOD = [
    *(CERTIFY, [*CERTIFY[:3], "64/255", *CERTIFY[4:]], PREDICT),
    [*PREDICT, *PGD, "--seed", str(2**128 - 1)],
    [*TRAIN, "--crop-padding", "7", "--momentum", "0.999", "--seed", str(2**128 - 1)],
    *([*TRAIN_PGD, *PGD], [*TRAIN_PGD, *DDN], [*TRAIN, "--pretrained-model", "model.tar"]),
    *(SIZED, AGAINST, BASE, [*ONLY, "0"], [*ONLY_AGAINST, "3"]),
]
MANY = "1" + "0" * 25
POSITIONS = {
    **dict.fromkeys(("certify", "predict"), ("dataset", "checkpoint", "sigma", "outfile")),
    "attack": ("dataset", "checkpoint", "sigma", "outdir"),
    **dict.fromkeys(("train", "train_pgd"), ("dataset", "arch", "outdir")),
}


def replaced(command: list[str], **positions: str) -> list[str]:
    """A command line with other positional arguments."""
    given = dict(zip(POSITIONS[command[0]], command[1:]))
    return [command[0], *(given | positions).values(), *command[1 + len(given) :]]


OVER_INPUTS = [
    ([*QUANTIZE[:4], "model.tar", "--overwrite"], USAGE, ["model.tar"]),
    ([*QUANTIZE[:4], "./folder/../model.tar", "--overwrite"], USAGE, ["model.tar"]),
    ([*QUANTIZE[:4], "link.tar", "--overwrite"], USAGE, ["link.tar", "model.tar"]),
    (["quantize", "export", "model.tar", "model.tar", "--overwrite"], USAGE, ["model.tar"]),
    (["certify", "merge", "log.tsv", "other.tsv", "log.tsv", "--overwrite"], USAGE, ["log.tsv"]),
    ([*replaced(CERTIFY, outfile="model.tar"), "--overwrite"], USAGE, ["model.tar"]),
    ([*replaced(CERTIFY, outfile="file"), "--denoiser", "file"], USAGE, ["file"]),
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
        "train_denoiser digits digits_dncnn trained --noise 0.25 --objective stability "
        "--classifier trained/checkpoint.pth.tar --overwrite".split(),
        USAGE,
        ["trained/checkpoint.pth.tar"],
    ),
    ([*replaced(CERTIFY, outfile="model.tar"), "--resume"], USAGE, ["model.tar"]),
    (["analyze", "table", "log.tsv", "-o", "log.tsv"], USAGE, ["log.tsv"]),
    (["cite", "log.tsv", "-o", "log.tsv"], USAGE, ["log.tsv"]),
    (["sweep", "report", "grid.toml", "-o", "grid.toml"], USAGE, ["grid.toml"]),
]
ATTACK_USAGES = [
    (ONE_STEP, ["--epsilon", "--against"]),
    ([*SIZED, "--against", "certified.tsv"], ["--epsilon", "--against"]),
    ([*SIZED, "--fraction", "0.9"], ["--fraction", "--against"]),
    ([*SIZED, "--false-alarm", "0.1"], ["--false-alarm", "--against"]),
    ([*ONE_STEP, "--epsilon", "64"], ["--epsilon", "64/255"]),
    ([*ONE_STEP, "--epsilon", "0.5", "1/2"], ["--epsilon", "twice"]),
    ([*ONE_STEP, "--epsilon", "0.5", "0.25", "0.50"], ["--epsilon", "twice"]),
    ([*ONE_STEP, "--epsilon"], ["--epsilon"]),
    *(
        ([*ONE_STEP, "--epsilon", size], ["--epsilon", size])
        for size in ("-1", "nan", "inf", "1/0")
    ),
    ([*BASE, "--num-noise-vec", "4"], ["--num-noise-vec", "--gradient base"]),
    ([*SIZED, "--gradient", "best"], ["'best'", "plug-in", "stein", "base"]),
    (
        [*SIZED, "--gradient", "expected-loss", "--beta", "4"],
        ["--beta", "--gradient expected-loss", "plug-in"],
    ),
    ([*SIZED, "--gradient", "stein", "--beta", "1"], ["--beta", "--gradient stein", "plug-in"]),
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
ATTACK_FAILURES = [
    ([*ONLY, "0", "359"], ["images 0,359", "no image 359"]),
    ([*ONLY_AGAINST, "3", "9"], ["--only 9", "certified.tsv", "no image 9"]),
    ([*ONE_STEP, "--against", "nowhere.tsv"], ["nowhere.tsv"]),
    ([*ONE_STEP, "--against", "."], [".", "name one certification log"]),
    (
        [*ONE_STEP, "--against", "prediction.tsv"],
        ["prediction.tsv", "prediction log", "certification"],
    ),
    (
        [*ONE_STEP, "--against", "against.tsv"],
        ["against.tsv", "falsification log", "certification"],
    ),
    ([*ONE_STEP, "--against", "nothing.tsv"], ["nothing.tsv", "radius above 0"]),
    ([*ONE_STEP, "--against", "header.tsv"], ["header.tsv", "no rows"]),
    ([*ONE_STEP, "--against", "model.tar"], ["model.tar"]),
    ([*ONE_STEP, "--against", "bad_manifest.tsv"], ["bad_manifest.tsv", "manifest"]),
    ([*ONE_STEP, "--against", "too_large.tsv"], ["too_large.tsv", "radius"]),
    ([*ONE_STEP, "--against", "no_image.tsv"], ["no_image.tsv", "5000"]),
    ([*ONE_STEP, "--against", "no_class.tsv"], ["no_class.tsv", "500"]),
    (replaced(SIZED, outdir="file/out"), ["file"]),
    (replaced(SIZED, outdir="file"), ["file"]),
    (replaced(SIZED, checkpoint="missing.tar"), ["missing.tar"]),
    (replaced(AGAINST, sigma="0.5"), ["certified.tsv", "sigma was 0.25"]),
    ([*AGAINST, "--split", "train"], ["certified.tsv", "split was 'test', now 'train'"]),
    ([*AGAINST, "--precision", "bf16"], ["certified.tsv", "precision was 'fp32', now 'bf16'"]),
    (replaced(AGAINST, checkpoint="other.tar"), ["certified.tsv", "checkpoint_sha256"]),
]
# The number of classes bounds k, and a method has settings of its own.
METHODS = [
    (
        [*CERTIFY, "--method", "top-k", "--top-k", "10"],
        ["--top-k 10", "below that of the classes, 10"],
    ),
    ([*PREDICT, "--top-k", "10"], ["--top-k 10", "below that of the classes, 10"]),
    ([*PREDICT, "--top-k", "0"], ["'0' is not a whole number from 1 to 4,000,000,000"]),
    ([*CERTIFY, "--top-k", "2"], ["--top-k is not read by --method exact, but by --method top-k"]),
    *(
        ([*CERTIFY, *method, *setting], [setting[0], "--method exact"])
        for method in ([], ["--method", "exact"])
        for setting in (["--radii", "0.25"], ["--ladder"], ["--label-aware"])
    ),
    *(
        ([*CERTIFY, "--method", "adaptive", "--radii", *radii], ["--radii", *map(repr, radii)])
        for radii in (["-1"], ["nan"], [])
    ),
    ([*CERTIFY, "--method", "adaptive", "--alpha", "1e-10"], ["alpha", "1e-09", "adaptive"]),
]
THREADS = [
    ([*command.split(), "--threads", "0"], ["--threads", "'0'", "from 1 to 1,024"])
    for command in (
        *("train", "train_pgd", "train_denoiser", "quantize"),
        *("certify", "predict", "attack", "certify verify"),
    )
]
MISTYPED = [
    ([*CERTIFY, "--skp", "20"], ["unknown option --skp (did you mean --skip?)"]),
    ([*CERTIFY, "--alfa=0.01"], ["unknown option --alfa (did you mean --alpha?)"]),
    (["certify", "--skp", "20", *CERTIFY[1:]], ["unknown option --skp (did you mean --skip?)"]),
    ([*CERTIFY, "--qwxz"], ["unknown option --qwxz"]),
    ([*CERTIFY, "--epsilon", "1"], ["unknown option --epsilon; --plugin FILE adds"]),
    ([*CERTIFY, "--noise", "1"], ["unknown option --noise; --plugin FILE adds"]),
    ([*CERTIFY, "--n", "9"], ["unknown option --n (did you mean --N?)"]),
    ([*CERTIFY, "--sigma", "1"], ["unknown option --sigma: SIGMA is written without a flag"]),
    ([*TRAIN, "--sigma", "1"], ["unknown option --sigma (did you mean --noise?)"]),
    (["certify", "merge", "log.tsv", "--overwritten"], ["(did you mean --overwrite?)"]),
    (["analyze", "table", "log.tsv", "--sigmaa", "3"], ["(did you mean --sigma?)"]),
    (["analyze", "--tabel", "log.tsv"], ["unknown option --tabel"]),
    (["analyze", "tabel", "log.tsv"], ["'tabel'", "'table'"]),
    (["sweep", "rum", "grid.toml"], ["'rum'", "'run'"]),
    ([*TRAIN, "--noice", "1"], ["unknown option --noice (did you mean --noise?)"]),
    ([*TRAIN, "--no-horizontal-flop"], ["(did you mean --no-horizontal-flip?)"]),
]
# A file is replaced by one of its own kind.
OTHER_KINDS = {
    "checkpoint": (b"PK\x03\x04\0\0archive/data.pkl" + bytes(654_000), "other data"),
    "manifest": (b'{\n  "settings": {"sigma": 0.25}\n}\n', "text that begins with '{'"),
    "log": (b"idx\tlabel\tpredict\n0\t3\t3\n", r"text that begins with 'idx\tlabel"),
    "training log": (b"epoch\ttime\tlr\n0\t1\t0.1\n", r"text that begins with 'epoch\ttime"),
    "grid": (b'command = "train"\n[train]\n', "text that begins with 'command = \"train\"'"),
    "program": (b"import csv, sys\n", "text that begins with 'import csv, sys'"),
    "labels of somebody": (b"id,label\n0,1\n", "text that begins with 'id,label'"),
    "records of somebody": (b'[\n  {\n    "id": 1\n  }\n]\n', "text that begins with '['"),
}
KINDS = [
    *((["table", "-o", f"kinds/{name}"], name, says) for name, (_, says) in OTHER_KINDS.items()),
    (["table", "--format", "csv", "-o", "kinds/checkpoint"], "checkpoint", "other data"),
    (["plot", "-o", "kinds/png/out"], "kinds/png/out.png", "other data"),
    (["plot", "-o", "kinds/pdf/out"], "kinds/pdf/out.pdf", "other data"),
    (["plot", "-o", "kinds/curves.svg"], "kinds/curves.svg", "text that begins with 'mine'"),
    (
        ["table", "-o", "new.md", "-o", "kinds/log"],
        "kinds/log",
        r"text that begins with 'idx\tlabel",
    ),
    (["report", "-o", "kinds/page/report.html"], "kinds/page/report.html", "other data"),
    (["report", "-o", "kinds/page"], "kinds/page/report.html", "other data"),
    (["report", "-o", "kinds/log.html"], "kinds/log.html", r"text that begins with 'idx\tlabel"),
]
OUTPUTS = [
    *(
        (["analyze", kind, "log.tsv", "--sigma", "0.25", *options], [path, f" but {says}"])
        for (kind, *options), path, says in KINDS
    ),
    *(
        (
            ["analyze", kind, "log.tsv", "--sigma", "0.25", "-o", path],
            [f"{path} is no regular file"],
        )
        for kind, paths in {"table": ("pipe", "full"), "report": ("pipe.html", "full.html")}.items()
        for path in paths
    ),
    *(
        (replaced(TRAIN, outdir=folder), [f"{folder}/{name}", "2 March"])
        for folder, name in (("notes", "log.txt"), ("further_notes", "args.json"))
    ),
]
# What a training cannot begin with, stand behind, or continue.
BEGINNINGS = [
    ([*TRAIN, "--denoiser", "none.pth.tar"], ["none.pth.tar does not exist"]),
    ([*TRAIN, "--denoiser", "openai:none.pt"], ["--denoiser openai:none.pt", "cannot be read"]),
    ([*TRAIN, "--denoiser", "diffusers:none"], ["--denoiser diffusers:none", "config.json"]),
    ([*TRAIN, "--denoiser", "model.tar"], ["model.tar", "no denoiser"]),
    ([*TRAIN, "--lora", "2"], ["--lora", "Vision Transformer"]),
    ([*replaced(TRAIN, outdir="foreign"), "--resume"], ["not written by smoothadv"]),
    (
        [*replaced(TRAIN, arch="cifar_resnet20"), "--pretrained-model", "model.tar"],
        ["is not a cifar_resnet20"],
    ),
    *(
        ([*TRAIN, "--pretrained-model", *words.split()], found)
        for words, found in {
            "keys.tar": ["keys.tar", "is not a digits_resnet8"],
            "missing.tar": ["missing.tar", "does not exist"],
            "model.tar --input-layer center": ["'center'", "'normalize'"],
            "silent.tar": ["silent.tar", "--input-layer"],
        }.items()
    ),
]
IMAGES = "images digits model.tar 0.25".split()
CASES = [
    # Checkpoints.
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
    # Before anything is downloaded.
    (replaced(CERTIFY, dataset="cifar10"), FAILURE, ["model.tar", "'cifar10'", "image_shape"]),
    ([*CERTIFY, "--input-layer", "center"], FAILURE, ["normalize", "center"]),
    # Numbers.
    *(
        (replaced(CERTIFY, sigma=sigma), USAGE, ["SIGMA", sigma])
        for sigma in ("0", "-1", "nan", "inf", "a quarter", "1/0", "64/")
    ),
    (replaced(PREDICT, sigma="0"), USAGE, ["SIGMA", "'0'"]),
    ([*TRAIN, "--noise", "-0.25"], USAGE, ["--noise", "-0.25"]),
    ([*TRAIN, "--noise", "nan"], USAGE, ["--noise", "nan"]),
    *(
        ([*PREDICT, *PGD, "--epsilon", size], USAGE, ["--epsilon", size])
        for size in ("-1", "1/0", "nan", "1/2/3")
    ),
    ([*TRAIN_PGD, *PGD, "--epsilon", "127"], USAGE, ["--epsilon", "127/255"]),
    *(
        ([*CERTIFY, "--alpha", alpha], USAGE, ["--alpha", alpha, "0 and 1"])
        for alpha in ("0", "1", "-0.5", "x")
    ),
    *(
        ([*CERTIFY, option, "0"], USAGE, [option, "'0'"])
        for option in ("--max", "--skip", "--N", "--N0", "--batch")
    ),
    ([*CERTIFY, "--N", "1.5e0"], USAGE, ["--N", "1.5e0", "whole number"]),
    ([*CERTIFY, "--seed", "-1"], USAGE, ["--seed", "-1"]),
    ([*CERTIFY, "--max", "-2"], USAGE, ["--max", "-2"]),
    ([*PREDICT, *PGD, "--num-steps", "0"], USAGE, ["--num-steps", "'0'"]),
    ([*PREDICT, *DDN, "--gamma-DDN", "1"], USAGE, ["--gamma-DDN", "'1'"]),
    *(
        ([*TRAIN, option, "0"], USAGE, [option, "'0'"])
        for option in ("--epochs", "--batch", "--lr", "--lr-step-size")
    ),
    ([*CERTIFY, "--device", "nonsense"], USAGE, ["--device", "nonsense"]),
    ([*CERTIFY, "--device", "cuda:99"], USAGE, ["--device", "cuda:99"]),
    # Names.
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
    ([*CERTIFY, "--input-layer", "whiten"], USAGE, ["--input-layer", "normalize", "center"]),
    (["analyze", "summaries", "log.tsv"], USAGE, ["summaries", "summary", "table", "plot"]),
    # An abbreviation may mean something else tomorrow.
    ([*CERTIFY, "--alph", "0.01"], USAGE, ["--alph"]),
    (["certify", *IMAGES, "file"], FAILURE, ["file cannot be read as an image"]),
    (["certify", *IMAGES, "folder"], FAILURE, ["folder holds no images: no file ends in .jpg"]),
    # Contradictions.
    (["certify", *IMAGES, "images", "--timestep", "3"], USAGE, ["--timestep is for a diffusion"]),
    ([*TRAIN_PGD, *PGD, "--init-norm-DDN", "1"], USAGE, ["--init-norm-DDN", "PGD"]),
    ([*TRAIN_PGD, *DDN, "--random-start"], USAGE, ["--random-start", "DDN"]),
    ([*TRAIN, *PGD], USAGE, ["--attack", "gaussian"]),
    ([*TRAIN, "--epsilon", "0.5"], USAGE, ["--epsilon", "gaussian"]),
    ([*TRAIN, "--warmup", "5"], USAGE, ["--warmup", "gaussian"]),
    ([*TRAIN, "--num-noise-vec", "2"], USAGE, ["--num-noise-vec", "gaussian"]),
    (
        [*TRAIN_PGD, *PGD, "--noise", "0", "--gradient", "stein"],
        USAGE,
        ["--gradient stein", "noise"],
    ),
    (
        [*TRAIN_PGD[:4], *PGD, "--gradient", "stein"],
        USAGE,
        ["give --noise"],
    ),
    ([*PREDICT, "--num-noise-vec", "2"], USAGE, ["--num-noise-vec", "--attack"]),
    ([*PREDICT, "--epsilon", "0.5"], USAGE, ["--epsilon", "--attack"]),
    ([*PREDICT, "--gradient", "base"], USAGE, ["--gradient", "--attack"]),
    ([*TRAIN_PGD, *PGD, "--gradient", "base"], USAGE, ["--gradient", "'base'"]),
    # Omissions.
    (TRAIN[:-2], USAGE, ["--noise"]),
    ([*TRAIN_PGD[:-2], *PGD], USAGE, ["--noise"]),
    ([*TRAIN_PGD, "--attack", "PGD", "--num-steps", "2"], USAGE, ["--epsilon"]),
    ([*TRAIN_PGD, "--attack", "PGD", "--epsilon", "1"], USAGE, ["--num-steps"]),
    (TRAIN_PGD, USAGE, ["--attack", "PGD", "DDN"]),
    (CERTIFY[:3], USAGE, ["SIGMA", "OUTFILE"]),
    (["analyze"], USAGE, ["ANALYSIS"]),
    # Files that cannot be read or written.
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
    (replaced(TRAIN, dataset="imagefolder:nowhere"), FAILURE, ["there is no folder", "nowhere"]),
    (replaced(TRAIN, dataset="imagefolder:folder"), FAILURE, ["holds nothing", "train", "test"]),
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
    (["certify", "merge", "out.tsv", "gone.tsv"], FAILURE, ["gone.tsv: it does not exist"]),
    (["analyze", "summary", "nothing/*.tsv"], FAILURE, ["nothing/*.tsv"]),
    (["analyze", "summary", "folder"], FAILURE, ["folder", "certification log"]),
    (["analyze", "summary", "file"], FAILURE, ["file"]),
    (["analyze", "summary", "corrupt.tar"], FAILURE, ["corrupt.tar"]),
    (["analyze", "summary", "binary"], FAILURE, ["binary"]),
    (["analyze", "summary", "header.tsv"], FAILURE, ["header.tsv", "no rows"]),
    *((["cite", "log.tsv", one], FAILURE, [one, "no log"]) for one in ("folder", "binary")),
    (["cite", "log.tsv", "gone"], FAILURE, ["gone", "no file"]),
    # Paths that name no file.
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
    ([*ANALYZE, "curves.jpg"], USAGE, ["-o curves.jpg", "not JPG"]),
    (["analyze", "report", "log.tsv", "-o", ""], USAGE, ["-o", "''", "write . for this one"]),
    (["sweep", "report", "grid.toml", "-o", ""], USAGE, ["-o", "''", "the file to write"]),
    (replaced(TRAIN, outdir=""), USAGE, ["OUTDIR", "''", "write . for this one"]),
    (
        ["attack", *CERTIFY[1:4], "", "--epsilon", "0.5"],
        USAGE,
        ["OUTDIR", "''", "write . for this one"],
    ),
    # Numbers beyond all sense.
    (
        ["analyze", "envelope", "log.tsv", "--decimals", "9223372036854775808"],
        USAGE,
        ["--decimals", "0 to 100"],
    ),
    (["analyze", "envelope", "log.tsv", "--decimals", "101"], USAGE, ["--decimals", "0 to 100"]),
    ([*PREDICT, *PGD, "--num-steps", MANY], USAGE, ["--num-steps", MANY, "4,000,000,000"]),
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
    # Plug-ins.
    *(
        ([command, "--plugin", "gone.py"], USAGE, ["gone.py cannot be read"])
        for command in ("train", "train_pgd", "certify", "predict", "attack", "analyze", "sweep")
    ),
    (["sweep", "status", "gone.toml"], USAGE, ["gone.py cannot be read"]),
    (["sweep", "status", "text.toml"], FAILURE, ["list of texts"]),
    (["certify", "--plugin"], USAGE, ["--plugin: expected one argument"]),
    (
        ["certify", "--plugin=bad.py"],
        FAILURE,
        ["plug-in bad.py cannot be loaded: ZeroDivisionError"],
    ),
    (["certify", "--plugin", "shapes.py", "--plugin", "bad.py"], FAILURE, ["plug-in bad.py"]),
    *(
        (command, USAGE, [f"unknown {wrong}", "; --plugin FILE adds your own"])
        for wrong, command in (
            ("dataset 'shapes'", replaced(TRAIN, dataset="shapes")),
            ("architecture 'shapes_cnn'", replaced(TRAIN, arch="shapes_cnn")),
            ("objective 'soft_gaussian'", [*TRAIN, "--objective", "soft_gaussian"]),
            ("dataset 'digit'", replaced(CERTIFY, dataset="digit", checkpoint="missing.tar")),
        )
    ),
    # And those whose exit code or last words are the same in all.
    *((command, code, [*words, "replaced"]) for command, code, words in OVER_INPUTS),
    *((command, FAILURE, words) for command, words in (*ATTACK_FAILURES, *BEGINNINGS)),
    *((command, FAILURE, [*words, "name another file"]) for command, words in OUTPUTS),
    *((command, USAGE, words) for command, words in (*ATTACK_USAGES, *METHODS, *THREADS)),
    *(
        (command, USAGE, [*words, f"(see smoothadv {command[0]}", " --help)"])
        for command, words in MISTYPED
    ),
]


def write_images(folder: Path, *sizes: tuple[int, int]) -> None:
    """A dataset of two classes; image i of each class has sizes[i] (width, height)."""
    for split, label, number in product(("train", "test"), "ab", range(len(sizes))):
        grey = np.full(sizes[number][::-1], 100 + number, dtype=np.uint8)
        save_image(folder / split / label / f"{number}.png", grey)


HEADER = "idx\tlabel\tpredict\tradius\tcorrect\ttime\n"
TEXTS = {
    "file": "I am a file.\n",
    "log.tsv": HEADER + "0\t1\t1\t0.5\t1\t0:00:01\n",
    "header.tsv": HEADER,
    "nothing.tsv": HEADER + "0\t8\t-1\t0.0\t0\t0:00:01\n1\t8\t8\t0.0\t1\t0:00:01\n",
    "bad_manifest.tsv": HEADER + "0\t8\t8\t0.1\t1\t0:00:01\n",
    "bad_manifest.tsv.manifest.json": "{",
    "no_image.tsv": HEADER + "1\t8\t8\t0.1\t1\t0:00:01\n5000\t8\t8\t0.1\t1\t0:00:01\n",
    "no_class.tsv": HEADER + "1\t8\t8\t0.1\t1\t0:00:01\n0\t8\t500\t0.1\t0\t0:00:01\n",
    "too_large.tsv": HEADER + "0\t8\t8\t10\t1\t0:00:01\n",
    "against.tsv": (
        "idx\tlabel\tpredict\tbasePredict\tcorrect\ttime\tattack_norm\tepsilon\tabstain\tcertified"
        "\tradius\tflipped\n0\t8\t8\t8\t1\t0:00:01\t0.1\t0.1\t0\t8\t0.1\t0\n"
    ),
    "kinds/curves.svg": "mine",
    "kinds/log.html": "idx\tlabel\tpredict\n0\t3\t3\n",
    "notes/log.txt": "2 March: rerun with sigma 0.5\n",
    "further_notes/args.json": "2 March: rerun with sigma 0.5\n",
    "bad.py": "1 / 0",
    "shapes.py": SHAPES,
    "gone.toml": GRID.replace('["shapes.py"]', "['gone.py']"),
    "text.toml": GRID.replace('["shapes.py"]', "'shapes.py'"),
}
EMPTY = "grid.toml other.tsv".split()
FOLDERS = "folder foreign trained notes further_notes kinds/png kinds/pdf kinds/page".split()
TRAINED = "checkpoint.pth.tar args.json log.txt".split()


@pytest.fixture(scope="module")
def place(checkpoint, tmp_path_factory) -> Path:
    """A folder with all files that the table names, good and bad; no case may change them."""
    place = tmp_path_factory.mktemp("place")
    good = torch.load(checkpoint, weights_only=True)
    (place / "model.tar").write_bytes(checkpoint.read_bytes())
    (place / "corrupt.tar").write_bytes(checkpoint.read_bytes()[:5000])
    torch.save({**good, "arch": "resnet_of_mine"}, place / "unknown_arch.tar")
    torch.save({**good, "epoch": 99}, place / "other.tar")
    keys = {f"{key}s": value for key, value in good["state_dict"].items()}
    torch.save({**good, "state_dict": keys}, place / "keys.tar")
    torch.save({**good, "input_layer": None}, place / "silent.tar")
    (place / "link.tar").symlink_to("model.tar")
    (place / "binary").write_bytes(bytes(range(256)))
    for folder in FOLDERS:
        (place / folder).mkdir(parents=True)
    for name, (content, _) in OTHER_KINDS.items():
        (place / "kinds" / name).write_bytes(content)
    for name in ("png/out.png", "pdf/out.pdf", "page/report.html"):
        (place / "kinds" / name).write_bytes(OTHER_KINDS["checkpoint"][0])
    for name in ("pipe", "pipe.html"):
        os.mkfifo(place / name)
        (place / name.replace("pipe", "full")).symlink_to("/dev/full")
    for name in [*EMPTY, *(f"trained/{name}" for name in TRAINED)]:
        (place / name).touch()
    foreign = {name: value for name, value in good.items() if name != "recipe"}
    torch.save(foreign, place / "foreign/checkpoint.pth.tar")
    for name, text in TEXTS.items():
        (place / name).write_text(text)
    small = ("--device", "cpu", "digits", checkpoint, 0.25)
    succeed("certify", *small, place / "certified.tsv", "--N", 300, "--max", 4)
    succeed("predict", *small, place / "prediction.tsv", "--N", 11, "--max", 1)
    write_images(place / "images", (8, 8))
    write_images(place / "mixed", (8, 8), (6, 8))
    write_images(place / "torn", (8, 8), (8, 8))
    (place / "torn/train/a/1.png").write_bytes(b"\x89PNG\r\n")
    assert rows(place / "certified.tsv")[3]["predict"] != "-1", "the good commands attack image 3"
    return place


@pytest.fixture(scope="module")
def before(place) -> dict[str, bytes | None]:
    """All files there, which no bad command changes."""
    return snapshot(place)


@pytest.mark.parametrize(
    ("command", "code", "words"), [pytest.param(*case, id=" ".join(case[0])) for case in CASES]
)
def test_bad_input_gets_one_line_and_leaves_nothing(
    command, code, words, place, before, monkeypatch, capsys
):
    monkeypatch.chdir(place)
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
