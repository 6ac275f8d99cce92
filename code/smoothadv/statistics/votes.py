"""Certificates of any randomized classifier, from votes that the caller draws: of text, graphs,
policies or models in other frameworks.

The guarantee is that of the procedure (docs/guarantee.md). It needs votes of fresh, independent
draws from one distribution. What a radius means is decided by the noise: with Gaussian noise it is
Cohen et al.'s l2 radius; else only the bound on the class's probability is meant.
"""

from collections.abc import Callable, Generator
from typing import Any, TypeVar

import numpy as np

from smoothadv.base.settings import SettingError, found_value
from smoothadv.statistics import Certificate, Draws, Procedure
from smoothadv.statistics.prediction import predict
from smoothadv.statistics.ranges import check

Answer = TypeVar("Answer")
NO_LABEL = -1


def certify_votes(
    draw: Callable[[int], Any],
    procedure: Procedure,
    *,
    label: int = NO_LABEL,
    batch: int | None = None,
) -> Certificate:
    """The certificate of one input by a procedure, such as ``PROCEDURES["exact"](Smoothing(...))``.

    ``draw(count)`` returns the votes of ``count`` >= 1 fresh draws: how many of them are of each of
    the K >= 2 classes, whole numbers [K]. It is asked for at most ``batch`` >= 1 draws at a time;
    counting stops after a batch with which an abstention is certain. Class and radius are those
    that the package finds of the same votes; only the counts of an abstention depend on the batch.
    ``label`` is the true class, where the procedure reads it; a negative one is unknown. ValueError
    on arguments and counts that are none.
    """
    if not isinstance(procedure, Procedure):
        expected = "one like PROCEDURES['exact'](Smoothing(...))"
        raise SettingError(f"procedure: {found_value(procedure)}, expected {expected}")
    procedure.require_one_classifier()
    return _answered(procedure.run(label), draw, batch, label)


def predict_votes(
    draw: Callable[[int], Any],
    n: int,
    alpha: float,
    *,
    top_k: int = 1,
    batch: int | None = None,
) -> list[int]:
    """The ``top_k`` most probable classes of one input by ``n`` votes, none if abstaining: see
    ``prediction.predict``, and ``certify_votes`` for ``draw`` and ``batch``.
    """
    return _answered(predict(n, alpha, top_k), draw, batch)


def _answered(
    voting: Generator[Draws, np.ndarray, Answer],
    draw: Callable[[int], Any],
    batch: int | None,
    label: int = NO_LABEL,
) -> Answer:
    """What a procedure finds, where its requests are drawn in batches."""
    check(label=label, batch=1 if batch is None else batch)
    if not callable(draw):
        raise SettingError(f"draw: {found_value(draw)}, expected a function of a number of draws")
    classes, request = 0, next(voting)
    while True:
        counts = np.zeros(classes, np.int64)
        missing = request.count
        while missing > 0:
            asked = min(missing, batch or missing)
            votes = _checked(draw(asked), asked, classes)
            classes = len(votes)
            counts = votes if not len(counts) else counts + votes
            missing -= asked
            if request.is_settled is not None and request.is_settled(counts):
                break
        if label >= classes:
            raise SettingError(f"label: found {label}, expected one of {classes} classes")
        try:
            request = voting.send(counts)
        except StopIteration as end:
            return end.value


def _checked(votes: Any, asked: int, classes: int) -> np.ndarray:
    """Votes as int64 [K]; ValueError unless they are those of so many draws, for as many classes as
    before.
    """
    counts = np.asarray(votes)
    if counts.ndim != 1 or len(counts) < 2 or (classes and len(counts) != classes):
        expected = f"[{classes}], as before" if classes else "[K], with K of at least 2"
        raise ValueError(
            f"draw({asked}) returned counts of shape {list(counts.shape)}: expected {expected}"
        )
    for value in counts.tolist():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and 0 <= value <= asked and value == int(value)):
            raise ValueError(
                f"draw({asked}) returned {value!r}: expected whole numbers from 0 to {asked}"
            )
    whole = counts.astype(np.int64)
    if (total := int(whole.sum())) != asked:
        raise ValueError(f"draw({asked}) returned {total} votes: expected {asked}")
    return whole
