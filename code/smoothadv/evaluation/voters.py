"""The classifiers of an evaluation: a single one, the stages of a cascade, or those of a router and
last the router.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from smoothadv.base.errors import UserError, first_line, warn
from smoothadv.base.files import digest
from smoothadv.datasets import ImageDataset, get_dataset
from smoothadv.datasets.images import changing_image
from smoothadv.datasets.relabelled import RelabelledImages
from smoothadv.evaluation.specs import EvaluationSpec
from smoothadv.models.load import BaseClassifier, classifier_digest, load
from smoothadv.models.name import sigma_names
from smoothadv.noise import GaussianNoise, Noise, NoiseKey, RoundedGaussianNoise
from smoothadv.records.logs import DENOISER, MODEL
from smoothadv.voting.classifier import VotingClassifier, optimized_for_inference

# Logits of an image that differ by more than this share of the largest one differ by more than
# rounding, also in bf16.
_FUNCTION = 0.02

Loaded: TypeAlias = tuple[EvaluationSpec, ImageDataset, BaseClassifier]
"""A spec, which has photographs prepared as the library of its model prepares them; the images,
labelled by the classes of the model; and the model.
"""


@dataclass(frozen=True)
class Voter:
    """A classifier that votes.

    ``base`` is the base classifier as trained, ``form`` the form that votes, ``victim`` the form
    that is attacked. ``noise`` makes the noise of each image, keyed by ``key``.
    """

    base: BaseClassifier
    num_classes: int
    form: VotingClassifier
    victim: VotingClassifier
    noise: Noise
    key: NoiseKey


def _loaded(spec: EvaluationSpec) -> Loaded:
    """The model of a spec, before its images, since reading or downloading these takes longer."""
    spec, base = load(spec)
    images = spec.dataset
    if isinstance(images, str):
        images = get_dataset(images, spec.split, spec.data_dir)
    if base.classes is not None:
        images = RelabelledImages(images, *base.classes)
    return spec, images, base


def load_models(spec: EvaluationSpec) -> list[Loaded]:
    """Each classifier of a spec with its images; UserError where one cannot be had, or does not fit
    its images, and where stages have other images or classes than the first one.
    """
    stages = spec.classifiers if spec.router is None else spec.classifiers[:-1]
    loaded = [_loaded(spec.of_stage(stage)) for stage in stages]
    images = loaded[0][1]
    if (index := changing_image(images)) is not None:
        raise UserError(
            f"image {index} of '{images.description.name}' is another one each time it is read: "
            "leave random crops, mirror images and noise out of the Dataset"
        )
    for place, (_, other, _) in enumerate(loaded[1:], start=2):
        facts = [(each.fingerprint(), each.description) for each in (images, other)]
        if facts[0] != facts[1]:
            raise UserError(
                f"{spec.model or 'stages'}: stage {place} has other images or classes than the "
                "first one: all must have the same"
            )
    if spec.router is not None:
        # Its classes are the stages; the labels say nothing.
        names, known = sigma_names(stage.sigma for stage in stages), images.description
        by_stage = RelabelledImages(images, names, [0] * known.num_classes)
        by_stage.description = replace(by_stage.description, name=f"{known.name} by stage")
        loaded.append(_loaded(replace(spec.of_stage(spec.router), dataset=by_stage)))
    return loaded


def noise_keys(loaded: Sequence[Loaded]) -> tuple[str, list[NoiseKey]]:
    """A digest of all classifiers, and the key of the noise of each.

    Each of several has draws of its own, not those of a log of that model alone: users may have
    chosen the stages by such logs, and draws are used once.
    """
    keys = [
        NoiseKey(
            classifier_digest(base.module, {**base.settings, **spec.plugins(*base.architectures)}),
            images.fingerprint(),
            base.settings.get(DENOISER, {}).get("noise_sd", spec.sigma),
            spec.seed,
        )
        for spec, images, base in loaded
    ]
    if len(keys) == 1:
        return keys[0].classifier, keys
    together = digest([" ".join(key.classifier for key in keys)])
    places = enumerate(keys, start=1)
    return together, [replace(key, classifier=f"{together} {place}") for place, key in places]


def voter_of(
    spec: EvaluationSpec,
    loaded: Loaded,
    key: NoiseKey,
    device: torch.device,
    sound: bool,
    warns: bool,
) -> Voter:
    """A loaded classifier, which is moved to the device, as a voter in the precision of a spec."""
    _, images, base = loaded
    classifier = base.module.to(device)
    example = images[0][0] if len(images) else None
    form = optimized_for_inference(classifier, device, example, spec.precision)
    if example is not None and "checkpoint_sha256" not in base.settings:
        _check_module(
            form, example.to(device), base.name or base.architectures[0].rpartition(".")[2], warns
        )
    if spec.compile and warns:
        print("compiling the classifier first, which may take a minute", file=sys.stderr)
    victim = form
    if spec.precision == "fp16":  # where the gradients of confident predictions underflow
        victim = optimized_for_inference(classifier, device, example)
    noise = (RoundedGaussianNoise if sound else GaussianNoise)(key.sigma, key.seed, key=key)
    return Voter(base, images.description.num_classes, form, victim, noise, key)


@torch.inference_mode()
def _check_module(form: VotingClassifier, image: torch.Tensor, name: str, warns: bool) -> None:
    """UserError where a module of the user's own does not run in the form that votes; a warning if
    it is no function.

    An architecture of a checkpoint needs no such check.
    """
    try:
        logits = form(torch.stack([image, 1 - image, image]))[0]
        again = form(torch.stack([image, image / 2, 1 - image]))[0]
    except (RuntimeError, ValueError, TypeError) as error:
        raise UserError(
            f"{name} does not run with weights and images of {form.dtype}, batch 3: "
            f"{first_line(error)}"
        ) from error
    scale = float(logits.abs().max())  # NaN: the votes will tell
    if (
        warns
        and scale == scale
        and not torch.allclose(logits, again, rtol=_FUNCTION, atol=_FUNCTION * scale)
    ):
        warn(
            f"the logits of {name} for an image depend on the other images in a batch, or on "
            "chance, in eval mode too: certificates are about a function of one image"
        )


def joined(settings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What records say of each classifier, in one: equal values once, others as lists; texts that
    differ are joined, and a flag holds if it holds for all.
    """
    together: dict[str, Any] = {}
    for name in {name: None for each in settings for name in each}:
        values = [each.get(name) for each in settings]
        if len(values) > 1 and name in MODEL:
            together[name] = {"stages": values}
        elif all(value == values[0] for value in values):
            together[name] = values[0]
        elif all(isinstance(value, bool) for value in values):
            together[name] = all(values)
        elif name == "input_layer" or any(isinstance(value, dict) for value in values):
            together[name] = values
        elif all(isinstance(value, str) for value in values):
            together[name] = " > ".join(map(str, values))
    return together
