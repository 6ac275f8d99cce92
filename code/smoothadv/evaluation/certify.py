"""Certify many images, by any certification procedure, into a log."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np

from smoothadv.base.errors import warn
from smoothadv.evaluation.log import Example, LogContent, write_log
from smoothadv.evaluation.setup import Evaluation, prepare
from smoothadv.evaluation.specs import CertifySpec
from smoothadv.records.logs import CERTIFICATION_COLUMNS, format_radius
from smoothadv.records.writer import WrittenLog
from smoothadv.statistics import Draws, Procedure
from smoothadv.statistics.bounds import squared_grey_radius
from smoothadv.voting.counter import Poll

_SOUND_COLUMN = "squared_radius"


def certify(spec: CertifySpec) -> tuple[WrittenLog, Procedure]:
    """Write the missing rows of the log ``spec.log``, as ``write_log``; returns the procedure,
    too.
    """
    evaluation, procedure, content = prepare_certification(spec)
    if procedure.largest_radius is None:
        least = procedure.least_draws(spec.alpha)
        enough = "a larger --N" if least is None else f"at least --N {least}"
        warn(
            f"--N {spec.n} can certify nothing at --alpha {spec.alpha:g}, every image will "
            f"abstain: {enough} is needed"
        )
    return write_log(evaluation, content), procedure


def prepare_certification(spec: CertifySpec) -> tuple[Evaluation, Procedure, LogContent]:
    """All that certifying needs, the procedure, and how the log is made."""
    evaluation = prepare(spec, spec.log, spec.sound)
    noise, description = evaluation.noise, evaluation.dataset.description
    procedure = spec.procedure(description, noise.distance(math.prod(description.image_shape)))

    def polls(examples: list[Example]) -> Iterator[Poll]:
        for example in examples:
            if noise.is_sound:
                evaluation.check_image(example.index, example.image)
            stream = noise.stream(example.index, evaluation.device)
            yield Poll(example.image, stream, _row(procedure, example.label, noise.is_sound))

    content = LogContent(
        columns=(*CERTIFICATION_COLUMNS, *procedure.columns, *[_SOUND_COLUMN] * noise.is_sound),
        settings=procedure.record(),
        make_polls=polls,
        activity="certifying",
        title=f"certified at {spec.sigma:g}:",
        scores=lambda row: bool(row["correct"]) and float(row["radius"]) >= spec.sigma,
    )
    return evaluation, procedure, content


def _row(
    procedure: Procedure, label: int, sound: bool
) -> Generator[Draws, np.ndarray, dict[str, Any]]:
    """Run the procedure on one image; returns the columns of the image's row."""
    certificate = yield from procedure.votes(label)
    row = {"predict": certificate.prediction, "radius": format_radius(certificate.radius)}
    row |= {"successes": certificate.successes, "trials": certificate.trials, **certificate.details}
    return {**row, _SOUND_COLUMN: squared_grey_radius(certificate.radius)} if sound else row
