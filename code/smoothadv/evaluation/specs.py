"""Requests: to certify or predict with a smoothed classifier, to attack it, or to attack its
certificates.

A request is complete and frozen: commands make one from options, functions of the Python interface
from arguments.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from smoothadv.base import plugins
from smoothadv.base.choices import EXISTING, INPUT_LAYER_NAMES, PRECISION_NAMES
from smoothadv.base.errors import UserError
from smoothadv.base.settings import (
    Checked,
    any_seed,
    batch_size,
    checked_field,
    number,
    one_of,
    positive_int,
    positive_noise_level,
    probability,
    up_to_a_million,
)
from smoothadv.datasets import SPLITS
from smoothadv.evaluation.shards import Shard
from smoothadv.statistics import PROCEDURES, Procedure

if TYPE_CHECKING:
    import torch

    from smoothadv.attacks import GradientAttack, SmoothedAttack
    from smoothadv.datasets import ImageDataset

PREDICTION_DRAWS = 100_000
"""The draws of PREDICT per image, by default."""
DEFAULT_FRACTION, DEFAULT_FALSE_ALARM = 0.999, 0.001
_fraction = number(float, "a share of the radius strictly between 0 and 1", lambda v: 0 < v < 1)


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest(Checked):
    """The fields that all requests share.

    - ``classifier``: a checkpoint, an ensemble as ``ensembles`` names it, a network by name, with
      its weights if ``pretrained``, or a module that maps images [B, C, H, W] in [0, 1] to logits
      [B, K]; ``input_layer`` ("normalize" or "center") where a checkpoint does not record it.
    - ``denoiser``: a checkpoint of a denoiser, or diffusers:PATH, that noisy images pass first
      (None: none).
    - ``images``: the name of a dataset, whose files lie in ``data_dir``, or the images themselves.
      Of the dataset's ``split`` every ``skip``-th image is used, at most ``maximum`` of them (None:
      all).
    - ``sigma`` > 0 on images in [0, 1]; ``alpha`` is the probability of a false statement per
      image; ``seed`` that of all noise; ``draws`` (n) is the number per image (None: the default of
      the kind of request).
    - ``batch`` noisy images per forward pass (None: that of the log to be continued, else one that
      suits the device), ``precision`` a name in PRECISION_NAMES, ``compile``, ``device`` (None: the
      first GPU, else the CPU).
    - ``shard``: the share of the images to evaluate (None: all); ``existing`` says what to do with
      a log that exists already: "resume", "overwrite" or "refuse".
    - ``command``: the command line that the manifest records (None: that of this process).
    """

    classifier: Path | torch.nn.Module
    images: str | ImageDataset
    sigma: float = checked_field(positive_noise_level)
    alpha: float = checked_field(probability, 0.001)
    seed: int = checked_field(any_seed, 0)
    denoiser: str | os.PathLike[str] | None = checked_field(str, None)
    draws: int | None = checked_field(positive_int, None, name="n")
    input_layer: str | None = checked_field(one_of(INPUT_LAYER_NAMES), None)
    pretrained: bool = checked_field(None, True)
    data_dir: str | Path | None = checked_field(str, None)
    split: str = checked_field(one_of(SPLITS), "test")
    skip: int = checked_field(positive_int, 1)
    maximum: int | None = checked_field(positive_int, None)
    batch: int | None = checked_field(batch_size, None)
    precision: str = checked_field(one_of(PRECISION_NAMES), "fp32")
    compile: bool = checked_field(None, False)
    device: torch.device | None = None
    shard: Shard | None = None
    existing: str = checked_field(one_of(EXISTING), "resume")
    command: Sequence[str] | None = None

    @property
    def n(self) -> int:
        """The draws per image."""
        return self.draws or PREDICTION_DRAWS

    @property
    def components(self) -> tuple[Any, ...]:
        """What decides the numbers besides dataset and classifier: a certification procedure, or an
        attack.
        """
        plan: AttackPlan | None = getattr(self, "attack", None)
        return () if plan is None else (plan.attack,)

    def plugins(self, *architectures: str) -> dict[str, dict[str, str]]:
        """What settings record of the plug-ins that take part, with classifiers of these
        architectures.
        """
        dataset = self.images if isinstance(self.images, str) else None
        kinds = [
            {"dataset": dataset, "architecture": arch, "denoiser": arch} for arch in architectures
        ]
        return plugins.digests(
            one for names in kinds for one in plugins.used(names, self.components)
        )

    def stated_settings(self, *architectures: str) -> dict[str, Any]:
        """What decides the numbers in a log, as far as it is known before any file is read."""
        given = {"batch": self.batch, "input_layer": self.input_layer}
        return {
            "dataset": self.images
            if isinstance(self.images, str)
            else self.images.description.name,
            "split": self.split if isinstance(self.images, str) else None,
            **self.plugins(*architectures),
            "sigma": self.sigma,
            "alpha": self.alpha,
            "seed": self.seed,
            "precision": self.precision,
            "compiled": self.compile,
            **{name: value for name, value in given.items() if value is not None},
        }


def select_examples(size: int, skip: int, maximum: int | None) -> range:
    """Every ``skip``-th index of a dataset of ``size`` images, at most ``maximum`` of them (None:
    all).
    """
    indices = range(0, size, skip)
    return indices if maximum is None else indices[:maximum]


@dataclass(frozen=True, kw_only=True)
class CertifyRequest(EvaluationRequest):
    """Certify images into the log ``outfile``.

    ``n0`` draws select the class; ``method`` names the certification procedure,
    ``procedure_settings`` are its fields. ``sound`` draws noise in whole grey levels and uses
    deterministic kernels only.
    """

    outfile: Path | None
    n0: int = checked_field(positive_int, 100)
    method: str = checked_field(str, "exact")
    procedure_settings: Mapping[str, Any] = checked_field(
        None, name="settings", kind=Mapping, default_factory=lambda: MappingProxyType({})
    )
    sound: bool = checked_field(None, False)

    def __post_init__(self) -> None:
        super().__post_init__()
        fields = {field.name for field in dataclasses.fields(self.procedure)} - {"smoothing"}
        for name in self.procedure_settings:
            if name not in fields:
                known = ", ".join(sorted(fields)) or "none"
                raise UserError(
                    f"settings of method '{self.method}': found {name!r}, expected {known}"
                )

    @property
    def procedure(self) -> type[Procedure]:
        """The class of the certification procedure."""
        return PROCEDURES[self.method]

    @property
    def components(self) -> tuple[Any, ...]:
        return (self.procedure,)

    @property
    def n(self) -> int:
        """The draws that estimate the class's probability; of an adaptive procedure, at most."""
        return self.draws or self.procedure.default_n


@dataclass(frozen=True, kw_only=True)
class AttackPlan(Checked):
    """An attack on a smoothed classifier: ``attack``, averaged over ``num_noise_vec`` draws of
    noise.

    ``is_on_base`` attacks the base classifier, without noise. ``restarts``, ``target`` and
    ``batch`` (None: one that suits the device) are those of ``SmoothedAttack``.
    """

    attack: GradientAttack
    num_noise_vec: int = checked_field(up_to_a_million, 1)
    is_on_base: bool = checked_field(None, False, name="base_attack")
    restarts: int = checked_field(positive_int, 1)
    target: int | str | None = checked_field(None, None, kind=int | str)
    batch: int | None = checked_field(batch_size, None, name="attack_batch")

    def smoothed(self, sigma: float, seed: int, batch: int = 256) -> SmoothedAttack:
        """The attack on a classifier that is smoothed with ``sigma``: the last arguments of
        ``SmoothedAttack``.
        """
        from smoothadv.attacks import SmoothedAttack

        sigma = 0.0 if self.is_on_base else sigma
        goal: dict[str, Any] = {"restarts": self.restarts, "target": self.target, "batch": batch}
        return SmoothedAttack(self.attack, sigma, self.num_noise_vec, seed=seed, **goal)


@dataclass(frozen=True, kw_only=True)
class PredictRequest(EvaluationRequest):
    """Predict the classes of images into the log ``outfile``, after an ``attack`` on the images
    (None: no attack).

    With ``top_k`` above 1, a prediction is the set of the k most probable classes.
    """

    outfile: Path | None
    attack: AttackPlan | None = None
    top_k: int = checked_field(positive_int, 1)


@dataclass(frozen=True, kw_only=True)
class AttackRequest(EvaluationRequest):
    """Attack images with each of ``epsilons``, l2 norms on images in [0, 1]; ``outdir`` gets a log
    for each.

    ``only`` holds the indices of the images to attack (None: all images that ``skip`` and
    ``maximum`` select).
    """

    outdir: Path | None
    attack: AttackPlan
    epsilons: tuple[float, ...] = ()
    only: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class FalsifyRequest(EvaluationRequest):
    """Attack each image of the certification log ``against`` within ``fraction`` of its radius;
    ``outdir`` gets a log.

    ``false_alarm`` is the probability of calling certificates false although each of them holds its
    alpha.
    """

    outdir: Path | None
    attack: AttackPlan
    against: Path
    fraction: float = checked_field(_fraction, DEFAULT_FRACTION)
    false_alarm: float = checked_field(probability, DEFAULT_FALSE_ALARM)
    only: tuple[int, ...] | None = None
