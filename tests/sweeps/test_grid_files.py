"""The grids of this project: each can be planned here without its data, and its folders say what it makes."""

import math
from pathlib import Path

import pytest

from smoothadv.analysis.shared.hyper_parameters import parameters_of
from smoothadv.sweeps.grid import read_grid
from smoothadv.sweeps.jobs import StateKind, state_of
from support.commands import CODE
from support.sweeping import plans_of

FOLDER = CODE.parent / "scripts/grids"
GRIDS = {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}


@pytest.fixture(scope="module")
def plans(tmp_path_factory) -> dict[str, list]:
    """The plans of each grid, made once, in an empty folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("empty"))
        return {name: plans_of(path) for name, path in GRIDS.items()}


def test_there_are_grids():
    assert "digits-smoke" in GRIDS and len(GRIDS) >= 2
    assert [path.name for path in FOLDER.iterdir() if path.suffix != ".toml"] == []


@pytest.mark.parametrize("name", GRIDS)
def test_every_job_has_a_folder_of_its_own(plans, name):
    grid, of_grid = read_grid(GRIDS[name]), plans[name]
    names = [plan.job.name for plan in of_grid]
    assert len(set(names)) == len(names) == len(grid.trained) > 0
    logs = [log for plan in of_grid for stage in plan.job.evaluations for log in stage.logs]
    assert len(set(logs)) == len(logs)
    assert all(not Path(name).is_absolute() and ".." not in Path(name).parts for name in names)


def test_no_two_grids_write_to_one_place(plans):
    """So all of them can be run in one folder."""
    folders = [plan.job.training.folder for of_grid in plans.values() for plan in of_grid]
    assert len(set(folders)) == len(folders)


@pytest.mark.parametrize("name", GRIDS)
def test_no_two_models_of_a_grid_are_identical(plans, name):
    made = [(str(plan.job.training.recipe), plan.job.training.needs) for plan in plans[name]]
    weights = [plan.trainings[0].request.unlabelled_weight for plan in plans[name]]
    assert len(set(zip(made, weights))) == len(made)


@pytest.mark.parametrize("name", GRIDS)
def test_logs_tell_what_made_their_models(plans, name):
    for plan in plans[name]:
        objective = plan.job.training.recipe["objective"]
        attack = objective.get("attack") or {}
        for stage in plan.job.evaluations:
            if stage.words[0] != "certify":
                continue
            found = parameters_of("certification", stage.logs[0], {})
            assert found.get("dataset") == plan.job.training.recipe["dataset"]
            assert found.get("arch") == plan.job.training.recipe["arch"]
            assert found.get("noise") == pytest.approx(objective["noise_sd"], rel=5e-4)
            assert found.get("sigma") == pytest.approx(stage.settings[0]["sigma"], rel=5e-4)
            assert (found.get("attack"), found.get("num_steps")) == (attack.get("name"), attack.get("num_steps"))
            if attack:
                assert found.get("epsilon") == pytest.approx(attack["epsilon"], rel=5e-4)
                assert found.get("num_noise_vec") == objective["num_noise_vec"]
            assert isinstance(found.get("training"), str)


@pytest.mark.parametrize("name", GRIDS)
def test_nothing_is_there_yet_and_others_make_what_is_needed(plans, name):
    """Every model that a training starts from is made by another grid."""
    checkpoints = {plan.job.training.checkpoint for of_grid in plans.values() for plan in of_grid}
    for plan in plans[name]:
        needs = plan.job.training.needs
        assert state_of(plan.job).kind is (StateKind.BLOCKED if needs else StateKind.WAITING)
        models = {path for path in needs if path.suffix == ".tar"}
        assert models <= checkpoints, f"{models - checkpoints} is made by no grid"


def test_smoke_grid_is_small(plans):
    of_grid = plans["digits-smoke"]
    assert len(of_grid) >= 8 and {plan.trainings[0].request.dataset for plan in of_grid} == {"digits"}
    assert all(plan.job.evaluations and plan.job.training.epochs <= 15 for plan in of_grid)
    groups = {plan.job.group for plan in of_grid}
    assert {"Gaussian", "SmoothAdv"} <= groups


@pytest.mark.parametrize("name", [name for name in GRIDS if name.startswith("paper-cifar10")])
def test_grids_of_the_paper_have_its_values(plans, name):
    """Salman et al. (2019), appendix D: 150 epochs, and the values of sigma, epsilon, T and m."""
    for recipe in (plan.job.training.recipe for plan in plans[name]):
        assert recipe["learning_rate"] == 0.1 and recipe["batch"] == 256 and recipe["weight_decay"] == 1e-4
        assert (recipe["learning_rate_step"], recipe["learning_rate_factor"]) == (50, 0.1)
        assert recipe["objective"]["warmup"] == 10
        assert recipe["objective"]["noise_sd"] in (0.12, 0.25, 0.5, 1.0)
        attack = recipe["objective"]["attack"]
        close = [size for size in (64, 127, 255, 512) if math.isclose(attack["epsilon"], size / 255, rel_tol=0.02)]
        assert close and attack["num_steps"] in (2, 4, 6, 8, 10)
        assert recipe["objective"]["num_noise_vec"] in (1, 2, 4, 8)
    assert {plan.job.training.epochs for plan in plans[name]} == {150}
    assert {stage.selection["skip"] for plan in plans[name] for stage in plan.job.evaluations} == {20}
