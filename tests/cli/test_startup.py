"""What a command imports before it works: help texts and usage errors wait for no library that they
do not need.
"""

import json
import sys

from smoothadv.architectures import INPUT_LAYERS
from smoothadv.base.settings import INPUT_LAYER_NAMES, PRECISION_NAMES
from smoothadv.voting.classifier import PRECISIONS
from support.commands import CODE, run_process

# Each takes a noticeable part of the time that torch takes.
SLOW = [
    "PIL",
    "huggingface_hub",
    "jinja2",
    "matplotlib",
    "mpmath",
    "pandas",
    "safetensors",
    "scipy.stats",
    "sklearn",
    "statsmodels",
    "torchvision",
    "torch._dynamo",
    "torch._inductor",
]
# Runs command lines one after the other; prints after each which of the modules have been imported
# by then.
PROGRAM = """
import json, sys
from smoothadv.cli import main
lines, watched = map(json.loads, sys.argv[1:])
for line in lines:
    code = main(line)
    print("\\nend", code, *(name for name in watched if name in sys.modules))
"""
# With the exit code of each.
WITHOUT_TORCH = [
    (["--help"], 0),
    (["--version"], 0),
    (["certfy"], 2),
    (["certify", "--help"], 0),
    (["certify", "--version"], 0),
    (["certify"], 2),
    (["certify", "digits", "c.pth.tar", "0", "log.tsv"], 2),
    (["certify", "digits", "c.pth.tar", "0.25", "log.tsv", "--precison", "bf16"], 2),
    (["certify", "digits", "c.pth.tar", "0.25", "log.tsv", "--method", "adaptiv"], 2),
    (["certify", "digits", "c.pth.tar", "0.25", "log.tsv", "--radii", "0.5"], 2),
    (["certify", "merge", "--help"], 0),
    (["analyze", "--help"], 0),
    (["analyze", "plot", "--help"], 0),
    (["analyze", "tabel"], 2),
    (["push", "--help"], 0),
    (["push", "model.pth.tar", "me"], 2),
    (["sweep", "--help"], 0),
    (["sweep", "run", "--help"], 0),
    (["sweep", "run", "grid.toml", "--engine", "locl"], 2),
    (["sweep", "plan", "nowhere.toml"], 1),
]
# Only torch knows whether there is such a device.
NO_DEVICE = ["certify", "digits", "c.pth.tar", "0.25", "log.tsv", "--device", "nowhere"]
WITH_TORCH = [
    (NO_DEVICE, 2),
    *(([name, "--help"], 0) for name in ("train", "train_pgd", "predict", "attack")),
]


def imported(lines: list[list[str]], watched: list[str], folder) -> list[tuple[int, set[str]]]:
    """The exit code of each command line, and which of the modules it or an earlier one has
    imported.
    """
    words = [sys.executable, "-c", PROGRAM, json.dumps(lines), json.dumps(watched)]
    done = run_process(words, folder, PYTHONPATH=str(CODE))
    assert done.returncode == 0, done.stderr
    ends = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("end ")]
    assert len(ends) == len(lines)
    return [(int(code), set(names)) for code, *names in ends]


def test_commands_import_no_library_that_they_do_not_need(checkpoint, tmp_path):
    """In one process: help texts and usage errors without torch, then those with it, then a
    certification.
    """
    certify = [
        "certify",
        "digits",
        str(checkpoint),
        "0.25",
        str(tmp_path / "log.tsv"),
        "--N",
        "100",
        "--max",
        "1",
    ]
    lines = [line for line, _ in WITHOUT_TORCH + WITH_TORCH]
    *found, (code, at_work) = imported(
        [*lines, [*certify, "--device", "cpu"]], ["torch", *SLOW], tmp_path
    )
    assert list(zip(lines, found)) == [
        *((line, (code, set())) for line, code in WITHOUT_TORCH),
        *((line, (code, {"torch"})) for line, code in WITH_TORCH),
    ]
    # The images come with scikit-learn, which imports SciPy and, where it is installed, pandas.
    assert code == 0 and at_work - {"scipy.stats", "pandas"} == {"torch", "sklearn"}


def test_names_that_help_texts_list_are_those_that_torch_code_defines():
    assert list(INPUT_LAYER_NAMES) == list(INPUT_LAYERS) and list(PRECISION_NAMES) == list(
        PRECISIONS
    )
