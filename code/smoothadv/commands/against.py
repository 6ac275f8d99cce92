"""Attempts to falsify certificates: what a log claims, attacks within its radii, and whether too many claims fell.

A certificate is false with probability at most its alpha, PREDICT answers wrongly with at most its own. So an attacked
image flips, PREDICT answering another class than the certified one within the radius, with at most their sum,
independently of other images: the number of flips is credible up to a quantile of a binomial distribution.
"""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from smoothadv.analysis.logs import read_logs
from smoothadv.bounds import tolerated_false_statements
from smoothadv.certification import ABSTAIN
from smoothadv.checkpoints import file_digest
from smoothadv.commands.attacking import AttackedBallots
from smoothadv.commands.components import warn
from smoothadv.commands.smoothing import SmoothingJob
from smoothadv.errors import UserError
from smoothadv.evaluation import Example
from smoothadv.noise import Purpose
from smoothadv.records import differing_fields

DEFAULT_FRACTION, DEFAULT_FALSE_ALARM = 0.999, 0.001
OUTDIR = object()
"""Stands for the folder in the words of a command."""
_SAME = ("dataset", "split", "dataset_fingerprint", "checkpoint_sha256", "input_layer", "sigma", "precision")


@dataclass(frozen=True)
class Certificates:
    """The claims of a log: by index the certified class and its radius, each false with probability ``alpha``."""

    path: Path
    claims: dict[int, tuple[int, float]]
    alpha: float
    fraction: float
    settings: dict[str, Any] | None

    @property
    def indices(self) -> list[int]:
        return sorted(self.claims)

    @property
    def sound(self) -> bool:
        """Whether they are about images of 8 bits and noise in whole grey levels."""
        return bool((self.settings or {}).get("sound"))

    @property
    def record(self) -> dict[str, Any]:
        """What the manifest of attacks on them says."""
        return {"sha256": file_digest(self.path), "fraction": self.fraction, "alpha": self.alpha}

    def check_job(self, job: SmoothingJob) -> None:
        """UserError unless the certificates are about the classifier and the images that are to be attacked."""
        last, classes = max(self.claims), job.dataset.description.num_classes
        largest = max(certified for certified, _ in self.claims.values())
        if last >= len(job.dataset) or largest >= classes:
            raise UserError(
                f"{self.path} certifies something else: it has image {last} and class {largest}, "
                f"{job.settings['dataset']} has {len(job.dataset)} images of {classes} classes"
            )
        if self.settings is None:
            warn(f"{self.path} has no manifest: nothing tells whether it certifies this checkpoint at this sigma")
            return
        recorded, now = ({name: record.get(name) for name in _SAME} for record in (self.settings, job.settings))
        difference = differing_fields(recorded, now)
        if difference:
            raise UserError(f"{self.path} certifies something else: {difference}")


def read_certificates(options: argparse.Namespace) -> Certificates:
    """The claims of the log named by --against; UserError where it makes none or cannot be trusted."""
    (log,) = read_logs([str(options.against)], ("certification",), {}, warn).certification
    if log.parameters.get("sigma") is None:  # then this command must be right about it, and the radii possible
        stated = {"sigma": options.sigma}
        (log,) = read_logs([str(options.against)], ("certification",), stated, lambda message: None).certification
    sigma, manifest = log.parameters.get("sigma"), log.parameters.manifest
    if sigma not in (None, options.sigma):
        raise UserError(f"{options.against} certifies something else: sigma was {sigma}, now {options.sigma}")
    table = log.table[(log.table.predict != ABSTAIN) & (log.table.radius > 0)]
    if table.empty:
        raise UserError(f"{options.against} certifies no image within a radius above 0: there is nothing to attack")
    claims = {int(idx): (int(c), float(r)) for idx, c, r in zip(table.idx, table.predict, table.radius)}
    return Certificates(
        options.against,
        claims,
        float(log.parameters.get("alpha")),
        options.fraction or DEFAULT_FRACTION,
        None if manifest is None else manifest["settings"],
    )


@dataclass(frozen=True)
class CertificateBallots(AttackedBallots):
    """Attacks away from the certified class within a fraction of the radius; PREDICT gets draws that nobody saw."""

    certificates: Certificates
    votes: ClassVar[Purpose] = Purpose.ATTACKED_VOTES

    def aim(self, example: Example) -> tuple[int, float]:
        certified, radius = self.certificates.claims[example.index]
        return certified, self.certificates.fraction * radius

    def outcome(self, example: Example, prediction: int) -> dict[str, Any]:
        certified, radius = self.certificates.claims[example.index]
        return {"certified": certified, "radius": radius, "flipped": int(prediction not in (ABSTAIN, certified))}


def report(options: argparse.Namespace, certificates: Certificates, table: Any, again: list[str]) -> None:
    """Tell what became of the certificates, each flip with the command that repeats it; UserError if they are too many.

    ``table`` is the finished log, ``again`` the words of a command that attacks them all in the same way.
    """
    flips = table[table.flipped == 1]
    chance = certificates.alpha + options.alpha
    tolerated = tolerated_false_statements(len(table), chance, options.false_alarm or DEFAULT_FALSE_ALARM)
    for row in flips.itertuples():
        outdir = f"{options.outdir}_{row.idx}"
        command = shlex.join([outdir if word is OUTDIR else word for word in [*again, "--only", str(row.idx)]])
        print(
            f"flipped: image {row.idx} (class {row.label}), certified as {row.certified} within {row.radius:.6g}, is "
            f"predicted as {row.predict} at a distance of {row.attack_norm:.6g}; again with\n  {command}"
        )
    said = (
        f"{options.outfile}: {len(table)} certificates attacked at {certificates.fraction:g} of their radii, "
        f"{len(flips)} flipped, {(table.predict == ABSTAIN).sum()} abstained; up to {tolerated} flips are credible at "
        f"alpha {certificates.alpha:g} + {options.alpha:g}"
    )
    if len(flips) > tolerated:
        raise UserError(f"{options.against} holds false certificates: {said}")
    print(said)
