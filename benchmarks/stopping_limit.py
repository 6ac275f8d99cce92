"""How near sequential certification is to its limit: draws, loss and ratio to Wald's bound,
simulated on p_A of released models.

    python benchmarks/stopping_limit.py --logs released [--rounds 3] [--sigma 0.5]
    python benchmarks/stopping_limit.py --logs released --patience 6e4 9e4 12e4

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

Printed are, per noise level and overall, the draws per input (selection included), the largest drop
of certified accuracy at a radius of the paper's tables against exact with n = 100,000 on the same
draws (points), and the ratio of the draws to Wald's bound. The procedures are run through their
``run``; the selection is assumed to find the class that p_A belongs to. All misses go to one
rival, so that ``sequential`` gains nothing by its bound on the rival and pays a tenth of alpha for
it. Wald's bound is what no sequential test of level alpha goes below on average, even if it knows
p_A: log(1 / alpha) / KL(p_A, t) draws for the highest radius that it can decide with 125,000, whose
null hypothesis is p_A <= t, and 0 for inputs without one. ``--patience`` prints instead what
``sequential`` needs with these, on models that no table reports: those of the released grids with
T = 2 and one noise draw.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np
from scipy import optimize, special, stats

from smoothadv.records.readers import read_certification_log
from smoothadv.statistics import Certificate, Procedure, Smoothing, sequential
from smoothadv.statistics.adaptive import Adaptive
from smoothadv.statistics.bounds import certified_radius, radius_probability
from smoothadv.statistics.on_grid import PAPER_RADII

N0, N, N_MAX, SEQUENTIAL_MAX, ALPHA = 100, 100_000, 125_000, 150_000, 1e-3
BEST_MODELS = "data/certify/best_models/cifar10/ours/cifar10/PGD_10steps_multiNoiseSamples"
WEAKER_MODELS = "data/certify/cifar10"
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
    return with_abstentions(p, right, ~predicted, generator)


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
) -> Population:
    """The population after its abstentions got classes, and probabilities below the certified
    ones.
    """
    p, right = p.copy(), right.copy()
    certified = np.flatnonzero(~abstained)
    if abstained.any() and len(certified):
        least = p[certified].min()
        uncertain = certified[p[certified] <= UNCERTAIN]
        density = max(1, len(uncertain)) / (UNCERTAIN - least)
        lowest = max(LEAST, least - abstained.sum() / density)
        p[abstained] = generator.uniform(lowest, least, abstained.sum())
        share = right[uncertain if len(uncertain) else certified].mean()
        right[abstained] = generator.random(abstained.sum()) < share
    return Population(p, right)


@cache
def fixed_radius(successes: int, sigma: float) -> float:
    """The radius that the exact procedure certifies; -1 for an abstention."""
    radius = certified_radius(successes, N, sigma, ALPHA)
    return -1.0 if radius is None else radius


def wald_bound(p: np.ndarray, sigma: float, n: int = N_MAX) -> np.ndarray:
    """Wald's bound [N] for inputs of probabilities ``p`` [N]: log(1 / alpha) / KL(p, t), where t is
    the null of the highest radius with t < p for which that is at most ``n``; 0 where there is
    none.
    """
    bound = np.zeros(len(p))
    for radius in PAPER_RADII:
        t = radius_probability(radius, sigma)
        if t < 1:
            divergence = special.xlogy(p, p / t) + special.xlogy(1 - p, (1 - p) / (1 - t))
            needed = np.log(1 / ALPHA) / np.where(p > t, np.maximum(divergence, 1e-300), 1e-300)
            bound = np.where(needed <= n, needed, bound)
    return bound


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
class Result:
    """Mean draws per input, and the largest loss of certified accuracy at a radius, in points."""

    draws: float
    loss: float = 0.0


def simulated(
    procedure: Procedure, populations: Iterable[Population], generator: np.random.Generator
) -> Result:
    """What a procedure needs and loses on all inputs."""
    sigma = procedure.smoothing.sigma
    rows = []
    for population in populations:
        for p, right in zip(population.p.tolist(), population.right.tolist()):
            certificate, successes = certify(procedure, p, generator)
            radius = certificate.radius if right and certificate.prediction == 0 else -1.0
            fixed = fixed_radius(successes, sigma) if right else -1.0
            rows.append((certificate.details["samples"], radius, fixed))
    samples, radius, fixed = np.array(rows).T
    losses = [float((fixed >= r).mean() - (radius >= r).mean()) for r in PAPER_RADII]
    return Result(float(samples.mean()), 100 * max(losses))


def results_at(sigma: float, logs: Path, rounds: int, patience: list[float]) -> dict[str, Result]:
    """All rows of the table at one noise level."""
    generator = np.random.default_rng(0)
    paths = [logs / BEST_MODELS / LOGS[sigma]]
    if patience:
        paths = sorted((logs / WEAKER_MODELS).rglob(f"sigma_{sigma:.2f}"))
    populations = [
        released_population(path, sigma, generator) for path in paths for _ in range(rounds)
    ]
    wald = np.mean([wald_bound(population.p, sigma).mean() for population in populations])
    results = {"exact": Result(float(N0 + N))}
    ours = sequential.Sequential(Smoothing(sigma, N0, SEQUENTIAL_MAX, ALPHA), radii=PAPER_RADII)
    for value in patience:
        with mock.patch.object(sequential, "_FUTILITY", (value, *sequential._FUTILITY[1:])):
            results[f"{value:,.0f}"] = simulated(ours, populations, np.random.default_rng(1))
    if not patience:
        adaptive = Adaptive(Smoothing(sigma, N0, N_MAX, ALPHA), radii=PAPER_RADII)
        results["adaptive"] = simulated(adaptive, populations, generator)
        results["sequential"] = simulated(ours, populations, generator)
    return results | {"Wald": Result(float(wald))}


def print_table(table: dict[float, dict[str, Result]]) -> None:
    """Draws, loss in points and ratio to Wald's bound of each rule, per noise level and over
    all.
    """
    columns = {f"sigma {sigma:g}": [results] for sigma, results in table.items()}
    columns |= {"overall": list(table.values())} if len(table) > 1 else {}
    print(f"{'':>12}" + "".join(f"{name:>24}" for name in columns))
    print(f"{'':>12}" + f"{'draws':>10} {'loss':>6} {'ratio':>6}" * len(columns))
    for rule in next(iter(table.values())):
        line = f"{rule:>12}"
        for several in columns.values():
            draws = np.mean([results[rule].draws for results in several])
            wald = np.mean([results["Wald"].draws for results in several])
            loss = max(results[rule].loss for results in several)
            line += f"{draws:10,.0f} {loss:6.3f} {draws / wald:6.2f}"
        print(line)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--logs",
        type=Path,
        required=True,
        help="folder of the released logs: it holds data/certify",
    )
    parser.add_argument(
        "--sigma", type=float, choices=LOGS, action="append", help="only this noise level"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="how often each population is drawn and certified"
    )
    parser.add_argument("--patience", type=float, nargs="+", default=[])
    options = parser.parse_args()
    given = options.logs, options.rounds, options.patience
    print_table({sigma: results_at(sigma, *given) for sigma in options.sigma or LOGS})


if __name__ == "__main__":
    main()
