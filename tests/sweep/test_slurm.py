"""Sweeps on a real Slurm: whatever happens to jobs, models and logs equal those of an undisturbed
sweep; training on several nodes, which whatever ends a job early continues to the same weights.
"""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import sweep_runs
from support.commands import CODE, rows, timeless
from support.slurm import Cluster, why_not
from support.sweep_runs import NAMES
from support.trainings import read, same_state

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=why_not() or "")]
IN_QUEUE = {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "SUSPENDED", "STOPPED"}
RUN = ["run", "--engine", "slurm", "--device", "cpu"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture
def cluster(shared) -> Iterator[Cluster]:
    """Slurm without a job, before and after."""
    yield shared
    for number in queue(shared):
        shared.run("scancel", "--full", "--signal=KILL", number)
        shared.run("scancel", number)
    shared.wait_until(lambda: not queue(shared))


def queue(cluster: Cluster) -> list[str]:
    return [number for number, state in cluster.jobs().items() if state in IN_QUEUE]


def job_id(folder: Path, name: str) -> str:
    """The number that Slurm has given to a job, once its record says so."""
    record = folder / "logs/tiny" / name / "job.json"
    found = re.search('"id": "([0-9_]+)"', record.read_text()) if record.exists() else None
    return found[1] if found else ""


def restarts(cluster: Cluster, folder: Path) -> dict[str, int]:
    """How often each job was put into the queue again."""
    return {name: int(cluster.job(job_id(folder, name))["Restarts"]) for name in NAMES}


def assert_went_on(folder: Path, name: str) -> None:
    """A training was stopped by SIGTERM, and later continued from what it had saved."""
    first, _, second = sweep_runs.job_log(folder, name).partition("stopped by SIGTERM")
    assert "resuming" not in first and "resuming" in second, sweep_runs.job_log(folder, name)


def test_preempted_jobs_go_on(cluster, folder, reference):
    """A job of higher priority takes both nodes while they train. 60 seconds."""
    with sweep_runs.started(folder, *RUN, environment=cluster.environment) as running:
        running.wait_until(lambda: sweep_runs.in_training(folder))
        command = [
            "--partition=high",
            "--nodes=2",
            "--exclusive",
            "--output=/dev/null",
            "--wrap=sleep 1",
        ]
        other = str(cluster.submit(*command, cwd=cluster.folder))
        cluster.wait_until(lambda: cluster.jobs()[other] == "COMPLETED")
        sweep_runs.assert_done(running, reference)
    requeued = [name for name, count in restarts(cluster, folder).items() if count]
    stopped = [
        name for name in requeued if "stopped by SIGTERM" in sweep_runs.job_log(folder, name)
    ]
    assert stopped
    for name in stopped:
        assert_went_on(folder, name)


def watcher_of(stage: int) -> int:
    parent = int(Path(f"/proc/{stage}/stat").read_text().rpartition(")")[2].split()[1])
    assert "submitit.core._submit" in Path(f"/proc/{parent}/cmdline").read_text().split("\0")
    return parent


def test_killed_job_is_reported_and_done_by_the_same_command(cluster, folder, reference):
    """One job's stage and its watcher are killed at the same moment. 80 seconds."""
    with sweep_runs.started(folder, *RUN, environment=cluster.environment) as running:
        running.wait_until(lambda: sweep_runs.in_training(folder))
        killed = sweep_runs.in_training(folder)[0]
        (stage,) = sweep_runs.stages(folder, killed)
        doomed = [watcher_of(stage), stage]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in doomed:
                os.kill(process, number)
        assert running.wait() == 1
    others = [name for name in NAMES if name != killed]
    assert f"stopped {killed}\n" in running.out and "tiny: 4 jobs: 1 stopped, 3 done" in running.out
    assert [running.out.count(f"done    {name}\n") for name in others] == [1] * 3
    assert running.err.startswith("error: 1 of 4 jobs not done") and running.err.count("\n") == 1
    output = sweep_runs.ran(folder, "status", environment=cluster.environment).out
    assert re.search(rf"\| stopped *\| {killed} *\| train: [0-9]+ of 20 epochs", output), output

    before = {
        path: moment for path, moment in sweep_runs.artefacts(folder).items() if killed not in path
    }
    again = sweep_runs.ran(folder, *RUN, environment=cluster.environment)
    assert again.process.returncode == 0, again.err + sweep_runs.all_output(folder)
    assert f"1/1  {again.out.split('1/1  ')[1].split()[0]}  done    {killed}\n" in again.out
    assert {
        path: moment for path, moment in sweep_runs.artefacts(folder).items() if path in before
    } == before
    assert len(before) == 15
    assert [sweep_runs.attempts(folder, name) for name in NAMES] == [
        1 + (name == killed) for name in NAMES
    ]
    sweep_runs.audit(folder, reference)


def test_jobs_of_a_lost_node_go_on_at_another(cluster, folder, reference):
    """A minute and a half, half of it until Slurm has noticed."""
    with sweep_runs.started(folder, *RUN, environment=cluster.environment) as running:
        running.wait_until(lambda: len(sweep_runs.in_training(folder)) == 4)
        on_n1 = [name for name in NAMES if cluster.job(job_id(folder, name))["NodeList"] == "n1"]
        try:
            cluster.lose("n1")
            cluster.wait_until(lambda: all(restarts(cluster, folder)[name] for name in on_n1))
            for name in on_n1:  # else not before two minutes have passed
                cluster.run("scontrol", "update", f"JobId={job_id(folder, name)}", "StartTime=now")
            sweep_runs.assert_done(running, reference)
        finally:
            cluster.recover("n1")
            cluster.wait_until(
                lambda: (
                    cluster.run("sinfo", "-h", "-N", "-p", "low", "-o", "%T").split()
                    == ["idle"] * 2
                )
            )
    assert len(on_n1) == 2 and restarts(cluster, folder) == {
        name: int(name in on_n1) for name in NAMES
    }
    for name in on_n1:
        assert sweep_runs.attempts(folder, name) == 2 and "resuming" in sweep_runs.job_log(
            folder, name
        )
        assert cluster.job(job_id(folder, name))["NodeList"] == "n0"


def test_detached_sweep_is_left_to_slurm_and_submitted_once(cluster, folder, reference):
    first = sweep_runs.ran(folder, *RUN, "--detach", environment=cluster.environment)
    assert (first.process.returncode, first.err) == (0, "")
    assert len(queue(cluster)) == 4
    second = sweep_runs.ran(folder, *RUN, "--detach", environment=cluster.environment)
    assert (second.process.returncode, second.err) == (0, "")
    found = re.search(
        "(?:([0-9]) of them are in the engine's queue already\n)?nothing to do\n", second.out
    )
    running = re.search("([0-9]) running", second.out)
    assert found and int(found[1] or 0) + int(running[1] if running else 0) == 4, second.out
    assert len(queue(cluster)) == 4
    cluster.wait_until(lambda: not queue(cluster))
    status = sweep_runs.ran(folder, "status", environment=cluster.environment)
    assert status.process.returncode == 0 and status.out.endswith("\ntiny: 4 jobs: 4 done\n")
    assert [sweep_runs.attempts(folder, name) for name in NAMES] == [1] * 4
    sweep_runs.audit(folder, reference)


def test_interrupted_sweep_leaves_its_jobs_to_slurm(cluster, folder, reference):
    with sweep_runs.started(folder, *RUN, environment=cluster.environment) as running:
        running.wait_until(lambda: sweep_runs.in_training(folder))
        running.interrupt()
        assert running.wait() == 130
    assert "interrupted" in running.err and "Traceback" not in running.err
    assert len(queue(cluster)) == 4
    cluster.wait_until(lambda: not queue(cluster))
    again = sweep_runs.ran(folder, *RUN, environment=cluster.environment)
    assert again.process.returncode == 0 and "tiny: 4 jobs: 4 done\nnothing to do\n" in again.out
    assert [sweep_runs.attempts(folder, name) for name in NAMES] == [1] * 4
    sweep_runs.audit(folder, reference)


def test_job_at_its_time_limit_goes_on(cluster, tmp_path):
    """With the shortest limit that Slurm knows, the warning comes within half a minute of each
    start. A minute.
    """
    folder = sweep_runs.lay_out(tmp_path / "long", epochs=100_000)
    only = ["--only", f"*{NAMES[0]}", "--minutes", 1]
    with sweep_runs.started(folder, *RUN, *only, environment=cluster.environment) as running:
        running.wait_until(lambda: "resuming" in sweep_runs.job_log(folder, NAMES[0]))
        (number,) = queue(cluster)
        assert int(cluster.job(number)["Restarts"]) >= 1
        assert_went_on(folder, NAMES[0])


CLONE = CODE.parent
SCRIPT = CLONE / "scripts/slurm/train_multinode.sbatch"
# 12 steps each; at every tenth step the processes decide whether to save or stop.
EPOCHS = 40
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"}


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
def whole(shared, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert final_state(shared, submit(shared, folder)) == "COMPLETED", output_of(folder)
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
