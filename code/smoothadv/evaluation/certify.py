"""Certify many images, by any certification procedure, into a log."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np

from smoothadv.base.errors import UsageError, warn
from smoothadv.base.settings import settings_record
from smoothadv.datasets import DatasetDescription
from smoothadv.evaluation.log import Example, LogPlan, write_log
from smoothadv.evaluation.setup import SmoothingJob, check_top_k, noise_kind, prepare
from smoothadv.evaluation.specs import CertifyRequest
from smoothadv.records.logs import CERTIFICATION_COLUMNS, format_radius
from smoothadv.records.writer import WrittenLog
from smoothadv.statistics import Draws, Procedure, Smoothing
from smoothadv.statistics.bounds import squared_grey_radius
from smoothadv.voting.counter import Poll

_SOUND_COLUMN = "squared_radius"


def certify(request: CertifyRequest) -> tuple[WrittenLog, Procedure]:
    """Write the missing rows of the log ``request.outfile``, as ``write_log``; returns the
    procedure, too.
    """
    job = prepare(request, request.outfile, request.sound)
    procedure = make_procedure(request, job.dataset.description)
    if procedure.largest_radius is None:
        least = procedure.least_draws(request.alpha)
        warn(
            f"--N {request.n} can certify nothing at --alpha {request.alpha:g}, every image will "
            f"abstain: {'a larger --N' if least is None else f'at least --N {least}'} is needed"
        )

    return write_log(job, plan_of(request, job, procedure)), procedure


def plan_of(request: CertifyRequest, job: SmoothingJob, procedure: Procedure) -> LogPlan:
    """How the log of a request is made."""

    def polls(examples: list[Example]) -> Iterator[Poll]:
        for example in examples:
            job.check_image(example.index, example.image)
            yield Poll(
                example.image,
                job.stream(example.index),
                _voting(procedure, example.label, request.sound),
            )

    return LogPlan(
        columns=(
            *CERTIFICATION_COLUMNS,
            *procedure.columns,
            *((_SOUND_COLUMN,) if request.sound else ()),
        ),
        settings=procedure_record(request, procedure),
        make_polls=polls,
        description="certifying",
        title=f"certified at {request.sigma:g}:",
        scores=lambda row: bool(row["correct"]) and float(row["radius"]) >= request.sigma,
    )


def make_procedure(request: CertifyRequest, description: DatasetDescription) -> Procedure:
    """The certification procedure of a request; UsageError where the procedure refuses the
    request's numbers.
    """
    chosen, given = request.procedure, dict(request.procedure_settings)
    if "radii" in {field.name for field in dataclasses.fields(chosen)}:
        given.setdefault("radii", description.radii)
    noise = noise_kind(request.sound)(request.sigma, request.seed)
    distance = noise.distance(math.prod(description.image_shape))
    try:
        smoothing = Smoothing(request.sigma, request.n0, request.n, request.alpha, distance)
        procedure = chosen(smoothing, **given)
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
    check_top_k(getattr(procedure, "top_k", 1), description)
    return procedure


def procedure_record(request: CertifyRequest, procedure: Procedure) -> dict[str, Any]:
    """The procedure's part of the settings that decide the numbers in a log."""
    given = {"N0": request.n0, "N": request.n, "method": request.method, "sound": request.sound}
    fields = {
        name: value
        for name, value in settings_record(procedure).items()
        if name not in ("name", "smoothing")
    }
    return {**given, **fields, **procedure.settings}


def _voting(
    procedure: Procedure, label: int, sound: bool
) -> Generator[Draws, np.ndarray, dict[str, Any]]:
    """Run the procedure on one image; returns the columns of the image's row."""
    certificate = yield from procedure.votes(label)
    row = {"predict": certificate.prediction, "radius": format_radius(certificate.radius)}
    row |= {"successes": certificate.successes, "trials": certificate.trials, **certificate.details}
    return {**row, _SOUND_COLUMN: squared_grey_radius(certificate.radius)} if sound else row
