"""How near sequential certification is to its limit: draws, loss and ratio to Wald's bound of
several rules.

    python benchmarks/stopping_limit.py --logs released [--rounds 3] [--sigma 0.5]
    python benchmarks/stopping_limit.py --logs released --patience 6e4 9e4 12e4

The inputs are those of adaptive_savings.py, whose docstring tells how their p_A is estimated.
Printed are, per noise level and overall, the draws per input (selection included), the largest drop
of certified accuracy at a radius of the paper's tables against exact with n = 100,000 on the same
draws (points), and the ratio of the draws to Wald's bound:

* ``adaptive``, ``sequential``: the procedures of these names, each run through its ``run``. All
  misses go to one rival, so that ``sequential`` gains nothing by its bound on the rival and pays a
  tenth of alpha for it.
* ``plan``: exact error spending for p_A alone, with the constants of ``sequential``.
* ``mixture``: stops where the beta(1/2, 1/2) mixture over p > t has 1 / alpha times the likelihood
  of t: a martingale, so that the level holds at any number of draws.
* ``e-process``: between two looks it bets on the share of successes so far (predictable plug-in); a
  row is rejected at a wealth of 1 / alpha. It and ``mixture`` may go on to ``ANYTIME_MAX`` draws;
  both give up like ``plan``.
* ``programme``: ``plan`` with looks thinned to the ratio ``LIMIT_GROWTH``; when to give up is
  computed by dynamic programming under the distribution of p_A of other models' logs, at a price of
  ``PRICE`` draws per lost decision.
* ``limit, stopping``: a lower bound on the draws of every rule with the boundaries and looks of
  ``programme`` that loses at most .05 points at each radius, even if it knows the distribution of
  p_A over these very inputs.
* ``limit, all``: the same for all boundaries at these looks that keep the level alpha for each
  radius, whether or not the rule gives up earlier.
* ``Wald``: log(1 / alpha) / KL(p, t), for an oracle that knows p; see
  ``adaptive_savings.wald_bound``.

Both limits are Lagrangian: for any prices y >= 0 of a lost decision and u >= 0 of a false one, the
smallest mean of draws + y lost + u false, found by backward induction, less what the constraints
allow is a lower bound. Printed is the larger of the bounds at ``PRICES``; better prices for each
radius could only raise it. The rules that are bounded know the numbers of draws and of successes
and the rows crossed, but neither the selection votes nor the label. The distribution of p_A is cut
into atoms that are ``ATOM`` apart in arcsin(sqrt(p)). The limits take most of the time: ten minutes
or so for all noise levels.
"""

from __future__ import annotations

import argparse
import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np
from adaptive_savings import (
    ALPHA,
    BEST_MODELS,
    FIXED_DRAWS,
    LOGS,
    N0,
    N,
    Population,
    fixed_radius,
    new_adaptive,
    released_population,
    simulate,
    wald_bound,
)
from scipy import special, stats
from stopping_programme import Prior, Programme, prior_of

from smoothadv.statistics import Procedure, Smoothing, sequential
from smoothadv.statistics.bounds import radius_probability
from smoothadv.statistics.error_spending import (
    efficacy_table,
    futility_probability,
    look_schedule,
    predictive_quantile,
    success_upper_bound,
)
from smoothadv.statistics.on_grid import PAPER_RADII

PLAN_MAX, ANYTIME_MAX = 150_000, 200_000
PLAN = {
    **dict(
        zip(("early", "growth", "step"), (sequential._EARLY, sequential._GROWTH, sequential._STEP))
    ),
    **dict(zip(("patience", "power", "tilt"), sequential._FUTILITY)),
    "selection_gamma": sequential._GAMMA,
}
OTHER_MODELS = "data/certify/best_models/cifar10/ours"
WEAKER_MODELS = "data/certify/cifar10"
PROCEDURES: dict[str, Callable[[float], Procedure]] = {
    "adaptive": new_adaptive,
    "sequential": lambda sigma: sequential.Sequential(
        Smoothing(sigma, N0, PLAN_MAX, ALPHA), radii=PAPER_RADII
    ),
}
ALLOWED_LOSS = 0.0005
PRICE, PRICES, LEVEL_PRICE = 4e5, (2e5, 4e5), 0.1
LIMIT_GROWTH = 1.15
PATHS = 5
"""How often the draws of a population are repeated for the rules that are fast to simulate."""


@dataclass(frozen=True)
class Tables:
    """The boundaries of a rule, as integers; rows are null hypotheses p <= nulls[j].

    ``nulls`` float64 [J] ascending; ``looks`` int64 [K] ascending, the last one n_max; ``efficacy``
    int64 [J, K]: at look k, row j is rejected by at least efficacy[j, k] successes of looks[k]
    draws; ``futility`` int64 [J, K]: with at most futility[j, k] successes a rejection of row j by
    the end is too unlikely to wait for (-1: never).
    """

    nulls: np.ndarray
    looks: np.ndarray
    efficacy: np.ndarray
    futility: np.ndarray


def plan_looks(nulls: np.ndarray, n_max: int, growth: float = PLAN["growth"]) -> np.ndarray:
    """The numbers of draws at which ``PLAN`` looks."""
    return look_schedule(nulls.tolist(), n_max, ALPHA, PLAN["early"], growth, int(PLAN["step"]))


def plan_tables(nulls: np.ndarray, growth: float = PLAN["growth"]) -> Tables:
    """Boundaries by exact error spending and futility with the constants of ``PLAN``."""
    looks = plan_looks(nulls, PLAN_MAX, growth)
    efficacy = efficacy_table(nulls.tolist(), looks, ALPHA, PLAN["early"])
    return Tables(nulls, looks, efficacy, give_up(nulls, looks, efficacy))


def give_up(nulls: np.ndarray, looks: np.ndarray, efficacy: np.ndarray) -> np.ndarray:
    """The futility boundaries [J, K] of ``PLAN``."""
    n_max = int(looks[-1])
    rows = np.full_like(efficacy, -1)
    for j, (t, last) in enumerate(zip(nulls.tolist(), efficacy[:, -1].tolist())):
        for k, n in enumerate(looks[:-1].tolist()):
            price = futility_probability(n, n_max, t, PLAN["patience"], PLAN["power"], PLAN["tilt"])
            counts = range(min(n, last - 1) + 1)
            rows[j, k] = (
                bisect_left(counts, last, key=lambda s: predictive_quantile(s, n, n_max, price)) - 1
            )
        rows[j, -1] = min(n_max, last - 1)
    return rows


def mixture_tables(nulls: np.ndarray) -> Tables:
    """The smallest counts at which the mixture over p > t has 1 / alpha times the likelihood of
    t.
    """
    looks = plan_looks(nulls, ANYTIME_MAX)
    rows = []
    for t in nulls.tolist():
        low, high = np.ceil(looks * t).astype(np.int64), looks + 1
        while (low < high).any():
            middle = (low + high) // 2
            rejects = mixture_log_ratio(np.minimum(middle, looks), looks, t) >= math.log(1 / ALPHA)
            low, high = (
                np.where(rejects | (low >= high), low, middle + 1),
                np.where(rejects, middle, high),
            )
        rows.append(low)
    efficacy = np.maximum.accumulate(rows, axis=0)
    return Tables(nulls, looks, efficacy, give_up(nulls, looks, efficacy))


def mixture_log_ratio(successes: np.ndarray, n: np.ndarray, t: float) -> np.ndarray:
    """Log of the likelihood of the counts under beta(1/2, 1/2) restricted to p > t, over that under
    p = t.
    """
    if t > 1 - 1e-9:
        return np.full(np.shape(n), -np.inf)
    a, b = 0.5 + successes, 0.5 + n - successes
    mixed = special.betaln(a, b) + np.log(np.maximum(special.betaincc(a, b, t), 1e-300))
    prior = special.betaln(0.5, 0.5) + math.log(special.betaincc(0.5, 0.5, t))
    return mixed - prior - special.xlogy(successes, t) - special.xlog1py(n - successes, -t)


@dataclass(frozen=True)
class Paths:
    """The successes [N, U] of N inputs after each of the draws ``looks`` [U], and those [N] of the
    selection.
    """

    looks: np.ndarray
    successes: np.ndarray
    selected: np.ndarray

    def at(self, n: int) -> np.ndarray:
        return self.successes[:, np.searchsorted(self.looks, n)]


def draw_paths(p: np.ndarray, looks: np.ndarray, generator: np.random.Generator) -> Paths:
    """Draws for inputs of probabilities ``p`` [N]."""
    counts = generator.binomial(np.diff(looks, prepend=0), p[:, None])
    return Paths(looks, np.cumsum(counts, axis=1), generator.binomial(N0, p))


Crossing = Callable[[int, np.ndarray], np.ndarray]
"""From a look's number and the successes [N] then: the highest row [N] that is crossed there, -1 if
none.
"""


def run_tables(
    tables: Tables, paths: Paths, crossing: Crossing | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Draws [N], selection included, and the number [N] of the highest row crossed before a rule
    stops.
    """
    upper = np.array([success_upper_bound(s, N0, PLAN["selection_gamma"]) for s in range(N0 + 1)])
    alive = tables.looks[-1] * upper[paths.selected] >= tables.efficacy[0, -1]
    last, reachable = len(tables.nulls) - 1, tables.efficacy[:, -1] <= tables.looks[-1]
    samples, level = np.full(len(alive), N0), np.full(len(alive), -1)
    for k, n in enumerate(tables.looks.tolist()):
        successes = paths.at(n)
        crossed = (
            crossing(k, successes)
            if crossing
            else np.searchsorted(tables.efficacy[:, k], successes, "right") - 1
        )
        level = np.where(alive, np.maximum(level, crossed), level)
        samples[alive] = N0 + n
        following = np.minimum(level + 1, last)
        hopeless = ~reachable[following] | (successes <= tables.futility[following, k])
        alive &= ~((level == last) | hopeless)
    return samples, level


def plug_in_crossing(tables: Tables) -> Crossing:
    """The rows whose plug-in e-process has reached 1 / alpha: a bet on the share of successes at
    the look before.
    """
    share, before, wealth, rejected = 0.5, (0, 0), 0.0, False
    t = np.minimum(tables.nulls, 1 - 1e-15)

    def crossing(k: int, successes: np.ndarray) -> np.ndarray:
        nonlocal share, before, wealth, rejected
        n, hits = int(tables.looks[k]), (successes - before[1])[:, None]
        bet = np.maximum(share, t)  # no bet against a null above the share
        wealth = (
            wealth + hits * np.log(bet / t) + (n - before[0] - hits) * np.log((1 - bet) / (1 - t))
        )
        rejected = rejected | (wealth >= math.log(1 / ALPHA))
        share, before = ((successes + 0.5) / (n + 1))[:, None], (n, successes)
        # A row counts if all smaller nulls are rejected as well: a false claim then needs one
        # certain true null.
        return np.logical_and.accumulate(rejected, axis=1).sum(axis=1) - 1

    return crossing


def fixed_share(nulls: np.ndarray, sigma: float, prior: Prior) -> np.ndarray:
    """The share [J] of inputs that the exact procedure certifies, with the right class, at each
    radius.
    """
    least = least_fixed_counts(sigma)
    tails = np.array([stats.binom.sf(count - 1, N, prior.p) for count in least])
    return tails @ (prior.weight * prior.right)


def least_fixed_counts(sigma: float) -> np.ndarray:
    """The smallest count of N with which the exact procedure certifies each radius; N + 1 if
    none.
    """
    found = []
    for radius in PAPER_RADII:
        low, high = N // 2, N + 1
        while low < high:
            middle = (low + high) // 2
            low, high = (
                (low, middle) if fixed_radius(middle, sigma) >= radius else (middle + 1, high)
            )
        found.append(low)
    return np.array(found)


def lower_bound(
    sigma: float,
    nulls: np.ndarray,
    looks: np.ndarray,
    prior: Prior,
    price: float,
    efficacy: np.ndarray | None = None,
) -> float:
    """Draws that no rule with these looks goes below if it loses at most ``ALLOWED_LOSS``; see the
    module's docstring.

    Without ``efficacy``, a false rejection of row j has a price of 1 / alpha times what the level
    costs there: about Wald's bound, summed over the inputs that this row decides, by log(1 /
    alpha), and a share of the lost decisions.
    """
    prices, penalty, paid = np.full(len(nulls), price), None, 0.0
    if efficacy is None:
        bound, row = wald_bound(prior.p, sigma)
        decided = np.bincount(row + 1, prior.weight * bound, len(nulls) + 1)[1:]
        penalty = decided / math.log(1 / ALPHA) / ALPHA + LEVEL_PRICE * price * (decided > 0)
        paid = float(penalty.sum() * ALPHA)
    value = Programme(nulls, looks, prior, prices, efficacy, penalty).value
    kept = np.maximum(fixed_share(nulls, sigma, prior) - ALLOWED_LOSS, 0)
    return N0 + value + float(prices @ kept) - paid


@dataclass(frozen=True)
class Result:
    """Mean draws per input, and the share of inputs [J] whose certification the rule loses at each
    radius.
    """

    draws: float
    loss: np.ndarray


def result_of(
    samples: np.ndarray, level: np.ndarray, paths: Paths, right: np.ndarray, sigma: float
) -> Result:
    """What a rule needed and lost against the exact procedure on the same paths."""
    fixed = np.searchsorted(least_fixed_counts(sigma), paths.at(N), "right") - 1
    rows = np.arange(len(PAPER_RADII))
    lost = (fixed[:, None] >= rows).astype(int) - (level[:, None] >= rows)
    return Result(float(samples.mean()), (lost * right[:, None]).mean(axis=0))


def run_rules(
    rules: dict[str, Tables],
    populations: list[Population],
    sigma: float,
    generator: np.random.Generator,
) -> dict[str, Result]:
    """What rules that are decided by the counts alone need and lose, all on the same draws."""
    looks = np.unique(np.concatenate([[N], *(tables.looks for tables in rules.values())]))
    found: dict[str, list[Result]] = {name: [] for name in rules}
    for population in populations * PATHS:
        paths = draw_paths(population.p, looks, generator)
        for name, tables in rules.items():
            crossing = plug_in_crossing(tables) if name == "e-process" else None
            samples, level = run_tables(tables, paths, crossing)
            found[name].append(result_of(samples, level, paths, population.right, sigma))
    return {name: mean_of(each) for name, each in found.items()}


def compare_rules(
    sigma: float,
    populations: list[Population],
    others: list[Population],
    generator: np.random.Generator,
) -> dict[str, Result]:
    """The rules that are decided by the counts alone, all on the same draws."""
    nulls = np.array([radius_probability(radius, sigma) for radius in PAPER_RADII])
    plan, mixture, thinned = (
        plan_tables(nulls),
        mixture_tables(nulls),
        plan_tables(nulls, LIMIT_GROWTH),
    )
    programme = Programme(
        nulls, thinned.looks, prior_of(others), np.full(len(nulls), PRICE), thinned.efficacy
    )
    rules = {"plan": plan, "mixture": mixture, "e-process": mixture}
    rules["programme"] = replace(thinned, futility=programme.futility)
    results = run_rules(rules, populations, sigma, generator)
    own, allowed = prior_of(populations), np.full(len(nulls), ALLOWED_LOSS)
    for name, efficacy in (("limit, stopping", thinned.efficacy), ("limit, all", None)):
        bounds = [
            lower_bound(sigma, nulls, thinned.looks, own, price, efficacy) for price in PRICES
        ]
        results[name] = Result(max(bounds), allowed)
    return results


def mean_of(results: list[Result]) -> Result:
    return Result(
        float(np.mean([result.draws for result in results])),
        np.mean([result.loss for result in results], axis=0),
    )


def procedure_result(
    procedure: Procedure, populations: list[Population], generator: np.random.Generator
) -> Result:
    """What a procedure needs and loses, run through its requests for votes."""
    outcome = simulate(procedure, populations, generator)
    lost = [(outcome.fixed >= r).mean() - (outcome.radius >= r).mean() for r in PAPER_RADII]
    return Result(outcome.mean, np.array(lost))


def results_at(sigma: float, logs: Path, rounds: int) -> dict[str, Result]:
    """All rows of the table at one noise level."""
    generator = np.random.default_rng(0)
    path = logs / BEST_MODELS / LOGS[sigma]
    populations = [released_population(path, sigma, generator) for _ in range(rounds)]
    best_models = logs / OTHER_MODELS
    others = [
        released_population(other, sigma, generator)
        for other in sorted(best_models.rglob(path.name))
        if other != path
    ]
    wald = np.mean([wald_bound(population.p, sigma)[0].mean() for population in populations])
    results = {"exact": Result(float(FIXED_DRAWS), np.zeros(1))}
    for name, new_procedure in PROCEDURES.items():
        results[name] = procedure_result(new_procedure(sigma), populations, generator)
    results |= compare_rules(sigma, populations, others, generator)
    return results | {"Wald": Result(float(wald), np.zeros(1))}


def choice_at(sigma: float, logs: Path, rounds: int, patience: list[float]) -> dict[str, Result]:
    """What ``plan`` needs and loses with each patience, on models that no table reports; the same
    draws for all.

    These are the models of the released grids with T = 2 and one noise draw, PGD and DDN, of each
    epsilon.
    """
    found = sorted((logs / WEAKER_MODELS).rglob(f"sigma_{sigma:.2f}"))
    generator = np.random.default_rng(1)
    populations = [
        released_population(path, sigma, generator) for path in found for _ in range(rounds)
    ]
    nulls = np.array([radius_probability(radius, sigma) for radius in PAPER_RADII])
    tables = {}
    for value in patience:
        with mock.patch.dict(PLAN, patience=value):
            tables[f"{value:,.0f}"] = plan_tables(nulls)
    wald = np.mean([wald_bound(population.p, sigma)[0].mean() for population in populations])
    results = {
        "exact": Result(float(FIXED_DRAWS), np.zeros(1)),
        **run_rules(tables, populations, sigma, generator),
    }
    return results | {"Wald": Result(float(wald), np.zeros(1))}


def print_table(table: dict[float, dict[str, Result]]) -> None:
    """Draws, loss in points and ratio to Wald's bound of each rule, per noise level and over
    all.
    """
    columns = {f"sigma {sigma:g}": [results] for sigma, results in table.items()}
    columns |= {"overall": list(table.values())} if len(table) > 1 else {}
    print(f"{'':>15}" + "".join(f"{name:>24}" for name in columns))
    print(f"{'':>15}" + f"{'draws':>10} {'loss':>6} {'ratio':>6}" * len(columns))
    for rule in next(iter(table.values())):
        line = f"{rule:>15}"
        for several in columns.values():
            draws = np.mean([results[rule].draws for results in several])
            wald = np.mean([results["Wald"].draws for results in several])
            loss = max(100 * results[rule].loss.max() for results in several)
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
    parser.add_argument(
        "--patience", type=float, nargs="+", help="print instead what plan needs with these"
    )
    options = parser.parse_args()
    sigmas, given = options.sigma or LOGS, (options.logs, options.rounds)
    if options.patience:
        print_table({sigma: choice_at(sigma, *given, options.patience) for sigma in sigmas})
    else:
        print_table({sigma: results_at(sigma, *given) for sigma in sigmas})


if __name__ == "__main__":
    main()
