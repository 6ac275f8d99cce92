"""Sequential certification on a grid of radii: as many draws as the decision needs, at the same level alpha."""

from __future__ import annotations

import hashlib
import io
import json
import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from smoothadv.bounds import radius_probability
from smoothadv.certification import ABSTAIN, PROCEDURES, Certificate, Draws, Procedure, Voting
from smoothadv.certification.error_spending import Tables, build_tables, look_schedule, success_upper_bound
from smoothadv.files import read_cached, write_cached
from smoothadv.settings import non_negative_float, setting

PAPER_RADII = tuple(0.25 * step for step in range(10))
"""0 and the columns of the paper's CIFAR-10 tables."""
SMALLEST_ALPHA = 1e-9
"""Each look reserves an error of 1e-12 against rounding, which would use up a smaller alpha."""
LADDER = 100
"""Steps of the fine grid per sigma."""
GRID_COLUMNS = ("samples", "level", "looks")
LABEL_AWARE = "label_aware"
"""Columns of a log. samples counts all draws, level is the number of the largest radius that was certified (-1: none),
looks counts the looks; LABEL_AWARE is 1 where the class selected was not the label. successes and trials are the counts
at the look that certified the radius: later looks, for a larger radius, may have a smaller share of successes."""
_EARLY, _GAMMA = 0.5, 0.01
_TABLES_VERSION = 1


@PROCEDURES.register("adaptive")
@dataclass(frozen=True)
class Adaptive(Procedure):
    """Decide, for a grid of radii, which of them are certified; stop as soon as that is known or out of reach.

    n0 votes select a class c. The draws for c are then counted at the looks of an exact error-spending table with a
    row for each radius r_j, whose null hypothesis is p_A <= Phi(r_j / sigma). The radius returned is the largest
    whose row was crossed; the procedure gives up where the next row is out of reach.

    Formal guarantee: the probability, over the draws, of returning a class and a radius such that the smoothed
    classifier is not that class throughout the closed ball of that radius is at most alpha, however early the procedure
    stops. Let r_j be the smallest radius of the grid with Phi(r_j / sigma) >= p_A, if c is the class of
    probability p_A: a false statement needs row j to be crossed, an event that grows with p and whose probability at
    p = Phi(r_j / sigma) is at most alpha by the construction of the row. It holds for each input by itself. It is
    void if the radii, n or alpha are chosen after the draws, or if the run is repeated until its result pleases.
    """

    default_n: ClassVar[int] = 125_000
    on_grid: ClassVar[bool] = True
    one_sided: ClassVar[bool] = True
    radii: tuple[float, ...] | None = setting(
        None,
        help="l2 radii to decide, in addition to 0 (default: the columns of the paper's tables for the dataset)",
        parse=non_negative_float,
        many=True,
    )
    ladder: bool = setting(
        False, help="also test a fine grid of radii, sigma/100 apart, with the same draws: finer radii in the log"
    )
    label_aware: bool = setting(
        False, help="for benchmarks only: stop if the selected class is not the true class; the log records it"
    )

    def __post_init__(self) -> None:
        radii = self._radii_to_decide
        if not all(math.isfinite(radius) and radius >= 0 for radius in radii):
            raise ValueError(f"radii must be finite and at least 0, got {', '.join(map(str, radii))}")
        if self.smoothing.alpha < SMALLEST_ALPHA:
            raise ValueError(f"alpha must be at least {SMALLEST_ALPHA:g} for adaptive, got {self.smoothing.alpha:g}")
        # One order, one description: the same radii in another order are the same procedure.
        object.__setattr__(self, "radii", tuple(sorted({0.0, *map(float, radii)})))

    @property
    def _radii_to_decide(self) -> tuple[float, ...]:
        return PAPER_RADII if self.radii is None else self.radii

    @property
    def columns(self) -> tuple[str, ...]:
        return (*GRID_COLUMNS, *((LABEL_AWARE,) if self.label_aware else ()))

    @cached_property
    def largest_radius(self) -> float | None:
        if self._hopeless(self.smoothing.n0):
            return None
        best = -1
        for look, n in enumerate(self._tables.looks):
            best = max(best, self._crossed(int(n), look))
            if self._is_decided(best, look, int(n)):
                break
        return float(self._grid[best]) if best >= 0 else None

    def _crossed(self, successes: int, look: int) -> int:
        """The highest row that these successes cross at this look; -1 if none."""
        return int((successes >= self._tables.efficacy[:, look]).sum()) - 1

    def votes(self, label: int) -> Voting:
        selection = yield Draws(self.smoothing.n0)
        candidate = int(selection.argmax())
        if self.label_aware and candidate != label:
            return self._certificate(candidate, (0, 0), self.smoothing.n0, 0, -1, skipped=True)
        successes, drawn, looks, best, counts = 0, 0, 0, -1, (0, 0)  # best: the highest row crossed, by counts
        if not self._hopeless(int(selection[candidate])):
            for look, n in enumerate(self._tables.looks):
                votes = yield Draws(int(n) - drawn)
                successes, drawn, looks = successes + int(votes[candidate]), int(n), looks + 1
                if (crossed := self._crossed(successes, look)) > best or best < 0:
                    best, counts = crossed, (successes, drawn)
                if self._is_decided(best, look, successes):
                    break
        return self._certificate(candidate, counts, self.smoothing.n0 + drawn, looks, best)

    def _hopeless(self, selected: int) -> bool:
        """Whether the selection alone makes an abstention so likely that no draw is worth its cost."""
        most = self.smoothing.n * success_upper_bound(selected, self.smoothing.n0, _GAMMA)
        return most < int(self._tables.efficacy[0, -1])

    def _is_decided(self, best: int, look: int, successes: int) -> bool:
        """Whether no radius is left to decide, or the next one is out of reach or too unlikely to wait for."""
        following = self._decisions[self._decisions > best]
        if not len(following) or look == len(self._tables.looks) - 1:
            return True
        row = following[0]
        return not self._reachable(self._tables.efficacy[row]) or successes <= self._tables.futility[row, look]

    def _reachable(self, row: np.ndarray) -> bool:
        return int(row[-1]) <= self.smoothing.n

    def _certificate(
        self, candidate: int, counts: tuple[int, int], samples: int, looks: int, best: int, skipped: bool = False
    ) -> Certificate:
        level = int((self._decisions <= best).sum()) - 1
        details = dict(zip(GRID_COLUMNS, (samples, level, looks)))
        if self.label_aware:
            details[LABEL_AWARE] = int(skipped)
        statement = (candidate, float(self._grid[best])) if best >= 0 else (ABSTAIN, 0.0)
        return Certificate(*statement, *counts, details)

    @property
    def settings(self) -> dict[str, str]:
        digest = hashlib.sha256(self._tables.looks.tobytes())
        digest.update(self._tables.efficacy.tobytes())
        digest.update(self._tables.futility.tobytes())
        return {"tables_sha256": digest.hexdigest()}

    @cached_property
    def _grid(self) -> np.ndarray:
        """All radii with a row, ascending, as float64."""
        radii = set(self._radii_to_decide)
        if self.ladder:
            sigma = self.smoothing.sigma
            # n_max successes in a row reject no p beyond alpha^(1 / n_max).
            top = math.sqrt(2 * math.log(max(2.0, self.smoothing.n / -math.log(self.smoothing.alpha)))) + 1
            radii |= {sigma * step / LADDER for step in range(math.ceil(top * LADDER))}
        return np.array(sorted(radii))

    @cached_property
    def _decisions(self) -> np.ndarray:
        """The rows of the radii to decide; the others only refine what is reported."""
        return np.flatnonzero(np.isin(self._grid, self._radii_to_decide))

    @cached_property
    def _tables(self) -> Tables:
        smoothing = self.smoothing
        nulls = [radius_probability(float(radius), smoothing.sigma, smoothing.noise_distance) for radius in self._grid]
        deciding = [nulls[row] for row in self._decisions]
        looks = look_schedule(deciding, smoothing.n, smoothing.alpha, _EARLY)
        return _cached_tables(nulls, looks, smoothing.alpha)


def _cached_tables(nulls: list[float], looks: np.ndarray, alpha: float) -> Tables:
    """The tables from this user's cache; if they are missing or damaged there, they are built and cached."""
    parameters = {
        "version": _TABLES_VERSION,
        "nulls": [null.hex() for null in nulls],
        "looks": [int(look) for look in looks],
        "alpha": alpha.hex(),
        "early": _EARLY,
        "gamma": _GAMMA,
    }
    name = "tables-" + hashlib.sha256(json.dumps(parameters).encode()).hexdigest()[:32]
    cached = read_cached(name)
    if cached is not None:
        arrays = np.load(io.BytesIO(cached), allow_pickle=False)
        return Tables(np.array(nulls), looks, arrays["efficacy"], arrays["futility"])
    tables = build_tables(nulls, looks, alpha, _EARLY, _GAMMA)
    content = io.BytesIO()
    np.savez(content, efficacy=tables.efficacy, futility=tables.futility)
    write_cached(name, content.getvalue())
    return tables
