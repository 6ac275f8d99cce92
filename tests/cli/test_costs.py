"""Cost of a sweep: computed by hand and by a slow, obvious loop with known times, and once
measured.
"""

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from smoothadv.datasets import get_dataset
from smoothadv.sweep import costs
from smoothadv.sweep.grid import read_grid
from smoothadv.sweep.planning import plan_sweep

UPDATE, STEP, VOTE, GRADIENT = 3.0, 0.5, 0.01, 0.03
METER = costs._CostMeter  # the real one
HEAD = '[fixed]\ndataset = "digits"\narch = "digits_resnet8"\nnoise = 0.25\n'


@pytest.fixture
def known(monkeypatch, workplace) -> costs._CostMeter:
    """A meter for which a noisy copy takes UPDATE seconds, a step of attack STEP more, and a vote
    VOTE.
    """
    machine = costs._CostMeter(torch.device("cpu"))
    monkeypatch.setattr(machine, "_measure_update", lambda training: (UPDATE, STEP))
    monkeypatch.setattr(
        machine,
        "_measure_pass",
        lambda _, evaluation, with_gradient: (VOTE, GRADIENT)[with_gradient],
    )
    monkeypatch.setattr(costs, "_CostMeter", lambda device: machine)
    return machine


def plans(text: str) -> list:
    Path("grid.toml").write_text(HEAD + text)
    return plan_sweep(read_grid(Path("grid.toml")), {})


def obvious_training_seconds(plan) -> float:
    """Epoch by epoch and batch by batch: trained and attacked copies, then the test images of the
    epoch.
    """
    (training,), seconds = plan.trainings, 0.0
    objective = training.request.objective
    images = len(get_dataset("digits", "train"))
    for epoch in range(training.schedule.epochs):
        left = images
        for _ in range(training.schedule.steps_per_epoch or 10**9):
            batch = min(left, training.schedule.batch)
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
    (plan,) = plans(f'attack = "PGD"\nepsilon = 0.5\n{text}[[sweep]]\nseed = 0\n')
    assert known.cost(plan)["training"] == pytest.approx(obvious_training_seconds(plan))


@pytest.mark.parametrize(
    ("objective", "more", "m", "steps", "attacked", "looks"),
    [  # acr-weakness attacks and chooses from epoch 2 on, and weighs before 2 and 5
        ("acr-weakness", "attack-from-epoch = 2\nresample-every = 3\n", 4, 6, 5, 100 + 2 * 16),
        ("cat-rs", 'teacher = "a"\nteacher-draws = 50\n', 4, 4, 7, 50),
        ("smoothmix", "", 2, 4, 7, 0),
        ("distillation", 'teacher = "a"\n', 1, 0, 7, 0),
    ],
)
def test_attacks_of_noise_and_looks_at_training_images_are_counted(
    known, objective, more, m, steps, attacked, looks
):
    """With known times; and with real ones, an update of every objective can be measured."""
    (plan,) = plans(
        f'epochs = 7\nbatch = 16\n[[sweep]]\nnoise = 0.5\nobjective = "{objective}"\n{more}'
    )
    updates, tests = (
        1438 * m * (7 * UPDATE + attacked * steps * STEP),
        7 * 359 * m * (UPDATE + steps * STEP),
    )
    assert known.cost(plan)["training"] == pytest.approx(updates + tests + 1438 * looks * VOTE)
    update, step = METER(torch.device("cpu"))._measure_update(plan.trainings[0])
    assert np.all(update > 0) and np.all(np.asarray(step) >= 0)


def test_certificates_and_attacks_cost_their_votes_and_gradients(known):
    (plan,) = plans(
        "[[sweep]]\nseed = 0\n[[certify]]\nskip = 100\nN = 900\nN0 = 100\n"
        "[[attack]]\nskip = 100\nepsilon = [0.25, 0.5]\nN = 50\nnum-steps = 3\nnum-noise-vec = "
        "5\nrestarts = 2\n"
    )
    cost = known.cost(plan)
    assert cost["certifying"] == pytest.approx(4 * 1000 * VOTE), "images 0, 100, 200 and 300 of 359"
    assert cost["attacking"] == pytest.approx(2 * 4 * (50 * VOTE + 3 * 5 * 2 * GRADIENT)), (
        "two logs"
    )
    assert set(cost) == {"training", "certifying", "attacking"}


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
    (plan,) = plans(f"[[sweep]]\nseed = 0\n[[attack]]\nmax = 1\nepsilon = 0.5\nN = 50\n{options}")
    assert known.cost(plan)["attacking"] == pytest.approx(50 * VOTE + seconds)


def test_default_number_of_draws_is_counted(known):
    (plan,) = plans(
        '[[sweep]]\nseed = 0\n[[certify]]\nmax = 1\n[[certify]]\nname = "a"\nN = 10\nmax = 1\n'
    )
    assert known.cost(plan)["certifying"] == pytest.approx((100_100 + 110) * VOTE)


def test_total_is_that_of_all_jobs_and_reads_well(known):
    all_plans = plans("epochs = 2\n[[sweep]]\nseed = [0, 1, 2]\n[[certify]]\nmax = 10\nN = 900\n")
    grid = read_grid(Path("grid.toml"))
    each = (2 * 1438 + 2 * 359) * UPDATE
    total = 3 * (each + 10 * 1000 * VOTE)
    text = costs.cost_table(grid, all_plans, "cpu")
    assert (
        f"about {total / 3600:.3g} hours on cpu" in text
        and f"training {3 * each / 3600:.3g} hours" in text
    )
    assert "certifying 5 minutes" in text and "without starting commands" in text


def test_range_and_what_is_chosen_later_are_told(known, monkeypatch):
    slower = np.array([1.0, 1.5])
    monkeypatch.setattr(
        known, "_measure_pass", lambda training, evaluation, with_gradient: VOTE * slower
    )
    monkeypatch.setattr(known, "_measure_update", lambda training: (UPDATE * slower, 0.0))
    found = plans(
        "epochs = 1\n[[sweep]]\nseed = [0, 1, 2]\n[[certify]]\nmax = 10\nN = 900\n"
        '[[certify]]\nbest = true\nname = "best"\nmax = 4\nN = 900\nN0 = 100\n'
    )
    text = costs.cost_table(read_grid(Path("grid.toml")), found, "cpu")
    each = (1438 + 359) * UPDATE
    assert f"training {3 * each / 3600:.3g} to {4.5 * each / 3600:.3g} hours" in text
    assert "certifying 5 to 7.5 minutes" in text
    # Three times a command that certifies four images with 1,000 draws, should all models be the
    # best.
    assert "chosen later, are not counted: at most 2 to 3 minutes more" in text
    assert "fastest and slowest of 5 or more measurements" in text


def test_ensemble_without_evaluations_costs_nothing(known, monkeypatch):
    monkeypatch.setattr(
        known, "_measure_update", lambda training: (np.array([UPDATE, 2 * UPDATE]), 0.0)
    )
    found = plans('epochs = 1\n[[sweep]]\nseed = [0, 1]\n[[ensemble]]\nof = "grid"\n')
    assert "shortest job takes about 0 seconds" in costs.cost_table(
        read_grid(Path("grid.toml")), found, "cpu"
    )


def test_waiting_for_other_programs_is_not_counted():
    torch.set_num_threads(1)  # of several, which share the CPUs, all time counts
    low, high = costs._CostMeter(torch.device("cpu"))._seconds(lambda: time.sleep(0.1))
    assert 0 <= low <= high < 0.05


def test_little_is_measured_on_a_slow_machine(monkeypatch):
    monkeypatch.setattr(costs, "_SECONDS_TO_MEASURE", -1.0)
    machine, calls = costs._CostMeter(torch.device("cpu")), []
    machine._seconds(lambda: calls.append(1))
    assert (len(calls), machine.fewest) == (1, 1)


def test_step_of_an_attack_is_measured(workplace, monkeypatch):
    """With real measurements: an update takes time, and so does a step of its attack."""
    monkeypatch.setattr(costs, "_REPEATS", 1)
    (plan,) = plans(
        'attack = "PGD"\nepsilon = 0.5\nnum-steps = 4\nbatch = 64\n[[sweep]]\nseed = 0\n'
    )
    machine = costs._CostMeter(torch.device("cpu"))
    update, step = machine._measure_update(plan.trainings[0])
    assert (update > 0).all() and (update >= step).all() and (step >= 0).all()
    (plan,) = plans("[[sweep]]\nseed = 0\n[[attack]]\nmax = 1\nepsilon = 0.5\n")
    (attacked,) = plan.evaluations
    assert all(
        (machine._measure_pass(plan.trainings[0], attacked, gradient) > 0).all()
        for gradient in (False, True)
    )


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
