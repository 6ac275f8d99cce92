"""Certify many images, by any certification procedure, into a log."""

import math
from collections.abc import Generator, Iterator
from datetime import timedelta
from typing import Any

import numpy as np

from smoothadv.base.errors import counted, warn
from smoothadv.base.files import kept_rows
from smoothadv.datasets import labels_of
from smoothadv.evaluation.log import Example, LogContent, checked_log, write_log
from smoothadv.evaluation.setup import Evaluation, prepare
from smoothadv.evaluation.specs import CertifySpec
from smoothadv.records.logs import CERTIFICATION_COLUMNS, SQUARED_RADIUS, format_radius
from smoothadv.records.writer import WrittenLog
from smoothadv.statistics import PROCEDURES, Draws, Procedure
from smoothadv.statistics.bounds import squared_grey_radius
from smoothadv.statistics.error_spending import rows_of
from smoothadv.voting.counter import Poll


def certify(spec: CertifySpec) -> tuple[WrittenLog, Procedure]:
    """Write the missing rows of the log ``spec.log``, as ``write_log``; returns the procedure,
    too.
    """
    evaluation, procedure, content = prepare_certification(spec)
    return write_log(evaluation, content), procedure


def prepare_certification(spec: CertifySpec) -> tuple[Evaluation, Procedure, LogContent]:
    """All that certifying needs, the procedure, and how the log is made."""
    evaluation = prepare(spec, spec.log, spec.sound)
    is_sound, description = evaluation.is_sound, evaluation.dataset.description
    dimension = math.prod(description.image_shape)
    distances = tuple(voter.noise.distance(dimension) for voter in evaluation.voters)
    procedure = spec.procedure(description, distances)
    rows_of.set(kept_rows)
    if procedure.largest_radius is None:
        least = procedure.least_draws(spec.alpha)
        enough = "a larger --N" if least is None else f"at least --N {least}"
        warn(
            f"--N {spec.n} can certify nothing at --alpha {spec.alpha:g}, every image will "
            f"abstain: {enough} is needed"
        )

    def polls(examples: list[Example]) -> Iterator[Poll]:
        for example in examples:
            voting = _row(procedure, example.label, is_sound)
            streams = evaluation.streams(example.index, example.image)
            yield Poll(example.image, streams, voting)

    content = LogContent(
        columns=(*CERTIFICATION_COLUMNS, *procedure.columns, *[SQUARED_RADIUS] * is_sound),
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
    certificate = yield from procedure.run(label)
    row = {"predict": certificate.prediction, "radius": format_radius(certificate.radius)}
    row |= {"successes": certificate.successes, "trials": certificate.trials, **certificate.details}
    return {**row, SQUARED_RADIUS: squared_grey_radius(certificate.radius)} if sound else row


def rehearse(spec: CertifySpec) -> str:
    """What ``certify`` would do, and how long it would take by a few timed batches, as a sentence
    for people; no file is written. "" in all but the first process of torchrun.

    UserError where ``certify`` could not write the log.
    """
    evaluation, _, content = prepare_certification(spec)
    path, _, indices, done = checked_log(evaluation, content)
    missing = [index for index in indices if index not in done]
    voters = spec.most_voters
    draws = len(missing) * voters * (spec.n0 + spec.n)
    each = f"{voters} times " * (voters > 1) + f"{spec.n0:,} + {spec.n:,}"
    most = "" if PROCEDURES[spec.method].fixed_sample and voters == 1 else "at most "
    if not missing:
        told = f"nothing is left to be done: {path} has {counted(len(indices), 'row')}"
        return told * evaluation.processes.is_first
    evaluation = evaluation.probed()
    rate, name = _draws_per_second(evaluation, missing[0]), evaluation.settings["dataset"]
    if not evaluation.processes.is_first:
        return ""
    duration = timedelta(seconds=round(draws / rate / evaluation.processes.size))
    return (
        f"{len(missing):,} of {counted(len(indices), 'image')} of "
        f"{counted(len({*labels_of(evaluation.dataset, [*indices])}), 'class')} of {name} are to "
        f"be certified by {spec.method}: {most}{each} draws each, {draws:,} in all; "
        f"{evaluation.device} makes {rate:,.0f} per second in batches of {evaluation.batch}, which "
        f"takes {most}{duration}"
    )


def _draws_per_second(evaluation: Evaluation, index: int) -> float:
    """The draws of an image that are counted in a second, by batches of about two seconds."""
    image, counter, batch = evaluation.dataset[index][0], evaluation.counter(), evaluation.batch

    def voting(count: int) -> Generator[Draws, np.ndarray, None]:
        yield Draws(count)

    def seconds(count: int) -> float:
        (result,) = counter.run([Poll(image, evaluation.streams(index, image), voting(count))])
        return result.seconds

    seconds(batch)  # the first batch takes longer
    count = batch * min(200, 1 + round(2 / seconds(batch)))
    return count / seconds(count)
