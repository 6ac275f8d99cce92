"""Predict the classes of many images, clean or attacked, into a log (PREDICT of Cohen et al., 2019)."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import numpy as np

from smoothadv.certification import Draws
from smoothadv.certification.prediction import predict as prediction_of_votes
from smoothadv.evaluation.attacked_images import (
    AttackedPolls,
    attack_record,
    base_prediction,
    fit_to_job,
    prediction_columns,
)
from smoothadv.evaluation.image_loop import Example
from smoothadv.evaluation.log_writing import LogPlan, write_log
from smoothadv.evaluation.requests import PredictRequest
from smoothadv.evaluation.smoothing_job import check_top_k, prepare, warn_of_few_draws
from smoothadv.records import PREDICTION_COLUMNS, class_columns
from smoothadv.smoothing.voting import Poll


def predict(request: PredictRequest) -> bool:
    """Write the missing rows of the log ``request.outfile``; False where this process has written only a share of it.

    UserError where the request cannot be carried out, possibly after some rows; the log keeps the rows written so far.
    """
    job = prepare(request, request.outfile)
    check_top_k(request.top_k, job.dataset.description)
    warn_of_few_draws(request, request.top_k)
    attack = None if request.attack is None else fit_to_job(request.attack, job, request, request.outfile)
    attacked = None if attack is None else AttackedPolls(job, attack, request.n, request.alpha, request.top_k)

    def polls(examples: list[Example]) -> Iterator[Poll]:
        for example in examples:
            voting = _voting(request, example.label, base_prediction(job, example.image.to(job.device)))
            yield Poll(example.image, job.stream(example.index), voting)

    plan = LogPlan(
        request=request,
        path=request.outfile,
        columns=(*PREDICTION_COLUMNS, *class_columns(request.top_k)) if attacked is None else attacked.columns,
        settings={"N": request.n, **attack_record(attack), **({"top_k": request.top_k} if request.top_k > 1 else {})},
        make_polls=attacked or polls,
        description="predicting",
        attack=attack,
    )
    return write_log(job, plan)


def _voting(request: PredictRequest, label: int, base: int) -> Generator[Draws, np.ndarray, dict[str, Any]]:
    """Run PREDICT on one image; returns the columns of the image's row."""
    classes = yield from prediction_of_votes(request.n, request.alpha, request.top_k)
    return {"basePredict": base, **prediction_columns(classes, label, request.top_k)}
