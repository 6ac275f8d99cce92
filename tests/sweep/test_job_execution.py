"""Running jobs: stages run in order and once, continue after any interruption, and stop with their
watcher.
"""

import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from smoothadv.base.errors import DoubtfulWarning
from smoothadv.sweep import jobs as sweep_jobs
from smoothadv.sweep.engines import SweepContext
from smoothadv.sweep.engines.local import Local
from smoothadv.sweep.jobs import (
    BLOCKED,
    BUSY,
    DONE,
    FAILED,
    RUNNING,
    STOPPED,
    WAITING,
    SweepJob,
    execute,
    last_line,
    state_of,
)
from support.commands import rows
from support.patience import HANG_SECONDS, wait_for
from support.refusals import refusal
from support.sweeping import (
    Pretended,
    commands_in,
    is_alive,
    jobs_of,
    pretended_job,
    pretending,
    watcher,
    write_grid,
)

pytestmark = pytest.mark.usefixtures("workplace")
linux = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux ends processes with those that started them"
)


@pytest.fixture
def pretend(workplace) -> Mapping[str, str]:
    return pretending(workplace / "pretender")


def making(name: str, *lines: str, title: str = "pretend", before: str = "") -> Pretended:
    """A stage that records that it began, runs ``lines`` and then makes the file ``name``."""
    begin = f"open('begun', 'a').write('{name} ')"
    program = "\n".join([before, begin, *lines, f"open('{name}', 'w').close()"])
    return Pretended(program, Path.cwd() / name, title)


def begun() -> list[str]:
    return Path("begun").read_text().split() if Path("begun").exists() else []


def run(job: SweepJob, environment: Mapping[str, str], stop: threading.Event | None = None) -> str:
    return execute(job, environment, stop or threading.Event(), {"engine": "test"})


def whole_number(path: str) -> int | None:
    """The number in a file that was written with a line end; None until it is."""
    text = Path(path).read_text() if Path(path).exists() else ""
    return int(text) if text.endswith("\n") else None


# Writes its process id to a file, and waits.
WAIT = f"import time; open('process', 'w').write(f'{{os.getpid()}}\\n'); time.sleep({HANG_SECONDS})"
WHERE_NEEDED = "if not os.path.exists('again'):\n    open('again', 'w').close(); "


def test_stages_run_in_order_and_write_to_the_log(pretend):
    first, second = (
        making("a", "print('first said')"),
        making("b", "print('second', file=sys.stderr)"),
    )
    job = pretended_job(Path.cwd(), first, second, making("c"))
    assert state_of(job).kind is WAITING
    assert run(job, pretend) == DONE
    assert begun() == ["a", "b", "c"] and state_of(job).kind is DONE
    log_text = job.record.log.read_text()
    assert (
        log_text.index(" smoothadv pretend")
        < log_text.index("first said")
        < log_text.index("second")
    )
    assert commands_in(job.record.log) == 3
    record = job.record.read()
    assert (record["state"], record["engine"], record["pid"]) == ("done", "test", os.getpid())
    assert run(job, pretend) == DONE
    assert begun() == ["a", "b", "c"] and job.record.log.read_text() == log_text, (
        "nothing is done twice"
    )


def test_failure_is_recorded_with_stage_and_line_and_the_rest_is_left(pretend):
    failing = making(
        "b",
        "print('about'); print('error: no luck\\n', file=sys.stderr); os._exit(3)",
        title="second",
    )
    job = pretended_job(Path.cwd(), making("a", title="first"), failing, making("c"))
    assert run(job, pretend) == FAILED and begun() == ["a", "b"]
    record = job.record.read()
    assert (record["state"], record["stage"], record["line"]) == (
        "failed",
        "second",
        "error: no luck",
    )
    assert record["exit"] == 3
    state = state_of(job)
    assert state.kind is FAILED and state.detail == "second: error: no luck"
    job = replace(job, evaluations=(making("b"), job.evaluations[1]))
    assert (
        run(job, pretend) == DONE and begun() == ["a", "b", "b", "c"] and state_of(job).kind is DONE
    )


def test_stage_without_its_artefacts_failed_and_a_conflict_starts_no_process(
    pretend,
):
    job = pretended_job(
        Path.cwd(), Pretended("print('done, really')", Path.cwd() / "never", "first"), making("b")
    )
    assert run(job, pretend) == FAILED and begun() == []
    assert job.record.read()["stage"] == "first" and "0 of 1 file" in job.record.read()["line"]
    job = pretended_job(
        Path.cwd(), making("a"), replace(making("b"), conflict="made by somebody else")
    )
    assert run(job, pretend) == FAILED and begun() == [], "nor is what comes before it begun"
    assert job.record.read()["line"] == "made by somebody else"


ASKED = "import signal; signal.signal({0}, signal.SIG_DFL); os.kill(os.getpid(), {0})"
CRASH = "print('nearly there', flush=True); os.kill(os.getpid(), {})"
ENDS = {
    "killed": ("os.kill(os.getpid(), 9)", STOPPED, []),
    "obeyed SIGTERM": ("print('stopped by SIGTERM', flush=True); os._exit(143)", STOPPED, []),
    "interrupted": ("os._exit(130)", STOPPED, []),
    "torchrun": ("print('SignalException: signal: 15', flush=True); os._exit(1)", STOPPED, []),
    **{f"signal {number}": (ASKED.format(number), STOPPED, []) for number in (1, 2, 10, 15)},
    # The crash would come again, so a scheduler must not repeat the job for ever.
    "segmentation fault": (CRASH.format(11), FAILED, ["signal 11, Segmentation", "nearly there"]),
    "aborted": (CRASH.format(6), FAILED, ["signal 6, Aborted", "nearly there"]),
    "bus error": (CRASH.format(7), FAILED, ["signal 7, Bus error", "nearly there"]),
}


@pytest.mark.parametrize("how", ENDS)
def test_stage_that_a_signal_ended_is_stopped_unless_it_crashed(pretend, how):
    program, outcome, words = ENDS[how]
    job = pretended_job(Path.cwd(), making("a", WHERE_NEEDED + program), making("b"))
    assert run(job, pretend) == outcome and begun() == ["a"]
    state = state_of(job)
    assert state.kind == job.record.read()["state"] == outcome
    assert [word for word in words if word not in state.detail] == [], state.detail
    assert run(job, pretend) == DONE and begun() == ["a", "a", "b"]


def test_stage_does_not_start_if_a_file_it_needs_is_gone(pretend):
    """The file disappears after the sweep has looked at the job and before the engine starts it."""
    needed = Path.cwd() / "needed"
    job = pretended_job(Path.cwd(), replace(making("a"), needs=(needed,)))
    assert run(job, pretend) == BLOCKED and begun() == []
    assert state_of(job).kind is BLOCKED and str(needed) in state_of(job).detail
    needed.touch()
    assert run(job, pretend) == DONE


def test_file_in_place_of_a_jobs_folder_fails_this_job(pretend):
    Path("stuck").touch()
    job = replace(pretended_job(Path.cwd(), making("a")), logs=Path.cwd() / "stuck/logs")
    with pytest.warns(DoubtfulWarning, match=str(Path.cwd() / "stuck")):
        assert run(job, pretend) == FAILED


def test_no_stage_begins_after_a_request_to_stop(pretend):
    stop = threading.Event()
    stop.set()
    job = pretended_job(Path.cwd(), making("a"))
    assert run(job, pretend, stop) == STOPPED and begun() == []
    Path("a").touch()
    assert run(job, pretend, stop) == DONE, "which it is already"


@pytest.mark.parametrize(("last", "ends"), [(False, STOPPED), (True, DONE)])
def test_stage_is_asked_once_to_stop_and_may_finish(pretend, last, ends):
    patient = [
        "import signal, time",
        "signal.signal(signal.SIGTERM, lambda *_: open('asked', 'a').write('x'))",
        "open('ready', 'w').close()",
        "while not os.path.exists('asked'): time.sleep(0.01)",
        "time.sleep(0.5)",
    ]
    job = pretended_job(Path.cwd(), making("a", *patient), *[] if last else [making("b")])
    stop, outcome = threading.Event(), []
    thread = threading.Thread(target=lambda: outcome.append(run(job, pretend, stop)))
    thread.start()
    wait_for(Path("ready").exists)
    assert state_of(job).kind is RUNNING
    stop.set()
    thread.join(HANG_SECONDS)
    assert outcome == [ends] and begun() == ["a"] and Path("asked").read_text() == "x"


def test_stage_has_the_environment_of_its_job_and_no_terminal(pretend):
    facts = (
        "[os.environ.get('OMP_NUM_THREADS'), os.environ.get('MINE'), os.getsid(0) == os.getpid(), "
        "sys.stdin.read()]"
    )
    ignored = "signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN"
    program = (
        f"import json, signal; json.dump([*{facts}, {ignored}, os.getcwd()], open('facts', 'w'))"
    )
    job = replace(pretended_job(Path.cwd(), making("a", program)), threads=3)
    assert run(job, {**pretend, "MINE": "5"}) == DONE
    assert json.loads(Path("facts").read_text()) == ["3", "5", True, "", True, str(Path.cwd())]


def test_two_at_once_do_not_work_twice(pretend, monkeypatch):
    slow = making("a", "import time", "while not os.path.exists('go'): time.sleep(0.01)")
    job = pretended_job(Path.cwd(), slow, making("b"))
    outcomes = []
    threads = [
        threading.Thread(target=lambda: outcomes.append(run(job, pretend))) for _ in range(2)
    ]
    threads[0].start()
    wait_for(begun)
    with monkeypatch.context() as patch:
        patch.setattr(sweep_jobs, "_PATIENCE_SECONDS", 0)
        assert run(job, pretend) == BUSY
    threads[1].start()
    Path("go").touch()
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert outcomes == [DONE, DONE] and begun() == ["a", "b"], (
        "the other waited, and found everything done"
    )


@linux
def test_stage_ends_with_its_watcher_however_that_ended(pretend):
    job = pretended_job(Path.cwd(), making("a", f"{WHERE_NEEDED}{WAIT}"), making("b"))
    Path("job.pickle").write_bytes(pickle.dumps(job))
    process = watcher(Path("job.pickle"), pretend)
    wait_for(lambda: whole_number("process") or process.poll() is not None)
    stage = whole_number("process")
    assert stage and is_alive(stage) and state_of(job).kind is RUNNING
    process.kill()
    process.communicate()
    wait_for(lambda: not is_alive(stage))
    assert job.record.read()["state"] == "running", "it could not say more"
    assert state_of(job).kind is STOPPED
    assert run(job, pretend) == DONE and begun() == ["a", "a", "b"]


# Stops slowly when it is asked to, like a training that has to finish an update.
SLOW_TO_STOP = f"""import signal, time
def stop(*_):
    time.sleep(1.5)
    open('saved', 'w').close()
    os._exit(143)
signal.signal(signal.SIGTERM, stop)
open('process', 'w').write(f'{{os.getpid()}}\\n')
time.sleep({HANG_SECONDS})"""


@linux
def test_stage_that_outlives_its_watcher_to_save_is_waited_for(pretend):
    looks = "open('saw', 'w').write(str(os.path.exists('saved')))"
    program = f"if os.path.exists('process'): {looks}\nelse: exec({SLOW_TO_STOP!r})"
    job = pretended_job(Path.cwd(), making("a", program))
    Path("job.pickle").write_bytes(pickle.dumps(job))
    process = watcher(Path("job.pickle"), pretend)
    wait_for(lambda: whole_number("process") or process.poll() is not None)
    process.kill()
    process.communicate()
    assert run(job, pretend) == DONE and begun() == ["a", "a"]
    assert Path("saw").read_text() == "True", "there is never more than one at work"


@linux
def test_stage_whose_watcher_is_dead_already_does_not_begin(pretend):
    words = [
        sys.executable,
        "-m",
        "smoothadv.sweep.stop_with_parent",
        "1",
        sys.executable,
        "-c",
        "print('begun')",
    ]
    done = subprocess.run(
        words, env={**os.environ, **pretend}, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert (done.returncode, done.stdout) == (143, "")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", ""),
        (b"\n \n", ""),
        (b"one\ntwo\n\n", "two"),
        (b"one\n  two", "two"),
        (b"x" * 9999 + b"\nlast\n", "last"),
        (b"\xff\xfe\n", "\ufffd\ufffd"),
    ],
)
def test_last_line(content, line):
    Path("log").write_bytes(content)
    assert last_line(Path("log")) == line


def test_too_few_gpus_are_an_error_before_anything_runs():
    job = replace(pretended_job(Path.cwd(), making("a")), processes=2)
    context = SweepContext("name", Path("logs"), ("0",))
    refusal(Local().run, [job], context, print, names="2 processes, but only 1 GPU visible")
    assert begun() == []


@pytest.mark.slow
def test_two_processes_share_each_stage_of_a_job():
    further = {
        "certify": [{"max": 6, "N": 200}],
        "attack": [{"max": 4, "N": 100, "epsilon": 0.5, "num-steps": 1}],
    }
    (job,) = jobs_of(
        write_grid(Path("grid.toml"), {"noise": 0.25}, processes=2, threads=1, **further)
    )
    assert execute(job, {}, threading.Event(), {}) == DONE, job.record.log.read_text()
    (run_of_training,) = json.loads((job.training.folder / "args.json").read_text())["runs"]
    assert run_of_training["processes"] == 2
    assert [len(rows(log)) for stage in job.evaluations for log in stage.logs] == [6, 4]
    log_text = job.record.log.read_text()
    assert "2 processes on cpu" in log_text and state_of(job).kind is DONE
    assert (
        execute(job, {}, threading.Event(), {}) == DONE and job.record.log.read_text() == log_text
    )
