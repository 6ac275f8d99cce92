"""The command sweep: it does all that is missing, nothing twice, and the failure of a job affects
no other. But for one real run, commands are faked.
"""

import json
import os
import signal
from pathlib import Path

import pytest

from smoothadv.records.logs import manifest_path
from smoothadv.sweep import jobs as sweep_jobs
from smoothadv.sweep import planning
from smoothadv.sweep.command import context_of
from smoothadv.sweep.engines import SweepContext
from smoothadv.sweep.engines.local import Local
from smoothadv.sweep.jobs import SweepJob
from smoothadv.sweep.stages import Stage
from support import sweep_runs
from support.commands import ENVIRONMENT, call, refused, rows, snapshot
from support.sweeping import (
    CERTIFY,
    commands_in,
    fake,
    fake_commands,
    finish,
    jobs_of,
    write_grid,
)
from support.warm import patch_stages

GAUSSIAN = {"noise": 0.25, "group": "Gaussian"}
SMOOTHADV = {"noise": 0.25, "attack": "PGD", "epsilon": 0.5, "num-steps": 1, "group": "SmoothAdv"}
HERE = "digits/digits_resnet8/noise_0.25"
FOLDERS = [f"gaussian/{HERE}", f"PGD_1step/eps_0.50/{HERE}"]
CPU = ["--device", "cpu"]
LOGS = [Path("logs/grid", folder, "test/sigma_0.25.tsv") for folder in FOLDERS]


def the_grid(*further: dict, name: str = "grid.toml", **others) -> Path:
    """The grid of two models, preceded by the ``further`` ones, in the working folder."""
    given = {"threads": 1, "certify": [CERTIFY], **others}
    return write_grid(Path(name), *further, GAUSSIAN, SMOOTHADV, **given)


@pytest.fixture
def done(workplace) -> Path:
    """The working folder, in which the sweep was run."""
    for job in jobs_of(the_grid()):
        finish(job)
    return workplace


def sweep(capsys, action: str, *options: object):
    return call(capsys, "sweep", action, *CPU, "grid.toml", *options)


def status(capsys, *options: object) -> list[dict]:
    outcome = sweep(capsys, "status", "--format", "json", *options)
    assert outcome.code == 0, outcome
    return json.loads(outcome.out)


def files(folder: Path) -> dict[str, int]:
    """When every file was last changed; without locks, which reading may change."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "job.lock"]
    return {str(path): path.stat().st_mtime_ns for path in paths}


def undo_certification(log: Path) -> None:
    log.unlink()
    manifest_path(log).unlink()


def keep_rows(log: Path, count: int) -> None:
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[: 1 + count]))


def test_sweep_trains_and_certifies_every_model(workplace, capsys, warm, monkeypatch):
    """The real commands. The same command again does nothing."""
    patch_stages(warm, monkeypatch)
    the_grid()
    outcome = sweep(capsys, "run", "--jobs", 2)
    assert (outcome.code, outcome.err.replace("\n", "")) == (0, ""), outcome
    first, *jobs, last, advice = outcome.out.splitlines()
    assert first == "grid: 2 jobs: 2 waiting" and last == "grid: 2 jobs: 2 done"
    assert sorted(line.split()[-1] for line in jobs) == sorted(FOLDERS)
    assert all(" done " in line for line in jobs) and "sweep report grid.toml" in advice
    for folder, log in zip(FOLDERS, LOGS):
        model, job_log = Path("models/grid", folder), Path("logs/grid", folder, "job.log")
        assert len(rows(model / "log.txt")) == 2
        assert [row["idx"] for row in rows(log)] == list("01234")
        text = job_log.read_text()
        assert "saved models/grid/" in text and "certified accuracy" in text
        assert commands_in(job_log) == 2
    before, contents = files(workplace), snapshot(workplace)
    for action in ("run", "retry", "status"):
        outcome = sweep(capsys, action)
        assert outcome.code == 0 and outcome.err == "" and "2 done" in outcome.out
        assert ("nothing to do" in outcome.out) == (action != "status")
    assert files(workplace) == before and snapshot(workplace) == contents


def test_jobs_that_fail_or_lack_a_file_stop_no_other(done, capsys, monkeypatch):
    """A training that fails, twice, and a certification between."""

    def run(job: SweepJob, stage: Stage, *_: object) -> int:
        started.append(f"{job.group} {stage.title}")
        if job.group == "Hopeless":
            job.record.log.write_text("error: the loss is not finite\n")
            return 1
        fake(stage)
        return 0

    started: list[str] = []
    monkeypatch.setattr(sweep_jobs, "_run", run)
    undo_certification(LOGS[1])
    hopeless = {"noise": 0.25, "lr": [1e9], "group": "Hopeless"}
    the_grid(hopeless, {"noise": 0.25, "pretrained-model": "none.pth.tar", "group": "Lacking"})
    before = files(done)
    assert [row["state"] for row in status(capsys)] == ["waiting", "blocked", "done", "stopped"]
    outcome = sweep(capsys, "run")
    assert outcome.code == 1 and started == ["Hopeless train", "SmoothAdv certify sigma_0.25"]
    words = [line.split() for line in outcome.out.splitlines()]
    ends = {line[-1]: line[-2] for line in words if line[0].endswith("/2")}
    failing = f"gaussian/lr_1000000000/{HERE}"
    assert ends == {failing: "failed", FOLDERS[1]: "done"}
    failed, blocked, error = outcome.err.splitlines()
    assert failed.startswith("warning: failed: ") and "job.log" in failed
    assert blocked.startswith("warning: blocked: ") and "none.pth.tar" in blocked
    assert error.startswith("error: 2 of 4 jobs not done") and "sweep retry grid.toml" in error
    states = {row["folder"]: row for row in status(capsys)}
    assert [row["state"] for row in states.values()] == ["failed", "blocked", "done", "done"]
    assert states[failing]["detail"] == "train: error: the loss is not finite"
    after = files(done)
    again = sweep(capsys, "run")
    assert again.code == 1 and "nothing to do" in again.out and files(done) == after
    retried = sweep(capsys, "retry")
    assert retried.code == 1 and retried.out.count("failed") >= 2
    assert started[2:] == ["Hopeless train"]
    assert before.items() <= files(done).items()


def test_job_without_images_is_blocked_and_the_same_command_tries_again(
    workplace, capsys, monkeypatch
):
    fixed = {"dataset": "imagenet", "arch": "resnet50", "epochs": 1}
    write_grid(Path("grid.toml"), GAUSSIAN, fixed=fixed, certify=[CERTIFY])
    fake_commands(monkeypatch)
    monkeypatch.setenv("IMAGENET_DIR", "nowhere")
    outcome = sweep(capsys, "run")
    assert outcome.code == 1 and "1 job: 1 blocked" in outcome.out
    blocked, error = outcome.err.splitlines()
    assert blocked.startswith("warning: blocked: ") and "nowhere/train holds 0 class" in blocked
    assert "sweep run grid.toml continues" in error and not Path("logs").exists()
    with monkeypatch.context() as patch:
        planning._lacking.cache_clear()
        patch.setattr(planning, "get_dataset", lambda *_: [])
        assert sweep(capsys, "run").code == 0
    planning._lacking.cache_clear()


def test_only_some_jobs(done, capsys, monkeypatch):
    listed = [(row["state"], row["folder"]) for row in status(capsys, "--only", "*eps_9*", "gaus*")]
    assert listed == [("done", FOLDERS[0])]
    for log in LOGS:
        undo_certification(log)
    begun = []
    monkeypatch.setattr(
        Local, "run", lambda engine, jobs, context, ended: begun.extend(job.name for job in jobs)
    )
    outcome = sweep(capsys, "run", "--only", "PGD*")
    assert outcome.out.splitlines()[0] == "grid: 1 job: 1 stopped" and begun == FOLDERS[1:]
    assert refused(sweep(capsys, "run", "--only", "none*"), "none*")


def test_plan_prints_what_would_be_done_and_a_report_on_nothing_is_refused(workplace, capsys):
    the_grid(about="Two models", models="m", logs="l")
    outcome = sweep(capsys, "plan")
    head = "grid: Two models\n2 jobs, 2 models = 1 + 1\nmodels in m, logs in l\n"
    assert outcome.code == 0 and outcome.out.startswith(head)
    assert all(outcome.out.count(word) == 1 for word in [*FOLDERS, "Gaussian", "SmoothAdv"])
    assert outcome.out.count("certify sigma_0.25") == 2
    assert refused(sweep(capsys, "report"), "2 jobs")
    assert [path.name for path in workplace.iterdir()] == ["grid.toml"]


def test_plan_says_the_times_in_the_logs_of_jobs_that_are_done(done, capsys):
    undone = LOGS[0].read_text()
    assert undone.count("0:00:00.1") == CERTIFY["max"]
    LOGS[0].write_text(undone.replace("0:00:00.1", "1 day, 2:00:00.25", 1))
    # Each has 2 epochs of 0.5 s; then 4 x 0.1 s and 93,600.25 s, and 5 x 0.1 s.
    said = "2 jobs done; the logs have times of 1 day, 2:00:03, 13:00:02 per job\n"
    assert said in sweep(capsys, "plan").out
    keep_rows(LOGS[0], 4)
    assert "1 job done; the logs have times of 0:00:02" in sweep(capsys, "plan").out


def test_plan_of_many_jobs_fits_a_screen(workplace, capsys):
    grid = str(Path(__file__).parents[2] / "scripts/grids/paper-cifar10-pgd.toml")
    plans = [call(capsys, "sweep", "plan", grid, "--format", f).out for f in ["markdown", "csv"]]
    assert plans[0].count("\n") <= 30 and "and 68 more jobs; --format csv lists all" in plans[0]
    assert plans[1].count("noise_0.25") == 20


def test_report_is_about_the_groups_and_leaves_out_what_is_unfinished(done, capsys):
    def report(name: str, *options: object) -> tuple[str, str]:
        outcome = sweep(capsys, "report", *options)
        assert outcome.code == 0 and f"wrote {name}" in outcome.out
        return Path(name).read_text().replace("/<wbr>", "/"), outcome.err

    page, warnings = report("logs/grid/report.html")
    assert warnings == ""
    assert [word for word in ["Gaussian", "SmoothAdv", *map(str, LOGS)] if word not in page] == []
    keep_rows(LOGS[1], 2)
    page, warnings = report("mine.html", "-o", "mine.html")
    assert "warning: 1 of 2 jobs" in warnings and str(LOGS[1]) not in page
    page, _ = report("all.html", "-o", "all.html", "--unfinished")
    assert str(LOGS[1]) in page


def begun_certifying(folder: Path, name: str) -> bool:
    logs = [*(folder / "logs/tiny" / name).rglob("*.tsv")]
    return bool(logs) and len(rows(logs[0])) >= 5


@pytest.mark.slow
def test_sweep_killed_in_all_of_its_phases_is_completed_by_the_same_command(workplace, reference):
    sweep_runs.lay_out(workplace)
    for name in sweep_runs.NAMES[:2]:
        for in_phase in (sweep_runs.trained_epochs, begun_certifying):
            with sweep_runs.started(workplace, "run", *CPU, environment=ENVIRONMENT) as running:
                running.wait_until(lambda phase=in_phase, name=name: phase(workplace, name))
                running.process.kill()
                assert running.wait() == -signal.SIGKILL
    done = sweep_runs.ran(workplace, "run", *CPU)
    assert done.process.returncode == 0, done.err
    sweep_runs.audit(workplace, reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "jobs"), [(signal.SIGINT, 130, 1), (signal.SIGTERM, 143, 2)]
)
def test_interrupted_sweep_saves_reports_and_continues(workplace, reference, number, code, jobs):
    command = ["run", *CPU, "--jobs", jobs]
    with sweep_runs.started(
        sweep_runs.lay_out(workplace), *command, environment=ENVIRONMENT
    ) as running:
        running.wait_until(lambda: sweep_runs.trained_epochs(workplace, sweep_runs.NAMES[0]))
        os.kill(running.process.pid, number)
        assert running.wait() == code and "run the same command again" in running.err
    assert "Traceback" not in running.err and sweep_runs.stages(workplace) == [], (
        "nothing goes on behind one's back"
    )
    done = sweep_runs.ran(workplace, *command)
    assert done.process.returncode == 0, done.err
    sweep_runs.audit(workplace, reference)


def test_several_grids_are_one_sweep(done, capsys):
    write_grid(Path("more.toml"), {"noise": 0.5, "group": "More"}, certify=[CERTIFY])
    outcome = sweep(capsys, "status", "more.toml")
    assert outcome.out.splitlines()[-1] == "grid, more: 3 jobs: 1 waiting, 2 done"
    outcome = sweep(capsys, "report", "more.toml", "-o", "page.html")
    assert outcome.code == 0 and "1 of 3 jobs" in outcome.err
    assert "Gaussian" in Path("page.html").read_text()


@pytest.mark.parametrize("kind", ["models", "logs"])
def test_two_grids_of_one_folder_are_refused(workplace, capsys, kind):
    for name in ("one", "two"):
        write_grid(Path(f"{name}.toml"), {"noise": [0.25]}, **{kind: f"{kind}/shared"})
    outcome = call(capsys, "sweep", "run", "one.toml", "two.toml")
    assert refused(outcome, "two.toml: two grids", f"would write {kind}/shared", "one.toml: name")
    assert {path.name for path in workplace.iterdir()} == {"one.toml", "two.toml"}


@pytest.mark.parametrize(
    ("named", "count", "gpus"),
    [
        (None, 2, ("0", "1")),
        ("", 0, ()),
        ("2,3", 2, ("2", "3")),
        ("0, 1,", 2, ("0", "1")),
        ("0,1,-1,2", 2, ("0", "1")),
        ("-1", 0, ()),
        ("GPU-8f,MIG-1/2", 2, ("GPU-8f", "MIG-1/2")),
    ],
)
def test_gpus_have_the_names_of_the_environment_variable(named, count, gpus, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named or "")
    assert context_of("a", Path("logs"), None) == SweepContext("a", Path("logs"), gpus)
    assert context_of("a", Path("logs"), "cpu") == SweepContext("a", Path("logs"), (), False)
