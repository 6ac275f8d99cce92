"""The second stages of a sweep: the best models by one [[certify]] are certified on more images by
another; ensembles. Commands are faked.

An ensemble of models of other jobs is evaluated as one classifier as soon as these have been
trained.
"""

from pathlib import Path

import pytest

from smoothadv.analysis.facts import facts_of
from smoothadv.base.errors import UserError
from smoothadv.records.logs import recorded_settings
from smoothadv.sweep.jobs import BLOCKED, FAILED, state_of
from support.commands import call, rows
from support.sweeping import fake, fake_commands, finish, jobs_of, write_grid

pytestmark = pytest.mark.usefixtures("workplace")
GRID = Path("grid.toml")
SWEEP = {"noise": [0.25, 0.5, 1.0], "group": "A"}
FEW = {"name": "all", "max": 5, "N": 200}
MORE = {"name": "more", "max": 9, "N": 300, "best": "all"}
HERE = "digits/digits_resnet8/noise_0.25"


def log(noise: str, name: str) -> Path:
    folder = f"logs/grid/gaussian/digits/digits_resnet8/noise_{noise}"
    return Path(folder, f"test/sigma_{noise}_{name}.tsv")


def sweep(capsys, action: str, *options: object):
    return call(capsys, "sweep", action, GRID, "--device", "cpu", *options)


@pytest.fixture
def first_stage(monkeypatch):
    """The sweep with all models trained and certified; at noise 0.25 one is best at radius 0.25, at
    0.5 up to 0.75.
    """
    fake_commands(monkeypatch)
    write_grid(GRID, SWEEP, certify=[FEW, MORE])
    for job, certified in zip(jobs_of(GRID), (4, 3, 0)):
        finish(job, certified)


def test_best_models_are_certified_on_more_images_as_soon_as_all_have_been_compared(
    first_stage, capsys
):
    kept = log("1.00", "all").read_text()
    log("1.00", "all").write_text("".join(kept.splitlines(keepends=True)[:-1]))
    assert all([table.name for table in job.pending] == ["more"] for job in jobs_of(GRID))
    assert sweep(capsys, "plan").out.count("perhaps certify more") == 3
    assert "the best models, for 'more', are not known yet" in sweep(capsys, "status").out
    log("1.00", "all").write_text(kept)
    outcome = sweep(capsys, "run")
    assert outcome.code == 0 and outcome.out.splitlines()[0] == "grid: 3 jobs: 2 stopped, 1 done"
    assert "are not known" not in outcome.out
    assert outcome.out.splitlines()[-2] == "grid: 3 jobs: 3 done"
    made = [len(rows(path)) for noise in ("0.25", "0.50") if (path := log(noise, "more")).exists()]
    assert made == [9, 9] and not log("1.00", "more").exists()
    assert "nothing to do" in sweep(capsys, "run").out
    assert sweep(capsys, "report").code == 0
    assert "on other images" in Path("logs/grid/report.html").read_text()


def test_one_run_does_both_stages(capsys, monkeypatch):
    fake_commands(monkeypatch)
    write_grid(GRID, {**SWEEP, "noise": [0.25, 0.5]}, certify=[FEW, {**MORE, "best": True}])
    outcome = sweep(capsys, "run")
    assert outcome.code == 0, outcome
    assert "; the best models, for 'more', are not known yet" in outcome.out.splitlines()[0]
    assert log("0.50", "more").exists()


@pytest.mark.parametrize(
    ("mistaken", "said"),
    [
        ({"skp": 3}, "unknown option --skp"),
        ({"name": "all"}, "two tables would write"),
        ({"max": 0}, "--max"),
    ],
)
def test_error_in_a_table_about_the_best_does_not_wait_for_their_logs(capsys, mistaken, said):
    write_grid(GRID, SWEEP, certify=[FEW, {**MORE, **mistaken}])
    outcome = sweep(capsys, "plan")
    assert outcome.code and said in outcome.err and not outcome.out


SEEDS = {"noise": 0.25, "seed": [0, 1], "group": "single"}
CERTIFY = {"max": 3, "N": 200}
LOG = Path(f"logs/grid/gaussian/ensemble_of_2_probabilities/{HERE}/test/sigma_0.25.tsv")
MEMBERS = [Path(f"models/grid/gaussian/seed_{seed}/{HERE}/checkpoint.pth.tar") for seed in (0, 1)]


def test_one_run_trains_the_members_and_then_evaluates_them_together(capsys, monkeypatch):
    fake_commands(monkeypatch)
    ensemble = {"of": "single", "mean": "probabilities"}
    attack = {**CERTIFY, "group": "single ensemble", "epsilon": 0.5, "num-steps": 1}
    write_grid(GRID, SEEDS, ensemble=[ensemble], certify=[CERTIFY], attack=[attack])
    together = jobs_of(GRID)[2]
    assert together.training is None and together.group == "single ensemble"
    members = tuple(Path.cwd() / path for path in MEMBERS)
    assert {stage.needs for stage in together.evaluations} == {members}
    outcome = sweep(capsys, "run")
    assert outcome.code == 0, outcome
    assert "3 jobs: 2 waiting, 1 blocked" in outcome.out and "3 jobs: 3 done" in outcome.out
    assert len(recorded_settings(LOG)["checkpoint_sha256"]["probabilities"]) == 2
    found = facts_of("certification", LOG, {})
    # What all members have in common.
    assert found.get("training") == "Gaussian" and found.get("noise") == 0.25
    assert "nothing to do" in sweep(capsys, "run").out
    assert sweep(capsys, "report").code == 0
    assert "single ensemble" in Path("logs/grid/report.html").read_text()
    MEMBERS[1].write_bytes(MEMBERS[0].read_bytes())
    state = state_of(together)
    assert state.kind is FAILED and "another model" in state.detail
    assert f"{MEMBERS[0]} or " in state.detail


def test_an_ensemble_waits_for_all_of_its_members():
    write_grid(GRID, SEEDS, ensemble=[{"of": "single"}], certify=[CERTIFY])
    first, _, together = jobs_of(GRID)
    assert together.name == f"gaussian/ensemble_of_2/{HERE}"
    finish(first)
    state = state_of(together)
    assert state.kind is BLOCKED and str(MEMBERS[1]) in state.detail


def test_members_of_several_architectures_are_named_by_both():
    models = {"noise": [0.25, 0.5], "arch": ["digits_resnet8", "cifar_resnet20"], "group": "A"}
    write_grid(GRID, models, ensemble=[{"of": "A", "over": "arch"}], certify=[CERTIFY])
    names = [job.name for job in jobs_of(GRID) if job.training is None]
    both = "digits/digits_resnet8+cifar_resnet20"
    assert names == [f"gaussian/ensemble_of_2/{both}/noise_{noise}" for noise in ("0.25", "0.50")]


def test_a_single_member_is_refused():
    write_grid(GRID, {"noise": [0.25, 0.5], "group": "single"}, ensemble=[{"of": "single"}])
    said = r"\[\[ensemble\]\] 1: gaussian/.*noise_0.25 would be alone: .* but seed"
    with pytest.raises(UserError, match=said):
        jobs_of(GRID)


def test_a_member_of_another_recipe_is_not_evaluated():
    """The grid was edited after a member had been trained, so that its own job fails, and the
    ensemble must too.
    """
    for weight_decay in (0.1, 0.5):
        models = {**SEEDS, "weight-decay": weight_decay}
        write_grid(GRID, models, ensemble=[{"of": "single"}], certify=[CERTIFY])
        for job in jobs_of(GRID)[:2] * (weight_decay == 0.1):
            fake(job.training)
    for job in jobs_of(GRID):
        state = state_of(job)
        assert state.kind is FAILED, job.name
        assert "holds a model of another recipe" in state.detail
