"""Predict the classes of many images, clean or attacked, into a log (PREDICT of Cohen et al.,
2019).
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from smoothadv.attacks import SmoothedAttack
from smoothadv.attacks.shared.geometry import in_grey_levels, l2_norm
from smoothadv.attacks.shared.smoothed_attack import EVERY
from smoothadv.base.devices import to_device, to_host
from smoothadv.base.errors import UsageError
from smoothadv.base.settings import settings_record
from smoothadv.evaluation.log import Example, LogPlan, write_log
from smoothadv.evaluation.setup import (
    SmoothingJob,
    check_top_k,
    prepare,
    recorded_number,
    warn_of_few_draws,
)
from smoothadv.evaluation.specs import AttackPlan, PredictRequest
from smoothadv.noise import Purpose, RoundedGaussianNoise
from smoothadv.records.logs import ATTACK_COLUMNS, PREDICTION_COLUMNS, class_columns
from smoothadv.records.writer import WrittenLog
from smoothadv.statistics import ABSTAIN, Draws, prediction
from smoothadv.voting.classifier import default_attack_batch
from smoothadv.voting.counter import Poll


def attack_record(attack: SmoothedAttack | None) -> dict[str, Any]:
    """The attack's part of the settings that decide the numbers in a log; None stands for no
    attack.
    """
    if attack is None:
        return {"attack": None, "num_noise_vec": None, "base_attack": False}
    record = {"attack": settings_record(attack.attack), "num_noise_vec": attack.num_noise_vec}
    record |= {
        "base_attack": attack.sigma == 0,
        "restarts": attack.restarts,
        "target": attack.target,
    }
    return {**record, "attack_batch": attack.batch}


def fit_to_job(
    plan: AttackPlan, job: SmoothingJob, usual_batch: int | None = None
) -> SmoothedAttack:
    """The attack, with its batch: the plan's, else that of the log to be continued, else
    ``usual_batch``.

    By default that is one which suits the device. UsageError where the attack's target is no class
    of the images.
    """
    classes = job.dataset.description.num_classes
    if isinstance(plan.target, int) and plan.target >= classes:
        raise UsageError(
            f"--target {plan.target}: the classes of {job.settings['dataset']} are 0 to "
            f"{classes - 1}"
        )
    if plan.target is not None and classes < 2:
        raise UsageError(f"--target {plan.target}: {job.settings['dataset']} has only one class")
    batch = plan.batch or recorded_number(job.request, job.log, "attack_batch") or usual_batch
    if batch is None:
        shape, is_shard = job.dataset.description.image_shape, job.request.shard is not None
        batch = default_attack_batch(job.attacked, shape, job.device, plan.num_noise_vec, is_shard)
    return plan.smoothed(job.request.sigma, job.key.attack_seed, job.processes.received(batch))


@dataclass(frozen=True)
class PredictionPolls:
    """Polls images for PREDICT, after an ``attack``, if any; correct is a label among the ``top_k``
    classes.
    """

    job: SmoothingJob
    attack: SmoothedAttack | None
    top_k: int = 1
    votes: ClassVar[Purpose] = Purpose.VOTES

    def plan(self, description: str, settings: dict[str, Any], **further: Any) -> LogPlan:
        """How the job's log is made; ``settings`` join those of the attack, ``further`` has fields
        of the plan.
        """
        settings = {"N": self.job.request.n, **attack_record(self.attack), **settings}
        return LogPlan(self.columns, settings, self, description, attack=self.attack, **further)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the rows: also the target, where each example has one, and the classes of
        a set.
        """
        if self.attack is None:
            return (*PREDICTION_COLUMNS, *class_columns(self.top_k))
        target = ("target",) if self.attack.target not in (None, EVERY) else ()
        return (*ATTACK_COLUMNS, *target, *class_columns(self.top_k))

    def __call__(self, examples: list[Example]) -> Iterator[Poll]:
        job, attack = self.job, self.attack
        if attack is None:
            yield from (
                self._poll(example, to_device(example.image, job.device), {})
                for example in examples
            )
            return
        images = torch.stack([example.image for example in examples]).to(job.device)
        indices = [example.index for example in examples]
        aims = [self.aim(example) for example in examples]
        labels = torch.tensor([label for label, _ in aims], device=job.device)
        epsilon = torch.tensor([epsilon for _, epsilon in aims], dtype=torch.float64)
        targets = attack.choose_targets(job.attacked, images, labels, indices)
        adversarial = attack(
            job.attacked, images, labels, indices, epsilon=epsilon, targets=targets
        )
        if isinstance(job.noise, RoundedGaussianNoise):
            adversarial = in_grey_levels(images, adversarial, epsilon)
        norms = l2_norm(adversarial.double() - images.double()).tolist()
        for row, example in enumerate(examples):
            columns = {"attack_norm": norms[row], "epsilon": float(epsilon[row])}
            if targets is not None:
                columns["target"] = int(targets[row])
            yield self._poll(example, adversarial[row], columns)

    def aim(self, example: Example) -> tuple[int, float]:
        """What the attack on an example wants: to leave this label, by a perturbation of at most
        this l2 norm.
        """
        return example.label, 0.0 if self.attack is None else self.attack.attack.epsilon

    def outcome(self, example: Example, predicted: int, columns: dict[str, Any]) -> dict[str, Any]:
        """Further columns of the row of an example, which has ``columns`` of its attack."""
        return {}

    @torch.inference_mode()
    def _poll(self, example: Example, image: torch.Tensor, columns: dict[str, Any]) -> Poll:
        """The poll of one image, whose row has also the base classifier's class for it, without
        noise.
        """
        base = to_host(self.job.classifier(image.unsqueeze(0)).argmax())
        return Poll(
            image, self.job.stream(example.index, self.votes), self._voting(example, columns, base)
        )

    def _voting(
        self, example: Example, columns: dict[str, Any], base: Callable[[], torch.Tensor]
    ) -> Generator[Draws, np.ndarray, dict[str, Any]]:
        """Run PREDICT on one image; returns the columns of the image's row.

        ``predict`` is the label to be left if that is among the predicted classes, else the first
        of them; ``base`` returns the base classifier's class, for which no draw should wait.
        """
        request, (wanted, _) = self.job.request, self.aim(example)
        classes = yield from prediction.predict(request.n, request.alpha, self.top_k)
        columns["basePredict"] = int(base())
        predicted = wanted if wanted in classes else [*classes, ABSTAIN][0]
        of_set = dict(zip(class_columns(self.top_k), classes or [ABSTAIN] * self.top_k))
        further = {**columns, **self.outcome(example, predicted, columns)}
        return {"abstain": int(not classes), "predict": predicted, **of_set, **further}


def predict(request: PredictRequest) -> WrittenLog:
    """Write the missing rows of the log ``request.outfile``, as ``write_log``."""
    job = prepare(request, request.outfile)
    check_top_k(request.top_k, job.dataset.description)
    warn_of_few_draws(request, request.top_k)
    attack = None if request.attack is None else fit_to_job(request.attack, job)
    polls = PredictionPolls(job, attack, request.top_k)
    return write_log(
        job, polls.plan("predicting", {"top_k": request.top_k} if request.top_k > 1 else {})
    )
