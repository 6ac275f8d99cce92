"""Draws some rows of a certification log again and compares them with the log."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smoothadv.base.devices import default_device, device_name
from smoothadv.base.errors import UserError
from smoothadv.base.plugins import names_function
from smoothadv.checkpoints import read_members
from smoothadv.evaluation.certify import make_procedure, plan_of
from smoothadv.evaluation.log import write_log
from smoothadv.evaluation.named_networks import is_named
from smoothadv.evaluation.setup import prepare
from smoothadv.evaluation.specs import CertifyRequest
from smoothadv.records.logs import (
    DENOISER,
    differing_settings,
    read_manifest_file,
    settings_and_logits,
)
from smoothadv.records.manifests import METHODS, images_of, log_fault
from smoothadv.records.readers import read_certification_log, read_fields
from smoothadv.statistics import PROCEDURES

if TYPE_CHECKING:
    import torch

# Settings of a log and the fields of a request that they come from.
_FIELDS = {
    **{
        name: name
        for name in (
            "split",
            "sigma",
            "alpha",
            "seed",
            "precision",
            "batch",
            "input_layer",
            "method",
            "sound",
            "pretrained",
        )
    },
    **{"dataset": "images", "N0": "n0", "N": "draws", "compiled": "compile"},
}


@dataclass(frozen=True, kw_only=True)
class VerifyRequest:
    """Repeat ``rows`` random rows of the certification log ``log``; ``seed`` chooses them (None: at
    random).

    ``classifier`` is the checkpoint and ``denoiser`` the denoiser before it, if any (None: where
    the log's manifest says they were). The manifest says all the rest.
    """

    log: Path
    rows: int = 20
    seed: int | None = None
    classifier: Path | None = None
    denoiser: str | None = None
    data_dir: str | None = None
    device: torch.device | None = None


@dataclass(frozen=True)
class Verification:
    """How many of the log's rows were ``repeated``, and how some of them differ, by index of the
    image.

    ``missing`` are the indices of the images that were selected for the log and have no row.
    """

    repeated: int
    of: int
    differences: dict[int, str]
    missing: list[int]


def verify(request: VerifyRequest) -> Verification:
    """Compare all columns but the time.

    UserError where the log's settings cannot be had here: those of a float network name the
    machine.
    """
    table, manifest = read_certification_log(request.log), read_manifest_file(request.log)
    if (fault := log_fault(manifest)) and manifest["settings"].get("method", "exact") in METHODS:
        raise UserError(f"{request.log} is left in doubt: its manifest {fault}")
    settings = {
        name: value for name, value in settings_and_logits(manifest).items() if name != "shard"
    }
    certify_request, device = (
        _request(request, manifest),
        device_name(request.device or default_device()),
    )
    if (was := settings.get("device")) not in (None, device):
        raise UserError(
            f"{request.log} cannot be repeated here: device was {was!r}, now {device!r}"
        )
    job = prepare(certify_request, request.log, certify_request.sound)
    procedure = make_procedure(certify_request, job.dataset.description)
    plan = plan_of(certify_request, job, procedure)
    if difference := differing_settings(settings, {**job.settings, **plan.settings}):
        raise UserError(f"{request.log} cannot be repeated here: {difference}")
    run = {"skip": 1, "max": None, **(manifest["runs"] or [{}])[-1], "images": len(job.dataset)}
    expected = images_of(manifest["settings"], run)
    if foreign := sorted({*table.idx.tolist()}.difference(expected)):
        raise UserError(
            f"{request.log} has a row of image {foreign[0]}, and there are {len(job.dataset)} "
            "images"
        )
    missing = sorted({*expected}.difference(table.idx.tolist()))
    chosen = sorted(
        random.Random(request.seed).sample(table.idx.tolist(), min(request.rows, len(table)))
    )
    again = write_log(dataclasses.replace(job, log=None, indices=chosen), plan)
    now = {
        row["idx"]: {name: str(value) for name, value in row.items()} for row in again.rows or ()
    }
    before = read_fields(request.log)
    differences = {index: _difference(before[index], now[index]) for index in chosen}
    return Verification(
        len(chosen),
        len(table),
        {index: text for index, text in differences.items() if text},
        missing,
    )


def _request(request: VerifyRequest, manifest: dict[str, Any]) -> CertifyRequest:
    """The request that made the log, as its manifest records it; UserError where that does not say
    enough.
    """
    settings, recorded = (
        manifest["settings"],
        [run["checkpoint"] for run in manifest["runs"] if run.get("checkpoint")],
    )
    method, classifier = (
        settings.get("method"),
        request.classifier or next(map(Path, recorded), None),
    )
    if ("module_sha256" in settings and "library" not in settings) or settings.get(
        "split", ""
    ) is None:
        raise UserError(
            f"{request.log} is of a module or of images that a program handed over: only it can "
            "repeat them"
        )
    if classifier is None or method not in PROCEDURES:
        what = (
            "checkpoint: name it with --classifier"
            if method in PROCEDURES
            else "certification procedure"
        )
        raise UserError(f"the manifest of {request.log} names no {what}")
    if request.classifier is None and names_function(str(classifier)):
        raise UserError(
            f"{request.log} is of code in a file, which is not run unasked: add --classifier "
            f"{classifier}"
        )
    try:
        contents = () if is_named(classifier) else read_members(classifier).contents
    except UserError as error:
        raise UserError(f"{error}; --classifier names the one of {request.log}") from error
    names = {field.name for field in dataclasses.fields(PROCEDURES[method])} & settings.keys()
    given = {
        name: tuple(value) if isinstance(value := settings[name], list) else value for name in names
    }
    fields = {
        field: settings[name] for name, field in _FIELDS.items() if settings.get(name) is not None
    }
    if is_named(classifier):  # whose library says it
        fields.pop("input_layer", None)
    if isinstance(
        layers := fields.get("input_layer"), list
    ):  # of an ensemble: asked for where it is not recorded
        of_each = (
            layer for layer, content in zip(layers, contents) if content.get("input_layer") is None
        )
        fields["input_layer"] = next(of_each, None)
    if request.denoiser is not None and DENOISER not in settings:
        raise UserError(
            f"{request.log} is of a classifier without a denoiser: leave --denoiser out"
        )
    denoisers = [run[DENOISER] for run in manifest["runs"] if run.get(DENOISER)]
    return CertifyRequest(
        **fields,
        denoiser=(request.denoiser or next(iter(denoisers), None))
        if DENOISER in settings
        else None,
        classifier=classifier,
        procedure_settings=given,
        data_dir=request.data_dir,
        device=request.device,
        outfile=request.log,
    )


def _difference(before: dict[str, str], now: dict[str, str]) -> str:
    """What differs beside the time, "" if nothing does."""
    names = [
        name for name in {**before, **now} if name != "time" and before.get(name) != now.get(name)
    ]
    return ", ".join(f"{name} was {before.get(name)}, now {now.get(name)}" for name in names)
