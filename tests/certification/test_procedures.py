"""What every certification procedure declares about itself is true of its certificates."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from smoothadv.certification import ABSTAIN, PROCEDURES, Certificate, Procedure, Smoothing
from support.votes import ListedVotes, certify, listed

every_procedure = pytest.mark.parametrize("name", list(PROCEDURES))
SMOOTHING = Smoothing(0.25, 100, 20_000, 1e-3)


def certificates(procedure: Procedure) -> list[Certificate]:
    """Certificates for classes of many probabilities: their radii differ, and some abstain."""
    shares = np.concatenate([[0.25] * 5, np.linspace(0.45, 0.99, 40), 1 - np.geomspace(1e-2, 1e-6, 20)])
    generator, draws = np.random.default_rng(0), SMOOTHING.n0 + SMOOTHING.n
    found = [certify(procedure, ListedVotes(listed(p, draws, generator))) for p in shares]
    assert 0 < sum(each.prediction == ABSTAIN for each in found) < len(found) / 2
    return found


def test_the_names_say_which_procedure_is_which():
    assert {name: (PROCEDURES[name].on_grid, PROCEDURES[name].fixed_sample) for name in ("exact", "adaptive")} == {
        "exact": (False, True),
        "adaptive": (True, False),
    }


@every_procedure
def test_only_a_procedure_on_a_grid_returns_few_radii(name):
    found = certificates(PROCEDURES[name](SMOOTHING))
    steps = np.array([each.radius / SMOOTHING.sigma * 100 for each in found])
    assert (np.abs(steps - steps.round()) < 1e-9).all() == PROCEDURES[name].on_grid


@every_procedure
def test_only_a_fixed_sample_makes_all_radii_a_function_of_the_counts(name):
    procedure = PROCEDURES[name](SMOOTHING)
    found = [each for each in certificates(procedure) if each.prediction != ABSTAIN]
    assert all(each.trials == SMOOTHING.n for each in found) == procedure.fixed_sample
    record = {**dataclasses.asdict(procedure), "sigma": 0.25, "alpha": 1e-3}
    counts = [{"successes": each.successes, "trials": each.trials, **each.details} for each in found]
    assert {"successes", "trials"} <= set(procedure.counts(record)) <= set(counts[0])
    recomputed = [procedure.radius_from(each, record) for each in counts]
    assert (recomputed == [each.radius for each in found]) == procedure.fixed_sample
    stricter = [procedure.radius_from(each, {**record, "alpha": 1e-4}) for each in counts]
    assert all(less is None or less < radius for less, radius in zip(stricter, recomputed) if radius is not None)


@every_procedure
@pytest.mark.parametrize("alpha", [0.5, 0.1, 1e-3, 1e-6])
def test_the_least_number_of_draws_certifies_and_one_less_does_not(name, alpha):
    least = PROCEDURES[name].least_draws(alpha)
    if least is None:
        fields = {field.name for field in dataclasses.fields(PROCEDURES[name])}
        assert fields & {"radii", "alpha_share"}, "it depends on more than alpha"
        return
    at, below = (PROCEDURES[name](Smoothing(0.25, 10, max(1, n), alpha)).largest_radius for n in (least, least - 1))
    assert at is not None and (below is None or least == 1)


@every_procedure
def test_columns_are_the_details_of_every_certificate(name):
    procedure = PROCEDURES[name](SMOOTHING)
    assert all(set(each.details) == set(procedure.columns) for each in certificates(procedure))


@every_procedure
def test_procedures_are_frozen_and_derive_from_the_base_class(name):
    procedure = PROCEDURES[name](SMOOTHING)
    assert isinstance(procedure, Procedure) and procedure.default_n >= 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        procedure.smoothing = SMOOTHING
