"""The command sweep: it does all that is missing, nothing twice, and the failure of a job affects
no other.
"""

import io
import json
import os
import shutil
import signal
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from smoothadv.analysis.shared.hyper_parameters import parameters_of
from smoothadv.cli.sweep import visible_gpus
from smoothadv.sweep.engines.local import Local
from support import sweep_runs
from support.commands import ENVIRONMENT, call, command_main, refused, rows, snapshot
from support.sweeping import CERTIFY, commands_in, write_grid
from support.warm import patch_stages

GAUSSIAN = {"noise": 0.25, "group": "Gaussian"}
SMOOTHADV = {"noise": 0.25, "attack": "PGD", "epsilon": 0.5, "num-steps": 1, "group": "SmoothAdv"}
HERE = "digits/digits_resnet8/noise_0.25"
FOLDERS = [f"gaussian/{HERE}", f"PGD_1step/eps_0.50/{HERE}"]
CPU = ["--device", "cpu"]


def the_grid(*further: dict, name: str = "grid.toml", **others) -> Path:
    """The grid of two models, preceded by the ``further`` ones, in the working folder."""
    given = {"threads": 1, "certify": [CERTIFY], **others}
    return write_grid(Path(name), *further, GAUSSIAN, SMOOTHADV, **given)


@pytest.fixture(scope="module")
def finished(warm, tmp_path_factory) -> Path:
    """A folder in which the sweep was run, with its output in a file."""
    folder, out, err = tmp_path_factory.mktemp("finished"), io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        patch_stages(warm, patch)
        the_grid()
        code = command_main("sweep")(["run", "grid.toml", "--jobs", "2", *CPU])
    (folder / "output.json").write_text(json.dumps([code, out.getvalue(), err.getvalue()]))
    return folder


@pytest.fixture
def done(finished, workplace) -> Path:
    """A copy of that folder, as the working folder."""
    shutil.copytree(finished, workplace, dirs_exist_ok=True)
    return workplace


def moments(folder: Path) -> dict[str, int]:
    """When every file was last changed; without locks, which reading may change."""
    return {
        str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != "job.lock"
    }


def log_of(folder: str) -> Path:
    return Path("logs/grid", folder, "test/sigma_0.25.tsv")


def test_sweep_trains_and_certifies_every_model(done):
    code, out, err = json.loads(Path("output.json").read_text())
    assert (code, err.replace("\n", "")) == (0, ""), err
    first, *jobs, last, advice = out.splitlines()
    assert first == "grid: 2 jobs: 2 waiting" and last == "grid: 2 jobs: 2 done"
    assert sorted(line.split()[-1] for line in jobs) == sorted(FOLDERS)
    assert all(" done " in line for line in jobs) and "sweep report grid.toml" in advice
    for folder in FOLDERS:
        model, log = Path("models/grid", folder), log_of(folder)
        assert sorted(path.name for path in model.iterdir()) == [
            "args.json",
            "checkpoint.pth.tar",
            "log.txt",
        ]
        assert len(rows(model / "log.txt")) == 2 and [row["idx"] for row in rows(log)] == list(
            "01234"
        )
        job_log = Path("logs/grid", folder, "job.log")
        text = job_log.read_text()
        assert (
            "saved models/grid/" in text
            and "certified accuracy" in text
            and commands_in(job_log) == 2
        )
    manifest = log_of(FOLDERS[1]).with_name("sigma_0.25.tsv.manifest.json")
    settings = json.loads(manifest.read_text())["settings"]
    assert settings["training"]["objective"]["attack"]["epsilon"] == 0.5 and settings["N"] == 200
    manifest.unlink()
    found = parameters_of("certification", log_of(FOLDERS[1]), {})
    assert [found.get(name) for name in ("training", "epsilon", "num_steps")] == [
        "SmoothAdv-PGD",
        0.5,
        1,
    ]


def test_same_command_again_does_nothing_and_says_so(done, capsys):
    before, contents = moments(done), snapshot(done)
    for action in ("run", "retry", "status"):
        outcome = call(capsys, "sweep", action, "grid.toml", *CPU)
        assert outcome.code == 0 and outcome.err == "" and "2 done" in outcome.out
        assert ("nothing to do" in outcome.out) == (action != "status")
    assert moments(done) == before and snapshot(done) == contents


def test_jobs_that_fail_or_lack_a_file_stop_no_other(done, capsys, warm, monkeypatch):
    """A training that fails, twice, and a certification between."""
    patch_stages(warm, monkeypatch)
    undo_certification(FOLDERS[1])
    before = moments(done / "models") | moments(done / "logs/grid/gaussian")
    hopeless = {"noise": 0.25, "lr": [1e9], "group": "Hopeless"}
    lacking = {"noise": 0.25, "pretrained-model": "none.pth.tar", "group": "Lacking"}
    the_grid(hopeless, lacking)
    assert [row["state"] for row in status(capsys)] == ["waiting", "blocked", "done", "stopped"]
    outcome = call(capsys, "sweep", "run", "grid.toml", *CPU)
    assert outcome.code == 1
    ends = {
        line.split()[-1]: line.split()[-2]
        for line in outcome.out.splitlines()
        if line.split()[0].endswith("/2")
    }
    failing = f"gaussian/lr_1000000000/{HERE}"
    assert ends == {failing: "failed", FOLDERS[1]: "done"}
    failed, blocked, error = outcome.err.splitlines()
    assert failed.startswith("warning: failed: ") and blocked.startswith("warning: blocked: ")
    assert "none.pth.tar" in blocked and "job.log" in failed
    assert error.startswith("error: 2 of 4 jobs are not done") and "sweep retry grid.toml" in error
    states = {row["folder"]: row for row in status(capsys)}
    assert [row["state"] for row in states.values()] == ["failed", "blocked", "done", "done"]
    log = Path("logs/grid", failing, "job.log")
    last = log.read_text().splitlines()[-1]
    assert "finite" in last and last in states[failing]["detail"]
    after = moments(done)
    again = call(capsys, "sweep", "run", "grid.toml", *CPU)
    assert again.code == 1 and "nothing to do" in again.out and moments(done) == after, (
        "a failed job is left alone"
    )
    retried = call(capsys, "sweep", "retry", "grid.toml", *CPU)
    assert retried.code == 1 and retried.out.count("failed") >= 2 and commands_in(log) == 2
    now = moments(done)
    files = [path for path in before if Path(path).is_file()]
    assert len(files) > 8 and {path: now[path] for path in files} == {
        path: before[path] for path in files
    }


def undo_certification(folder: str) -> None:
    log_of(folder).unlink()
    log_of(folder).with_name("sigma_0.25.tsv.manifest.json").unlink()


def status(capsys, *options: object) -> list[dict]:
    outcome = call(capsys, "sweep", "status", "grid.toml", "--format", "json", *CPU, *options)
    assert outcome.code == 0, outcome
    return json.loads(outcome.out)


def test_status_lists_every_job(done, capsys):
    assert [(row["state"], row["folder"]) for row in status(capsys)] == [
        ("done", folder) for folder in FOLDERS
    ]
    lines = log_of(FOLDERS[0]).read_bytes().splitlines(keepends=True)
    log_of(FOLDERS[0]).write_bytes(b"".join(lines[:3]))
    shutil.rmtree(Path("models/grid", FOLDERS[1]))
    shutil.rmtree(Path("logs/grid", FOLDERS[1]))
    first, second = status(capsys)
    assert (first["state"], second["state"]) == ("stopped", "waiting") and "2 of 5 images" in first[
        "detail"
    ]
    outcome = call(capsys, "sweep", "status", "grid.toml", *CPU)
    assert (
        outcome.code == 0 and outcome.out.splitlines()[-1] == "grid: 2 jobs: 1 waiting, 1 stopped"
    )


def test_only_some_jobs(done, capsys, monkeypatch):
    assert [row["folder"] for row in status(capsys, "--only", "PGD*")] == FOLDERS[1:]
    assert [row["folder"] for row in status(capsys, "--only", "*eps_9*", "gaus*")] == FOLDERS[:1]
    for folder in FOLDERS:
        undo_certification(folder)
    begun = []
    monkeypatch.setattr(
        Local, "run", lambda engine, jobs, site, ended: begun.extend(job.name for job in jobs)
    )
    outcome = call(capsys, "sweep", "run", "grid.toml", *CPU, "--only", "PGD*")
    assert outcome.out.splitlines()[0] == "grid: 1 jobs: 1 stopped"
    assert begun == FOLDERS[1:]
    assert refused(call(capsys, "sweep", "run", "grid.toml", "--only", "none*"), "none*")


def test_plan_prints_what_would_be_done_and_does_nothing(workplace, capsys):
    the_grid(about="Two models", models="m", logs="l")
    outcome = call(capsys, "sweep", "plan", "grid.toml", "--no-cost")
    assert outcome.code == 0 and "Two models" in outcome.out and "2 jobs" in outcome.out
    assert "models in m, logs in l" in outcome.out
    assert all(outcome.out.count(word) == 1 for word in [*FOLDERS, "Gaussian", "SmoothAdv"])
    assert outcome.out.count("certify sigma_0.25") == 2
    assert [path.name for path in workplace.iterdir()] == ["grid.toml"]


def test_report_is_about_the_groups_and_leaves_out_what_is_unfinished(done, capsys):
    outcome = call(capsys, "sweep", "report", "grid.toml", *CPU)
    assert outcome.code == 0 and outcome.err == "" and "wrote logs/grid/report.html" in outcome.out
    page = Path("logs/grid/report.html").read_text()
    assert (
        page.lstrip().lower().startswith("<!doctype html")
        and "Gaussian" in page
        and "SmoothAdv" in page
    )
    lines = log_of(FOLDERS[1]).read_bytes().splitlines(keepends=True)
    log_of(FOLDERS[1]).write_bytes(b"".join(lines[:3]))
    outcome = call(capsys, "sweep", "report", "grid.toml", "-o", "mine.html", *CPU)
    assert outcome.code == 0 and "warning: " in outcome.err and "1 of 2 jobs" in outcome.err
    assert str(log_of(FOLDERS[1])) not in Path("mine.html").read_text()
    assert (
        call(capsys, "sweep", "report", "grid.toml", "-o", "all.html", "--unfinished", *CPU).code
        == 0
    )
    assert str(log_of(FOLDERS[1])) in Path("all.html").read_text().replace("/<wbr>", "/")
    assert str(log_of(FOLDERS[0])) in page and str(log_of(FOLDERS[1])) in page, "which a page names"


def test_report_on_nothing_is_refused(workplace, capsys):
    the_grid()
    assert refused(call(capsys, "sweep", "report", "grid.toml"), "2 jobs")
    assert [path.name for path in workplace.iterdir()] == ["grid.toml"]


def begun_certifying(folder: Path, name: str) -> bool:
    logs = [*(folder / "logs/tiny" / name).rglob("*.tsv")]
    return bool(logs) and len(rows(logs[0])) >= 5


@pytest.mark.slow
def test_sweep_killed_in_all_of_its_phases_is_completed_by_the_same_command(workplace, reference):
    """A minute."""
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
    """Half a minute each."""
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


@pytest.mark.parametrize(
    ("named", "options", "gpus"),
    [("2,3", [], ("2", "3")), (None, [], ("0", "1")), ("2,3", CPU, ())],
    ids=["some", "all", "told to use the CPU"],
)
def test_jobs_get_the_gpus_that_the_sweep_may_use(
    workplace, capsys, monkeypatch, named, options, gpus
):
    the_grid()
    sites = []
    monkeypatch.setattr(Local, "run", lambda engine, jobs, site, ended: sites.append(site))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    outcome = call(capsys, "sweep", "run", "grid.toml", *options)
    assert outcome.code == 1 and "2 of 2 jobs are not done" in outcome.err
    assert [(site.gpus, site.wants_gpus) for site in sites] == [(gpus, not options)]


def test_several_grids_are_one_sweep(done, capsys):
    the_grid(name="other.toml", models="models/grid", logs="logs/grid")
    write_grid(Path("more.toml"), {"noise": 0.5, "group": "More"}, certify=[CERTIFY])
    outcome = call(capsys, "sweep", "status", "grid.toml", "more.toml", *CPU)
    assert outcome.out.splitlines()[-1] == "grid, more: 3 jobs: 1 waiting, 2 done"
    outcome = call(capsys, "sweep", "report", "grid.toml", "more.toml", "-o", "page.html", *CPU)
    assert (
        outcome.code == 0
        and "1 of 3 jobs" in outcome.err
        and "Gaussian" in Path("page.html").read_text()
    )
    outcome = call(capsys, "sweep", "run", "grid.toml", "other.toml", *CPU)
    assert refused(outcome, "grid.toml and other.toml"), "they would write to one place"


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
def test_gpus_have_the_names_of_the_environment_variable(named, count, gpus):
    assert visible_gpus(named, count) == gpus
