"""Every argument of the public functions of counts and levels is checked: whatever cannot be is
refused by one line that begins with the argument's name.
"""

import inspect
import types
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from smoothadv.statistics import (
    PROCEDURES,
    Smoothing,
    accuracy,
    bounds,
    cascade,
    error_spending,
    prediction,
    router,
    top_k,
    two_sided,
)
from support.refusals import refusal

USUAL = {
    **dict.fromkeys("successes top ahead n".split(), 60),
    **dict.fromkeys("rival runner_up behind statements step".split(), 5),
    **dict.fromkeys("trials n_max examples".split(), 100),
    **dict.fromkeys("top_k k most stages dimension parts".split(), 2),
    **dict.fromkeys("alpha false_alarm rho gamma".split(), 0.01),
    **dict.fromkeys("null early share alpha_share confidence chance failure".split(), 0.6),
    **dict.fromkeys("radius l2_radius linf_radius power tilt sigma patience".split(), 0.5),
    "rivals": [5, 2],
    "votes": np.array([60, 30, 10]),
    "candidate": 0,
    "noise_distance": 0.001,
    "threshold": 0.7,
    "probability": 0.1,
    "exact": False,
    "growth": 1.5,
    "z_lower": 0.1,
    "z_rival": 0.2,
    "nulls": [0.5, 0.6],
    "allowance": [0.01, 0.02],
    "looks": np.array([100, 200]),
    "last_boundaries": np.array([150, 160]),
    "accuracies": np.array([0.4, 0.2]),
    "values": np.array([0.1, 0.2]),
    "radii": [0.25],
    "classes": 3,
    "table": pd.DataFrame({"radius": [0.5, 0.1], "correct": [1, 0], "predict": [1, -1]}),
}
USUAL["tables"] = [USUAL["table"]]
_NO_NUMBERS = ("x", None, True, np.nan)
_COUNT = (*_NO_NUMBERS, -1, 0.5, 2**70)
_LEVEL = (*_NO_NUMBERS, 0, 1, 2, -0.1)
_LENGTH = (*_NO_NUMBERS, -0.1, np.inf, 10**400)
BAD = {
    **dict.fromkeys("successes rival top runner_up ahead behind statements".split(), _COUNT),
    **dict.fromkeys(
        "trials n n_max examples step top_k k most stages dimension parts".split(), _COUNT
    ),
    **dict.fromkeys("alpha false_alarm rho gamma alpha_share confidence".split(), _LEVEL),
    **dict.fromkeys("null early chance failure".split(), (*_NO_NUMBERS, -0.1, 1.1)),
    **dict.fromkeys("l2_radius linf_radius power tilt".split(), _LENGTH),
    **dict.fromkeys("sigma patience".split(), (*_LENGTH, 0)),
    "radius": (*_NO_NUMBERS, np.inf, 10**400),
    "share": (*_NO_NUMBERS, 0, -0.1, 1.1),
    "growth": (*_NO_NUMBERS, 1, np.inf),
    "noise_distance": (*_NO_NUMBERS, -1e-9, 0.0501),
    "threshold": (*_NO_NUMBERS, 0.0009, 0.9991),
    "probability": (*_NO_NUMBERS, -0.1),
    **dict.fromkeys(("z_lower", "z_rival"), _NO_NUMBERS),
    "rivals": ([], [-1, 2], [0.5], [60]),
    "votes": ([-1, 2], [0.5, 1.5], ["x"]),
    "candidate": (-1, 3),
    "looks": ([0, 100], [0.5]),
    "last_boundaries": ([-1], [0.5]),
    **dict.fromkeys(("nulls", "allowance", "accuracies"), ([-0.1], [1.1], [np.nan])),
    "values": ([-0.1], [np.nan]),
    "radii": ([np.nan], ["x"]),
    **dict.fromkeys(("table", "tables", "exact", "classes"), ()),
}
FUNCTIONS: dict[str, Callable] = {
    f"{module.__name__.rpartition('.')[2]}.{name}": function
    for module in (accuracy, bounds, cascade, error_spending, prediction, router, top_k, two_sided)
    for name, function in vars(module).items()
    if isinstance(function, types.FunctionType)
    and function.__module__ == module.__name__
    and not name.startswith("_")
}


def result(name: str, **changes: object) -> object:
    """What a function makes of usual arguments but for some; of a procedure, its first request."""
    function = FUNCTIONS[name]
    usual = {each: USUAL[each] for each in inspect.signature(function).parameters}
    made = function(**{**usual, **changes})
    return next(made) if isinstance(made, types.GeneratorType) else made


@pytest.mark.parametrize("name", FUNCTIONS)
def test_usual_arguments_are_taken_also_of_numpy(name):
    arguments = inspect.signature(FUNCTIONS[name]).parameters
    numbers = {each: np.array(USUAL[each])[()] for each in arguments if np.isscalar(USUAL[each])}
    np.testing.assert_equal(result(name), result(name, **numbers))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_out_of_range_are_named(name):
    for argument in inspect.signature(FUNCTIONS[name]).parameters:
        for value in BAD[argument]:
            message = refusal(result, name, **{argument: value})
            assert message.startswith(f"{argument}: found") and ", expected" in message, message


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        ("bounds.lower_confidence_bound", "successes", 101),
        ("bounds.failure_upper_bound", "successes", 101),
        ("bounds.binomial_interval", "successes", 101),
        ("bounds.vote_is_significant", "runner_up", 61),
        ("bounds.top_k_radius", "rivals", [30, 11]),
        ("bounds.top_k_radius", "share", 1),
        ("two_sided.check_share", "alpha", 5e-324),
        ("bounds.two_sided_radius", "rival", 41),
        ("cascade.predict_in_cascade", "threshold", 0.49),
        ("error_spending.futility_probability", "n", 101),
        ("error_spending.predictive_quantile", "successes", 61),
        ("error_spending.success_upper_bound", "successes", 101),
        ("top_k.check_top_k", "top_k", 3),
        ("top_k.check_top_k", "classes", 2),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(name, argument, value):
    assert ": found" in refusal(result, name, names=", expected", **{argument: value})


STAGED = {"sigmas": (0.5, 0.25, 0.5), "noise_distances": (0.0, 0.01, 0.0)}
SMOOTHING = {"sigma": 0.5, "n0": 10, "n": 100, "alpha": 0.01, "noise_distance": 0.0}


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        *((None, "sigma", value) for value in (*_LENGTH, 0)),
        *((None, name, value) for name in ("n0", "n") for value in (*_COUNT, 0)),
        *((None, "alpha", value) for value in _LEVEL),
        *((None, "noise_distance", value) for value in BAD["noise_distance"]),
        *(
            (name, setting, value)
            for name in ("cascade", "router", "sequential-cascade", "sequential-router")
            for setting, value in (
                *(("sigmas", value) for value in ("x", (0.5, -1), (0.5, 0), (0.25, 0.1, 0.25))),
                *(("noise_distances", value) for value in ((0.0,), (0.0, 0.06, 0.0), (0.0,) * 4)),
                *(("alpha_share", value) for value in _LEVEL),
            )
        ),
        *((name, "sigmas", ()) for name in ("router", "sequential-router")),
        *((name, "sigmas", (0.5, 0.5)) for name in ("router", "sequential-router")),
        *(("cascade", "threshold", value) for value in (*_NO_NUMBERS, 0.49, 1.0)),
        *(("top-k", "top_k", value) for value in (*_COUNT, 0)),
        *((name, "radii", value) for name in ("adaptive", "sequential") for value in ((-1,), ())),
    ],
)
def test_settings_out_of_range_are_named(name, setting, value):
    if name is None:
        message = refusal(Smoothing, **{**SMOOTHING, setting: value})
    else:
        staged = STAGED if hasattr(PROCEDURES[name], "two_sided") else {}
        if setting == "sigmas":
            staged = {}
        message = refusal(PROCEDURES[name], Smoothing(**SMOOTHING), **{**staged, setting: value})
    assert message.startswith(f"{setting}: found") and ", expected" in message, message
