"""Specifications of evaluations: certify, predict, attack, falsify, verify.

A spec is complete and frozen. Its fields are the options of the command and the keywords of the
Python function; a contradiction between them is refused here, for both.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from smoothadv.base import plugins
from smoothadv.base.errors import UsageError, UserError
from smoothadv.base.settings import (
    PRECISION_NAMES,
    SettingError,
    any_seed,
    batch_size,
    checked,
    identity,
    non_negative_int,
    number,
    output_file,
    output_folder,
    perturbation_size,
    positive_int,
    probability,
    refuse_twice,
    setting,
    settings_of,
    up_to_a_million,
)
from smoothadv.datasets import SPLITS, DatasetDescription, ImageDataset
from smoothadv.evaluation.image_sets import image_set, images_named
from smoothadv.evaluation.shards import Shard
from smoothadv.models.name import STAGES
from smoothadv.models.spec import ModelSpec, RunSpec
from smoothadv.statistics import PROCEDURES, Procedure, Smoothing

if TYPE_CHECKING:
    from smoothadv.attacks import StagedAttack

Spec = TypeVar("Spec", bound="EvaluationSpec")
OF_STAGES = ("sigmas", "noise_distances", "threshold")
"""Settings of procedures that the stages decide, and no ``settings``."""
PREDICTION_DRAWS = 100_000
"""The draws of PREDICT per image, by default."""


_PROCEDURES = {
    ("exact", "cascade"): "cascade",
    ("sequential", "cascade"): "sequential-cascade",
    ("exact", "router"): "router",
    ("sequential", "router"): "sequential-router",
}
"""The procedures for several classifiers, by --method and by kind of model."""


def method_of(method: str, kind: str) -> str:
    """The procedure that --method names, for a model of this kind: "cascade", "router" or "", a
    single classifier; UsageError where it is for another kind.
    """
    name = _PROCEDURES.get((method, kind), method)
    kinds = {name: kind for (_, kind), name in _PROCEDURES.items()}
    if kinds.get(name, "") == kind:
        return name
    if name in kinds:
        hint = "" if kind else f": write {STAGES} in place of sigma"
        raise UsageError(f"--method {method} is for {kinds[name]}s{hint}")
    raise UsageError(f"--method {method} is not for {kind}s: take one of exact, sequential")


def a_shard(text: str) -> Shard:
    """Parses K/N with 0 <= K < N."""
    match = re.fullmatch("([0-9]{1,9})/([0-9]{1,9})", text)
    if not match or not int(match[1]) < int(match[2]):
        raise SettingError(
            f"'{text}' is no shard: write K/N, K from 0 to N-1, as in 0/8, 1/8, ... 7/8 for eight "
            "shards"
        )
    return Shard(int(match[1]), int(match[2]))


def a_limit(text: str) -> int | None:
    """Parses a number of images; -1 stands for all."""
    return None if text == "-1" else positive_int(text)


def a_target(text: str) -> int | str:
    """Parses a class, or the rule that chooses one."""
    from smoothadv.attacks.smoothed_attack import EVERY, KNOWN_TARGETS, TARGET_RULES

    if text.isascii() and text.isdigit():
        return non_negative_int(text)
    if text not in KNOWN_TARGETS:
        raise SettingError(
            f"'{text}' is no target: write a class number, {', '.join(TARGET_RULES)} or {EVERY}"
        )
    return text


@dataclass(frozen=True, kw_only=True)
class EvaluationSpec(ModelSpec):
    """The settings that all evaluations of a smoothed classifier share.

    ``command`` is the command line that the manifest records (None: that of this process). ``n0``,
    ``method``, ``attack`` and ``only`` are those of commands that have them.
    """

    n: int = setting(
        None,
        parse=positive_int,
        flag="--N",
        records="N",
        help=f"draws per prediction (default: {PREDICTION_DRAWS:,})",
    )
    alpha: float = setting(
        0.001,
        parse=probability,
        records="alpha",
        help="probability of a false statement per image",
    )
    split: str = setting("test", choices=SPLITS, group="images", help="images to use")
    skip: int = setting(
        1, parse=positive_int, metavar="K", group="images", help="take every K-th image"
    )
    image_set: str | None = setting(
        None,
        parse=image_set,
        flag="--images",
        metavar="WHICH",
        group="images",
        help="take the images with indices like 500-999 or 3,7,20-30; or per-class:N[:SEED], N "
        "random images of each class; or those in a file, an index or the name of an image file in "
        "a line",
    )
    limit: int | None = setting(
        None,
        parse=a_limit,
        flag="--max --limit",
        metavar="M",
        group="images",
        help="stop after M images (default: -1, all)",
    )
    batch: int | None = setting(
        None,
        parse=batch_size,
        metavar="B",
        group="speed",
        records="batch",
        help="noisy images per forward pass (default: what suits the device)",
    )
    precision: str = setting(
        "fp32",
        choices=PRECISION_NAMES,
        group="speed",
        records="precision",
        help="precision of weights and activations; a lower one is another base classifier",
    )
    compile: bool = setting(
        False,
        group="speed",
        records="compiled",
        help="compile the classifier first, which takes minutes: faster on a CPU, and on a GPU for "
        "some networks (docs/gpus.md)",
    )
    tf32: bool = setting(
        True,
        flag="--no-tf32",
        group="speed",
        help="on GPUs, compute convolutions in full float32, not in TF32 (default: as PyTorch is "
        "set, or as the log that is continued was made)",
    )
    shard: Shard | None = setting(
        None,
        parse=a_shard,
        metavar="K/N",
        group="speed",
        keyword=False,
        help="evaluate the K-th of N shares of the images; `merge` joins the shares",
    )
    command: Sequence[str] | None = None
    n0: int = 0
    method: Any = None
    attack: Any = None
    only: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.image_set, Collection) and not isinstance(self.image_set, (str, bytes)):
            self._set(image_set=",".join(map(str, self.image_set)))
        super().__post_init__()
        if self.n is None:
            self._set(n=PREDICTION_DRAWS)
        named = self.image_set if self.only is None else ",".join(map(str, sorted({*self.only})))
        if named is not None and {self.skip - 1, self.limit, self.image_set} - {0, None, named}:
            raise UsageError(
                f"{'--images' if self.only is None else '--only'} is not read with --skip, --max "
                "or other images by name: leave all but one out"
            )
        self._set(image_set=named)

    def plugins(self, *architectures: str) -> dict[str, dict[str, str]]:
        """What settings record of the plug-ins that take part, with models of these
        architectures.
        """
        kinds = [
            {"dataset": self.dataset_name, "architecture": arch, "denoiser": arch}
            for arch in architectures
        ]
        components = [PROCEDURES.get(self.method), self.attack]
        return plugins.digests(one for names in kinds for one in plugins.used(names, components))

    def identity(self, *architectures: str) -> dict[str, Any]:
        """What decides the numbers in a log, as far as it is known before any file is read."""
        images = {"dataset": self.dataset_name, "split": self.split}
        if self.dataset_name is None:
            images = {"dataset": self.dataset.description.name, "split": None}
        return {**images, **self.plugins(*architectures), **identity(self)}

    def chosen_indices(self, dataset: ImageDataset) -> Sequence[int]:
        """The indices of the images to evaluate, of a dataset, ascending; UserError where it has
        not those that were named.
        """
        every = range(0, len(dataset), self.skip)[: self.limit]
        return every if self.image_set is None else images_named(self.image_set, dataset)


def check_top_k(top_k: int, description: DatasetDescription) -> None:
    """UsageError unless there are more classes than ``top_k``: any class is among the k most
    probable of k.
    """
    if top_k >= max(2, description.num_classes):
        raise UsageError(
            f"--top-k {top_k}: give a number below that of the classes, {description.num_classes}"
        )


def _certification_draws() -> str:
    usual = [f"{procedure.default_n:,} for {name}" for name, procedure in PROCEDURES.items()]
    return f"draws that estimate the class's probability, at most (default: {', '.join(usual)})"


@dataclass(frozen=True, kw_only=True)
class CertifySpec(EvaluationSpec):
    """Certify images into the log ``log``."""

    log: Path | None = setting(
        None, parse=output_file, flag="outfile", metavar="OUTFILE", help="log to write (TSV)"
    )
    n: int = setting(None, parse=positive_int, flag="--N", records="N", help=_certification_draws)
    n0: int = setting(
        100,
        parse=positive_int,
        flag="--N0",
        records="N0",
        help="draws that select the class",
    )
    method: str = setting(
        "exact",
        choices=PROCEDURES,
        group="procedure",
        records="method",
        help="certification procedure",
    )
    settings: Mapping[str, Any] | None = setting(
        None, flag="", help="further settings of the method, by field"
    )
    sound: bool = setting(
        False,
        group="procedure",
        records="sound",
        help="certificates that hold for the executed arithmetic, on 8-bit images",
    )
    fast: bool = setting(
        False,
        group="speed",
        help="take the --precision and --compile that are fastest here, by a few timed batches; "
        "the log records them",
    )
    dry_run: bool = setting(
        False,
        group="running",
        keyword=False,
        help="say what would be done and how long it would take, and write nothing",
    )

    _OF_ONE_STAGE: ClassVar[dict[str, Any]] = {"method": "exact", "settings": None}

    def __post_init__(self) -> None:
        asked = self.n
        super().__post_init__()
        self._set(method=method_of(self.method, self.kind))
        if asked is None:
            self._set(n=PROCEDURES[self.method].default_n)
        if self.fast and (self.compile or self.precision != "fp32" or self.stages is not None):
            chosen = "a cascade or a router" if self.stages else "--precision or --compile"
            raise UsageError(f"--fast chooses for one classifier: it is not for {chosen}")
        self.procedure()  # refuses its numbers before anything is loaded

    def identity(self, *architectures: str) -> dict[str, Any]:
        known = super().identity(*architectures)
        undecided = ("precision", "compiled") if self.fast else ()
        return {name: value for name, value in known.items() if name not in undecided}

    def procedure(
        self,
        description: DatasetDescription | None = None,
        noise_distances: tuple[float, ...] = (),
    ) -> Procedure:
        """The certification procedure for images of this description, under noise at this distance
        from a Gaussian, of each classifier; UsageError where it refuses its settings.
        """
        kind = PROCEDURES[self.method]
        known = {field.name for field in fields(kind)} - {"smoothing", *OF_STAGES}
        given = dict(self.settings or {})
        if unknown := [name for name in given if name not in known]:
            expected = ", ".join(sorted(known)) or "none"
            raise UserError(
                f"settings of method '{self.method}': found {unknown[0]!r}, expected {expected}"
            )
        if description is not None and "radii" in known:
            given.setdefault("radii", description.radii)
        if self.stages is not None:
            given["sigmas"] = tuple(stage.sigma for stage in self.classifiers)
            given["noise_distances"] = noise_distances
            given |= {} if self.threshold is None else {"threshold": self.threshold}
        try:
            smoothing = Smoothing(self.sigma, self.n0, self.n, self.alpha, *noise_distances[:1])
            procedure = kind(smoothing, **given)
        except (ValueError, TypeError) as error:
            raise UsageError(str(error)) from error
        if description is not None:
            check_top_k(procedure.top_k, description)
        return procedure


@dataclass(frozen=True, kw_only=True)
class AttackedSpec(EvaluationSpec):
    """The settings that all evaluations with an attack on the smoothed classifier share.

    ``num_noise_vec``, ``restarts`` and ``base_attack`` are None without an attack.
    """

    attack: Any = setting(
        None, flag="", records="attack", help="attack on the images, like PGD(0.5, 20)"
    )
    num_noise_vec: int = setting(
        None,
        parse=up_to_a_million,
        metavar="M",
        group="attack",
        records="num_noise_vec",
        help="noise draws that the attack averages over (default: 1 in predict, else 64)",
    )
    base_attack: bool = setting(
        False,
        flag="",
        group="attack",
        records="base_attack",
        help="attack the base classifier, without noise",
    )
    restarts: int = setting(
        None,
        parse=positive_int,
        metavar="R",
        group="attack",
        records="restarts",
        help="runs of the attack, of which the strongest counts (default: 1)",
    )
    target: int | str | None = setting(
        None,
        parse=a_target,
        metavar="CLASS",
        group="attack",
        records="target",
        help="class at which the attack aims: a number, runner-up, least-likely, random or every "
        "(default: any but the label)",
    )
    attack_batch: int | None = setting(
        None,
        parse=batch_size,
        metavar="B",
        group="attack",
        records="attack_batch",
        help="noisy images per pass of the attack (default: what suits the device)",
    )
    USUAL_ATTACK_DRAWS: ClassVar[int] = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attack is None:
            for one in settings_of(type(self)):
                value = getattr(self, one.field)
                if one.group == "attack" and value is not None and value is not False:
                    raise UsageError(
                        f"{one.flag or one.field}: found {value!r}, and there is no attack: give "
                        "one, like --attack PGD, or attack=PGD(0.5, 20) in Python"
                    )
            return
        from smoothadv.attacks import GradientAttack  # imports torch

        checked("attack", self.attack, None, GradientAttack)
        if self.base_attack and self.num_noise_vec not in (None, 1):
            raise UsageError(
                "--num-noise-vec is not read by an attack on the base classifier (--gradient base, "
                "or base_attack=True), which has no noise: leave one out"
            )
        usual = 1 if self.base_attack else self.USUAL_ATTACK_DRAWS
        self._set(num_noise_vec=self.num_noise_vec or usual, restarts=self.restarts or 1)
        try:
            self.smoothed_attack(seed=0)
        except ValueError as error:
            raise UserError(str(error)) from error

    def smoothed_attack(self, seed: int, batch: int = 256) -> "StagedAttack":
        """The attack on the smoothed classifiers, with this seed and batch."""
        from smoothadv.attacks import SmoothedAttack, StagedAttack

        attacks = [
            SmoothedAttack(
                self.attack,
                0.0 if self.base_attack else stage.sigma,
                self.num_noise_vec,
                seed=seed,
                restarts=self.restarts,
                target=self.target,
                batch=batch,
            )
            for stage in self.classifiers
        ]
        if self.router is not None:
            attacks[-1].target = None  # it has other classes
        return StagedAttack(attacks, self.threshold or 0.0, routes=self.router is not None)


@dataclass(frozen=True, kw_only=True)
class PredictSpec(AttackedSpec):
    """Predict the classes of images into the log ``log``, after an ``attack`` on the images if
    there is one.

    With ``top_k`` above 1, a prediction is the set of the k most probable classes.
    """

    log: Path | None = setting(
        None, parse=output_file, flag="outfile", metavar="OUTFILE", help="log to write (TSV)"
    )
    top_k: int = setting(
        1,
        parse=positive_int,
        metavar="K",
        help="predict the set of the K most probable classes, or abstain where these do not lead "
        "all others significantly (--alpha)",
    )
    USUAL_ATTACK_DRAWS: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k > 1 and self.stages is not None:
            raise UsageError(f"--top-k is not for {self.kind}s: leave it out")

    def identity(self, *architectures: str) -> dict[str, Any]:
        sets = {"top_k": self.top_k} if self.top_k > 1 else {}
        return {**super().identity(*architectures), **sets}


@dataclass(frozen=True, kw_only=True)
class _OutdirSpec(AttackedSpec):
    """The settings that attack and falsify share."""

    attack: Any = setting(flag="", records="attack", help="attack on the images, like PGD(0.5, 20)")
    outdir: Path | None = setting(
        None,
        parse=output_folder,
        flag="outdir",
        metavar="OUTDIR",
        help="folder for the logs (TSV), adversarial examples (NPZ) and pictures (PNG)",
    )
    only: tuple[int, ...] | None = setting(
        None,
        parse=non_negative_int,
        metavar="IDX",
        group="images",
        help="attack only the images with these indices",
    )

    def __post_init__(self) -> None:
        if self.attack is None:
            raise UsageError("attack: found None: give one, like PGD(0.5, 20)")
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class AttackSpec(_OutdirSpec):
    """Attack images with each of ``epsilons``; ``outdir`` gets a log for each."""

    epsilons: Sequence[float] = setting(
        (),
        parse=perturbation_size,
        flag="--epsilon",
        group="attack",
        unit="on images in [0, 1]",
        help="l2 norms of the attack, like 0.25 or 64/255, each with its log",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.epsilons:
            self._set(epsilons=(self.attack.epsilon,))
        refuse_twice("--epsilon", self.epsilons)


@dataclass(frozen=True, kw_only=True)
class FalsifySpec(_OutdirSpec):
    """Attack each image of the certification log ``against`` within its radius; ``outdir`` gets a
    log.
    """

    against: Path = setting(
        parse=Path,
        metavar="LOG",
        group="falsification",
        help="attack each image of this certification log within its certified radius; fails if "
        "more certificates prove false than alpha allows",
    )
    fraction: float = setting(
        0.999,
        parse=number(float, "a number above 0 and below 1, like 0.999", lambda v: 0 < v < 1),
        group="falsification",
        help="largest norm of an attack, as a fraction of the radius",
    )
    false_alarm: float = setting(
        0.001,
        parse=probability,
        group="falsification",
        help="probability of failing although every certificate holds its alpha",
    )


@dataclass(frozen=True, kw_only=True)
class VerifySpec(RunSpec):
    """Draw random rows of the certification log ``log`` again; its manifest says all that is not
    given.
    """

    dataset: Any = setting(None, flag="", keyword=False)
    existing: str = "resume"
    log: Path = setting(
        parse=Path, flag="log", help="certification log, with its manifest beside it"
    )
    rows: int = setting(20, parse=positive_int, metavar="K", help="random rows to draw again")
    model: Path | None = setting(
        None,
        parse=Path,
        flag="--classifier",
        metavar="CHECKPOINT",
        help="the checkpoint (default: where the manifest says it was)",
    )
    denoiser: str | None = setting(
        None,
        parse=str,
        metavar="CHECKPOINT",
        help="the denoiser before it, if there is one (default: likewise)",
    )
    seed: int | None = setting(  # type: ignore[assignment]
        None,
        parse=any_seed,
        help="seed that chooses the rows (default: another one each time)",
    )
    output: Path | None = setting(
        None,
        parse=output_file,
        flag="-o --output",
        metavar="FILE",
        help="if all are equal, write so to FILE, for analyze card --redrawn",
    )
