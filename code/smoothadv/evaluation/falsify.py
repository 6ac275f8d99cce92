"""Attempts to falsify certificates: attacks within the radii of a log, and whether too many
certificates prove false.

An image *flips* if it is certified and PREDICT returns another class for an attacked image within
the certified radius. Then either the certificate is false, which has probability at most the
certificate's alpha, or PREDICT returned a class that is not the smoothed classifier's, which has
probability at most PREDICT's alpha. So, before any noise is drawn, an image flips with probability
at most the sum of both alphas, independently of the other images. If every certificate holds its
alpha, the number of flips exceeds a quantile of a binomial distribution with at most the given
probability of a false alarm. The binomial distribution counts all images of the log, also those
without a certificate: the share of false certificates among the issued ones has no bound.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from smoothadv.analysis.reading import read_logs, rounded_by
from smoothadv.base import plugins
from smoothadv.base.errors import UserError, counted, escape, warn
from smoothadv.base.files import file_digest
from smoothadv.base.settings import settings_record
from smoothadv.evaluation.log import Example, checked_log, write_log
from smoothadv.evaluation.predict import PredictionPolls, with_attack_batch
from smoothadv.evaluation.setup import (
    Evaluation,
    prepare,
    settings_to_continue,
    warn_of_few_draws,
)
from smoothadv.evaluation.specs import FalsifySpec
from smoothadv.noise import Purpose
from smoothadv.records import logs as records
from smoothadv.records.readers import DataFrame
from smoothadv.records.writer import WrittenLog
from smoothadv.statistics import ABSTAIN
from smoothadv.statistics.bounds import tolerated_false_statements

_SAME = (
    "sigmas threshold "
    "dataset split dataset_fingerprint checkpoint_sha256 module_sha256 weights_given denoiser "
    "resize local_noise input_layer sigma precision"
).split()


@dataclass(frozen=True)
class Certificates:
    """The certificates of a log, ``claims``: its rows that are no abstentions, by index, each with
    a class ``predict`` that holds in the closed l2 ball of ``radius``. ``images`` are the indices
    of all its rows.

    Each image got a false certificate with probability at most ``alpha``. ``settings`` are the
    manifest's, {} without one. A class is certified to stay among the ``top_k`` first.
    """

    path: Path
    images: list[int]
    claims: dict[int, Any]
    alpha: float
    settings: dict[str, Any]
    top_k: int = 1

    def restricted_to(self, chosen: Collection[int]) -> "Certificates":
        """Only the certificates of the ``chosen`` images; UserError if there are none.

        Images without a certificate count too: the selection must not depend on which images are
        certified.
        """
        images = sorted({*self.images}.intersection(chosen))
        claims = {index: self.claims[index] for index in images if index in self.claims}
        if not claims:
            raise UserError(f"{self.path} certifies none of the images that were chosen")
        return replace(self, images=images, claims=claims)

    def check_evaluation(self, evaluation: Evaluation) -> None:
        """UserError unless the certificates were made for the classifier and the images that are to
        be attacked.
        """
        last, classes = max(self.claims), evaluation.dataset.description.num_classes
        largest = max(claim.predict for claim in self.claims.values())
        if last >= len(evaluation.dataset) or largest >= classes or self.top_k >= max(2, classes):
            sets = f" among the {self.top_k} most probable" * (self.top_k > 1)
            name, size = evaluation.settings["dataset"], len(evaluation.dataset)
            raise UserError(
                f"{self.path} certifies something else: it has image {last} and class "
                f"{largest}{sets}, {name} has {counted(size, 'image')} of "
                f"{counted(classes, 'class')}"
            )
        if not self.settings:
            warn(
                f"{self.path} has no manifest: whether it certifies this checkpoint at this sigma "
                "cannot be checked"
            )
            return
        recorded = {name: self.settings.get(name) for name in _SAME}
        now = {name: evaluation.settings.get(name) for name in _SAME}
        batch = self.settings.get("batch")
        if records.LOGITS in self.settings and batch is not None:
            # Elsewhere its batch may not fit.
            is_here = self.settings.get("device") == evaluation.settings.get("device")
            digest = evaluation.logits_digest(batch) if is_here else "unknown"
            sound = {"sound": bool(self.settings.get("sound"))}
            recorded |= {records.LOGITS: self.settings[records.LOGITS], **sound}
            now |= {records.LOGITS: digest, **sound}
        if difference := records.differing_settings(recorded, now):
            raise UserError(f"{self.path} certifies something else: {difference}")
        records.warn_of_other_logits(self.path, recorded, now)
        for plugin in plugins.changed(self.settings.get("plugins")):
            warn(f"{self.path} was made with another version of the plug-in {plugin.name}")


def read_certificates(spec: FalsifySpec) -> Certificates:
    """The certificates in the log ``spec.against``; UserError where there is none or the log cannot
    be true.
    """
    path, stated = spec.against, {"sigma": spec.sigma}
    if not path.is_file():
        raise UserError(f"{path} is no file: name one certification log")
    (log,) = read_logs([str(path)], ("certification",), {}, warn).certification
    if log.facts.get("sigma") is None:
        # Then the spec's sigma counts, and the radii must be possible at it.
        (log,) = read_logs([str(path)], ("certification",), stated, warn).certification
    for note in log.notes:
        warn(f"{path}: {note}")
    sigma, manifest = log.facts.get("sigma"), log.facts.manifest
    if sigma != spec.sigma:
        raise UserError(f"{path} certifies something else: sigma was {sigma}, now {spec.sigma}")
    table = log.table[["idx", "label", "predict", "radius"]]
    table = table.assign(radius=np.maximum(table.radius - rounded_by(log.table), 0.0))
    certified = table[(table.predict != ABSTAIN) & (table.radius > 0)]
    claims = {row.idx: row for row in certified.itertuples(index=False)}
    if not claims:
        raise UserError(
            f"{path} certifies no image within a radius above 0: there is nothing to attack"
        )
    return Certificates(
        path=path,
        images=log.table.idx.tolist(),
        claims=claims,
        alpha=log.facts.alpha,
        settings={} if manifest is None else manifest["settings"],
        top_k=log.top_k,
    )


@dataclass(frozen=True)
class CertificatePolls(PredictionPolls):
    """Attacks away from the certified class, within a fraction of the radius; PREDICT then uses
    fresh draws.
    """

    certificates: Certificates = field(kw_only=True)
    votes: ClassVar[Purpose] = Purpose.ATTACKED_VOTES

    @property
    def columns(self) -> tuple[str, ...]:
        return (*records.FALSIFICATION_COLUMNS, *super().columns[len(records.ATTACK_COLUMNS) :])

    def aim(self, example: Example) -> tuple[int, float]:
        claim = self.certificates.claims[example.index]
        if claim.label != example.label:
            dataset = self.evaluation.settings["dataset"]
            raise UserError(
                f"{self.certificates.path} certifies something else: image {example.index} has "
                f"class {claim.label} there, {example.label} in {dataset}"
            )
        assert isinstance(self.evaluation.spec, FalsifySpec)
        return claim.predict, self.evaluation.spec.fraction * claim.radius

    def judged(self, example: Example, predicted: int, attack_norm: float) -> dict[str, Any]:
        claim = self.certificates.claims[example.index]
        flipped = predicted not in (ABSTAIN, claim.predict) and attack_norm < claim.radius
        return {"certified": claim.predict, "radius": claim.radius, "flipped": int(flipped)}


@dataclass(frozen=True)
class Verdict:
    """The result of attacks on certificates: the flips, as rows of the log, and how many flips are
    ``tolerated``.
    """

    flips: DataFrame
    tolerated: int
    sentence: str

    @property
    def refutes(self) -> bool:
        """Whether there are more flips than are credible if every certificate holds its alpha."""
        return len(self.flips) > self.tolerated


def falsify(spec: FalsifySpec) -> tuple[WrittenLog, Certificates]:
    """Attack each certificate of ``spec.against``; the log in ``spec.outdir`` is written as by
    ``write_log``.

    ``verdict`` judges a whole log.
    """
    path = None if spec.outdir is None else spec.outdir / records.FALSIFICATION_LOG
    certificates = read_certificates(spec)
    warn_of_few_draws(spec, certificates.top_k)
    sound, recorded = bool(certificates.settings.get("sound")), certificates.settings.get("batch")
    if sound:  # votes in batches of another shape might be those of another function
        batch = spec.batch or settings_to_continue(spec, path).get("batch") or recorded
        if recorded not in (None, batch):
            raise UserError(
                f"{spec.against} was made with --sound and --batch {recorded}, not {batch}"
            )
        spec = replace(spec, batch=batch)
    every = certificates
    evaluation = prepare(spec, path, sound, certificates.settings if sound else None)
    certificates = every.restricted_to(
        evaluation.indices
        if spec.image_set and spec.only is None
        else [index for index in every.images if index % spec.skip == 0][: spec.limit]
    )
    indices = sorted(certificates.claims if spec.only is None else {*spec.only})
    if missing := sorted({*indices} - certificates.claims.keys()):
        raise UserError(f"--only {missing[0]}: {spec.against} certifies no image {missing[0]}")
    if spec.image_set and (others := {*evaluation.indices} - {*every.images}):
        warn(f"{spec.against} has no rows of {counted(len(others), 'image')} of those named")
    evaluation, attack = with_attack_batch(replace(evaluation, indices=indices))
    polls = CertificatePolls(evaluation, attack, certificates.top_k, certificates=certificates)
    sha256, alpha = file_digest(spec.against), certificates.alpha
    content = polls.content(
        f"attacking {escape(spec.against.name, 70)}",
        settings={
            "attack": {**settings_record(spec.attack), "epsilon": None},  # each image has its own
            "against": {"sha256": sha256, "fraction": spec.fraction, "alpha": alpha},
        },
        title="falsified",
        scores=lambda row: bool(row["flipped"]),
        keeps_images=True,
    )
    checked_log(evaluation, content)
    every.check_evaluation(evaluation)
    return write_log(evaluation, content), certificates


def verdict(
    spec: FalsifySpec, certificates: Certificates, table: DataFrame, named: object = None
) -> Verdict:
    """Judge ``certificates`` by the rows of the whole log of ``falsify``. The sentence is about
    what is ``named`` (None: the log of certificates).
    """
    flips = table[table.flipped == 1]
    chance = certificates.alpha + spec.alpha
    tolerated = tolerated_false_statements(len(certificates.images), chance, spec.false_alarm)
    sentence = (
        f"{named or spec.against}: {counted(len(table), 'certificate')} attacked at "
        f"{spec.fraction:.10g} of their radii, {len(flips)} flipped, "
        f"{(table.predict == ABSTAIN).sum()} abstained; "
        f"at alpha {certificates.alpha:g} + {spec.alpha:g}, up to {tolerated} of "
        f"{counted(len(certificates.images), 'image')} may flip by chance"
    )
    return Verdict(flips, tolerated, sentence)
