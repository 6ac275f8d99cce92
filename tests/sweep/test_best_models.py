"""The second stages of a sweep: the best models by one [[certify]] are certified on more images by
another; ensembles.

An ensemble of models of other jobs is evaluated as one classifier as soon as these have been
trained.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from smoothadv.analysis.envelope import Envelope, Selected
from smoothadv.analysis.shared.hyper_parameters import parameters_of
from smoothadv.base.errors import UserError
from smoothadv.records.logs import format_radius, tsv
from smoothadv.statistics.bounds import certified_radius
from smoothadv.sweep.jobs import StateKind, state_of
from support.commands import call, header, rows, succeed
from support.sweeping import do, finish, jobs_of, plans_of, write_grid
from support.warm import patch_stages

pytestmark = pytest.mark.usefixtures("workplace")
SWEEP = {"noise": [0.25, 0.5, 1.0], "group": "A"}
FEW = {"name": "all", "max": 5, "N": 200}
MORE = {"name": "more", "max": 9, "N": 300, "best": "all"}
CPU = ["--device", "cpu"]


def log(noise: str, name: str) -> Path:
    return Path(
        f"logs/grid/gaussian/digits/digits_resnet8/noise_{noise}/test/sigma_{noise}_{name}.tsv"
    )


def pretend(noise: str, certified: int) -> None:
    """Rewrite a log as if so many of its five images had been certified by unanimous votes, and no
    others.
    """
    path, radius = log(noise, "all"), format_radius(certified_radius(200, 200, float(noise), 0.001))
    yes = {"radius": radius, "correct": 1, "successes": 200, "trials": 200}
    no = {"predict": -1, "radius": "0.0", "correct": 0, "successes": 100, "trials": 200}
    changed = (
        {**row, "predict": row["label"], **(yes if i < certified else no)}
        for i, row in enumerate(rows(path))
    )
    path.write_text(tsv(header(path), changed))


def certify_best() -> None:
    for job in jobs_of(Path("grid.toml")):
        for stage in job.evaluations[1:]:
            do(stage)


@pytest.fixture
def first_stage(capsys, warm, monkeypatch):
    """The sweep with all models trained and certified; at noise 0.25 one is best at radius 0.25, at
    0.5 up to 0.75.
    """
    patch_stages(warm, monkeypatch)
    write_grid(Path("grid.toml"), SWEEP, certify=[FEW, MORE], threads=1)
    for job in jobs_of(Path("grid.toml")):
        finish(job)
    pretend("0.25", 4)
    pretend("0.50", 3)
    pretend("1.00", 0)


def test_best_models_are_certified_on_more_images_as_soon_as_all_have_been_compared(
    first_stage, capsys
):
    kept = log("1.00", "all").read_text()
    log("1.00", "all").write_text("".join(kept.splitlines(keepends=True)[:-1]))
    assert all(
        [table.name for table in plan.pending] == ["more"] for plan in plans_of(Path("grid.toml"))
    )
    planned = call(capsys, "sweep", "plan", "grid.toml", "--no-cost", *CPU)
    assert planned.code == 0 and planned.out.count("perhaps certify more") == 3
    status = call(capsys, "sweep", "status", "grid.toml", *CPU)
    assert status.code == 0 and "the best models, for 'more', are not known yet" in status.out
    log("1.00", "all").write_text(kept)
    outcome = call(capsys, "sweep", "run", "grid.toml", *CPU)
    assert outcome.code == 0 and outcome.out.splitlines()[0] == "grid: 3 jobs: 2 stopped, 1 done"
    assert (
        "are not known" not in outcome.out
        and outcome.out.splitlines()[-2] == "grid: 3 jobs: 3 done"
    )
    assert [log(noise, "more").exists() for noise in ("0.25", "0.50", "1.00")] == [
        True,
        True,
        False,
    ]
    assert len(rows(log("0.25", "more"))) == 9
    again = call(capsys, "sweep", "run", "grid.toml", *CPU)
    assert again.code == 0 and "nothing to do" in again.out
    assert call(capsys, "sweep", "report", "grid.toml", *CPU).code == 0
    assert "on other images" in Path("logs/grid/report.html").read_text()


def test_one_run_does_both_stages(capsys, warm, monkeypatch):
    """Every model that certifies an image at some radius is compared; those of no such image are
    not chosen.
    """
    patch_stages(warm, monkeypatch)
    monkeypatch.setattr(
        Envelope,
        "select",
        lambda envelope, group, radii: [Selected(log, 1.0) for log in group if "0.50" in log.name],
    )
    write_grid(
        Path("grid.toml"),
        {**SWEEP, "noise": [0.25, 0.5]},
        certify=[FEW, {**MORE, "best": True}],
        threads=1,
    )
    outcome = call(capsys, "sweep", "run", "grid.toml", *CPU)
    assert (
        outcome.code == 0
        and "; the best models, for 'more', are not known yet" in outcome.out.splitlines()[0]
    )
    assert [log(noise, "more").exists() for noise in ("0.25", "0.50")] == [False, True]


def test_held_out_accuracy_leaves_out_the_images_that_chose(first_stage, capsys):
    certify_best()
    outcome = call(capsys, "analyze", "held_out", "A=logs/grid", "--format", "csv")
    lines = [line.split(",") for line in outcome.out.splitlines()]
    found = [dict(zip(lines[0], line)) for line in lines[1:]]
    assert [float(row["radius"]) for row in found] == [0.25, 0.5, 0.75]
    assert [row["model"].split("noise_")[-1][:4] for row in found] == ["0.25", "0.50", "0.50"], (
        found
    )
    assert [row["chosen"] for row in found] == ["0.8", "0.6", "0.6"]
    assert {(row["models"], row["chosen_examples"]) for row in found} == {("3", "5")}
    for row, noise in zip(found, ("0.25", "0.50", "0.50")):
        others = rows(log(noise, "more"))[5:]
        expected = (
            sum(
                one["correct"] == "1" and float(one["radius"]) >= float(row["radius"])
                for one in others
            )
            / 4
        )
        assert (float(row["held_out"]), row["held_out_examples"]) == (expected, "4")
        assert (
            float(row["low"])
            <= float(row["difference"])
            == expected - float(row["chosen"])
            <= float(row["high"])
        )


def test_held_out_needs_several_models_and_other_images(first_stage, capsys):
    do(jobs_of(Path("grid.toml"))[0].evaluations[1])
    for logs in (log("0.50", "all"), log("0.25", "all").parent):  # no other images; no other models
        outcome = call(capsys, "analyze", "held_out", f"A={logs}")
        assert outcome.code == 1 and outcome.err.count("error: ") == 1
        assert "needs logs of several models, and" in outcome.err


def test_report_says_which_log_is_of_a_model_that_is_no_longer_chosen(first_stage, capsys):
    certify_best()
    report = ["sweep", "report", "grid.toml", *CPU]
    assert "no job makes" not in call(capsys, *report).err
    pretend("0.50", 0)
    outcome = call(capsys, *report)
    assert (
        outcome.code == 0
        and f"logs that no job makes are left out: {log('0.50', 'more')}\n" in outcome.err
    )


@pytest.mark.parametrize(
    ("mistaken", "said"),
    [
        ({"skp": 3}, "unknown option --skp"),
        ({"name": "all"}, "two tables would write"),
        ({"max": 0}, "--max"),
    ],
)
def test_error_in_a_table_about_the_best_does_not_wait_for_their_logs(capsys, mistaken, said):
    write_grid(Path("grid.toml"), SWEEP, certify=[FEW, {**MORE, **mistaken}])
    outcome = call(capsys, "sweep", "plan", "grid.toml", "--no-cost", *CPU)
    assert outcome.code and said in outcome.err and not outcome.out


def test_costs_say_that_the_best_models_come_on_top(capsys, monkeypatch):
    monkeypatch.setattr(
        "smoothadv.sweep.costs._CostMeter.cost", lambda *_: Counter({"training": 1.0})
    )
    for certify, told in (([FEW], 0), ([FEW, MORE], 1)):
        write_grid(Path("grid.toml"), SWEEP, certify=certify)
        assert (
            call(capsys, "sweep", "plan", "grid.toml", *CPU).out.count(
                "the best models, chosen later"
            )
            == told
        )


SEEDS = {"noise": 0.25, "seed": [0, 1], "group": "single"}
CERTIFY = {"max": 3, "N": 200}
HERE = "digits/digits_resnet8/noise_0.25"
LOG = Path(f"logs/grid/gaussian/ensemble_of_2_probabilities/{HERE}/test/sigma_0.25.tsv")
FILE = Path(f"models/grid/gaussian/ensemble_of_2_probabilities/{HERE}/ensemble.toml")
MEMBERS = [Path(f"models/grid/gaussian/seed_{seed}/{HERE}/checkpoint.pth.tar") for seed in (0, 1)]


def test_one_run_trains_the_members_and_then_evaluates_them_together(capsys, warm, monkeypatch):
    patch_stages(warm, monkeypatch)
    of_groups = {"of": "single", "mean": "probabilities"}
    attack = {
        **CERTIFY,
        "group": "single ensemble",
        "epsilon": 0.5,
        "num-steps": 1,
        "num-noise-vec": 2,
    }
    grid = write_grid(
        Path("grid.toml"),
        SEEDS,
        ensemble=[of_groups],
        certify=[CERTIFY],
        attack=[attack],
        threads=1,
    )
    first, second, together = jobs_of(grid)
    assert together.training is None and together.group == "single ensemble"
    assert {stage.needs for stage in together.evaluations} == {
        tuple(Path.cwd() / path for path in MEMBERS)
    }
    outcome = call(capsys, "sweep", "run", "grid.toml", *CPU)
    assert (
        outcome.code == 0
        and "3 jobs: 2 waiting, 1 blocked" in outcome.out
        and "3 jobs: 3 done" in outcome.out
    )
    succeed("certify", "digits", FILE, 0.25, "own.tsv", "--max", 3, "--N", 200, *CPU)
    own, of_sweep = ([{**row, "time": ""} for row in rows(log)] for log in (Path("own.tsv"), LOG))
    assert own == of_sweep and len(own) == 3
    settings = json.loads(LOG.with_name(f"{LOG.name}.manifest.json").read_text())["settings"]
    assert len(settings["checkpoint_sha256"]["probabilities"]) == 2
    found = parameters_of("certification", LOG, {})
    assert found.get("training") == "Gaussian" and found.get("noise") == 0.25, (
        "what all members have in common"
    )
    again = call(capsys, "sweep", "run", "grid.toml", *CPU)
    assert again.code == 0 and "nothing to do" in again.out
    report = call(capsys, "sweep", "report", "grid.toml", *CPU)
    assert report.code == 0 and "single ensemble" in Path("logs/grid/report.html").read_text()
    MEMBERS[1].write_bytes(MEMBERS[0].read_bytes())
    state = state_of(together)
    assert (
        state.kind is StateKind.FAILED
        and f"{MEMBERS[0]} or " in state.detail
        and "another model" in state.detail
    )


def test_an_ensemble_waits_for_all_of_its_members():
    grid = write_grid(Path("grid.toml"), SEEDS, ensemble=[{"of": "single"}], certify=[CERTIFY])
    first, second, together = jobs_of(grid)
    assert together.name == f"gaussian/ensemble_of_2/{HERE}"
    finish(first)
    state = state_of(together)
    assert state.kind is StateKind.BLOCKED and str(MEMBERS[1]) in state.detail


def test_members_of_several_architectures_are_named_by_both():
    sweep = {"noise": [0.25, 0.5], "arch": ["digits_resnet8", "cifar_resnet20"], "group": "A"}
    plans = jobs_of(
        write_grid(
            Path("grid.toml"), sweep, ensemble=[{"of": "A", "over": "arch"}], certify=[CERTIFY]
        )
    )
    names = [job.name for job in plans if job.training is None]
    both = "digits/digits_resnet8+cifar_resnet20"
    assert names == [f"gaussian/ensemble_of_2/{both}/noise_{noise}" for noise in ("0.25", "0.50")]


@pytest.mark.parametrize(
    ("sweep", "over", "said"),
    [
        (
            {"noise": [0.25, 0.5], "group": "single"},
            "seed",
            "gaussian/.*noise_0.25 would be alone: .* but seed",
        ),
        (SEEDS, ["seed", "sed"], r"'over' names 'sed', which .*\[\[sweep\]\] 1 does not set"),
    ],
)
def test_a_single_member_and_an_option_that_no_member_sets_are_refused(sweep, over, said):
    grid = write_grid(Path("grid.toml"), sweep, ensemble=[{"of": "single", "over": over}])
    with pytest.raises(UserError, match=rf"\[\[ensemble\]\] 1: {said}"):
        jobs_of(grid)


def test_a_member_of_another_recipe_is_not_evaluated():
    """The grid was edited after a member had been trained, so that its own job fails, and the
    ensemble must too.
    """
    write_grid(Path("grid.toml"), SEEDS, ensemble=[{"of": "single"}], certify=[CERTIFY])
    for job in jobs_of(Path("grid.toml"))[:2]:
        do(job.stages[0])
    write_grid(
        Path("grid.toml"),
        {**SEEDS, "weight-decay": 0.5},
        ensemble=[{"of": "single"}],
        certify=[CERTIFY],
    )
    for job in jobs_of(Path("grid.toml")):
        state = state_of(job)
        assert (
            state.kind is StateKind.FAILED and "holds a model of another recipe" in state.detail
        ), job.name
