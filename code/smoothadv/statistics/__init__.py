"""Certification procedures: from counts of noisy votes to a class and a radius. No torch.

A procedure sees the classifier only through the votes that it requests, so that the caller may pack
the draws of several images into one batch. To add a procedure, add one file that registers it in
``PROCEDURES``; ``records.rows`` has the rules for the rows of logs. Nothing here reads or writes a
file: what takes long to compute, ``error_spending.rows_of`` may keep.
"""

import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from smoothadv.base.registry import Registry, discover
from smoothadv.base.settings import (
    Checked,
    SettingError,
    number,
    positive_float,
    positive_int,
    probability,
    setting,
    settings_record,
)
from smoothadv.statistics.bounds import certified_radius
from smoothadv.statistics.ranges import RANGES

COUNT_COLUMNS = ("successes", "trials")
"""What logs call the counts of every certificate: successes of trials estimation draws voted for
the selected class.
"""
SAMPLES, LEVEL, LOOKS, LABEL_AWARE = "samples", "level", "looks", "label_aware"
"""Columns of procedures that look several times. SAMPLES counts all draws, LEVEL is the number of
the largest radius that was certified (-1: none), LOOKS counts the looks; LABEL_AWARE is 1 where the
class selected was not the label. successes and trials are the counts at the look that certified the
radius: later looks, for a larger radius, may have a smaller share of successes."""
TABLES = "tables_sha256"
"""The setting that has the digest of the tables of a procedure that looks several times."""
ABSTAIN = -1
"""The class that stands for "no statement" in results and logs."""


a_distance = number(float, *RANGES["noise_distance"][1:])
"""Parses the distance of noise from a Gaussian."""


@dataclass(frozen=True)
class Draws:
    """A request for the votes of ``count`` >= 0 fresh draws; the answer is int64 [K], the votes for
    each class.

    With ``is_settled``, counting stops at the first draw with whose vote ``is_settled(counts)`` is
    true of the counts so far, and the answer holds fewer than ``count`` votes; once true, it must
    stay so whatever the further votes. ``stage`` is the number of the classifier that votes, where
    there are several.
    """

    count: int
    is_settled: Callable[[np.ndarray], bool] | None = None
    stage: int = 0


Voting = Generator[Draws, np.ndarray, "Certificate"]
"""A procedure's generator for one input: it yields requests, receives the votes and returns its
certificate.
"""


@dataclass(frozen=True)
class Certificate:
    """What a procedure states about one input.

    ``prediction`` is a class in 0..K-1 or ABSTAIN; ``radius`` is the l2 radius, on images in [0,
    1], of the closed ball that the statement is about, 0 if abstaining; ``successes`` of ``trials``
    estimation draws voted for the selected class. ``details`` holds the procedure's own columns of
    a log.
    """

    prediction: int
    radius: float
    successes: int
    trials: int
    details: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Looked:
    """What a test found: the largest ``radius`` that a look certified, negative if none did, and
    the ``votes`` [K] that it saw there; the draws and the looks that it made.
    """

    radius: float
    votes: np.ndarray
    drawn: int = 0
    looks: int = 0


@dataclass(frozen=True)
class Bound:
    """A bound of a certificate: the ``test`` that decides it, of the class that was ``chosen`` by
    the ``selection``, votes [K] of the classifier of this ``stage``.
    """

    test: "Procedure"
    chosen: int
    selection: np.ndarray
    stage: int = 0


Selected = tuple[Bound, list[Bound], int]
Votes = Mapping[int, np.ndarray]


@dataclass(frozen=True)
class Smoothing(Checked):
    """The settings that all procedures share: the noise and the sample sizes.

    ``sigma`` > 0 is the noise's standard deviation, ``noise_distance`` its total variation distance
    from a Gaussian on one image (0: the noise is treated as one); ``n0`` draws select the class,
    ``n`` is the number, or the largest number, of draws that estimate its probability; ``alpha`` is
    the probability of a false statement per input. ValueError on impossible values.
    """

    sigma: float = setting(parse=positive_float)
    n0: int = setting(parse=positive_int)
    n: int = setting(parse=positive_int)
    alpha: float = setting(parse=probability)
    noise_distance: float = setting(0.0, parse=a_distance)


@dataclass(frozen=True)
class Procedure(Checked):
    """A certification procedure with its settings: ``PROCEDURES[name](smoothing, **settings)``.

    A subclass is a frozen dataclass; the fields that ``settings.setting`` makes become options of
    certify. It has either a ``run`` of its own, or ``decide``, which tests the bound on one class.

    Formal guarantee: the probability, over the draws, of returning a class and a radius such that
    the smoothed classifier is not that class throughout the closed ball of that radius is at most
    alpha (docs/guarantee.md has the proofs). It holds for each input by itself. It is void if draws
    are reused, if a setting is chosen after the draws, or if the run is repeated until its result
    pleases.
    """

    default_n: ClassVar[int] = 100_000
    """--N where the user names none."""
    on_grid: ClassVar[bool] = False
    """Whether radii are decided on a grid only: each is then a lower bound on what the same draws
    could certify.
    """
    fixed_sample: ClassVar[bool] = False
    """Whether every radius is ``radius_from`` the counts in its row, over exactly n draws."""
    certificate: ClassVar[str] = ""
    """What its certificates state, in words, or how these words begin. "one-sided": the radius R of
    a class states that p_A > Phi(R / sigma), and no more.
    """
    smoothing: Smoothing

    @classmethod
    def least_draws(cls, alpha: float) -> int | None:
        """The smallest n that can certify anything at level ``alpha``; None where that depends on
        other settings.
        """
        return None

    @classmethod
    def counts(cls, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """The columns that ``radius_from`` reads in a log with these settings: successes, trials,
        then rivals' votes.

        KeyError, TypeError or ValueError where a setting is missing or impossible.
        """
        return COUNT_COLUMNS

    @classmethod
    def radius_from(cls, counts: Mapping[str, int], settings: Mapping[str, Any]) -> float | None:
        """Of a fixed sample, the radius that the ``counts`` in a row of a log certify; None for an
        abstention.

        ``settings`` are those that the log records: sigma, alpha and the procedure's own; and the
        ``noise_distance`` of ``Smoothing``, 0 where they lack it. KeyError, TypeError or ValueError
        where one is missing or impossible.
        """
        return certified_radius(
            counts["successes"],
            counts["trials"],
            settings["sigma"],
            settings["alpha"],
            settings.get("noise_distance", 0.0),
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the procedure adds to a log: the keys of ``Certificate.details``."""
        return self.counts(vars(self))[len(COUNT_COLUMNS) :]

    @classmethod
    def recorded(cls, settings: Mapping[str, Any]) -> "Procedure":
        """The procedure with the ``settings`` that a log records, and those of ``radius_from``.
        KeyError, TypeError or ValueError where one is missing or impossible.
        """
        sigma, n0, n, alpha = (settings[name] for name in ("sigma", "N0", "N", "alpha"))
        smoothing = Smoothing(sigma, n0, n, alpha, settings.get("noise_distance", 0.0))
        names = {each.name for each in fields(cls)} & settings.keys() - {"smoothing"}
        return cls(smoothing, **{name: settings[name] for name in names})

    def shown(self, row: Mapping[str, int]) -> float | None:
        """The radius that the counts in a ``row`` of a log certify; None if they certify none."""
        return self.radius_from(row, {**vars(self.smoothing), **vars(self)})

    def record(self) -> dict[str, Any]:
        """The procedure's part of the settings that a log records: all that decides its numbers."""
        return {
            name: settings_record(getattr(self, name))
            for name in self.recorded_names()
            if name != TABLES
        }

    @classmethod
    def recorded_names(cls) -> tuple[str, ...]:
        """The names of the settings that ``record`` has."""
        names = [
            each.name for each in fields(cls) if each.name not in ("smoothing", "noise_distances")
        ]
        return (*names, TABLES) if cls.on_grid else (*names,)

    @property
    def classifiers(self) -> int:
        """How many classifiers vote: ``Draws.stage`` is below this number."""
        return 1

    def require_one_classifier(self) -> None:
        """SettingError where several classifiers vote."""
        if self.classifiers > 1:
            found = f"found {type(self).__name__}, of {self.classifiers} classifiers"
            raise SettingError(f"procedure: {found}, expected one of a single classifier")

    @property
    def top_k(self) -> int:
        """A certificate states that a class is among so many most probable ones."""
        return 1

    @cached_property
    def largest_radius(self) -> float | None:
        """The radius of an input whose every draw is a success; None if not even that certifies."""
        voting, others = self.run(0), [0] * self.top_k
        request = next(voting)
        while True:
            try:
                request = voting.send(np.array([request.count, *others]))
            except StopIteration as end:
                return None if end.value.prediction == ABSTAIN else float(end.value.radius)

    def run(self, label: int) -> Voting:
        """Certify one input, whose true class is ``label`` (negative: unknown).

        The label may decide which class the statement is about, or, in benchmarks, that none is
        needed.
        """
        own, bounds, drawn = yield from self.selected(label)
        is_skipped, looks = self.skips(own.chosen, label), 0
        radius = -1.0 if is_skipped else math.inf
        votes = {each.stage: np.zeros_like(each.selection) for each in bounds}
        for each in bounds:
            if radius >= 0:  # each bound is decided up to the radius that those before it left
                looked = yield from each.test.decide(
                    each.selection, each.chosen, radius, each.stage
                )
                votes[each.stage], radius = looked.votes, min(radius, looked.radius)
                drawn, looks = drawn + looked.drawn, looks + looked.looks
        known = {SAMPLES: drawn, LOOKS: looks, LABEL_AWARE: int(is_skipped)}
        known |= self.details(own, votes, radius)
        certified = self.largest(radius)
        return Certificate(
            prediction=ABSTAIN if certified is None else own.chosen,
            radius=certified or 0.0,
            successes=int(votes[own.stage][own.chosen]),
            trials=int(votes[own.stage].sum()),
            details={name: known.get(name, 0) for name in self.columns},
        )

    def selected(self, label: int) -> Generator[Draws, np.ndarray, Selected]:
        """Draw n0 votes, which select a class. Returns the bound on it, all bounds of a certificate
        in the order in which they are decided, and the number of draws.
        """
        selection = yield Draws(self.smoothing.n0)
        own = Bound(self, self.candidate(selection, label), selection)
        return own, [own], self.smoothing.n0

    def decide(
        self, selection: np.ndarray, candidate: int, most: float, stage: int
    ) -> Generator[Draws, np.ndarray, Looked]:
        """Test the bound on a class that the votes [K] of the ``selection`` chose, by fresh draws
        of the classifier ``stage``. Only radii up to ``most`` are of interest.
        """
        raise NotImplementedError(f"{type(self).__name__} has no decide of its own")

    def candidate(self, selection: np.ndarray, label: int) -> int:
        """The class that the statement is about, by the votes [K] of the selection; the smallest
        class among ties.
        """
        return int(selection.argmax())

    def skips(self, candidate: int, label: int) -> bool:
        """Whether an input is given up where this class was selected."""
        return False

    def details(self, own: Bound, votes: Votes, radius: float) -> dict[str, int]:
        """The further ``columns``, 0 where they are not named, of a certificate whose bounds show a
        ``radius``, negative if none; ``votes`` [K] by stage, at the look that decided.
        """
        return {}

    def largest(self, radius: float) -> float | None:
        """What is certified where bounds show a ``radius``; None if that is negative."""
        return None if radius < 0 else radius


@dataclass(frozen=True)
class FixedSample(Procedure):
    """Selects a class by n0 votes, then certifies ``radius_from`` the counts of n fresh votes.

    Counting stops as soon as only an abstention is possible: no decision changes, but its counts
    are partial.
    """

    fixed_sample: ClassVar[bool] = True

    def rivals(self, votes: np.ndarray, candidate: int) -> list[int]:
        """The counts of other classes that the radius depends on, one for each of ``columns``."""
        return []

    def details(self, own: Bound, votes: Votes, radius: float) -> dict[str, int]:
        return dict(zip(self.columns, self.rivals(votes[0], own.chosen)))

    def decide(
        self, selection: np.ndarray, candidate: int, most: float, stage: int
    ) -> Generator[Draws, np.ndarray, Looked]:
        """Look once, at the votes of n fresh draws, whatever the selection and ``most``."""
        n, settings = self.smoothing.n, {**vars(self.smoothing), **vars(self)}
        columns, reached = self.counts(settings), np.zeros_like(selection)

        def radius(votes: np.ndarray) -> float | None:
            """That of these votes if all that are missing are for the class."""
            own = n - int(votes.sum() - votes[candidate])
            counts = [own, n, *self.rivals(votes, candidate)]
            return self.radius_from(dict(zip(columns, counts)), settings)

        def is_settled(votes: np.ndarray) -> bool:
            """Whether the class cannot be certified any more. Where it could be even if the others
            had twice their votes, that holds until they have so many: ``reached`` are the doubled
            votes, and nothing is computed before a class exceeds its own.
            """
            nonlocal reached
            if (votes > reached).any():
                twice = 2 * votes
                twice[candidate] = n
                if twice.sum() > 2 * n or radius(twice) is None:
                    return radius(votes) is None
                reached = twice
            return False

        estimation = yield Draws(n, is_settled, stage)
        found = radius(estimation) if estimation.sum() == n else None
        return Looked(-1.0 if found is None else found, estimation)


PROCEDURES: Registry[type[Procedure]] = Registry("certification procedure")

discover(__name__, __path__)
