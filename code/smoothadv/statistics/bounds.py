"""Confidence bounds, certified radii and their conversions: float64 SciPy, never torch.

Notation: a smoothed classifier returned class c in ``successes`` of ``trials`` independent draws,
and ``alpha`` is the allowed probability of a false statement. Everything that becomes a radius goes
through q = 1 - p, the probability of *not* returning c: near p = 1 a float64 p has lost the digits
that matter, q has not.
"""

import math
import sys
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

import numpy as np
from scipy import special

from smoothadv.base.settings import SettingError
from smoothadv.statistics.ranges import trusting, within_ranges


def _check_rivals(successes: int, rivals: Sequence[int], trials: int) -> None:
    if not rivals or successes + sum(rivals) > trials:
        counts = f"{successes} successes and {list(rivals)} for rivals"
        raise SettingError(f"rivals: found {counts} of {trials} trials, expected no more than all")


@within_ranges
def lower_confidence_bound(successes: int, trials: int, alpha: float) -> float:
    """One-sided Clopper-Pearson lower bound on a binomial probability.

    The ``alpha`` quantile of Beta(successes, trials - successes + 1); 0 if there was no success and
    alpha^(1/trials) if there was nothing else (Cohen et al., LowerConfBound, section 3.2.2).

    Formal guarantee: for every p > 0, P[bound >= p] <= alpha over successes ~ Binomial(trials, p).
    Returns a float in [0, 1). ValueError unless 0 <= successes <= trials and 0 < alpha < 1.
    """
    if successes > trials:
        raise SettingError(f"successes: found {successes} of {trials} trials, expected at most all")
    if successes == 0:
        return 0.0
    if successes == trials:
        return math.exp(math.log(alpha) / trials)
    # SciPy's inverse is nan at some alpha below 1e-100: max and min with nan last are then 0 and 1.
    return max(0.0, float(special.betaincinv(successes, trials - successes + 1, alpha)))


@within_ranges
def failure_upper_bound(successes: int, trials: int, alpha: float) -> float:
    """Upper confidence bound on q = 1 - p, never below the exact one: ``1 -
    lower_confidence_bound``.

    The exact bound solves P[Binomial(trials, q) <= failures] = alpha. SciPy's inverse may be
    slightly too small, so this function raises q until the tail probability is at most alpha, with
    a margin for the rounding error of that probability (2e-11 at 6e8 trials). The result exceeds
    the exact bound by a relative 1e-8 at most where alpha is up to .99.

    Returns a float in (0, 1]. ValueError unless 0 <= successes <= trials and 0 < alpha < 1.
    """
    if successes > trials:
        raise SettingError(f"successes: found {successes} of {trials} trials, expected at most all")
    if successes == 0:
        return 1.0
    failures = trials - successes
    if failures == 0:
        return min(1.0, -math.expm1(math.log(alpha) / trials) * (1 + 1e-14))
    q = float(special.betainccinv(failures + 1, successes, alpha))
    step = 1e-12
    while not special.betaincc(failures + 1, successes, q) <= alpha * (1 - 1e-10):
        q = min(1.0, q * (1 + step))
        step *= 2
    return q


@within_ranges
def certified_radius(
    successes: int, trials: int, sigma: float, alpha: float, noise_distance: float = 0.0
) -> float | None:
    """Radius sigma * Phi^-1(p_lower) of Cohen et al., Theorem 1 with p_B = 1 - p_A; None means
    abstain.

    ``noise_distance`` d >= 0 bounds the total variation distance between the noise that was drawn
    and N(0, sigma^2 I) on any one image; the radius is then sigma * (Phi^-1(p_lower - d) -
    Phi^-1(1/2 + d)), since the probabilities are off by up to d at both images, the certified one
    and the perturbed one.

    Formal guarantee: with probability at least 1 - alpha over the draws, p_A > p_lower; the
    smoothed classifier then returns the same class everywhere in the closed l2 ball of this radius,
    which lies in the open one of radius sigma * Phi^-1(p_A). The returned float64 is never above
    the exact value, and for alpha up to .99 within 1e-8 sigma of it. Same unit as ``sigma``. None
    where p_lower < 1/2. ValueError on impossible counts, alpha outside (0, 1) or sigma <= 0.
    """
    return trusting(radius_of)(
        trusting(failure_upper_bound)(successes, trials, alpha), sigma, noise_distance
    )


@within_ranges
def radius_of(failure: float, sigma: float, noise_distance: float = 0.0) -> float | None:
    """The radius of ``certified_radius`` where ``failure`` is the upper bound on q = 1 - p."""
    loss = sigma * _distance_quantile(noise_distance)
    q = min(1.0, (failure + noise_distance) * (1 + 1e-15)) if noise_distance else failure
    if q > 0.5:
        return None
    # ndtri is accurate to a few units in the last place; the factor makes the radius smaller by
    # more than that.
    radius = -sigma * float(special.ndtri(q)) * (1 - 2e-15) - loss
    if noise_distance and radius <= 0:
        return None
    return max(0.0, radius)


@within_ranges
def threshold_radius(
    successes: int,
    trials: int,
    sigma: float,
    alpha: float,
    threshold: float,
    noise_distance: float = 0.0,
) -> float:
    """Radius sigma * (Phi^-1(p_lower - d) - Phi^-1(threshold + d)); negative if not even the image
    is certified.

    Formal guarantee: with probability at least 1 - alpha over the draws, the probability of a
    success is above ``threshold`` in the whole closed l2 ball of this radius (Cohen et al., lemma
    4), where a success is a fixed set of classes and d = ``noise_distance`` is as in
    ``certified_radius``. The float64 is never above the exact value. ``threshold`` lies in
    0.001..0.999. ValueError on impossible counts, levels, thresholds or sigma.
    """
    failure = trusting(failure_upper_bound)(successes, trials, alpha)
    z_lower = _quantile_below(failure, noise_distance)
    z_threshold = threshold_quantile(threshold, noise_distance)
    return sigma * (z_lower - z_threshold - (abs(z_lower) + abs(z_threshold)) * 4e-15)


@within_ranges
def threshold_quantile(threshold: float, noise_distance: float = 0.0) -> float:
    """An upper bound on Phi^-1(t + d), where t rounds to ``threshold`` in 0.001..0.999."""
    return float(special.ndtri(min(1.0, threshold + noise_distance + 1e-15))) + 1e-13


@within_ranges
def two_sided_radius(
    successes: int,
    rival: int,
    trials: int,
    sigma: float,
    alpha: float,
    share: float,
    noise_distance: float = 0.0,
) -> float | None:
    """Radius sigma / 2 (Phi^-1(p_lower) - Phi^-1(p_upper)) of Cohen et al., Theorem 1; None means
    abstain.

    ``rival`` is the largest count of another class among ``trials`` draws that returned class c
    ``successes`` times. p_lower is the lower bound on p_A at level ``share`` * alpha; p_upper is
    the smaller one of 1 - p_lower and the upper bound on the rival's probability at level (1 -
    ``share``) * alpha. 0 < ``share`` <= 1; with a ``share`` of 1 this is ``certified_radius``. With
    a ``noise_distance`` d, p_lower is smaller by d and p_upper larger, and the radius is such that
    Theorem 1 leaves a difference of 2 d between the two classes.

    Formal guarantee: with probability at least 1 - alpha over the draws, the smoothed classifier
    returns class c in the whole closed l2 ball of this radius, if c does not depend on these draws.
    Only the bound of the most probable rival has to hold, so that no level is divided among the
    classes (an intersection-union test: Berger, 1982, Technometrics 24(4); proof:
    docs/guarantee.md). ValueError on impossible counts, levels, shares or sigma.
    """
    _check_rivals(successes, [rival], trials)
    failure = failure_upper_bound(successes, trials, share * alpha)
    one_sided = trusting(radius_of)(failure, sigma, noise_distance)
    if share == 1:
        return one_sided
    z_lower = _quantile_below(failure, noise_distance)
    rival_failure = failure_upper_bound(trials - rival, trials, (1 - share) * alpha)
    z_rival = _quantile_below(rival_failure, noise_distance)
    radius = trusting(radius_between)(z_lower, z_rival, sigma, noise_distance)
    return one_sided if not radius >= 0 else max(one_sided or 0.0, radius)


@within_ranges
def top_k_radius(
    successes: int,
    rivals: Sequence[int],
    trials: int,
    sigma: float,
    alpha: float,
    share: float,
    noise_distance: float = 0.0,
) -> float | None:
    """Radius within which class c stays among the k most probable (Jia et al., ICLR 2020, Theorem
    1); None: abstain.

    ``rivals`` are the k largest counts of other classes among ``trials`` draws that returned c
    ``successes`` times (0 for a class that does not exist). p is the lower bound on p_A at level
    ``share`` * alpha, u_1 <= ... <= u_k are the upper bounds from ``rivals``, each at level (1 -
    ``share``) * alpha / k, and S_t is u_1 + ... + u_t, S_k at most 1 - p. The radius is the largest
    r with Phi(Phi^-1(p) - r / sigma) >= Phi(Phi^-1(S_t) + r / sigma) / t for some t; for one rival
    it is that of ``two_sided_radius``. With a ``noise_distance`` d, all probabilities may be off by
    d.

    Formal guarantee: with probability at least 1 - alpha over the draws, c is among the k most
    probable classes in the whole closed l2 ball of this radius, if c does not depend on these
    draws. Only the bounds of k classes have to hold, those that are fixed as at least as probable
    as c at the nearest image where there are so many: alpha is divided among k classes, not among
    all (proof: docs/guarantee.md). ValueError on impossible counts, levels, shares or sigma.
    """
    if share == 1:
        raise SettingError(f"share: found {share}, expected a number strictly between 0 and 1")
    _check_rivals(successes, rivals, trials)
    k = len(rivals)
    failure = failure_upper_bound(successes, trials, share * alpha)
    level = (1 - share) * alpha / k
    sums = list(
        accumulate(sorted(failure_upper_bound(trials - count, trials, level) for count in rivals))
    )
    sums[-1] = min(sums[-1], failure)
    safe = 1 + 1e-12 + k * 1e-15  # more than the rounding of SciPy's functions and of the sums
    z = -float(special.ndtri(min(1.0, (failure + noise_distance) * safe)))
    z_sets = special.ndtri(np.minimum(1.0, (np.array(sums) + noise_distance) * safe))
    sizes = np.arange(1, k + 1)

    def holds(r: float) -> bool:
        least = float(special.ndtr(z - r)) / safe - noise_distance
        return bool((least * sizes > special.ndtr(z_sets + r) * safe + noise_distance).any())

    if not holds(0.0):
        return None
    low, high = (
        0.0,
        40.0,
    )  # no float64 probability is more than that many standard deviations from another
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low * sigma * (1 - 1e-12)


@within_ranges
def radius_between(z_lower: float, z_rival: float, sigma: float, noise_distance: float) -> float:
    """A radius within which no rival is as probable as class c, by Theorem 1 of Cohen et al.;
    negative or nan if none.

    Phi(``z_lower``) < p_A - d and Phi(-``z_rival``) > p_B + d, where d = ``noise_distance`` >= 0
    and p_B is the probability of the strongest rival. A difference of 2 d is left between both
    classes at this radius.
    """
    if noise_distance:
        # A weaker bound on the rival holds, too: beyond a gap, by Lambert's W, the loss grows
        # faster than the sum.
        slope = _distance_quantile(max(noise_distance, 1e-150))
        u = min(
            math.sqrt(special.lambertw(slope**-2).real),
            math.sqrt(2 * math.log(max(1.0, 0.0999 / slope))),
        )
        z_rival = min(z_rival, z_lower + max(0.0, 2 * (u - 0.1)))
    rounding = (abs(z_lower) + abs(z_rival)) * 4e-15
    return sigma * (
        (z_lower + z_rival) / 2
        - rounding
        - trusting(quantile_loss)(z_lower, z_rival, noise_distance)
    )


@within_ranges
def quantile_loss(z_lower: float, z_rival: float, noise_distance: float) -> float:
    """e such that Phi(m + e) - Phi(m - e) >= 2 d, where m is (``z_lower`` - ``z_rival``) / 2; inf
    if that is above 0.1.

    So much may the probabilities of two classes differ from those under Gaussian noise, taken
    together.
    """
    # The normal density falls with |m| + e, which is |m| + 0.1 at most.
    loss = _distance_quantile(noise_distance) * math.exp(
        min(400.0, (abs(z_lower - z_rival) / 2 + 0.1) ** 2 / 2)
    )
    return loss if loss <= 0.1 else math.inf


def _quantile_below(failure: float, noise_distance: float) -> float:
    """Phi^-1(p_lower - d), within rounding, where ``failure`` is 1 - p_lower; -inf where p_lower <=
    d.
    """
    return -float(special.ndtri(min(1.0, (failure + noise_distance) * (1 + 1e-15))))


@within_ranges
def tolerated_false_statements(statements: int, probability: float, false_alarm: float) -> int:
    """The largest number of false statements that does not contradict an error probability of each
    statement.

    The smallest k with P[Binomial(statements, probability) > k] <= ``false_alarm``; ``statements``
    itself where ``probability``, which may be a sum of bounds, is 1 or more. Formal guarantee: if
    each statement is false with probability at most ``probability``, independently of the others,
    then more than k statements are false with probability at most ``false_alarm``.
    """
    from scipy import stats  # takes a second to load, and no radius needs it

    if probability >= 1:
        return statements
    k = int(stats.binom.isf(false_alarm, statements, probability)) if statements else 0
    while k > 0 and stats.binom.sf(k - 1, statements, probability) <= false_alarm:
        k -= 1
    while stats.binom.sf(k, statements, probability) > false_alarm:
        k += 1
    return k


@within_ranges
def binomial_interval(successes: int, trials: int, confidence: float) -> tuple[float, float]:
    """The two-sided Clopper-Pearson interval: it misses the true value with probability at most 1 -
    ``confidence``.
    """
    tail = (1 - confidence) / 2
    low = lower_confidence_bound(successes, trials, tail)
    return low, 1 - lower_confidence_bound(trials - successes, trials, tail)


def _distance_quantile(noise_distance: float) -> float:
    """An upper bound on Phi^-1(1/2 + d) for a small distance d."""
    # Phi^-1 is convex above 1/2, where it starts with slope sqrt(2 pi): 1 % covers its curvature up
    # to 0.05.
    return math.sqrt(2 * math.pi) * noise_distance * 1.01


@within_ranges
def radius_probability(
    radius: float, sigma: float, noise_distance: float = 0.0, threshold: float = 0.5
) -> float:
    """An upper bound on Phi(radius / sigma), the largest p_A for which ``radius`` is not certified.

    If the smoothed classifier is not constant on the closed ball of this radius, then p_A is at
    most this (Cohen et al., Theorem 1, read backwards). With noise at total variation distance d
    from the Gaussian it is Phi(radius / sigma + Phi^-1(1/2 + d)) + d. Returns a float in [0, 1]. A
    negative ``radius`` stands for a p_A below 1/2, which can be certified only where the rivals'
    bound makes up for it. With another ``threshold`` than 1/2, it is the largest probability for
    which that at the edge of the ball may be no more than the threshold.
    """
    z = _distance_quantile(noise_distance)
    if threshold != 0.5:
        z = threshold_quantile(threshold, noise_distance)
    z += radius / sigma * (1 + math.copysign(1e-15, radius))
    # Computed from the upper tail, which keeps its digits where p is near 1.
    q = float(special.ndtr(-z)) * (1 - 1e-13) - noise_distance
    return min(1.0, math.nextafter(1.0 - max(0.0, q), 2.0))


@within_ranges
def squared_grey_radius(l2_radius: float) -> int:
    """The largest integer m that is certain to lie below (255 * radius)^2; 0, the image itself, at
    radius 0.

    An 8-bit image X' with sum((X' - X)^2) <= m, in grey levels 0..255, then lies in the ball of
    ``l2_radius`` around X on the scale [0, 1]. The check uses integers only, so that no norm is
    rounded.
    """
    return math.floor(Fraction(255) ** 2 * Fraction(l2_radius) ** 2 * (1 - Fraction(1, 10**12)))


@within_ranges
def maximum_radius(trials: int, sigma: float, alpha: float) -> float:
    """The radius that ``trials`` successes out of ``trials`` certify: sigma *
    Phi^-1(alpha^(1/trials)).

    0 where not even that certifies.
    """
    return certified_radius(trials, trials, sigma, alpha) or 0.0


@within_ranges
def vote_is_significant(top: int, runner_up: int, alpha: float) -> bool:
    """PREDICT's test (Cohen et al., section 3.2.1): two-sided, top ~ Binomial(top + runner_up,
    1/2).

    Formal guarantee: if the runner-up is in truth at least as probable as the top class, the answer
    is True with probability at most alpha. ValueError unless top >= runner_up >= 0 and top >= 1.
    """
    if not top >= max(1, runner_up):
        raise SettingError(f"top: found {top} and {runner_up} votes, expected the larger count")
    # Both tails are equal. Within the margin few votes are counted exactly: 11 of 11 are
    # significant at level 2^-10.
    levels, votes = (alpha / 2, alpha / 2 * (1 + 1e-9)), top + runner_up
    surely, perhaps = (lead_is_significant(top, runner_up, level) for level in levels)
    if surely == perhaps or votes > 1100:  # of more votes no p-value is a float64
        return surely
    return 2 * sum(math.comb(votes, k) for k in range(top, votes + 1)) <= Fraction(alpha) * 2**votes


@within_ranges
def lead_is_significant(ahead: int, behind: int, alpha: float) -> bool:
    """Whether a class, chosen before the counts, is more probable than another: one-sided,
    Binomial(sum, 1/2).

    Formal guarantee: if it is not, the answer is True with probability at most alpha. More votes
    ``ahead`` or fewer ``behind`` never make it False. Both counts are at least 0.
    """
    # betainc is P[Binomial(ahead + behind, 1/2) >= ahead]; 1e-10 covers its rounding.
    return ahead > behind and bool(special.betainc(ahead, behind + 1, 0.5) <= alpha * (1 - 1e-10))


@within_ranges
def linf_radius(l2_radius: float, dimension: int) -> float:
    """The l_inf radius that an l2 radius implies in ``dimension`` coordinates: the largest float64
    up to r / sqrt(d).

    Holds because ||v||_2 <= sqrt(d) ||v||_inf (SmoothAdv, section 4.1). Same unit as ``l2_radius``
    >= 0.
    """
    numerator, denominator = l2_radius.as_integer_ratio()
    return _root_below(
        l2_radius / math.sqrt(dimension), numerator**2, denominator**2 * int(dimension)
    )


@within_ranges
def l2_radius_for(linf_radius: float | Fraction, dimension: int) -> float:
    """The l2 radius that certifies an l_inf radius r >= 0 in ``dimension`` coordinates: r sqrt(d),
    rounded up.
    """
    numerator, denominator = linf_radius.as_integer_ratio()
    square = numerator**2 * int(dimension), denominator**2
    root = _root_below(float(linf_radius) * math.sqrt(dimension), *square)
    return root if Fraction(root) ** 2 == Fraction(*square) else math.nextafter(root, math.inf)


def _root_below(guess: float, numerator: int, denominator: int) -> float:
    """The largest float64 whose square is at most a fraction; ``guess`` is the fraction's root but
    for rounding.
    """
    root = min(math.nextafter(math.nextafter(guess, math.inf), math.inf), sys.float_info.max)
    while True:
        above, below = root.as_integer_ratio()
        if above**2 * denominator <= numerator * below**2:
            return root
        root = math.nextafter(root, 0.0)


@within_ranges
def certified_accuracy_deduction(
    examples: int, alpha: float, rho: float, exact: bool = False
) -> float:
    """What to subtract from measured certified accuracies so that they hold with probability 1 -
    rho. A fraction.

    Each of ``examples`` certificates is false with probability at most alpha, independently;
    Bernstein's inequality bounds the false share: alpha + sqrt(2 alpha (1 - alpha) ln(1/rho) / N) +
    ln(1/rho) / (3 N) (Cohen et al., appendix C, with the factor 2 that the released analysis
    omits). ``exact``: the quantile k / N of Binomial(N, alpha) instead, k exceeded with probability
    at most rho. Valid for one fixed model, at all radii at once, not after a selection among
    several models.
    """
    if exact:
        return tolerated_false_statements(examples, alpha, rho) / examples
    log_term = math.log(1 / rho)
    return (
        alpha + math.sqrt(2 * alpha * (1 - alpha) * log_term / examples) + log_term / (3 * examples)
    )
