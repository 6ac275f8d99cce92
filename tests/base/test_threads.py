"""How many threads PyTorch uses: usable CPUs, size of images, --threads, and what goes on."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from smoothadv.base.cpus import suitable_threads, usable_cpus
from support.commands import CODE, run_process, succeed
from support.trainings import same_state


@pytest.fixture
def free_choice(monkeypatch) -> None:
    """No environment says how many threads to use, and PyTorch would use two."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    torch.set_num_threads(2)


def test_usable_cpus_are_shared(monkeypatch):
    monkeypatch.setattr("joblib.cpu_count", lambda: 8)
    assert usable_cpus() == 8
    sharing = [("LOCAL_WORLD_SIZE", "3", 2), ("SMOOTHADV_JOBS", "2", 1), ("SMOOTHADV_JOBS", "9", 1)]
    for name, value, count in sharing:
        monkeypatch.setenv(name, value)
        assert usable_cpus() == count


def test_threads_suit_images_and_cpus(monkeypatch, free_choice):
    monkeypatch.setattr("smoothadv.base.cpus.usable_cpus", lambda: 12)
    threads = [
        suitable_threads(shape, 99)
        for shape in ((1, 8, 8), (1, 4, 4), (1, 16, 16), (3, 32, 32), (3, 224, 224))
    ]
    assert threads == [1, 1, 4, 12, 12]
    assert suitable_threads((3, 32, 32), 6) == 6, "PyTorch would not use more"
    monkeypatch.setenv("OMP_NUM_THREADS", "99")
    assert suitable_threads((1, 8, 8), 99) == 99


@pytest.fixture
def used(free_choice, monkeypatch) -> Callable[..., list[int]]:
    """Runs a command; returns the threads of all runs in the record that it writes."""

    def run(record: str, *words: object) -> list[int]:
        succeed(*words, "--device", "cpu")
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        torch.set_num_threads(2)
        return [run["torch_threads"] for run in json.loads(Path(record).read_text())["runs"]]

    return run


def test_log_goes_on_with_its_threads(used, monkeypatch, checkpoint, workplace):
    certify = ["certify", "digits", checkpoint, 0.25, "log.tsv", "--N", 200, "--sound"]
    words = ["log.tsv.manifest.json", *certify]
    assert used(*words, "--max", 1) == [1], "images of 8x8"
    assert used(*words, "--max", 1, "--overwrite", "--threads", 3) == [3]
    assert used(*words, "--max", 2) == [3, 3], "a setting of the log"
    succeed("certify", "verify", "log.tsv", "--device", "cpu")
    torch.set_num_threads(2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert used(*words, "--max", 1, "--overwrite") == [2]


def test_command_that_names_no_images_keeps_to_the_usable_cpus(
    used, monkeypatch, checkpoint, workplace
):
    words = ["certify", "digits", checkpoint, 0.25, "log.tsv", "--N", 200, "--max", 1]
    used("log.tsv.manifest.json", *words)
    monkeypatch.setattr("smoothadv.models.spec.usable_cpus", lambda: 1)
    succeed("certify", "verify", "log.tsv", "--device", "cpu")
    assert torch.get_num_threads() == 1


def test_training_goes_on_with_its_threads(used, workplace):
    few = ["--noise", 0.25, "--steps-per-epoch", 1, "--batch", 32, "--evaluate-images", 1]

    def trained(folder: str, epochs: int, *options: object) -> list[int]:
        words = ["train", "digits", "digits_resnet8", folder, *few, "--epochs", epochs, *options]
        return used(f"{folder}/args.json", *words)

    assert trained("new", 1) == [1] and trained("whole", 2, "--threads", 2) == [2]
    assert trained("parts", 1, "--threads", 2) == [2] and trained("parts", 2, "--resume") == [2, 2]
    assert same_state(Path("parts"), Path("whole"))


PROGRAM = """
import os, sys
from smoothadv import cli as commands
commands.COMMANDS["train"] = lambda words: print(
    os.environ.get("GOMP_SPINCOUNT"), "torch" in sys.modules
)
for given in ({}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        os.environ.pop(name, None)
    os.environ.update(given)
    commands.main(["train"])
"""


def test_threads_that_wait_sleep_soon_unless_told_otherwise(tmp_path):
    """Set before torch is loaded, whose libraries read it."""
    done = run_process([sys.executable, "-c", PROGRAM], tmp_path, PYTHONPATH=str(CODE))
    assert done.stdout == "1000 False\n7 False\nNone False\n", done.stderr
