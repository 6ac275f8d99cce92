"""Predictions on the images of a job, clean or attacked, and the rows that they get in a log."""

from collections.abc import Callable, Generator, Iterator
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
from smoothadv.devices import to_device, to_host
from smoothadv.errors import UsageError
from smoothadv.evaluation.image_loop import Example
from smoothadv.evaluation.requests import AttackPlan, EvaluationRequest
from smoothadv.evaluation.smoothing_job import SmoothingJob, recorded_number
from smoothadv.noise import Purpose, RoundedGaussianNoise
from smoothadv.records import ATTACK_COLUMNS, PREDICTION_COLUMNS, class_columns
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
    batch = batch if job.workers is None else job.workers.agree("attack_batch", batch)
    return plan.smoothed(request.sigma, job.attack_seed, batch, job.has_plain_noise)


@dataclass(frozen=True)
class PredictionPolls:
    """Polls images for PREDICT with ``n`` draws, after an ``attack`` on them, if any: ``make_polls`` of a ``LogPlan``.

    A prediction is correct if the label is among its ``top_k`` classes.
    """

    job: SmoothingJob
    attack: SmoothedAttack | None
    n: int
    alpha: float
    top_k: int = 1
    votes: ClassVar[Purpose] = Purpose.VOTES

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the rows: also the target, where each example has one, and the classes of a set."""
        if self.attack is None:
            return (*PREDICTION_COLUMNS, *class_columns(self.top_k))
        target = ("target",) if self.attack.target not in (None, EVERY) else ()
        return (*ATTACK_COLUMNS, *target, *class_columns(self.top_k))

    def __call__(self, examples: list[Example]) -> Iterator[Poll]:
        job, attack = self.job, self.attack
        if attack is None:
            yield from (self._poll(example, to_device(example.image, job.device), {}) for example in examples)
            return
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
            yield self._poll(example, adversarial[row], columns)

    def aim(self, example: Example) -> tuple[int, float]:
        """What the attack on an example wants: to leave this label, by a perturbation of at most this l2 norm."""
        return example.label, 0.0 if self.attack is None else self.attack.attack.epsilon

    def outcome(self, example: Example, prediction: int, columns: dict[str, Any]) -> dict[str, Any]:
        """Further columns of the row of an example, which has ``columns`` of its attack."""
        return {}

    @torch.inference_mode()
    def _poll(self, example: Example, image: torch.Tensor, columns: dict[str, Any]) -> Poll:
        """The poll of one image, whose row has also the base classifier's class for it, without noise."""
        base = to_host(self.job.classifier(image.unsqueeze(0)).argmax())
        return Poll(image, self.job.stream(example.index, self.votes), self._voting(example, columns, base))

    def _voting(
        self, example: Example, columns: dict[str, Any], base: Callable[[], torch.Tensor]
    ) -> Generator[Draws, np.ndarray, dict[str, Any]]:
        """Run PREDICT on one image; returns the columns of the image's row.

        ``predict`` is the label to be left if that is among the predicted classes, else the first of them; ``base``
        returns the base classifier's class, for which no draw should wait.
        """
        classes, (wanted, _) = (yield from predict(self.n, self.alpha, self.top_k)), self.aim(example)
        columns["basePredict"] = int(base())
        prediction = wanted if wanted in classes else [*classes, ABSTAIN][0]
        of_set = dict(zip(class_columns(self.top_k), classes or [ABSTAIN] * self.top_k))
        further = {**columns, **self.outcome(example, prediction, columns)}
        return {"abstain": int(not classes), "predict": prediction, **of_set, **further}
