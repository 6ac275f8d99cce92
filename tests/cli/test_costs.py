"""Cost of a sweep: computed by hand and by a slow, obvious loop with known times, and once
measured.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from smoothadv.attacks import GradientAttack
from smoothadv.attacks.pgd import PGD
from smoothadv.cli.expectations import CommandReader
from smoothadv.datasets import describe_dataset, get_dataset
from smoothadv.objectives import Objective
from smoothadv.sweep import costs
from smoothadv.sweep.commands import Work
from smoothadv.sweep.grid import read_grid
from smoothadv.sweep.jobs import SweepJob
from smoothadv.training.costs import prepare_update
from smoothadv.training.spec import TrainSpec
from support.sweeping import jobs_of

UPDATE, STEP, VOTE, GRADIENT = 3.0, 0.5, 0.01, 0.03
HEAD = '[fixed]\ndataset = "digits"\narch = "digits_resnet8"\nnoise = 0.25\n'
GRID = Path("grid.toml")
pytestmark = pytest.mark.usefixtures("workplace")


def meter() -> costs._CostMeter:
    return costs._CostMeter(CommandReader(), torch.device("cpu"))


def known_piece(work: Work) -> float:
    """A noisy copy takes UPDATE seconds, a step of attack STEP more, a vote VOTE and a gradient
    GRADIENT.
    """
    if work.less:
        return STEP
    kind, *_, steps = work.key
    if kind == "passes":
        return (VOTE, GRADIENT)[work.key[1]]
    return UPDATE + steps * STEP


@pytest.fixture
def known(monkeypatch) -> costs._CostMeter:
    """A meter for which work takes known times."""
    monkeypatch.setattr(costs._CostMeter, "_piece", lambda _, work: known_piece(work))
    return meter()


def cost(known: costs._CostMeter, job: SweepJob) -> costs.Seconds:
    return known.cost(job, job.stages)


def jobs(text: str) -> list[SweepJob]:
    GRID.write_text(HEAD + text)
    return jobs_of(GRID)


def cost_table(jobs: list[SweepJob]) -> str:
    return costs.cost_table(read_grid(GRID), jobs, CommandReader(), "cpu")


def obvious_training_seconds(job: SweepJob) -> float:
    """Epoch by epoch and batch by batch: trained and attacked copies, then the test images of the
    epoch.
    """
    _, request, _, schedule = CommandReader()._training(job.training.words)
    objective, seconds = request.objective, 0.0
    images = len(get_dataset("digits", "train"))
    for epoch in range(schedule.epochs):
        left = images
        for _ in range(schedule.steps_per_epoch or 10**9):
            batch = min(left, schedule.batch)
            left -= batch
            copies = batch * objective.copies
            steps = objective.attack.num_steps if objective.epsilon(epoch) > 0 else 0
            seconds += copies * (UPDATE + steps * STEP)
            if not left:
                break
        seconds += 359 * objective.copies * (UPDATE + objective.attack.num_steps * STEP)
    return seconds


@pytest.mark.parametrize(
    "text",
    [
        "epochs = 5\nwarmup = 3\nnum-steps = 2\n",
        "epochs = 4\nwarmup = 0\nnum-steps = 10\nnum-noise-vec = 4\nbatch = 100\n",
        "epochs = 3\nwarmup = 1\nnum-steps = 3\nsteps-per-epoch = 2\nbatch = 64\n",
    ],
)
def test_training_costs_what_a_loop_over_its_updates_counts(known, text):
    (job,) = jobs(f'attack = "PGD"\nepsilon = 0.5\n{text}[[sweep]]\nseed = 0\n')
    assert cost(known, job)["training"] == pytest.approx(obvious_training_seconds(job))


@pytest.mark.parametrize(
    ("objective", "more", "m", "steps", "attacked", "votes"),
    [  # acr-weakness attacks and chooses from epoch 2 on, and weighs before 2 and 5
        ("acr-weakness", "attack-from-epoch = 2\nresample-every = 3\n", 4, 6, 5, 100 + 2 * 16),
        ("cat-rs", 'teacher = "a"\nteacher-draws = 50\n', 4, 4, 7, 50),
        ("smoothmix", "", 2, 4, 7, 0),
        ("distillation", 'teacher = "a"\n', 1, 0, 7, 0),
    ],
)
def test_attacks_of_noise_and_votes_on_training_images_are_counted(
    known, objective, more, m, steps, attacked, votes
):
    """With known times."""
    (job,) = jobs(
        f'epochs = 7\nbatch = 16\n[[sweep]]\nnoise = 0.5\nobjective = "{objective}"\n{more}'
    )
    updates, tests = (
        1438 * m * (7 * UPDATE + attacked * steps * STEP),
        7 * 359 * m * (UPDATE + steps * STEP),
    )
    assert cost(known, job)["training"] == pytest.approx(updates + tests + 1438 * votes * VOTE)


@pytest.mark.parametrize("objective", ["acr-weakness", "cat-rs", "smoothmix", "distillation"])
def test_update_of_every_objective_can_be_measured(monkeypatch, objective):
    monkeypatch.setattr(costs, "_REPEATS", 1)
    teacher = 'teacher = "a"\n' * (objective in ("cat-rs", "distillation"))
    (job,) = jobs(f'batch = 16\n[[sweep]]\nobjective = "{objective}"\n{teacher}')
    real = meter()
    for work in real._work(job, job.training):
        assert np.all(real._piece(work) >= 0) and np.all(work.less or real._piece(work) > 0)


@dataclass(frozen=True)
class Plain(Objective):
    """With an attack, and without a field for its copies."""

    adversary: GradientAttack = PGD(0.5, 4)
    noise_sd: float = 0.25

    def epsilon(self, epoch):
        return self.adversary.epsilon


def test_update_of_an_objective_without_a_number_of_copies_can_be_measured():
    spec = TrainSpec(dataset="digits", model="digits_resnet8", outdir=Path(), objective=Plain())
    description = describe_dataset("digits")
    schedule = spec.schedule.schedule(description, spec.objective.copies)
    device = torch.device("cpu")
    act, copies = prepare_update(spec, schedule, description, 8, 2, device, most=4)
    act()
    assert copies == 4


def test_certificates_and_attacks_cost_their_votes_and_gradients(known):
    (job,) = jobs(
        "[[sweep]]\nseed = 0\n[[certify]]\nskip = 100\nN = 900\nN0 = 100\n"
        "[[attack]]\nskip = 100\nepsilon = [0.25, 0.5]\nN = 50\nnum-steps = 3\nnum-noise-vec = "
        "5\nrestarts = 2\n"
    )
    found = cost(known, job)
    # Images 0, 100, 200 and 300 of 359; two logs of the attack.
    assert found["certifying"] == pytest.approx(4 * 1000 * VOTE)
    assert found["attacking"] == pytest.approx(2 * 4 * (50 * VOTE + 3 * 5 * 2 * GRADIENT))
    assert set(found) == {"training", "certifying", "attacking"}


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ("", 20 * 64 * GRADIENT),
        ("base-attack = true\n", 20 * GRADIENT),
        ('gradient = "stein"\nnum-noise-vec = 8\n', 20 * 8 * VOTE),
        ('target = "every"\nnum-steps = 2\nnum-noise-vec = 1\n', 9 * 2 * GRADIENT),
        (
            'target = "runner-up"\nnum-steps = 2\nnum-noise-vec = 1\nrestarts = 3\n',
            3 * 2 * GRADIENT,
        ),
    ],
)
def test_attack_costs_what_it_computes(known, options, seconds):
    (job,) = jobs(f"[[sweep]]\nseed = 0\n[[attack]]\nmax = 1\nepsilon = 0.5\nN = 50\n{options}")
    assert cost(known, job)["attacking"] == pytest.approx(50 * VOTE + seconds)


def test_default_number_of_draws_is_counted(known):
    (job,) = jobs(
        '[[sweep]]\nseed = 0\n[[certify]]\nmax = 1\n[[certify]]\nname = "a"\nN = 10\nmax = 1\n'
    )
    assert cost(known, job)["certifying"] == pytest.approx((100_100 + 110) * VOTE)


def test_total_is_that_of_all_jobs_and_reads_well(known):
    several = jobs("epochs = 2\n[[sweep]]\nseed = [0, 1, 2]\n[[certify]]\nmax = 10\nN = 900\n")
    each = (2 * 1438 + 2 * 359) * UPDATE
    total = 3 * (each + 10 * 1000 * VOTE)
    text = cost_table(several)
    assert f"about {total / 3600:.3g} hours on cpu" in text
    assert f"training {3 * each / 3600:.3g} hours" in text
    assert "certifying 5 minutes" in text and "without starting commands" in text


def test_range_and_what_is_chosen_later_are_told(monkeypatch):
    slower = np.array([1.0, 1.5])
    monkeypatch.setattr(costs._CostMeter, "_piece", lambda _, work: known_piece(work) * slower)
    text = cost_table(
        jobs(
            "epochs = 1\n[[sweep]]\nseed = [0, 1, 2]\n[[certify]]\nmax = 10\nN = 900\n"
            '[[certify]]\nbest = true\nname = "best"\nmax = 4\nN = 900\nN0 = 100\n'
        )
    )
    each = (1438 + 359) * UPDATE
    assert f"training {3 * each / 3600:.3g} to {4.5 * each / 3600:.3g} hours" in text
    assert "certifying 5 to 7.5 minutes" in text
    # Three times a command that certifies four images with 1,000 draws, should all models be the
    # best.
    assert "chosen later, are not counted: at most 2 to 3 minutes more" in text
    assert "fastest and slowest of 5 or more measurements" in text


def test_ensemble_without_evaluations_costs_nothing(known):
    found = jobs('epochs = 1\n[[sweep]]\nseed = [0, 1]\n[[ensemble]]\nof = "grid"\n')
    assert "shortest job takes about 0 seconds" in cost_table(found)


def test_little_is_measured_on_a_slow_machine(monkeypatch):
    monkeypatch.setattr(costs, "_SECONDS_TO_MEASURE", -1.0)
    machine, calls = meter(), []
    machine._seconds(lambda: calls.append(1))
    assert (len(calls), machine.fewest) == (1, 1)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.5, "0.5 seconds"),
        (119, "119 seconds"),
        (120, "2 minutes"),
        (7200, "2 hours"),
        (864_000_000, "10,000 days"),
        ([1.5, 2], "1.5 to 2 seconds"),
    ],
)
def test_durations_read_well(seconds, text):
    assert costs._duration(seconds) == text
