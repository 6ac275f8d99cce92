"""Engines without clusters: their options, the GPUs of jobs, the parameters for schedulers, and job
records.
"""

import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from smoothadv.base.settings import options_of
from smoothadv.sweep.engines import ENGINES, SweepContext, local, ray, slurm
from smoothadv.sweep.engines.local import Local
from smoothadv.sweep.engines.slurm import Attempt, Slurm
from smoothadv.sweep.jobs import DONE, FAILED, STOPPED, SweepJob, state_of
from support.commands import Outcome, call, refused
from support.patience import HANG_SECONDS, wait_for
from support.refusals import refusal
from support.sweeping import Pretended, pretended_job, write_grid

pytestmark = pytest.mark.usefixtures("workplace")


def jobs_of(count: int, processes: int = 1, threads: int | None = None) -> list[SweepJob]:
    """Jobs with the names 0, 1 and so on."""
    job = pretended_job(Path.cwd(), Pretended("pass", Path("never")))
    return [
        replace(
            job,
            name=str(number),
            logs=Path("logs", str(number)),
            processes=processes,
            threads=threads,
        )
        for number in range(count)
    ]


def run_refused(capsys, *options: object) -> Outcome:
    """A run that is refused in one line and leaves no files."""
    grid = write_grid(Path("grid.toml"), {"noise": [0.25, 0.5]})
    outcome = call(capsys, "sweep", "run", grid, "--device", "cpu", *options)
    assert not Path("models").exists() and not Path("logs").exists()
    return outcome


SETTINGS = {
    engine: {setting.flag: setting for setting in options_of(ENGINES[engine])} for engine in ENGINES
}
FLAGS = {flag for settings in SETTINGS.values() for flag in settings}
VALUES = {"--sbatch": ["a=b"], "--detach": [], "--address": ["a:1"]}
# Options, and words of the refusal.
USAGE = [
    *(
        (
            ["--engine", engine, flag, *VALUES.get(flag, ["2"])],
            [f"{flag} is not read by --engine {engine}"],
        )
        for engine in ENGINES
        for flag in sorted(FLAGS - SETTINGS[engine].keys())
    ),
    (["--engine", "slrum"], ["slrum", "local", "ray", "slurm"]),
    (["--jobs", "0"], ["--jobs", "'0'"]),
    (["--engine", "slurm", "--minutes", "0"], ["--minutes", "'0'"]),
    (["--engine", "slurm", "--cpus", "many"], ["--cpus", "many"]),
    *(
        (["--engine", "slurm", "--sbatch", *given], ["--sbatch", f"'{given[-1]}' is not KEY=VALUE"])
        for given in (["a=b", "account"], ["=vision"], ["time="])
    ),
    (["--engine", "ray", "--retries", "-1"], ["--retries", "-1"]),
    *(
        (["--engine", "ray", "--address", given], ["--address", f"'{given}' is not HOST:PORT"])
        for given in ("nowhere", ":6379")
    ),
]


@pytest.mark.parametrize(("options", "words"), USAGE, ids=[" ".join(one) for one, _ in USAGE])
def test_what_no_engine_or_another_one_reads_is_a_usage_error(capsys, options, words):
    assert refused(run_refused(capsys, *options), *words, code=2)


@pytest.mark.parametrize(("package", "options"), [("submitit", ["slurm"]), ("ray", ["ray"])])
def test_engine_without_its_package_says_what_to_install(
    capsys, monkeypatch, programs, package, options
):
    """A None in sys.modules makes the import of that module fail."""
    for name in ("sbatch", "srun", "squeue"):
        programs(name, "exit 0")
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    outcome = run_refused(capsys, "--engine", *options)
    assert refused(outcome, f'pip install "smoothadv[{options[0]}]" or {package}')


@pytest.mark.parametrize("missing", ["sbatch", "squeue"])
def test_machine_that_does_not_submit_to_slurm_is_an_error(capsys, monkeypatch, programs, missing):
    for name in {"sbatch", "srun", "squeue"} - {missing}:
        programs(name, "exit 0")
    monkeypatch.setenv("PATH", os.environ["PATH"].split(os.pathsep)[0])
    assert refused(run_refused(capsys, "--engine", "slurm"), f"there is no {missing} here")


SHARES = {
    "one per GPU": (dict(jobs=6), dict(gpus="01"), 2, ["0", "1"]),
    "fewer jobs than GPUs": (dict(jobs=2), dict(gpus="0123"), 2, ["0", "1"]),
    "fewer at a time than GPUs": (dict(jobs=4, at_a_time=2), dict(gpus="0123"), 2, ["0", "1"]),
    "more at a time than GPUs": (dict(jobs=4, at_a_time=4), dict(gpus="01"), 4, ["0", "1"]),
    "groups of two": (dict(jobs=4, processes=2), dict(gpus="4567"), 2, ["4,5", "6,7"]),
    "a GPU too many for groups": (dict(jobs=3, processes=2), dict(gpus="012"), 1, ["0,1"]),
    "more at a time than groups": (
        dict(jobs=4, processes=2, at_a_time=2),
        dict(gpus="012"),
        2,
        ["0,1"],
    ),
    "by name": (dict(jobs=2), dict(gpus=("GPU-a", "GPU-b")), 2, ["GPU-a", "GPU-b"]),
    "no GPUs": (dict(jobs=3), dict(), 1, [None]),
    "no GPUs, several at a time": (dict(jobs=4, at_a_time=2), dict(), 2, [None]),
    "GPUs that are not wanted": (
        dict(jobs=3, processes=2),
        dict(gpus="0", wants_gpus=False),
        1,
        [None],
    ),
    "more at a time than jobs": (dict(jobs=2, at_a_time=9), dict(), 2, [None]),
}


@pytest.mark.parametrize("what", SHARES)
def test_gpus_that_jobs_see_and_how_many_run_at_once(monkeypatch, what):
    """Each job waits until as many have started as are to run at once."""
    given, context, at_once, expected = SHARES[what]
    gpus, threads, ends, all_run = set(), set(), [], threading.Barrier(at_once)

    def execute(
        job: SweepJob, environment: Mapping[str, str], stop: threading.Event, origin: Mapping
    ) -> str:
        gpus.add(environment.get("CUDA_VISIBLE_DEVICES"))
        threads.add(threading.get_ident())
        all_run.wait(HANG_SECONDS)
        assert environment["SMOOTHADV_JOBS"] == str(at_once)
        assert origin == {"engine": "local"} and not stop.is_set()
        return DONE

    monkeypatch.setattr(local, "execute", execute)
    jobs = jobs_of(given["jobs"], given.get("processes", 1))
    where = SweepContext(
        "name", Path("logs"), **{**context, "gpus": tuple(context.get("gpus", ()))}
    )
    Local(given.get("at_a_time")).run(jobs, where, lambda job, how: ends.append((job.name, how)))
    assert sorted(ends) == [(job.name, DONE) for job in jobs]
    assert len(threads) == at_once and sorted(gpus, key=str) == expected


@pytest.mark.parametrize("cause", [KeyboardInterrupt, ZeroDivisionError])
def test_whatever_ends_the_engine_stops_what_runs_and_begins_nothing_more(monkeypatch, cause):
    """Ctrl-C, or a defect, when two of five jobs run."""
    begun, stopped, ended = [], [], []
    both = threading.Barrier(2)

    def running(
        job: SweepJob, environment: Mapping[str, str], stop: threading.Event, origin: Mapping
    ) -> str:
        if stop.is_set():
            return STOPPED
        begun.append(job.name)
        if job.name in "01":
            both.wait(HANG_SECONDS)
        if job.name == "0" and cause is ZeroDivisionError:
            raise cause
        if job.name == "0":
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(HANG_SECONDS)
        stopped.append(job.name)
        return STOPPED

    monkeypatch.setattr(local, "execute", running)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    context = SweepContext("name", Path("logs"))
    with pytest.raises(cause):
        Local(2).run(jobs_of(5), context, lambda job, how: ended.append(job.name))
    signal.signal(signal.SIGINT, before)
    # Python joins a thread whose start was interrupted when it exits, not before. The next job may
    # begin before the engine notices the defect.
    running_still = {"0"} if cause is ZeroDivisionError else set()
    wait_for(lambda: {*stopped} == {*begun} - running_still)
    assert {"0", "1"} <= {*begun} <= {"0", "1", "2"} and ended == []
    assert cause is ZeroDivisionError or "2" not in begun


PARAMETERS = {
    "GPUs": (Slurm(), dict(), True, dict(cpus_per_task=8, gpus_per_node=1, time=1440)),
    "GPU per process": (Slurm(), dict(processes=4), True, dict(cpus_per_task=32, gpus_per_node=4)),
    "CPU": (Slurm(), dict(), False, dict(cpus_per_task=1, gpus_per_node=None)),
    "threads": (
        Slurm(),
        dict(threads=3, processes=2),
        False,
        dict(cpus_per_task=6, gpus_per_node=None),
    ),
    "CPUs as given": (
        Slurm(cpus=5),
        dict(threads=3, processes=2),
        True,
        dict(cpus_per_task=10, gpus_per_node=2),
    ),
    "at a time": (Slurm(jobs=2, minutes=7), dict(), False, dict(array_parallelism=2, time=7)),
    "all at a time": (
        Slurm(partition="p"),
        dict(),
        False,
        dict(array_parallelism=3, partition="p"),
    ),
    "further options": (
        Slurm(sbatch=["account=vision", "comment=a=b"]),
        dict(),
        False,
        dict(additional_parameters={"requeue": True, "account": "vision", "comment": "a=b"}),
    ),
}


@pytest.mark.parametrize("what", PARAMETERS)
def test_parameters_for_sbatch(what):
    engine, given, wants_gpus, expected = PARAMETERS[what]
    parameters = engine._parameters(
        jobs_of(3, **given), SweepContext("mine", Path("logs"), wants_gpus=wants_gpus)
    )
    assert {name: parameters.get(name) for name in expected} == expected
    assert (parameters["job_name"], parameters["nodes"], parameters["ntasks_per_node"]) == (
        "smoothadv-mine",
        1,
        1,
    )


@pytest.fixture
def programs(tmp_path, monkeypatch) -> Callable[[str, str], None]:
    """Puts short shell programs first into the path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", os.pathsep.join([str(folder), os.environ["PATH"]]))

    def add(name: str, lines: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{lines}\n")
        (folder / name).chmod(stat.S_IRWXU)

    return add


@pytest.mark.parametrize(
    "lines", ["echo 'slurm_load_jobs error: Unable to contact' >&2; exit 1", "kill -9 $$"]
)
def test_queue_that_cannot_be_read_is_an_error(programs, lines):
    programs("squeue", lines)
    (job,) = jobs_of(1)
    job.record.folder.mkdir(parents=True)
    assert Slurm().already_has([job]) == set(), "there is nothing to ask for"
    job.record.write("queued", engine="slurm", id="5")
    said = {"squeue: slurm_load_jobs error: Unable to contact", "squeue: failed"}
    assert refusal(Slurm().already_has, [job]) in said


def test_jobs_that_slurm_still_has_are_known_by_their_records(programs):
    programs("squeue", "printf '7_0\\n8\\n9_1\\n'")
    records = [
        {"id": "7_0"},
        {"id": "7_1"},
        {"id": "8"},
        {"id": "9"},
        {},
        {"id": "9_1", "engine": "other"},
    ]
    jobs = jobs_of(len(records) + 1)
    for job, facts in zip(jobs, records):
        job.record.folder.mkdir(parents=True)
        job.record.write("stopped", **{"engine": "slurm", **facts})
    assert Slurm().already_has(jobs) == {jobs[0].key, jobs[2].key}


def test_arrays_that_are_submitted_before_one_is_refused_are_recorded(programs, monkeypatch, capfd):
    """Each array has two jobs; sbatch refuses the second array. The same command again submits only
    what is missing.
    """
    pytest.importorskip(
        "submitit", reason="the slurm engine submits through submitit, which is optional"
    )
    monkeypatch.setattr(slurm, "_LARGEST_ARRAY", 2)
    count = "echo x >> submitted; n=$(wc -l < submitted)"
    programs("srun", "exit 0")
    programs("squeue", "printf '10_0\\n10_1\\n'")
    programs(
        "sbatch",
        f"{count}; [ $n = 2 ] && {{ echo 'sbatch: error: too many' >&2; exit 1; }}; echo Submitted "
        f"batch job ${{n}}0",
    )
    jobs, context = jobs_of(3), SweepContext("mine", Path("logs"), wants_gpus=False)
    engine = Slurm(detach=True)
    assert refusal(engine.run, jobs, context, print) == "sbatch refused: too many"
    assert capfd.readouterr() == ("", "")
    assert [job.record.read().get("id") for job in jobs] == ["10_0", "10_1", None]
    assert engine.already_has(jobs) == {jobs[0].key, jobs[1].key}
    engine.run(jobs[2:], context, print)
    assert jobs[2].record.read()["id"] == "30" and state_of(jobs[2]).detail == "queued as 30"


def test_signal_of_slurm_stops_the_stage_before_the_job_is_given_back(monkeypatch):
    """And submitit gets the same job to submit again."""
    submitit = pytest.importorskip(
        "submitit", reason="the slurm engine submits through submitit, which is optional"
    )
    (job,) = jobs_of(1)
    working, saved = threading.Event(), threading.Event()

    def executed(
        job: SweepJob, environment: Mapping[str, str], stop: threading.Event, origin: Mapping
    ) -> str:
        working.set()
        assert stop.wait(HANG_SECONDS) and origin == {"engine": "slurm", "id": "4_2"}
        saved.set()
        return STOPPED

    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "4")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    monkeypatch.setattr(slurm, "execute", executed)
    attempt, outcome = Attempt(), []
    thread = threading.Thread(target=lambda: outcome.append(attempt(job)))
    thread.start()
    wait_for(working.is_set)
    again = attempt.checkpoint(job)
    assert saved.is_set() and isinstance(again, submitit.helpers.DelayedSubmission)
    assert isinstance(again.function, Attempt) and again.args == (job,)
    thread.join(HANG_SECONDS)
    assert outcome == [STOPPED]


def test_whether_somebody_listens():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert ray._answers(f"127.0.0.1:{port}")
    assert not ray._answers(f"127.0.0.1:{port}")
    assert [ray._answers(text) for text in ("", "nowhere", "here:there", "127.0.0.1:99999999")] == [
        False
    ] * 4


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit])
def test_cancelled_attempt_is_no_crash_that_ray_would_try_again(monkeypatch, raised):
    def cancelled(*_) -> str:
        raise raised

    monkeypatch.setattr(ray, "execute", cancelled)
    assert ray.attempt_job(jobs_of(1)[0]) == STOPPED
    monkeypatch.setattr(ray, "execute", lambda *_: FAILED)
    assert ray.attempt_job(jobs_of(1)[0]) == FAILED
