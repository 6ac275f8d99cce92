"""Binomial tails and radii in 60-digit arithmetic, with sums alone. mpmath comes with torch,
through sympy.
"""

import mpmath

DIGITS = 60


def normal_quantile(p: mpmath.mpf) -> mpmath.mpf:
    """Phi^-1(p); -inf where p is not above 0."""
    return mpmath.sqrt(2) * mpmath.erfinv(max(2 * mpmath.mpf(p) - 1, -1))


def failure_probability(radius: float, noise_distance: float = 0.0) -> mpmath.mpf:
    """The q = 1 - p_A up to which ``radius`` (sigma = 1) is certified, noise being this far from a
    Gaussian.
    """
    distance = mpmath.mpf(noise_distance)
    return (
        mpmath.ncdf(-(mpmath.mpf(radius) + normal_quantile(mpmath.mpf(1) / 2 + distance)))
        - distance
    )


def probability_of_at_most(failures: int, trials: int, q: mpmath.mpf) -> mpmath.mpf:
    """P[Binomial(trials, q) <= failures], by summing until nothing changes 40 digits."""
    log_choose = (
        mpmath.loggamma(trials + 1)
        - mpmath.loggamma(failures + 1)
        - mpmath.loggamma(trials - failures + 1)
    )
    term = mpmath.exp(
        log_choose + failures * mpmath.log(q) + (trials - failures) * mpmath.log1p(-q)
    )
    total, odds = mpmath.mpf(0), (1 - q) / q
    for k in range(failures, -1, -1):
        total += term
        term *= odds * k / (trials - k + 1)
        if term < total * mpmath.mpf(10) ** -40:
            break
    return total


def is_sound_and_tight(
    radius: float,
    successes: int,
    trials: int,
    alpha: float,
    noise_distance: float = 0.0,
    slack: float = 1e-8,
) -> bool:
    """Whether radius (sigma = 1) is at most the exact one, at which the tail is alpha, and within
    ``slack`` of it.
    """
    with mpmath.workdps(DIGITS):
        ends = [mpmath.mpf(radius), mpmath.mpf(radius) + mpmath.mpf(slack)]
        probabilities = [failure_probability(end, noise_distance) for end in ends]
        # Where the larger radius is beyond all that any probability certifies, no tail is needed to
        # see it.
        tails = [
            probability_of_at_most(trials - successes, trials, q) if q > 0 else 1
            for q in probabilities
        ]
        return tails[0] <= mpmath.mpf(alpha) < tails[1] and probabilities[0] > 0
