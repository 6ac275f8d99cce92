"""Training on several nodes of a real Slurm: whatever ends a job early, it continues to the same
weights.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.commands import CODE, rows, timeless
from support.slurm import Cluster, why_not
from support.trainings import read, same_state

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=why_not() or "")]
CLONE = CODE.parent
SCRIPT = CLONE / "scripts/slurm/train_multinode.sbatch"
# 12 steps each; at every tenth step the processes decide whether to save or stop.
EPOCHS = 40
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def submit(
    cluster: Cluster, folder: Path, *options: object, epochs: int = EPOCHS, time: int = 10
) -> int:
    """Submit a job that trains in ``folder / "run"`` and prints to ``folder / "output.txt"``;
    returns its number.
    """
    training = [
        "train",
        "digits",
        "digits_resnet8",
        folder / "run",
        "--noise",
        0.25,
        "--device",
        "cpu",
    ]
    where = [f"--output={folder / 'output.txt'}", f"--time={time}"]
    return cluster.submit(*where, SCRIPT, *training, "--epochs", epochs, *options, cwd=CLONE)


def output_of(folder: Path) -> str:
    return (folder / "output.txt").read_text() if (folder / "output.txt").exists() else ""


def has_epochs(folder: Path, count: int) -> bool:
    log = folder / "run/log.txt"
    return log.exists() and len(rows(log)) >= count


def final_state(cluster: Cluster, job: int) -> str:
    cluster.wait_until(lambda: cluster.jobs()[str(job)] in ENDED)
    return cluster.jobs()[str(job)]


@pytest.fixture(scope="module")
def whole(cluster, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert final_state(cluster, submit(cluster, folder)) == "COMPLETED", output_of(folder)
    assert "2 processes on cpu" in output_of(folder) and len(read(folder / "run")["runs"]) == 1
    return folder / "run"


def preempt(cluster: Cluster, job: int) -> None:
    """Another job takes both nodes, for a moment."""
    command = [
        "--partition=high",
        "--nodes=2",
        "--ntasks=4",
        "--output=/dev/null",
        "--wrap=srun true",
    ]
    assert final_state(cluster, cluster.submit(*command, cwd=cluster.folder)) == "COMPLETED"


def lose_node(cluster: Cluster, job: int) -> None:
    cluster.lose("n1")
    cluster.wait_until(lambda: "down" in cluster.run("sinfo"))
    cluster.recover("n1")


FAULTS = {
    "requeued by hand": lambda cluster, job: cluster.run("scontrol", "requeue", job),
    "asked to stop": lambda cluster, job: cluster.run("scancel", "--signal=TERM", job),
    "preempted": preempt,
    "node lost": lose_node,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_disturbed_job_ends_with_the_weights_of_one_that_was_not(cluster, whole, tmp_path, fault):
    job = submit(cluster, tmp_path)
    cluster.wait_until(lambda: has_epochs(tmp_path, 2))
    FAULTS[fault](cluster, job)
    assert final_state(cluster, job) == "COMPLETED", output_of(tmp_path)
    assert cluster.job(job)["Restarts"] == "1"
    assert same_state(tmp_path / "run", whole)
    assert timeless(tmp_path / "run/log.txt") == timeless(whole / "log.txt")
    first, second = read(tmp_path / "run")["runs"]
    assert (
        (second["first_epoch"], second["first_step"])
        >= (2, 0)
        > (first["first_epoch"], first["first_step"])
    )
    if fault != "node lost":
        assert "stopped by SIGTERM" in output_of(tmp_path)
        step = second["first_step"]
        assert step in (0, 12) or (12 * second["first_epoch"] + step) % 10 == 0, (
            "where the processes agree to stop"
        )


def test_job_is_stopped_before_its_time_is_over_and_goes_on(cluster, tmp_path):
    """Its limit is one minute, so the signal two minutes before the end is due at once; Slurm
    checks twice a minute.
    """
    job = submit(cluster, tmp_path, epochs=100_000, time=1)
    try:
        cluster.wait_until(lambda: "resuming after epoch" in output_of(tmp_path))
    finally:
        cluster.run("scancel", job)
    assert "stopped by SIGTERM" in output_of(tmp_path) and "TIME LIMIT" not in output_of(tmp_path)


def test_cancelled_job_does_not_come_back(cluster, tmp_path):
    job = submit(cluster, tmp_path, epochs=100_000)
    cluster.wait_until(lambda: has_epochs(tmp_path, 1))
    cluster.run("scancel", job)
    assert final_state(cluster, job) == "CANCELLED" and cluster.job(job)["Restarts"] == "0"
    assert "stopped by SIGTERM" in output_of(tmp_path) and "to be continued" not in output_of(
        tmp_path
    )


def test_refused_option_ends_the_job(cluster, tmp_path):
    job = submit(cluster, tmp_path, "--no-such-option")
    assert final_state(cluster, job) == "FAILED" and cluster.job(job)["Restarts"] == "0"
    assert "error: unknown option --no-such-option" in output_of(tmp_path)


@pytest.mark.parametrize(
    "arguments", [[], ["train", "digits"], ["no_such_command", "digits", "digits_resnet8", "run"]]
)
def test_script_says_how_it_is_used(cluster, tmp_path, arguments):
    job = cluster.submit(f"--output={tmp_path / 'output.txt'}", SCRIPT, *arguments, cwd=CLONE)
    assert final_state(cluster, job) == "FAILED" and cluster.job(job)["ExitCode"] == "2:0"
    assert output_of(tmp_path).startswith("usage: sbatch ") and output_of(tmp_path).count("\n") == 1
