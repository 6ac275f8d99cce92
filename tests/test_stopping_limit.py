"""The benchmark of stopping: Wald's bound against its closed form."""

import importlib
import math
from types import ModuleType

import numpy as np
import pytest
from scipy import stats

from support.commands import CODE


@pytest.fixture
def limit(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(CODE.parent / "benchmarks"))
    return importlib.import_module("stopping_limit")


def test_walds_bound_is_that_of_the_highest_radius_within_reach(limit):
    p = stats.norm.cdf(np.array([-0.1, 0.01, 0.3, 0.6, 9.0]))
    bound = limit.wald_bound(p, sigma=1.0)
    t = stats.norm.cdf([0.25, 0.5, 2.25])
    divergence = p[2:] * np.log(p[2:] / t) + (1 - p[2:]) * np.log(
        np.maximum(1 - p[2:], 1e-300) / (1 - t)
    )
    assert bound == pytest.approx([0, 0, *(math.log(1000) / divergence)], rel=1e-9)
