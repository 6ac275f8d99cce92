"""Prepares an evaluation of a cascade or a router: one evaluation per classifier, under one
identity.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from smoothadv.base.errors import UserError
from smoothadv.base.files import digest
from smoothadv.base.members import Stage, sigma_names
from smoothadv.datasets import ImageDataset
from smoothadv.datasets.relabelled import RelabelledImages
from smoothadv.evaluation import setup
from smoothadv.evaluation.setup import Evaluation
from smoothadv.evaluation.specs import EvaluationSpec
from smoothadv.noise import Purpose
from smoothadv.records.logs import CLASSIFIER
from smoothadv.voting.stages import StagedCounter, StagedPoll

_OF_STAGES = ("checkpoint_sha256", "module_sha256")


@dataclass(frozen=True)
class CascadeEvaluation(Evaluation):
    """An evaluation of a cascade, with that of each of its ``stages``, and last of its router, if
    it has one; the classifier, its forms and the noise are those of the last stage.
    """

    stages: tuple[Evaluation, ...] = field(kw_only=True)

    @property
    def attacked(self) -> Any:
        return [stage.attacked for stage in self.stages]

    @property
    def are_integers(self) -> bool:
        return all(stage.are_integers for stage in self.stages)

    def distances(self, dimension: int) -> tuple[float, ...]:
        return tuple(stage.noise.distance(dimension) for stage in self.stages)

    def counter(self, batch: int | None = None, consensus: bool = True) -> Any:
        return StagedCounter([stage.counter(batch, consensus) for stage in self.stages])

    def poll(
        self, index: int, image: torch.Tensor, voting: Any, purpose: int = Purpose.VOTES
    ) -> Any:
        streams = (stage.noise.stream(index, self.device, purpose) for stage in self.stages)
        return StagedPoll(image, tuple(streams), voting)

    def _computed_digest(self, batch: int) -> str | None:
        digests = [stage.logits_digest(batch) for stage in self.stages]
        return None if None in digests else digest([" ".join(map(str, digests))])


def prepare(spec: EvaluationSpec, log: Path | None, sound: bool = False) -> Evaluation:
    """As ``setup.prepare``, also for several classifiers, which vote in batches of one size."""
    if spec.stages is None:
        return setup.prepare(spec, log, sound)
    stages: list[Evaluation] = []
    for stage in spec.stages:
        stages.append(_of_one(spec, stage, stages, log, sound))
        known = [(each.dataset.fingerprint(), each.dataset.description) for each in stages]
        if known[0] != known[-1]:
            raise UserError(
                f"{spec.model or 'stages'}: stage {len(stages)} has other images or classes than "
                "the first one: all must have the same"
            )
    if spec.router is not None:
        by_stage = _by_stage(stages[0].dataset, spec.stages)
        stages.append(_of_one(spec, spec.router, stages, log, sound, dataset=by_stage))
    together = digest([" ".join(stage.key.classifier for stage in stages)])
    stages = [_keyed(stage, f"{together} {place}") for place, stage in enumerate(stages, start=1)]
    last = stages[len(spec.stages) - 1]
    architectures = [str(stage.settings["arch"]) for stage in stages]
    settings = _joined([stage.settings for stage in stages])
    settings |= {
        **spec.identity(*architectures),
        CLASSIFIER: together,
        "sigmas": [stage.sigma for stage in spec.classifiers],
        **{name: last.settings[name] for name in ("num_classes", "dataset_fingerprint")},
    }
    name = None if spec.model is None else str(spec.model)
    of_cascade = {"spec": spec, "settings": settings}
    of_cascade["run_record"] = {**last.run_record, "checkpoint": name}
    of_cascade["digests"] = {}
    evaluation = CascadeEvaluation(**{**vars(last), **of_cascade}, stages=tuple(stages))
    return evaluation.continuing(log)


def _of_one(
    spec: EvaluationSpec,
    stage: Stage,
    earlier: Sequence[Evaluation],
    log: Path | None,
    sound: bool,
    **further: Any,
) -> Evaluation:
    """The evaluation of one classifier, with the batch of the ``earlier`` ones; ``further`` are
    fields of its spec.
    """
    own = spec.of_stage(stage)
    batch = earlier[0].batch if earlier else own.batch
    return setup.prepare(replace(own, batch=batch, **further), log, sound)


def _keyed(stage: Evaluation, classifier: str) -> Evaluation:
    """The evaluation of a stage, with draws of its own: those of a log of the same model alone may
    have chosen the stages.
    """
    key = replace(stage.key, classifier=classifier)
    return replace(stage, key=key, noise=replace(stage.noise, key=key))


def _by_stage(images: ImageDataset, stages: Sequence[Stage]) -> RelabelledImages:
    """The images for a router, whose classes are the stages; their labels say nothing."""
    names, known = sigma_names(stage.sigma for stage in stages), images.description
    by_stage = RelabelledImages(images, names, [0] * known.num_classes)
    by_stage.description = replace(by_stage.description, name=f"{known.name} by stage")
    return by_stage


def _joined(settings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The settings of stages in one: equal values once, others as lists; texts that differ are
    joined, and a flag holds if it holds for all.
    """
    joined: dict[str, Any] = {}
    for name in {name: None for each in settings for name in each}:
        values = [each.get(name) for each in settings]
        if name in _OF_STAGES:
            joined[name] = {"stages": values}
        elif all(value == values[0] for value in values):
            joined[name] = values[0]
        elif all(isinstance(value, bool) for value in values):
            joined[name] = all(values)
        elif name == "input_layer" or any(isinstance(value, dict) for value in values):
            joined[name] = values
        elif all(isinstance(value, str) for value in values):
            joined[name] = " > ".join(map(str, values))
    return joined
