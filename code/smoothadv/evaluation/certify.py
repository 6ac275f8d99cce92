"""Certify many images, by any certification procedure, into a log."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np

from smoothadv.base.errors import UsageError, warn
from smoothadv.base.settings import settings_record
from smoothadv.datasets import DatasetDescription
from smoothadv.evaluation.log import Example, LogSpec, write_log
from smoothadv.evaluation.setup import Evaluation, check_top_k, prepare
from smoothadv.evaluation.specs import CertifySpec
from smoothadv.noise import GaussianNoise, RoundedGaussianNoise
from smoothadv.records.logs import CERTIFICATION_COLUMNS, format_radius
from smoothadv.records.writer import WrittenLog
from smoothadv.statistics import Draws, Procedure, Smoothing
from smoothadv.statistics.bounds import squared_grey_radius
from smoothadv.voting.counter import Poll

_SOUND_COLUMN = "squared_radius"


def certify(spec: CertifySpec) -> tuple[WrittenLog, Procedure]:
    """Write the missing rows of the log ``spec.log``, as ``write_log``; returns the procedure,
    too.
    """
    evaluation = prepare(spec, spec.log, spec.sound)
    procedure = make_procedure(spec, evaluation.dataset.description)
    if procedure.largest_radius is None:
        least = procedure.least_draws(spec.alpha)
        enough = "a larger --N" if least is None else f"at least --N {least}"
        warn(
            f"--N {spec.n} can certify nothing at --alpha {spec.alpha:g}, every image will "
            f"abstain: {enough} is needed"
        )
    return write_log(evaluation, certification_log(evaluation, procedure)), procedure


def certification_log(evaluation: Evaluation, procedure: Procedure) -> LogSpec:
    """How a certification log is made."""
    spec = evaluation.spec
    is_sound = isinstance(evaluation.noise, RoundedGaussianNoise)

    def polls(examples: list[Example]) -> Iterator[Poll]:
        for example in examples:
            if is_sound:
                evaluation.check_image(example.index, example.image)
            stream = evaluation.noise.stream(example.index, evaluation.device)
            yield Poll(example.image, stream, _voting(procedure, example.label, is_sound))

    sound_columns = (_SOUND_COLUMN,) if is_sound else ()
    return LogSpec(
        columns=(*CERTIFICATION_COLUMNS, *procedure.columns, *sound_columns),
        settings=procedure_record(procedure),
        make_polls=polls,
        description="certifying",
        title=f"certified at {spec.sigma:g}:",
        scores=lambda row: bool(row["correct"]) and float(row["radius"]) >= spec.sigma,
    )


def make_procedure(spec: CertifySpec, description: DatasetDescription) -> Procedure:
    """The certification procedure of a spec; UsageError where the procedure refuses its numbers."""
    given = dict(spec.settings or {})
    if "radii" in spec.procedure.__dataclass_fields__:
        given.setdefault("radii", description.radii)
    noise = (RoundedGaussianNoise if spec.sound else GaussianNoise)(spec.sigma, spec.seed)
    distance = noise.distance(math.prod(description.image_shape))
    try:
        smoothing = Smoothing(spec.sigma, spec.n0, spec.n, spec.alpha, distance)
        procedure = spec.procedure(smoothing, **given)
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
    if (top_k := getattr(procedure, "top_k", None)) is not None:
        check_top_k(top_k, description)
    return procedure


def procedure_record(procedure: Procedure) -> dict[str, Any]:
    """The procedure's part of the settings that decide the numbers in a log."""
    fields = settings_record(procedure)
    own = {name: value for name, value in fields.items() if name not in ("name", "smoothing")}
    return {**own, **procedure.settings}


def _voting(
    procedure: Procedure, label: int, sound: bool
) -> Generator[Draws, np.ndarray, dict[str, Any]]:
    """Run the procedure on one image; returns the columns of the image's row."""
    certificate = yield from procedure.votes(label)
    row = {"predict": certificate.prediction, "radius": format_radius(certificate.radius)}
    row |= {"successes": certificate.successes, "trials": certificate.trials, **certificate.details}
    return {**row, _SOUND_COLUMN: squared_grey_radius(certificate.radius)} if sound else row
