"""How many threads PyTorch uses: usable CPUs, size of images, --threads, and what goes on."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from smoothadv.cpus import shorten_waiting, suitable_threads, usable_cpus
from support.commands import CODE, call, refused, run_process, succeed

CGROUPS = {
    "none": ({}, 8),
    "no quota": ({"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/cpu.max": "max 100000"}, 8),
    "quota": ({"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/cpu.max": "350000 100000\n"}, 3),
    "less than a CPU": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
    "of a group around": (
        {"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "4 2", "sys/fs/cgroup/a/b/cpu.max": "9 2"},
        2,
    ),
    "version 1": (
        {
            "proc/self/cgroup": "5:memory:/m\n4:cpu,cpuacct:/a\n0::/",
            "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "500000",
            "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
        5,
    ),
}


@pytest.fixture
def free_choice(monkeypatch, one_thread) -> None:
    """No environment says how many threads to use, and PyTorch would use two."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    torch.set_num_threads(2)


@pytest.mark.parametrize(("files", "expected"), CGROUPS.values(), ids=CGROUPS)
def test_usable_cpus(files, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8), raising=False)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cpus(tmp_path) == expected
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert usable_cpus(tmp_path) == max(1, expected // 3)


def test_threads_suit_images_and_cpus(monkeypatch, free_choice):
    monkeypatch.setattr("smoothadv.cpus.usable_cpus", lambda: 12)
    threads = [suitable_threads(shape, 99) for shape in ((1, 8, 8), (1, 4, 4), (1, 16, 16), (3, 32, 32), (3, 224, 224))]
    assert threads == [1, 1, 4, 12, 12]
    assert suitable_threads((3, 32, 32), 6) == 6, "PyTorch would not use more"
    monkeypatch.setenv("OMP_NUM_THREADS", "99")
    assert suitable_threads((1, 8, 8), 99) == 99


@pytest.mark.parametrize(
    "command", ["train", "train_pgd", "train_denoiser", "quantize", "certify", "predict", "attack", "certify verify"]
)
def test_every_command_that_computes_has_the_option(command, capsys):
    name, *further = command.split()
    assert refused(call(capsys, name, *further, "--threads", 0), "--threads", "'0'", "from 1 to 1,024", code=2)


def test_log_goes_on_with_its_threads(free_choice, monkeypatch, checkpoint, workplace):
    def certified(*options: object) -> list[int]:
        common = ["digits", checkpoint, "0.25", "log.tsv", "--N", 200, "--sound", "--device", "cpu"]
        succeed("certify", *common, *options)
        runs = json.loads(Path("log.tsv.manifest.json").read_text())["runs"]
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        torch.set_num_threads(2)
        return [run["torch_threads"] for run in runs]

    assert certified("--max", 1) == [1], "images of 8x8"
    assert certified("--max", 1, "--overwrite", "--threads", 3) == [3]
    assert certified("--max", 2) == [3, 3], "a setting of the log"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert certified("--max", 1, "--overwrite") == [2]
    torch.set_num_threads(1)
    succeed("certify", "verify", "log.tsv")


def test_training_goes_on_with_its_threads(free_choice, monkeypatch, workplace):
    def trained(folder: str, *options: object) -> list[int]:
        common = ["--noise", 0.25, "--steps-per-epoch", 2, "--evaluate-images", 1, "--device", "cpu", "--epochs"]
        succeed("train", "digits", "digits_resnet8", folder, *common, *options)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        torch.set_num_threads(2)
        return [run["torch_threads"] for run in json.loads(Path(folder, "args.json").read_text())["runs"]]

    assert trained("parts", 1, "--threads", 2) == [2]
    assert trained("parts", 2, "--resume") == [2, 2]
    assert trained("whole", 2, "--threads", 2) == [2]
    parts, whole = (torch.load(f"{name}/checkpoint.pth.tar", weights_only=True) for name in ("parts", "whole"))
    assert all(torch.equal(parts["state_dict"][name], value) for name, value in whole["state_dict"].items())
    record = json.loads(Path("whole/args.json").read_text())
    del record["runs"][0]["torch_threads"]
    Path("whole/args.json").write_text(json.dumps(record))
    assert trained("whole", 3, "--resume")[-1] == 2, "an older training took PyTorch's number"
    assert trained("new", 1) == [1]


def test_threads_that_wait_sleep_soon_unless_told_otherwise(monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    shorten_waiting()
    assert "GOMP_SPINCOUNT" not in os.environ
    monkeypatch.delenv("OMP_WAIT_POLICY")
    shorten_waiting()
    assert os.environ["GOMP_SPINCOUNT"] == "1000"


def test_waiting_is_set_before_torch_is_loaded(tmp_path):
    seen = "commands.shorten_waiting = lambda: print('torch' in sys.modules)"
    program = f"import sys; from smoothadv import commands; {seen}; commands.main(['train', '--help'])"
    done = run_process([sys.executable, "-c", program], tmp_path, PYTHONPATH=str(CODE))
    assert done.stdout.startswith("False\n") and "--threads N" in done.stdout
