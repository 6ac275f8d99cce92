"""Certification procedures: from counts of noisy votes to a class and a radius. No torch.

A procedure sees the classifier only through the votes that it requests, so that the caller may pack
the draws of several images into one batch. To add a procedure, add one file that registers it in
``PROCEDURES``. Readers check the rows of the procedures in ``records.manifests.METHODS``, which has
what they record; scripts/verify_log.py has the same list and recomputes their radii.
"""

import math
from abc import ABC, abstractmethod
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

    @classmethod
    def of(
        cls, candidate: int, radius: float | None, votes: np.ndarray, details: Mapping[str, int]
    ) -> "Certificate":
        """That of a class with this radius, by ``votes`` [K]; an abstention where it is negative or
        None.
        """
        statement = (ABSTAIN, 0.0) if radius is None or radius < 0 else (candidate, radius)
        return cls(*statement, int(votes[candidate]), int(votes.sum()), details)


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
class Procedure(Checked, ABC):
    """A certification procedure with its settings: ``PROCEDURES[name](smoothing, **settings)``.

    A subclass is a frozen dataclass; the fields that ``settings.setting`` makes become options of
    certify.

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
    """The kind of its certificates, or how that begins: what they state, and of what, whatever the
    votes that show it. "one-sided": the radius R of a class states that p_A > Phi(R / sigma) and no
    more.
    """
    smoothing: Smoothing

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "votes" in vars(cls):
            raise SettingError(f"{cls.__name__}: found a method votes(label), call it run(label)")

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

    def largest(self, most: float) -> float | None:
        """What is certified where bounds show a radius of ``most``; None if that is negative."""
        return None if most < 0 else most

    def record(self) -> dict[str, Any]:
        """The procedure's part of the settings that a log records: all that decides its numbers."""
        fields = settings_record(self)
        return {name: fields[name] for name in fields if name not in ("name", "smoothing")}

    @property
    def classifiers(self) -> int:
        """How many classifiers vote: ``Draws.stage`` is below this number."""
        return 1

    def require_one_classifier(self) -> None:
        """SettingError where several classifiers vote."""
        if self.classifiers > 1:
            found = f"found {type(self).__name__}, of {self.classifiers} classifiers"
            raise SettingError(f"procedure: {found}, expected one of a single classifier")

    @cached_property
    def largest_radius(self) -> float | None:
        """The radius of an input whose every draw is a success; None if not even that certifies."""
        voting, others = self.run(0), [0] * getattr(self, "top_k", 1)
        request = next(voting)
        while True:
            try:
                request = voting.send(np.array([request.count, *others]))
            except StopIteration as end:
                return None if end.value.prediction == ABSTAIN else float(end.value.radius)

    @abstractmethod
    def run(self, label: int) -> Voting:
        """Certify one input, whose true class is ``label`` (negative: unknown).

        The label may decide which class the statement is about, or, in benchmarks, that none is
        needed.
        """


@dataclass(frozen=True)
class FixedSample(Procedure):
    """Selects a class by n0 votes, then certifies ``radius_from`` the counts of n fresh votes.

    Counting stops as soon as only an abstention is possible: no decision changes, but its counts
    are partial.
    """

    fixed_sample: ClassVar[bool] = True

    def candidate(self, selection: np.ndarray, label: int) -> int:
        """The class that the statement is about, by the votes [K] of the selection; the smallest
        class among ties.
        """
        return int(selection.argmax())

    def rivals(self, votes: np.ndarray, candidate: int) -> list[int]:
        """The counts of other classes that the radius depends on, one for each of ``columns``."""
        return []

    def run(self, label: int) -> Voting:
        selection = yield Draws(self.smoothing.n0)
        candidate = self.candidate(selection, label)
        looked = yield from self.decide(selection, candidate)
        details = dict(zip(self.columns, self.rivals(looked.votes, candidate)))
        return Certificate.of(candidate, looked.radius, looked.votes, details)

    def decide(
        self, selection: np.ndarray, candidate: int, most: float = math.inf, stage: int = 0
    ) -> Generator[Draws, np.ndarray, Looked]:
        """Look once, at the votes of n fresh draws of a stage; ``selection`` and ``most`` are for
        procedures that look more than once.
        """
        n, settings = self.smoothing.n, {**vars(self.smoothing), **vars(self)}
        columns, reached = self.counts(settings), np.zeros_like(selection)

        def radius(votes: np.ndarray) -> float | None:
            """That of these votes if all that are missing are for the class."""
            own = n - int(votes.sum() - votes[candidate])
            counts = [own, n, *self.rivals(votes, candidate)]
            return self.radius_from(dict(zip(columns, counts)), settings)

        def is_settled(votes: np.ndarray) -> bool:
            """Whether the class cannot be certified. Where it can with twice the votes for others,
            it can with fewer, too: until these are ``reached``, nothing is computed.
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
