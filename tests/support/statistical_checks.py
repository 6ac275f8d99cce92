"""Checks on random outcomes. Each rejects what is true with probability at most FALSE_ALARM, over
the seeds.
"""

import numpy as np
from scipy import stats

FALSE_ALARM = 1e-6


def too_many(count: int, trials: int, probability: float) -> bool:
    """Whether ``count`` of ``trials`` independent events is too many for events of at most this
    probability.
    """
    return stats.binom.sf(count - 1, trials, probability) < FALSE_ALARM


def is_binomial_count(count: int, trials: int, probability: float) -> bool:
    """Whether ``count`` of ``trials`` is credible for independent events of this probability
    (two-sided).
    """
    return stats.binomtest(int(count), trials, probability).pvalue >= FALSE_ALARM


def is_gaussian_sample(samples: np.ndarray, sigma: float) -> bool:
    """Whether samples [N] are credibly independent draws of N(0, sigma^2): second moment, then a
    histogram.
    """
    scaled = samples.astype(np.float64).ravel() / sigma
    second_moment = np.sum(scaled**2)
    tails = stats.chi2.cdf(second_moment, len(scaled)), stats.chi2.sf(second_moment, len(scaled))
    # 50 bins of equal probability.
    counts = np.bincount((stats.norm.cdf(scaled) * 50).astype(int).clip(0, 49), minlength=50)
    return min(*tails, stats.chisquare(counts).pvalue) >= FALSE_ALARM / 3


def are_uncorrelated(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether two equally long samples are credibly uncorrelated (Fisher's transformation)."""
    correlation = np.corrcoef(first.ravel(), second.ravel())[0, 1].clip(-1 + 1e-12, 1 - 1e-12)
    return abs(np.arctanh(correlation)) * np.sqrt(first.size - 3) <= -stats.norm.ppf(
        FALSE_ALARM / 2
    )
