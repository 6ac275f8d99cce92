"""The course of the learning rate, and which images each update of an epoch is on."""

import dataclasses
import math

import pytest
import torch

from smoothadv.training.schedule import (
    OPTIMIZERS,
    SHAPES,
    Schedule,
    Step,
    optimizer_of,
    steps_of_epoch,
)

STEP = Schedule(epochs=150, batch=256, learning_rate=0.1, learning_rate_step=50)


@pytest.mark.parametrize(
    ("settings", "step", "rates"),
    [
        *(({}, step, [0.1] * 50 + [0.01] * 50 + [0.001] * 50) for step in (0, 195)),
        (
            {"learning_rate": 0.4, "learning_rate_step": 3, "learning_rate_factor": 0.5},
            0,
            [0.4] * 3 + [0.2] * 3 + [0.1] * 3 + [0.05],
        ),
    ],
)
def test_steps_divide_the_learning_rate_after_so_many_epochs(settings, step, rates):
    schedule = dataclasses.replace(STEP, **settings)
    found = [schedule.learning_rate_at(epoch, step, 196) for epoch in range(len(rates))]
    assert found == pytest.approx(rates)


@pytest.mark.parametrize(("epochs", "steps"), [(10, 100), (1, 1000), (1000, 1)])
def test_one_cycle_rises_over_a_fifth_and_falls_to_nearly_zero_linearly(epochs, steps):
    """Over a thousand updates: each of the two parts is a straight line, sampled in the middle of
    each update.
    """
    schedule = dataclasses.replace(STEP, epochs=epochs, learning_rate_shape="one-cycle")
    rates = [
        schedule.learning_rate_at(epoch, step, steps)
        for epoch in range(epochs)
        for step in range(steps)
    ]
    rise, fall = rates[:200], rates[200:]
    assert rise == pytest.approx([0.1 * (update + 0.5) / 200 for update in range(200)])
    assert fall == pytest.approx([0.1 * (800 - update - 0.5) / 800 for update in range(800)])
    assert max(rates) == pytest.approx(0.1, rel=0.005) and rates.index(max(rates)) in (199, 200)
    assert rates[0] < 0.001 and rates[-1] < 0.001


def test_cosine_rises_and_falls_to_its_end_and_weight_decay_goes_along():
    """As FT-CADIS's code computes them for each update, written out."""
    schedule = dataclasses.replace(
        STEP, epochs=5, learning_rate_shape="cosine", learning_rate_rise=2, learning_rate_end=0.01
    )
    for epoch, step in ((0, 0), (0, 3), (1, 3), (2, 0), (3, 1), (4, 3)):
        done = epoch + step / 4
        rate = 0.1 * done / 2
        if done >= 2:
            rate = 0.01 + (0.1 - 0.01) * 0.5 * (1 + math.cos(math.pi * (done - 2) / (5 - 2)))
        assert schedule.learning_rate_at(epoch, step, 4) == pytest.approx(rate)
    assert schedule.weight_decay_at(3, 1, 4) == STEP.weight_decay
    growing = dataclasses.replace(STEP, epochs=5, weight_decay=0.04, weight_decay_end=0.4)
    found = [growing.weight_decay_at(epoch, step, 2) for epoch in range(5) for step in range(2)]
    cosine = [0.4 + 0.5 * (0.04 - 0.4) * (1 + math.cos(math.pi * k / 10)) for k in range(10)]
    assert found == pytest.approx(cosine) and "epochs" in growing.record()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_record_has_the_number_of_epochs_only_where_rates_depend_on_it(shape):
    short, long = (
        dataclasses.replace(STEP, epochs=epochs, learning_rate_shape=shape) for epochs in (60, 90)
    )
    differ = any(
        short.learning_rate_at(epoch, 0, 5) != long.learning_rate_at(epoch, 0, 5)
        for epoch in range(60)
    )
    assert (short.record() != long.record()) == differ == (shape != "step")
    fields = {field.name for field in dataclasses.fields(Schedule)}
    of_cosine = {"learning_rate_rise", "learning_rate_end"}
    left_out = (set() if differ else {"epochs"}) | (set() if shape == "cosine" else of_cosine)
    assert short.record().keys() == fields - left_out


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_is_the_one_that_is_named(name):
    optimizer = optimizer_of(
        dataclasses.replace(STEP, optimizer=name), torch.nn.Linear(1, 1), torch.device("cpu")
    )
    assert type(optimizer).__name__.lower() == name


# ---- the order of images ----


def plan(
    labelled: int,
    pseudo: int = 0,
    batch: int = 8,
    seed: int = 0,
    epoch: int = 0,
    most: int | None = None,
):
    schedule = dataclasses.replace(STEP, batch=batch, steps_per_epoch=most)
    return steps_of_epoch(schedule, labelled, pseudo, seed, epoch)


def indices(steps: list[Step], source: int) -> list[int]:
    return [index for step in steps if step.source == source for index in step.indices.tolist()]


def as_lists(steps: list[Step]) -> list[tuple[int, list[int]]]:
    return [(step.source, step.indices.tolist()) for step in steps]


@pytest.mark.parametrize(("labelled", "batch"), [(50, 8), (48, 8), (5, 8), (8, 8), (3, 1)])
def test_every_labelled_image_comes_once(labelled, batch):
    steps = plan(labelled, batch=batch)
    assert sorted(indices(steps, 0)) == list(range(labelled))
    sizes = [len(step.indices) for step in steps]
    assert sizes[:-1] == [batch] * (len(sizes) - 1) and 1 <= sizes[-1] <= batch
    assert all(step.source == 0 and step.indices.dtype == torch.int64 for step in steps)


def test_the_order_is_a_function_of_seed_and_epoch():
    for pseudo in (0, 30):
        expected = as_lists(plan(100, pseudo, seed=3, epoch=2))
        torch.manual_seed(5)
        assert as_lists(plan(100, pseudo, seed=3, epoch=2)) == expected
        others = [
            plan(100, pseudo, seed=seed, epoch=epoch) for seed, epoch in [(3, 3), (4, 2), (2, 3)]
        ]
        assert all(as_lists(other) != expected for other in others)
    assert indices(plan(100), 0) != list(range(100))


@pytest.mark.parametrize("pseudo", [1, 5, 8, 20, 55, 56, 57, 500])
def test_there_are_as_many_pseudo_labelled_batches_as_labelled_ones(pseudo):
    """Fifty labelled images make seven batches of at most eight, so that 56 pseudo-labelled images
    are drawn.
    """
    steps = plan(50, pseudo)
    assert sum(step.source == 0 for step in steps) == sum(step.source == 1 for step in steps) == 7
    assert sorted(indices(steps, 0)) == list(range(50)), "as without"
    drawn = indices(steps, 1)
    assert all(len(step.indices) == 8 for step in steps if step.source == 1) and len(drawn) == 56
    # Images are drawn without replacement, round after round: the numbers of times differ by one at
    # most.
    counts = [drawn.count(index) for index in range(pseudo)]
    assert max(counts) == -(-56 // pseudo) and min(counts) == 56 // pseudo


def test_batches_of_both_kinds_are_mixed():
    """Of forty in random order about half have a neighbour of the other kind: 20 +- 3.2."""
    sources = [step.source for step in plan(160, 1000)]
    assert 8 <= sum(one != other for one, other in zip(sources, sources[1:])) <= 32
    assert {tuple(step.source for step in plan(160, 1000, epoch=epoch)) for epoch in range(3)} != {
        tuple(sources)
    }


@pytest.mark.parametrize("pseudo", [0, 30])
@pytest.mark.parametrize("most", [1, 5, 100])
def test_steps_per_epoch_ends_an_epoch_early(pseudo, most):
    everything = plan(50, pseudo)
    assert as_lists(plan(50, pseudo, most=most)) == as_lists(everything)[:most]
    assert len(plan(50, pseudo, most=most)) == min(most, len(everything))
