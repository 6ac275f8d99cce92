"""Certify many images, by any certification procedure, into a log; and draw some of its rows again
and compare them.
"""

import math
import random
from collections.abc import Generator, Iterator
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from smoothadv.base.errors import UsageError, UserError, counted, warn
from smoothadv.base.files import kept_rows
from smoothadv.base.plugins import loaded
from smoothadv.base.settings import settings_of
from smoothadv.datasets import labels_of
from smoothadv.evaluation.log import Example, LogContent, checked_log, write_log
from smoothadv.evaluation.setup import Evaluation, prepare
from smoothadv.evaluation.specs import OF_STAGES, CertifySpec, VerifySpec
from smoothadv.models.checkpoint import read_members
from smoothadv.models.name import LIBRARY, STAGES, parse_model
from smoothadv.records.logs import (
    CERTIFICATION_COLUMNS,
    DENOISER,
    IMAGE_SET,
    LOGITS,
    METHODS,
    SQUARED_RADIUS,
    differing_fields,
    differing_settings,
    format_radius,
    images_of,
    log_fault,
    read_manifest_file,
)
from smoothadv.records.readers import read_certification_log, read_fields
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


@dataclass(frozen=True)
class Verification:
    """How many of a log's ``rows`` were ``repeated``, chosen by ``seed``, and how some of them
    differ, by index of the image.

    ``missing`` are the indices of the images that were selected for the log and have no row.
    """

    repeated: int
    rows: int
    seed: int
    differences: dict[int, str]
    missing: list[int]


def verify(spec: VerifySpec) -> Verification:
    """Compare all columns but the time.

    UserError where the log's settings cannot be had here: the settings of a float network
    name the machine.
    """
    table, manifest = read_certification_log(spec.log), read_manifest_file(spec.log)
    if (fault := log_fault(manifest)) and manifest["settings"].get("method", "exact") in METHODS:
        raise UserError(f"{spec.log} is left in doubt: its manifest {fault}")
    digests = ({LOGITS: run[LOGITS]} for run in manifest["runs"] if LOGITS in run)
    settings = {**next(digests, {}), **manifest["settings"]}
    settings.pop("shard", None)
    evaluation, _, content = prepare_certification(_certification(spec, manifest))
    for look in (lambda: evaluation, evaluation.probed):  # no pass is made for other settings
        now = {**look().settings, **content.settings}
        if difference := differing_settings(settings, now):
            raise UserError(f"{spec.log} cannot be repeated here: {difference}")
    size, indices = len(evaluation.dataset), table.idx.tolist()
    run = {"skip": 1, "max": None, **(manifest["runs"] or [{}])[-1], "images": size}
    expected = images_of(manifest["settings"], run)
    if foreign := sorted({*indices}.difference(expected)):
        raise UserError(f"{spec.log} has a row of image {foreign[0]} of {counted(size, 'image')}")
    missing = sorted({*expected}.difference(indices))
    seed = random.SystemRandom().randrange(2**32) if spec.seed is None else spec.seed
    chosen = sorted(random.Random(seed).sample(indices, min(spec.rows, len(indices))))
    again = write_log(replace(evaluation, log=None, indices=chosen), content)
    before, differences = read_fields(spec.log), dict[int, str]()
    for idx, line in again.rows.items():
        was, now = before[idx], dict(zip(again.columns, line.split("\t")))
        if text := differing_fields({**was, "time": ""}, {**now, "time": ""}):
            differences[idx] = text
    return Verification(len(chosen), len(indices), seed, differences, missing)


def _certification(spec: VerifySpec, manifest: dict[str, Any]) -> CertifySpec:
    """The spec that made the log, as its manifest records it; UserError where that does not say
    enough.
    """
    settings, runs = manifest["settings"], manifest["runs"]
    checkpoints = [Path(run["checkpoint"]) for run in runs if run.get("checkpoint")]
    if ("module_sha256" in settings and not checkpoints) or settings.get("split") is None:
        raise UserError(
            f"{spec.log} is of a module or of images that a program handed over: only it can "
            "repeat them"
        )
    if absent := sorted(settings.get("plugins", {}).keys() - {one.name for one in loaded()}):
        raise UserError(
            f"{spec.log} was made with {', '.join(absent)}, which is not loaded: add --plugin "
            f"PATH/{absent[0]}"
        )
    method = settings.get("method")
    if method not in PROCEDURES:
        raise UserError(
            f"the manifest of {spec.log} names no certification procedure that is known here, but "
            f"{method!r}"
        )
    model = spec.model or next(iter(checkpoints), None)
    if model is None:
        raise UserError(
            f"the manifest of {spec.log} names no checkpoint: name it with --classifier"
        )
    denoiser = spec.denoiser
    if DENOISER in settings:
        denoiser = denoiser or next((run[DENOISER] for run in runs if run.get(DENOISER)), None)
    elif denoiser is not None:
        raise UserError(f"{spec.log} is of a classifier without a denoiser: leave --denoiser out")
    recorded = {
        one.field: settings[one.records]
        for one in settings_of(CertifySpec)
        if one.records and settings.get(one.records) is not None
    }
    if "sigmas" in settings:
        recorded |= {"sigma": STAGES, "input_layer": None}
    else:
        recorded["input_layer"] = _input_layer(spec.log, model, settings)
    names = {field.name for field in fields(PROCEDURES[method])} & settings.keys()
    own = {name: settings[name] for name in names.difference(OF_STAGES)}
    try:
        return CertifySpec(
            **recorded,
            dataset=settings["dataset"],
            split=settings["split"],
            image_set=settings.get(IMAGE_SET, {}).get("indices"),
            pretrained=settings.get("pretrained", True),
            model=model,
            denoiser=denoiser,
            settings={n: tuple(v) if isinstance(v, list) else v for n, v in own.items()},
            data_dir=spec.data_dir,
            device=spec.device,
            log=spec.log,
        )
    except UsageError as error:
        raise UserError(f"{spec.log} cannot be repeated here: {error}") from error


def _input_layer(log: Path, model: Path, settings: dict[str, Any]) -> str | None:
    """The input layer to ask for: where checkpoints do not record one, that of the manifest."""
    if parse_model(model).kind == LIBRARY:  # where constants are recorded, its library says them
        return None if "mean" in settings else settings.get("input_layer")
    try:
        given = settings.get("arch_given"), settings.get("weights_given")
        contents = read_members(model, *given).contents
    except UserError as error:
        raise UserError(f"{error}; --classifier names the one of {log}") from error
    layers = settings.get("input_layer")
    if not isinstance(layers, list):
        return layers
    unrecorded = (
        layer for layer, content in zip(layers, contents) if content.get("input_layer") is None
    )
    return next(unrecorded, None)
