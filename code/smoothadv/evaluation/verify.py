"""Draws some rows of a certification log again and compares them with the log."""

import dataclasses
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smoothadv.base.errors import UsageError, UserError, counted
from smoothadv.base.plugins import loaded
from smoothadv.base.settings import settings_of
from smoothadv.evaluation.certify import prepare_certification
from smoothadv.evaluation.log import write_log
from smoothadv.evaluation.specs import OF_STAGES, CertifySpec, VerifySpec
from smoothadv.models.checkpoint import read_members
from smoothadv.models.name import LIBRARY, STAGES, parse_model
from smoothadv.records.logs import (
    DENOISER,
    IMAGE_SET,
    LOGITS,
    METHODS,
    differing_fields,
    differing_settings,
    images_of,
    log_fault,
    read_manifest_file,
)
from smoothadv.records.readers import read_certification_log, read_fields
from smoothadv.statistics import PROCEDURES


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
    again = write_log(dataclasses.replace(evaluation, log=None, indices=chosen), content)
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
    is_module = "module_sha256" in settings and not checkpoints
    if is_module or settings.get("split") is None:
        raise UserError(
            f"{spec.log} is of a module or of images that a program handed over: only it can "
            "repeat them"
        )
    if absent := sorted(settings.get("plugins", {}).keys() - {one.name for one in loaded()}):
        made = f"{spec.log} was made with {', '.join(absent)}"
        raise UserError(f"{made}, which is not loaded: add --plugin PATH/{absent[0]}")
    method = settings.get("method")
    if method not in PROCEDURES:
        named = f"names no certification procedure that is known here, but {method!r}"
        raise UserError(f"the manifest of {spec.log} {named}")
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
    names = {field.name for field in dataclasses.fields(PROCEDURES[method])} & settings.keys()
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
