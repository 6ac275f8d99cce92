"""The base classifier of a request, from a checkpoint or a module, and what a log's manifest
records about it.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from smoothadv.architectures.logits import logits_in, probe
from smoothadv.attacks.estimators import frozen
from smoothadv.base.digests import digest, file_digest
from smoothadv.base.errors import UserError, warn
from smoothadv.base.members import Members
from smoothadv.checkpoints import (
    ADDRESS,
    bytes_of,
    classifier_from_members,
    digest_of,
    recorded_input_layer,
)
from smoothadv.checkpoints.denoisers import denoised_classifier
from smoothadv.datasets import DatasetDescription
from smoothadv.records.logs import DENOISER


@dataclass(frozen=True)
class BaseClassifier:
    """A base classifier: maps images [B, C, H, W] in [0, 1] to logits [B, K]; in eval mode, on the
    CPU.

    ``settings`` identify it in a log's manifest; ``source`` has the checkpoints that it is from
    (None: a module, which is a network by name if it is ``named``), and ``denoiser`` what the
    checkpoint of the denoiser before it records of its training.
    """

    module: torch.nn.Module
    settings: dict[str, Any]
    source: Members | None = None
    named: str | None = None
    denoiser: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str | None:
        """The checkpoint's path, or how an ensemble or a network was named; None of a module."""
        return self.named if self.source is None else str(self.source.name)

    @property
    def architectures(self) -> list[str]:
        """Those of its checkpoints, or the module's class, and that of the denoiser before it."""
        own = (
            [self.settings["arch"]]
            if self.source is None
            else [one["arch"] for one in self.source.contents]
        )
        return [*own, *([self.settings[DENOISER]["arch"]] if DENOISER in self.settings else [])]

    def warn_about_mismatch(self, dataset: str | None, sigma: float) -> None:
        """Warn where dataset (None: unnamed) or sigma differ from those of the training: probably a
        mistake.
        """
        sources = [*zip(self.source.paths, self.source.contents)] if self.source else []
        for path, content in [
            *sources,
            *([("the denoiser", self.denoiser)] if self.denoiser else []),
        ]:
            trained_on, noise_sd = content.get("dataset"), content.get("noise_sd")
            if self.denoiser and content is not self.denoiser:
                noise_sd = None  # the denoiser removes it
            if None not in (trained_on, dataset) and trained_on != dataset:
                warn(f"{path} was trained on '{trained_on}', not on '{dataset}'")
            if noise_sd is not None and noise_sd != sigma:
                warn(f"{path} was trained with noise {noise_sd}; it is being smoothed with {sigma}")


def with_denoiser(
    base: BaseClassifier, denoiser: str, description: DatasetDescription, sigma: float
) -> BaseClassifier:
    """The classifier behind a denoiser, for noise of ``sigma``; UserError where that does not fit
    the images.
    """
    module, facts, content = denoised_classifier(base.module, denoiser, description, sigma)
    return replace(
        base, module=module, settings={**base.settings, DENOISER: facts}, denoiser=content
    )


def base_classifier(
    source: Members | torch.nn.Module, description: DatasetDescription, input_layer: str | None
) -> BaseClassifier:
    """The classifier in checkpoints, or a copy of a module; UserError where it does not fit the
    images.
    """
    if isinstance(source, torch.nn.Module):
        return from_module(source, description)
    module = classifier_from_members(source, description, input_layer)
    facts = [
        {
            "checkpoint_sha256": file_digest(path),
            "arch": content["arch"],
            "input_layer": recorded_input_layer(content, path, layer),
            "training": content.get("recipe"),
        }
        for path, content, layer in zip(
            source.paths, source.contents, source.input_layers(input_layer)
        )
    ]
    return BaseClassifier(
        module, _of_ensemble(facts, source.mean) if source.mean else facts[0], source
    )


def _of_ensemble(facts: list[dict[str, Any]], mean: str) -> dict[str, Any]:
    """The settings of an ensemble; ``mean`` is in what keys the noise and in what tells one model
    from another.
    """
    together = {name: [fact[name] for fact in facts] for name in facts[0]}
    arch, digests = (
        f"{'+'.join(together['arch'])} (mean of {mean})",
        {mean: together["checkpoint_sha256"]},
    )
    return {**together, "arch": arch, "checkpoint_sha256": digests}


def from_module(module: torch.nn.Module, description: DatasetDescription) -> BaseClassifier:
    """The classifier that a copy of a module is."""
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    settings = {
        "module_sha256": module_digest(module),
        "arch": name,
        "input_layer": None,
        "training": None,
    }
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise UserError(
            f"{type(module).__name__} is TorchScript, which cannot be copied whole: give the "
            "module itself"
        )
    classifier = copy.deepcopy(module).eval().cpu()
    return BaseClassifier(logits_of(classifier, description), settings)


def module_digest(module: torch.nn.Module) -> str:
    """A SHA-256, in hexadecimal, of a module's structure as printed, weights and buffers; its code
    is not covered.
    """
    parts: list[str | memoryview] = [ADDRESS.sub("", repr(module))]
    for name, value in module.state_dict().items():
        if isinstance(value, torch.Tensor):
            parts += [f"{name} {value.dtype} {tuple(value.shape)}\n", bytes_of(value)]
        else:  # what a module's get_extra_state returns
            parts.append(f"{name} {ADDRESS.sub('', repr(value))}\n")
    return digest(parts)


def classifier_digest(module: torch.nn.Module, settings: Mapping[str, Any]) -> str:
    """A SHA-256, in hexadecimal, of all of a classifier but the code of its module, to key its
    noise.

    That is the weights, all buffers, also those that ``state_dict`` leaves out, and the
    architecture, input layer, plug-ins and denoiser in ``settings``.
    """
    named = {name: settings.get(name) for name in ("arch", "input_layer", "plugins")}
    named |= {DENOISER: settings[DENOISER]} if DENOISER in settings else {}
    tensors = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    return digest_of([named, {**dict(tensors), **module.state_dict()}])


def logits_of(network: torch.nn.Module, description: DatasetDescription) -> torch.nn.Module:
    """``network``, in eval mode, as a module from images to logits; UserError where it does not fit
    the images.

    It must accept a grey image of the shape in ``description`` and return one logit for each class
    there.
    """
    classifier, classes = probe(network, torch.full(description.image_shape, 0.5))
    if classes != description.num_classes:
        raise UserError(
            f"{type(network).__name__} has {classes} classes, the images of '{description.name}' "
            f"have {description.num_classes}"
        )
    return classifier


def count_classes(network: torch.nn.Module, image: torch.Tensor) -> int:
    """K, the number of logits that a network returns for an image [C, H, W]; UserError where it
    returns none.
    """
    with frozen(network):
        return probe(network, image)[1]


@contextmanager
def trained_on_logits(network: torch.nn.Module, description: DatasetDescription) -> Iterator[None]:
    """Within this context, a network that returns an object or a mapping with ``logits`` returns
    the logits.

    Its ``state_dict`` stays as it is. UserError where it does not fit the images or has nothing to
    train.
    """
    if not any(weight.requires_grad for weight in network.parameters()):
        raise UserError(
            f"{type(network).__name__} has no parameters that require gradients: there is nothing "
            "to train"
        )
    with frozen(network):
        is_plain = logits_of(network, description) is network
    hook = (
        None
        if is_plain
        else network.register_forward_hook(lambda module, images, output: logits_in(output))
    )
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()
