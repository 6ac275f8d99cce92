"""How many noise draws `--method adaptive` saves, and how much accuracy it loses, simulated on p_A
of released models.

    python benchmarks/adaptive_savings.py --logs released [--rounds 3]
    python benchmarks/adaptive_savings.py --log logs/quickstart/sigma_0.50.tsv --sigma 0.5

``--logs`` names a clone of the released repository (or its unpacked logs). The simulation takes
four of its models: the best at radii 0.25, 0.625 to 0.75, 1.25 to 1.625 and 1.875 to 2.25. Their
logs do not contain p_A, so it is estimated:

* A radius belongs to one count n_A of 100,000, or to a few counts whose printed radius is the same;
  one of these is drawn, and p_A = n_A / n.
* If n_A = n, the rate of misses is drawn from a gamma distribution, given that no miss was seen.
  The gamma is fitted by maximum likelihood to the inputs with 0 to 20 misses, which are Poisson
  given their rate.
* The p_A of an abstention is drawn uniformly below the smallest certified p_A, with the density
  that inputs have between that p_A and 0.6, and not below 0.1. Its class is right as often as for
  the inputs in that range.

``--log`` takes p_A = successes / trials from one log that has these columns, and draws the class of
its abstentions as above. The adaptive procedure is run on draws with these p_A, and so is the exact
one with 100,000 draws; both use the same draws as long as both need draws. The selection is assumed
to find the class that p_A belongs to. Printed are the draws per input (selection included), how
many times fewer that is than for the exact procedure, the draws if wrong classes are skipped, the
average certified radius of both (the adaptive one with its ladder), and the loss: the largest drop
of certified accuracy at a radius of the paper's tables, in points. Wald's bound is what no
sequential test of level alpha goes below on average, even if it knows p_A: log(1 / alpha) / KL(p_A,
t) draws for the highest radius that it can decide with 125,000, whose null hypothesis is p_A <= t,
and 0 for inputs without one. (Exact with n = 100,000 certifies with a probability of one half what
takes 145,000 draws by this formula.) Computing the boundaries of four fine grids takes half a
minute, once. ``stopping_limit.py`` compares more rules.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from scipy import optimize, special, stats

from smoothadv.records.readers import read_certification_log
from smoothadv.statistics import Certificate, Procedure, Smoothing
from smoothadv.statistics.adaptive import Adaptive
from smoothadv.statistics.bounds import certified_radius, radius_probability
from smoothadv.statistics.on_grid import PAPER_RADII

N0, N, N_MAX, ALPHA = 100, 100_000, 125_000, 1e-3
FIXED_DRAWS = N0 + N
BEST_MODELS = "data/certify/best_models/cifar10/ours/cifar10/PGD_10steps_multiNoiseSamples"
LOGS = {
    0.12: "4-multitrain/eps_64/cifar10/resnet110/noise_0.12/test/sigma_0.12",
    0.25: "8-multitrain/eps_255/cifar10/resnet110/noise_0.25/test/sigma_0.25",
    0.50: "2-multitrain/eps_512/cifar10/resnet110/noise_0.50/test/sigma_0.50",
    1.00: "2-multitrain/eps_512/cifar10/resnet110/noise_1.00/test/sigma_1.00",
}
FEW_MISSES = 20
UNCERTAIN = 0.6
LEAST = 0.1
"""The smallest p_A that the most probable of ten classes can have."""


@dataclass(frozen=True)
class Population:
    """Inputs: the probability [N] of the selected class, and whether that class is the right one
    [N].
    """

    p: np.ndarray
    right: np.ndarray


def released_population(path: Path, sigma: float, generator: np.random.Generator) -> Population:
    """One draw of the inputs behind a released log, whose radii have three digits."""
    log = read_certification_log(path)
    predicted, right = log["predict"].to_numpy() >= 0, log["correct"].to_numpy() == 1
    count = np.zeros(len(log), np.int64)
    count[predicted] = counts_behind(log["radius"].to_numpy()[predicted], sigma, generator)
    p = count / N
    full = count == N
    p[full] = 1 - unseen_misses(N - count[predicted], int(full.sum()), generator) / N
    return with_abstentions(p, right, ~predicted, generator, spread=True)


def counts_behind(radii: np.ndarray, sigma: float, generator: np.random.Generator) -> np.ndarray:
    """For each logged radius one of the counts that give this printed radius, or the nearest count
    if there is none.
    """
    counts = np.arange(N // 2, N + 1)
    exact = sigma * special.ndtri(special.betaincinv(counts, N - counts + 1, ALPHA))
    exact[-1] = sigma * special.ndtri(ALPHA ** (1 / N))
    counts, exact = counts[exact > 0], exact[exact > 0]
    # Python's {:.3} is {:.3g} for these.
    printed = np.array([float(f"{radius:.3}") for radius in exact])
    first = np.searchsorted(printed, radii - 1e-9).clip(max=len(counts) - 1)
    behind = np.searchsorted(printed, radii + 1e-9)
    return counts[
        first + np.floor(generator.random(len(radii)) * np.maximum(1, behind - first)).astype(int)
    ]


def unseen_misses(misses: np.ndarray, number: int, generator: np.random.Generator) -> np.ndarray:
    """Rates of misses among N draws, for ``number`` inputs without a miss; see the module's
    docstring.
    """
    few = np.bincount(misses[misses <= FEW_MISSES], minlength=FEW_MISSES + 1)
    values = np.arange(FEW_MISSES + 1)

    def negative_log_likelihood(parameters: np.ndarray) -> float:
        shape, scale = np.exp(parameters)
        log_pmf = stats.nbinom.logpmf(values, shape, 1 / (1 + scale))
        return -float(few @ (log_pmf - special.logsumexp(log_pmf)))

    fit = optimize.minimize(
        negative_log_likelihood, [-1.0, 2.0], method="L-BFGS-B", bounds=[(-7, 4), (-7, 9)]
    )
    shape, scale = np.exp(fit.x)
    return generator.gamma(shape, scale / (1 + scale), number)


def with_abstentions(
    p: np.ndarray,
    right: np.ndarray,
    abstained: np.ndarray,
    generator: np.random.Generator,
    spread: bool,
) -> Population:
    """The population after its abstentions got classes and, with ``spread``, probabilities below
    the certified ones.
    """
    p, right = p.copy(), right.copy()
    certified = np.flatnonzero(~abstained)
    if abstained.any() and len(certified):
        least = p[certified].min()
        uncertain = certified[p[certified] <= UNCERTAIN]
        if spread:
            density = max(1, len(uncertain)) / (UNCERTAIN - least)
            lowest = max(LEAST, least - abstained.sum() / density)
            p[abstained] = generator.uniform(lowest, least, abstained.sum())
        share = right[uncertain if len(uncertain) else certified].mean()
        right[abstained] = generator.random(abstained.sum()) < share
    return Population(p, right)


def logged_population(path: Path, generator: np.random.Generator) -> Population:
    """One draw of the inputs of a log with counts."""
    log = read_certification_log(path)
    if "trials" not in log:
        raise SystemExit(
            f"{path} has no columns successes and trials: name a log that certify made"
        )
    p = (log["successes"] / log["trials"]).to_numpy()
    return with_abstentions(
        p, log["correct"].to_numpy() == 1, log["predict"].to_numpy() < 0, generator, spread=False
    )


@cache
def fixed_radius(successes: int, sigma: float) -> float:
    """The radius that the exact procedure certifies; -1 for an abstention."""
    radius = certified_radius(successes, N, sigma, ALPHA)
    return -1.0 if radius is None else radius


def new_adaptive(sigma: float, ladder: bool = False) -> Adaptive:
    """The adaptive procedure for the radii of the paper's tables."""
    return Adaptive(Smoothing(sigma, N0, N_MAX, ALPHA), radii=PAPER_RADII, ladder=ladder)


def wald_bound(p: np.ndarray, sigma: float, n: int = N_MAX) -> tuple[np.ndarray, np.ndarray]:
    """Wald's bound [N] for inputs of probabilities ``p``, and the numbers [N] of the radii decided
    (-1: none).

    log(1 / alpha) / KL(p, t), where t is the null of the highest radius with t < p for which that
    is at most ``n``; 0 where there is none.
    """
    bound, row = np.zeros(len(p)), np.full(len(p), -1)
    for j, radius in enumerate(PAPER_RADII):
        t = radius_probability(radius, sigma)
        if t < 1:
            divergence = special.xlogy(p, p / t) + special.xlogy(1 - p, (1 - p) / (1 - t))
            needed = np.log(1 / ALPHA) / np.where(p > t, np.maximum(divergence, 1e-300), 1e-300)
            bound, row = np.where(needed <= n, (needed, np.full(len(p), j)), (bound, row))
    return bound, row.astype(int)


def certify(
    procedure: Procedure, p: float, generator: np.random.Generator
) -> tuple[Certificate, int]:
    """The certificate for class 0 of probability ``p``, and how many of the first N draws that
    class won.
    """
    voting = procedure.run(0)
    request, drawn, successes, of_n = next(voting), -N0, 0, 0
    while True:
        hits = int(generator.binomial(request.count, p))
        misses = request.count - hits  # all for one rival; but in the selection class 0 wins
        votes = np.array([hits, misses if drawn >= 0 else max(0, min(misses, hits - 1))])
        successes += hits if drawn >= 0 else 0
        drawn += request.count
        of_n = successes if drawn <= N else of_n
        try:
            request = voting.send(votes)
        except StopIteration as stop:
            return stop.value, of_n + int(generator.binomial(max(0, N - drawn), p))


@dataclass(frozen=True)
class Outcome:
    """For each input [N]: draws, radii of both procedures (-1: abstained or wrong class), whether
    it is right.

    ``wald`` [N] is Wald's bound on its draws.
    """

    samples: np.ndarray
    radius: np.ndarray
    fixed: np.ndarray
    right: np.ndarray
    wald: np.ndarray

    @property
    def mean(self) -> float:
        return float(self.samples.mean())

    @property
    def label_aware_mean(self) -> float:
        return float(np.where(self.right, self.samples, N0).mean())

    @property
    def loss(self) -> float:
        """The largest drop of certified accuracy, in points."""
        return 100 * max(
            float((self.fixed >= r).mean() - (self.radius >= r).mean()) for r in PAPER_RADII
        )


def simulate(
    procedure: Procedure, populations: Iterable[Population], generator: np.random.Generator
) -> Outcome:
    """The outcome of ``procedure`` and of the exact one on all inputs."""
    sigma, rows, bounds = procedure.smoothing.sigma, [], []
    for population in populations:
        bounds.append(wald_bound(population.p, sigma)[0])
        for p, right in zip(population.p.tolist(), population.right.tolist()):
            certificate, successes = certify(procedure, p, generator)
            radius = certificate.radius if right and certificate.prediction == 0 else -1.0
            fixed = fixed_radius(successes, sigma) if right else -1.0
            rows.append((certificate.details["samples"], radius, fixed, right))
    return Outcome(*(np.array(column) for column in zip(*rows)), np.concatenate(bounds))


def report(name: str, outcomes: list[Outcome]) -> None:
    """Print one line of the table: for one population, or the mean over several with equal
    weights.
    """
    mean = np.mean([outcome.mean for outcome in outcomes])
    aware = np.mean([outcome.label_aware_mean for outcome in outcomes])
    average = np.mean([np.maximum(outcome.radius, 0).mean() for outcome in outcomes])
    fixed = np.mean([np.maximum(outcome.fixed, 0).mean() for outcome in outcomes])
    loss = max(outcome.loss for outcome in outcomes)
    wald = np.mean([outcome.wald.mean() for outcome in outcomes])
    print(
        f"{name:>9} {mean:9,.0f} {FIXED_DRAWS / mean:7.1f}x {aware:12,.0f} "
        f"{FIXED_DRAWS / aware:7.1f}x {loss:12.3f} {average:8.3f} {fixed:8.3f} "
        f"{average / fixed:6.3f} {wald:8,.0f} {mean / wald:6.2f}"
    )


def main() -> None:
    """Rebuild the populations, simulate, print a line for each and one over all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--logs", type=Path, help="folder of the released logs: it holds data/certify"
    )
    source.add_argument("--log", type=Path, help="one log with the columns successes and trials")
    parser.add_argument("--sigma", type=float, help="noise level of --log")
    parser.add_argument(
        "--rounds", type=int, default=3, help="how often each population is drawn and certified"
    )
    options = parser.parse_args()
    if options.log and options.sigma is None:
        parser.error("--log needs --sigma")
    print(
        "                draws  saving  label-aware  saving  loss/points      ACR  fixed n  "
        "ratio     Wald  draws/Wald"
    )
    generator, outcomes = np.random.default_rng(0), []
    for sigma in [options.sigma] if options.log else LOGS:
        populations = (
            logged_population(options.log, generator)
            if options.log
            else released_population(options.logs / BEST_MODELS / LOGS[sigma], sigma, generator)
            for _ in range(options.rounds)
        )
        outcomes.append(simulate(new_adaptive(sigma, ladder=True), populations, generator))
        report(f"{sigma:g}", outcomes[-1:])
    if len(outcomes) > 1:
        report("overall", outcomes)


if __name__ == "__main__":
    main()
