"""Predict the classes of many images, clean or attacked, into a log (PREDICT of Cohen et al.,
2019); or attack them with each of several epsilons, into a log and a file of images for each.
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from smoothadv.architectures.libraries.onnx import OnnxNetwork
from smoothadv.attacks import StagedAttack
from smoothadv.attacks.estimators import Stein
from smoothadv.attacks.geometry import in_grey_levels, l2_norm
from smoothadv.attacks.smoothed_attack import EVERY
from smoothadv.base.devices import to_device, to_host
from smoothadv.base.errors import UsageError
from smoothadv.base.settings import settings_record
from smoothadv.evaluation.log import Example, LogContent, write_log
from smoothadv.evaluation.setup import (
    Evaluation,
    prepare,
    settings_to_continue,
    warn_of_few_draws,
)
from smoothadv.evaluation.specs import AttackedSpec, AttackSpec, PredictSpec, check_top_k
from smoothadv.noise import Purpose
from smoothadv.records.logs import ATTACK_COLUMNS, PREDICTION_COLUMNS, attacked_log, class_columns
from smoothadv.records.writer import WrittenLog
from smoothadv.statistics import ABSTAIN, Draws, prediction
from smoothadv.statistics.cascade import predict_in_cascade
from smoothadv.statistics.router import predict_by_router
from smoothadv.voting.classifier import default_attack_batch
from smoothadv.voting.counter import Poll


def with_attack_batch(evaluation: Evaluation) -> tuple[Evaluation, StagedAttack | None]:
    """The evaluation with the batch of its attack, and that attack; None without one.

    The batch is that of the spec, else that of the log to be continued, else the one that it has,
    else one which suits the device. UsageError where the attack's target is no class of the images.
    """
    spec, description = evaluation.spec, evaluation.dataset.description
    assert isinstance(spec, AttackedSpec)
    if spec.attack is None:
        return evaluation, None
    target, classes = spec.target, description.num_classes
    dataset = evaluation.settings["dataset"]
    if isinstance(target, int) and target >= classes:
        raise UsageError(f"--target {target}: the classes of {dataset} are 0 to {classes - 1}")
    if target is not None and classes < 2:
        raise UsageError(f"--target {target}: {dataset} has only one class")
    if not isinstance(spec.attack.estimator, Stein):
        modules = [part for voter in evaluation.voters for part in voter.base.module.modules()]
        for part in modules:
            if isinstance(part, OnnxNetwork):
                part.refuse_gradients()
    recorded = settings_to_continue(spec, evaluation.log).get("attack_batch")
    batch = spec.attack_batch or recorded or evaluation.settings.get("attack_batch")
    if batch is None:
        batch = default_attack_batch(
            evaluation.last.victim,
            description.image_shape,
            evaluation.device,
            spec.num_noise_vec,
            spec.shard is not None,
        )
    batch = evaluation.processes.received(batch)
    record = {"attack": settings_record(spec.attack), "attack_batch": batch}
    evaluation = replace(evaluation, settings={**evaluation.settings, **record})
    return evaluation, spec.smoothed_attack(evaluation.last.key.attack_seed, batch)


@dataclass(frozen=True)
class PredictionPolls:
    """Polls images for PREDICT, after an ``attack``, if any; correct is a label among the ``top_k``
    classes.
    """

    evaluation: Evaluation
    attack: StagedAttack | None
    top_k: int = 1
    votes: ClassVar[Purpose] = Purpose.VOTES

    def content(self, activity: str, **further: Any) -> LogContent:
        """How the evaluation's log is made; ``further`` are fields of ``LogContent``."""
        further = {"settings": {}, "attack": self.attack, **further}
        return LogContent(self.columns, make_polls=self, activity=activity, **further)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the rows: also the target, where each example has one, and the classes of
        a set.
        """
        if self.attack is None:
            return (*PREDICTION_COLUMNS, *class_columns(self.top_k))
        target = ("target",) if self.attack.attacks[0].target not in (None, EVERY) else ()
        return (*ATTACK_COLUMNS, *target, *class_columns(self.top_k))

    def __call__(self, examples: list[Example]) -> Iterator[Poll]:
        evaluation, attack = self.evaluation, self.attack
        if attack is None:
            for example in examples:
                yield self._poll(example, to_device(example.image, evaluation.device), {})
            return
        images = torch.stack([example.image for example in examples]).to(evaluation.device)
        indices = [example.index for example in examples]
        aims = [self.aim(example) for example in examples]
        labels = torch.tensor([label for label, _ in aims], device=evaluation.device)
        epsilon = torch.tensor([epsilon for _, epsilon in aims], dtype=torch.float64)
        victims = [voter.victim for voter in evaluation.voters]
        targets = attack.choose_targets(victims, images, labels, indices)
        adversarial = attack(victims, images, labels, indices, epsilon=epsilon, targets=targets)
        if evaluation.is_sound:
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
        return example.label, 0.0 if self.attack is None else self.evaluation.spec.attack.epsilon

    def judged(self, example: Example, predicted: int, attack_norm: float) -> dict[str, Any]:
        """Further columns of the row of an example for which this class was predicted."""
        return {}

    @torch.inference_mode()
    def _poll(self, example: Example, image: torch.Tensor, columns: dict[str, Any]) -> Poll:
        """The poll of one image, whose row has also the base classifier's class for it, without
        noise.
        """
        evaluation = self.evaluation
        base = to_host(evaluation.last.base.module(image.unsqueeze(0).clone()).argmax())
        voting = self._voting(example, columns, base)
        return Poll(image, evaluation.streams(example.index, image, self.votes), voting)

    def _voting(
        self, example: Example, columns: dict[str, Any], base: Callable[[], torch.Tensor]
    ) -> Generator[Draws, np.ndarray, dict[str, Any]]:
        """Run PREDICT on one image; returns the columns of the image's row.

        ``predict`` is the label to be left if that is among the predicted classes, else the first
        of them; ``base`` returns the base classifier's class, for which no draw should wait.
        """
        spec, (label, _) = self.evaluation.spec, self.aim(example)
        stages = len(spec.stages or ())
        if spec.router is not None:
            classes = yield from predict_by_router(spec.n, spec.alpha, stages)
        elif spec.threshold is not None:
            classes = yield from predict_in_cascade(spec.n, spec.alpha, spec.threshold, stages)
        else:
            classes = yield from prediction.predict(spec.n, spec.alpha, self.top_k)
        predicted = label if label in classes else [*classes, ABSTAIN][0]
        return {
            "abstain": int(not classes),
            "predict": predicted,
            "basePredict": int(base()),
            **dict(zip(class_columns(self.top_k), classes or [ABSTAIN] * self.top_k)),
            **columns,
            **self.judged(example, predicted, columns.get("attack_norm", 0.0)),
        }


def predict(spec: PredictSpec) -> WrittenLog:
    """Write the missing rows of the log ``spec.log``, as ``write_log``."""
    evaluation = prepare(spec, spec.log)
    check_top_k(spec.top_k, evaluation.dataset.description)
    warn_of_few_draws(spec, spec.top_k)
    polls = PredictionPolls(*with_attack_batch(evaluation), spec.top_k)
    return write_log(polls.evaluation, polls.content("predicting"))


def attack(spec: AttackSpec) -> Iterator[WrittenLog]:
    """Write the missing rows of the logs in ``spec.outdir``, as ``write_log``; yields each finished
    log.
    """
    warn_of_few_draws(spec)
    specs = specs_by_log(spec)
    first = next((path for path in specs if path.exists()), next(iter(specs)))
    evaluation = prepare(spec, None if spec.outdir is None else first)
    evaluation, _ = with_attack_batch(evaluation)
    for path, one in specs.items():
        log = None if spec.outdir is None else path
        continued = replace(evaluation, spec=one).continuing(log)
        polls = PredictionPolls(*with_attack_batch(continued))
        content = polls.content(f"attacking, epsilon {one.attack.epsilon:g}", keeps_images=True)
        yield write_log(polls.evaluation, content)


def specs_by_log(spec: AttackSpec) -> dict[Path, AttackSpec]:
    """The logs of a spec, and the spec of each."""
    specs = {}
    for epsilon in spec.epsilons:
        attack = replace(spec.attack, epsilon=epsilon)
        one = replace(spec, attack=attack, epsilons=(epsilon,))
        specs[attacked_log(spec.outdir or Path(), epsilon)] = one
    return specs
