"""Attacks on the images of a job, and the rows that the attacked images get in a log."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from smoothadv.attacks import SmoothedAttack
from smoothadv.attacks.shared.geometry import in_grey_levels, l2_norm
from smoothadv.attacks.target_rules import EVERY
from smoothadv.certification import ABSTAIN, Draws
from smoothadv.certification.prediction import predict
from smoothadv.errors import UsageError
from smoothadv.evaluation.image_loop import Example
from smoothadv.evaluation.requests import AttackPlan, EvaluationRequest
from smoothadv.evaluation.smoothing_job import SmoothingJob, recorded_number
from smoothadv.noise import Purpose, RoundedGaussianNoise
from smoothadv.records import ATTACK_COLUMNS, class_columns
from smoothadv.settings import settings_record
from smoothadv.smoothing.classifier import default_attack_batch
from smoothadv.smoothing.voting import Poll

# An attack takes up to this many passes' worth of images at a time, so that few places of its last passes stay empty.
_PASSES = 4
# Where processes share the work, each should get images at least this many times.
_TURNS = 4


def attack_record(attack: SmoothedAttack | None) -> dict[str, Any]:
    """The attack's part of the settings that decide the numbers in a log; None stands for no attack."""
    if attack is None:
        return {"attack": None, "num_noise_vec": None, "base_attack": False}
    return {
        "attack": settings_record(attack.attack),
        "num_noise_vec": attack.num_noise_vec,
        "base_attack": attack.sigma == 0,
        "restarts": attack.restarts,
        "target": attack.target,
        "attack_batch": attack.batch,
    }


def examples_at_a_time(attack: SmoothedAttack | None, job: SmoothingJob) -> int:
    """How many images of a job are attacked together; one without an attack."""
    if attack is None:
        return 1
    group = attack.examples_per_pass
    if group > 1:
        # An image's index decides its place in a pass. In one pass's worth of images, several have the same place, and
        # other places have no image: a third of the pass would be computed for nothing.
        group *= _PASSES
    if job.workers is not None:  # if one process took many images, others might get none
        group = max(1, min(group, len(job.indices) // (_TURNS * job.workers.size)))
    return group


def fit_to_job(plan: AttackPlan, job: SmoothingJob, request: EvaluationRequest, log: Path) -> SmoothedAttack:
    """The attack, with its batch: the plan's, else that of the log to be continued, else one that suits the device.

    UsageError where its target is no class of the images.
    """
    classes = job.dataset.description.num_classes
    if isinstance(plan.target, int) and plan.target >= classes:
        raise UsageError(f"--target {plan.target}: the classes of {job.settings['dataset']} are 0 to {classes - 1}")
    if plan.target is not None and classes < 2:
        raise UsageError(f"--target {plan.target}: {job.settings['dataset']} has only one class")
    batch = plan.batch or recorded_number(request, log, "attack_batch")
    if batch is None:
        shape, is_shard = job.dataset.description.image_shape, request.shard is not None
        batch = default_attack_batch(job.attacked, shape, job.device, plan.num_noise_vec, is_shard)
    attack = plan.smoothed(request.sigma, job.attack_seed)
    attack.batch = batch if job.workers is None else job.workers.agree("attack_batch", batch)
    return attack


@dataclass(frozen=True)
class AttackedPolls:
    """Attacks examples and polls the attacked images, for PREDICT with ``n`` draws: ``make_polls`` of a ``LogPlan``.

    A prediction is correct if the label is among its ``top_k`` classes.
    """

    job: SmoothingJob
    attack: SmoothedAttack
    n: int
    alpha: float
    top_k: int = 1
    votes: ClassVar[Purpose] = Purpose.VOTES

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the rows: also the target, where each example has one, and the classes of a set."""
        target = ("target",) if self.attack.target not in (None, EVERY) else ()
        return (*ATTACK_COLUMNS, *target, *class_columns(self.top_k))

    def __call__(self, examples: list[Example]) -> Iterator[Poll]:
        job, attack = self.job, self.attack
        images = torch.stack([example.image for example in examples]).to(job.device)
        indices = [example.index for example in examples]
        aims = [self.aim(example) for example in examples]
        labels = torch.tensor([label for label, _ in aims], device=job.device)
        epsilon = torch.tensor([epsilon for _, epsilon in aims], dtype=torch.float64)
        targets = attack.choose_targets(job.attacked, images, labels, indices)
        adversarial = attack(job.attacked, images, labels, indices, epsilon=epsilon, targets=targets)
        if isinstance(job.noise, RoundedGaussianNoise):
            adversarial = in_grey_levels(images, adversarial, epsilon)
        norms = l2_norm(adversarial.double() - images.double()).tolist()
        for row, example in enumerate(examples):
            columns = {"attack_norm": norms[row], "epsilon": float(epsilon[row])}
            if targets is not None:
                columns["target"] = int(targets[row])
            columns["basePredict"] = base_prediction(job, adversarial[row])
            yield Poll(adversarial[row], job.stream(example.index, self.votes), self._voting(example, columns))

    def aim(self, example: Example) -> tuple[int, float]:
        """What the attack on an example wants: to leave this label, by a perturbation of at most this l2 norm."""
        return example.label, self.attack.attack.epsilon

    def outcome(self, example: Example, prediction: int, norm: float) -> dict[str, Any]:
        """Further columns of the row of an example, whose perturbation has the l2 norm ``norm``."""
        return {}

    def _voting(self, example: Example, columns: dict[str, Any]) -> Generator[Draws, np.ndarray, dict[str, Any]]:
        """Run PREDICT on one attacked image; returns the columns of the image's row."""
        classes = yield from predict(self.n, self.alpha, self.top_k)
        predicted = prediction_columns(classes, self.aim(example)[0], self.top_k)
        further = self.outcome(example, predicted["predict"], columns["attack_norm"])
        return {"abstain": int(not classes), **predicted, **columns, **further}


def prediction_columns(classes: list[int], wanted: int, top_k: int) -> dict[str, int]:
    """What the row of an image says of its predicted ``classes``, none for an abstention.

    ``predict`` is ``wanted`` if it is one of them, else the first.
    """
    predict = wanted if wanted in classes else [*classes, ABSTAIN][0]
    return {"predict": predict, **dict(zip(class_columns(top_k), classes or [ABSTAIN] * top_k))}


@torch.inference_mode()
def base_prediction(job: SmoothingJob, image: torch.Tensor) -> int:
    """The base classifier's class for an image [C, H, W] without noise."""
    return int(job.classifier(image.unsqueeze(0)).argmax())
