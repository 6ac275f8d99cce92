"""Ensembles in a sweep: models of other jobs, evaluated as one classifier as soon as these have been trained."""

import json
from pathlib import Path

import pytest

from smoothadv.analysis.shared.hyper_parameters import parameters_of
from smoothadv.errors import UserError
from smoothadv.sweeps.jobs import StateKind, state_of
from support.commands import call, rows, succeed
from support.sweeping import do, finish, jobs_of, write_grid
from support.warm import patch_stages

pytestmark = pytest.mark.usefixtures("workplace")
CPU = ["--device", "cpu"]
SEEDS = {"noise": 0.25, "seed": [0, 1], "group": "single"}
CERTIFY = {"max": 3, "N": 200}
HERE = "digits/digits_resnet8/noise_0.25"
LOG = Path(f"logs/grid/gaussian/ensemble_of_2_probabilities/{HERE}/test/sigma_0.25.tsv")
FILE = Path(f"models/grid/gaussian/ensemble_of_2_probabilities/{HERE}/ensemble.toml")
MEMBERS = [Path(f"models/grid/gaussian/seed_{seed}/{HERE}/checkpoint.pth.tar") for seed in (0, 1)]


def test_one_run_trains_the_members_and_then_evaluates_them_together(capsys, warm, monkeypatch):
    patch_stages(warm, monkeypatch)
    of_groups = {"of": "single", "mean": "probabilities"}
    attack = {**CERTIFY, "group": "single ensemble", "epsilon": 0.5, "num-steps": 1, "num-noise-vec": 2}
    grid = write_grid(Path("grid.toml"), SEEDS, ensemble=[of_groups], certify=[CERTIFY], attack=[attack], threads=1)
    first, second, together = jobs_of(grid)
    assert together.training is None and together.group == "single ensemble"
    assert {stage.needs for stage in together.evaluations} == {tuple(Path.cwd() / path for path in MEMBERS)}
    outcome = call(capsys, "sweep", "run", "grid.toml", *CPU)
    assert outcome.code == 0 and "3 jobs: 2 waiting, 1 blocked" in outcome.out and "3 jobs: 3 done" in outcome.out
    succeed("certify", "digits", FILE, 0.25, "own.tsv", "--max", 3, "--N", 200, *CPU)
    own, of_sweep = ([{**row, "time": ""} for row in rows(log)] for log in (Path("own.tsv"), LOG))
    assert own == of_sweep and len(own) == 3
    settings = json.loads(LOG.with_name(f"{LOG.name}.manifest.json").read_text())["settings"]
    assert len(settings["checkpoint_sha256"]["probabilities"]) == 2
    found = parameters_of("certification", LOG, {})
    assert found.get("training") == "Gaussian" and found.get("noise") == 0.25, "what all members have in common"
    again = call(capsys, "sweep", "run", "grid.toml", *CPU)
    assert again.code == 0 and "nothing to do" in again.out
    report = call(capsys, "sweep", "report", "grid.toml", *CPU)
    assert report.code == 0 and "single ensemble" in Path("logs/grid/report.html").read_text()
    MEMBERS[1].write_bytes(MEMBERS[0].read_bytes())
    state = state_of(together)
    assert state.kind is StateKind.FAILED and f"{MEMBERS[0]} or " in state.detail and "another model" in state.detail


def test_an_ensemble_waits_for_all_of_its_members():
    grid = write_grid(Path("grid.toml"), SEEDS, ensemble=[{"of": "single"}], certify=[CERTIFY])
    first, second, together = jobs_of(grid)
    assert together.name == f"gaussian/ensemble_of_2/{HERE}"
    finish(first)
    state = state_of(together)
    assert state.kind is StateKind.BLOCKED and str(MEMBERS[1]) in state.detail


def test_members_of_several_architectures_are_named_by_both():
    sweep = {"noise": [0.25, 0.5], "arch": ["digits_resnet8", "cifar_resnet20"], "group": "A"}
    plans = jobs_of(write_grid(Path("grid.toml"), sweep, ensemble=[{"of": "A", "over": "arch"}], certify=[CERTIFY]))
    names = [job.name for job in plans if job.training is None]
    both = "digits/digits_resnet8+cifar_resnet20"
    assert names == [f"gaussian/ensemble_of_2/{both}/noise_{noise}" for noise in ("0.25", "0.50")]


@pytest.mark.parametrize(
    ("sweep", "over", "said"),
    [
        ({"noise": [0.25, 0.5], "group": "single"}, "seed", "gaussian/.*noise_0.25 would be alone: .* but seed"),
        (SEEDS, ["seed", "sed"], r"'over' names 'sed', which .*\[\[sweep\]\] 1 does not set"),
    ],
)
def test_a_single_member_and_an_option_that_no_member_sets_are_refused(sweep, over, said):
    grid = write_grid(Path("grid.toml"), sweep, ensemble=[{"of": "single", "over": over}])
    with pytest.raises(UserError, match=rf"\[\[ensemble\]\] 1: {said}"):
        jobs_of(grid)


def test_a_member_of_another_recipe_is_not_evaluated():
    """The grid was edited after a member had been trained, so that its own job fails, and the ensemble must too."""
    write_grid(Path("grid.toml"), SEEDS, ensemble=[{"of": "single"}], certify=[CERTIFY])
    for job in jobs_of(Path("grid.toml"))[:2]:
        do(job.stages[0])
    write_grid(Path("grid.toml"), {**SEEDS, "weight-decay": 0.5}, ensemble=[{"of": "single"}], certify=[CERTIFY])
    for job in jobs_of(Path("grid.toml")):
        state = state_of(job)
        assert state.kind is StateKind.FAILED and "holds a model of another recipe" in state.detail, job.name
