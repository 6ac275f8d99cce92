"""The model of an evaluation, and the images as that model takes them.

A model is a checkpoint, an ensemble, a network by name or a module, perhaps behind a denoiser.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from smoothadv.architectures import chosen_architecture, names_network, user_network
from smoothadv.architectures.libraries import LibraryNetwork, library_network
from smoothadv.architectures.libraries.onnx import OnnxNetwork
from smoothadv.architectures.logits import logits_in, probe
from smoothadv.attacks.estimators import Stein, frozen
from smoothadv.base import plugins
from smoothadv.base.digests import file_digest
from smoothadv.base.errors import UsageError, UserError, warn
from smoothadv.base.members import Members
from smoothadv.checkpoints import (
    classifier_from_members,
    digest_of,
    read_members,
    recorded_input_layer,
)
from smoothadv.checkpoints.denoisers import denoised_classifier
from smoothadv.datasets import DatasetDescription, ImageDataset, get_dataset
from smoothadv.datasets.preparation import prepared_name, split_location
from smoothadv.datasets.relabelled import RelabelledImages, matched_classes
from smoothadv.evaluation.specs import EvaluationSpec
from smoothadv.noise import derive_generator
from smoothadv.records.logs import DENOISER

_PHOTOGRAPHS = ("imagefolder", "hf-dataset")


@dataclass(frozen=True)
class BaseClassifier:
    """A base classifier: maps images [B, C, H, W] in [0, 1] to logits [B, K]; in eval mode, on the
    CPU.

    ``settings`` identify it in a log's manifest. ``name`` is the checkpoint's path, or how an
    ensemble or a network is named; None of a module. ``members`` are its checkpoints, if it is from
    checkpoints, ``denoiser`` is what the checkpoint of the denoiser before it records of its
    training.
    """

    module: torch.nn.Module
    settings: dict[str, Any]
    name: str | None = None
    members: Members | None = None
    denoiser: dict[str, Any] = field(default_factory=dict)

    @property
    def architectures(self) -> list[str]:
        """The architectures of its checkpoints, or the module's class, and the denoiser's."""
        own = [self.settings["arch"]]
        if self.members is not None:
            own = [one["arch"] for one in self.members.contents]
        return [*own, self.settings[DENOISER]["arch"]] if DENOISER in self.settings else own

    def warn_about_mismatch(self, dataset: str | None, sigma: float) -> None:
        """Warn where the dataset (None: unnamed) or sigma is not that of the training."""
        trained = [*zip(self.members.paths, self.members.contents)] if self.members else []
        for path, content in trained:
            # A denoiser before the classifier removes the noise.
            noise_sd = None if self.denoiser else content.get("noise_sd")
            _warn_about_training(str(path), content.get("dataset"), noise_sd, dataset, sigma)
        if self.denoiser:
            trained_on, noise_sd = self.denoiser.get("dataset"), self.denoiser.get("noise_sd")
            _warn_about_training("the denoiser", trained_on, noise_sd, dataset, sigma)


def _warn_about_training(
    name: str, trained_on: str | None, noise_sd: float | None, dataset: str | None, sigma: float
) -> None:
    if None not in (trained_on, dataset) and trained_on != dataset:
        warn(f"{name} was trained on '{trained_on}', not on '{dataset}'")
    if noise_sd is not None and noise_sd != sigma:
        warn(f"{name} was trained with noise {noise_sd}; it is being smoothed with {sigma}")


@dataclass(frozen=True)
class NamedNetwork:
    """The network called ``name``, in records ``arch``, with its own weights if ``pretrained``,
    else random ones.
    """

    name: str
    arch: str
    found: LibraryNetwork
    pretrained: bool

    def base(self, description: DatasetDescription) -> BaseClassifier:
        """The base classifier, for the images described; UserError where it does not fit them."""
        base, found = from_module(self.found.normalized, description), self.found
        given = {"arch": self.arch, "pretrained": self.pretrained, "library": found.version}
        if found.mean and found.std:
            given |= {"mean": list(found.mean), "std": list(found.std), "input_layer": "normalize"}
        return replace(base, settings={**base.settings, **given}, name=self.name)

    def refuse_gradients_of(self, attack: Any) -> None:
        """UserError where an attack needs gradients that the network cannot have."""
        is_stein = attack is None or isinstance(attack.estimator, Stein)
        if not is_stein and isinstance(self.found.module, OnnxNetwork):
            self.found.module.refuse_gradients()

    def prepared_dataset(self, dataset: str) -> str:
        """The name of a dataset of photographs with the preparation that the network's library
        gives them; another name stays.
        """
        kind, _, location = dataset.partition(":")
        is_open = kind in _PHOTOGRAPHS and split_location(location)[1] is None
        if self.found.preparation is None or not is_open:
            return dataset
        return prepared_name(dataset, self.found.preparation)

    def relabelled(self, dataset: ImageDataset) -> ImageDataset:
        """The images under the classes of the network; UserError where a class of theirs is none of
        the network.
        """
        shape, folders = dataset.description.image_shape, dataset.description.class_names
        if self.found.mean and len(self.found.mean) != shape[0]:
            fit = f"{self.name} takes images of {len(self.found.mean)} channels"
            raise UserError(f"{fit}, '{dataset.description.name}' has {shape[0]}")
        usual = self.found.usual_names or default_class_names(
            self.found.normalized, torch.full(shape, 0.5)
        )
        if usual == folders:
            return dataset
        labels = matched_classes(folders, self.found.class_names, len(usual), self.name)
        if labels == list(range(len(usual))):
            return dataset
        return RelabelledImages(dataset, usual, labels)


Source = Members | NamedNetwork | torch.nn.Module
"""A model before the images are known."""


def open_model(spec: EvaluationSpec) -> Source:
    """The model of a spec; random weights are drawn from its seed.

    UserError where it cannot be had, or the spec says what is for another kind of model.
    """
    if is_named(spec.model):
        return _named_network(spec)
    if not spec.pretrained:
        raise UsageError(
            "--no-pretrained is for networks by name, like timm:resnet18: leave it out"
        )
    return spec.model if isinstance(spec.model, torch.nn.Module) else read_members(spec.model)


def is_named(model: str | Path | torch.nn.Module) -> bool:
    """Whether a model is a network by name, and no file."""
    return isinstance(model, Path) and names_network(str(model)) and not os.path.exists(model)


def _named_network(spec: EvaluationSpec) -> NamedNetwork:
    name = str(spec.model)
    if spec.input_layer is not None:
        raise UsageError(
            f"{name} has the normalization that its library says: leave --input-layer out"
        )
    if "+" in name and all(map(names_network, name.split("+"))):
        raise UserError(f"{name}: an ensemble is of checkpoints, not of networks by name")
    arch = chosen_architecture(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_generator("cpu", spec.seed).initial_seed())
        if arch not in plugins.FUNCTIONS:
            found = library_network(name, spec.pretrained)
        else:
            description = spec.description()
            names = tuple((name,) for name in description.class_names)
            found = LibraryNetwork(user_network(arch, description), "plug-in", names)
    return NamedNetwork(name, arch, found, spec.pretrained)


def fit_to_model(spec: EvaluationSpec, source: Source) -> EvaluationSpec:
    """The spec with the photographs prepared as the model's library does."""
    if not isinstance(source, NamedNetwork) or spec.dataset_name is None:
        return spec
    return replace(spec, dataset=source.prepared_dataset(spec.dataset))


def warn_about_network(source: Source, asked: EvaluationSpec, spec: EvaluationSpec) -> None:
    """Warn of random weights, and of photographs that are not prepared as ``asked``."""
    if not isinstance(source, NamedNetwork):
        return
    if not source.pretrained:
        warn(
            f"{source.name} has random weights, drawn from --seed: good for nothing but to try "
            "things out"
        )
    if spec is not asked and spec.dataset != asked.dataset:
        warn(
            f"images are resized and cropped as {source.name} expects: radii are about "
            f"{spec.dataset}"
        )


def load_images(spec: EvaluationSpec, source: Source) -> ImageDataset:
    """The images of a spec under the classes of its model; UserError where they do not fit it."""
    if isinstance(source, NamedNetwork):
        source.refuse_gradients_of(getattr(spec, "attack", None))
    dataset = spec.dataset
    if isinstance(dataset, str):
        dataset = get_dataset(dataset, spec.split, spec.data_dir)
    return source.relabelled(dataset) if isinstance(source, NamedNetwork) else dataset


def load_model(
    spec: EvaluationSpec, source: Source, description: DatasetDescription
) -> BaseClassifier:
    """The base classifier, behind the denoiser of the spec; UserError where it does not fit the
    images described.
    """
    if isinstance(source, NamedNetwork):
        base = source.base(description)
    elif isinstance(source, torch.nn.Module):
        base = from_module(source, description)
    else:
        base = _from_members(source, description, spec.input_layer)
    if spec.denoiser is None:
        return base
    module, facts, content = denoised_classifier(
        base.module, str(spec.denoiser), description, spec.sigma
    )
    settings = {**base.settings, DENOISER: facts}
    return replace(base, module=module, settings=settings, denoiser=content)


def _from_members(
    members: Members, description: DatasetDescription, input_layer: str | None
) -> BaseClassifier:
    """The classifier in checkpoints; the settings of an ensemble list the members' settings.

    How their outputs are averaged is in what keys the noise, and in what tells one model from
    another.
    """
    module = classifier_from_members(members, description, input_layer)
    layers = members.input_layers(input_layer)
    facts = [
        {
            "checkpoint_sha256": file_digest(path),
            "arch": content["arch"],
            "input_layer": recorded_input_layer(content, path, layer),
            "training": content.get("recipe"),
        }
        for path, content, layer in zip(members.paths, members.contents, layers)
    ]
    settings = facts[0]
    if members.mean:
        settings = {name: [fact[name] for fact in facts] for name in facts[0]}
        settings["arch"] = f"{'+'.join(settings['arch'])} (mean of {members.mean})"
        settings["checkpoint_sha256"] = {members.mean: settings["checkpoint_sha256"]}
    return BaseClassifier(module, settings, str(members.name), members)


def from_module(module: torch.nn.Module, description: DatasetDescription) -> BaseClassifier:
    """The classifier that a copy of a module is."""
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    settings = {
        "module_sha256": digest_of([repr(module), module.state_dict()]),
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


def default_class_names(network: torch.nn.Module, image: torch.Tensor) -> tuple[str, ...]:
    """The numbers of a network's classes, for an image [C, H, W], in place of their names."""
    return tuple(map(str, range(count_classes(network, image))))


def class_names_of(
    model: str | Path | torch.nn.Module, image: torch.Tensor, num_classes: int | None
) -> tuple[str, ...]:
    """The names of a model's classes, or their numbers, for an image [C, H, W]; UserError where
    nothing tells how many there are.
    """
    if isinstance(model, Path) and is_named(model):
        if not plugins.names_function(str(model)):
            found = library_network(str(model), pretrained=False)
            return found.usual_names or default_class_names(found.module, image)
    elif isinstance(model, Path):
        for content in read_members(model).contents:
            if content.get("classes"):
                return tuple(map(str, content["classes"]))
    if num_classes is not None:
        return tuple(map(str, range(num_classes)))
    if isinstance(model, torch.nn.Module):
        return default_class_names(model, image)
    raise UserError(f"nothing tells how many classes {model} has: give num_classes")


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
