"""Prepares an evaluation of a cascade or a router: one evaluation per classifier, under one
identity.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from smoothadv.base.errors import UserError
from smoothadv.base.files import digest
from smoothadv.datasets import ImageDataset
from smoothadv.datasets.relabelled import RelabelledImages
from smoothadv.evaluation import setup
from smoothadv.evaluation.setup import Evaluation
from smoothadv.evaluation.specs import EvaluationSpec
from smoothadv.models.name import Stage, sigma_names
from smoothadv.records.logs import CLASSIFIER

_OF_STAGES = ("checkpoint_sha256", "module_sha256")


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
    record = {**last.run_record, "checkpoint": name}
    evaluation = replace(
        last, spec=spec, settings=settings, run_record=record, digests={}, stages=tuple(stages)
    )
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
