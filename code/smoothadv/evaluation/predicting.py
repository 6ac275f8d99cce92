"""PREDICT of many images, clean or attacked, into a log."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np

from smoothadv.certification import Draws
from smoothadv.certification.prediction import predict as prediction_of_votes
from smoothadv.evaluation.attacked_images import (
    AttackedBallots,
    attack_record,
    base_prediction,
    fit_to_job,
    passes_of,
)
from smoothadv.evaluation.log_writing import LogPlan, write_log
from smoothadv.evaluation.loop import Example
from smoothadv.evaluation.requests import PredictRequest
from smoothadv.evaluation.smoothing_job import SmoothingJob, prepare, warn_of_few_draws
from smoothadv.records import PREDICTION_COLUMNS
from smoothadv.smoothing.voting import Poll


def predict(request: PredictRequest) -> bool:
    """Write what the log ``request.outfile`` lacks; whether it is whole now, and not just this process's share.

    UserError where what is asked for cannot be done, also in the middle; the rows written so far stay.
    """
    warn_of_few_draws(request)
    job = prepare(request, request.outfile)
    attack = None
    if request.attack is not None:
        attack = fit_to_job(request.attack, job, request, request.outfile)
    attacked = None if attack is None else AttackedBallots(job, attack, request.n, request.alpha)
    plan = LogPlan(
        path=request.outfile,
        shard=request.shard,
        existing=request.existing,
        columns=PREDICTION_COLUMNS if attacked is None else attacked.columns,
        settings={"N": request.n, **attack_record(attack)},
        ballots=attacked or _clean_ballots(job, request),
        description="predicting",
        title="correct",
        scores=lambda row: bool(row["correct"]),
        **({} if attack is None else passes_of(attack, job)),
    )
    return write_log(job, plan)


def _clean_ballots(job: SmoothingJob, request: PredictRequest) -> Callable[[list[Example]], Iterator[Poll]]:
    def ballots(examples: list[Example]) -> Iterator[Poll]:
        for example in examples:
            voting = _voting(request, base_prediction(job, example.image.to(job.device)))
            yield Poll(example.image, job.stream(example.index), voting)

    return ballots


def _voting(request: PredictRequest, base: int) -> Generator[Draws, np.ndarray, dict[str, Any]]:
    """PREDICT at work on one image; returns the columns of its row."""
    prediction = yield from prediction_of_votes(request.n, request.alpha)
    return {"predict": prediction, "basePredict": base}
