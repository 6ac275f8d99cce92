"""Networks by name in place of a checkpoint, like ``timm:resnet18``: with the weights that they
come with.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from smoothadv.architectures import chosen_architecture, names_network, user_network
from smoothadv.architectures.libraries import LibraryNetwork, library_network
from smoothadv.architectures.libraries.onnx import OnnxNetwork
from smoothadv.attacks.estimators import Stein
from smoothadv.base import plugins
from smoothadv.base.errors import UsageError, UserError
from smoothadv.datasets import DatasetDescription, ImageDataset, describe_dataset
from smoothadv.datasets.preparation import prepared_name, split_location
from smoothadv.datasets.relabelled import RelabelledImages, matched_classes
from smoothadv.evaluation.classifiers import BaseClassifier, count_classes, from_module
from smoothadv.evaluation.specs import EvaluationRequest
from smoothadv.noise import derive_generator

_OF_PHOTOGRAPHS = ("imagefolder", "hf-dataset")


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
        constants = (
            {"mean": list(found.mean), "std": list(found.std)} if found.mean and found.std else {}
        )
        given = {**constants, "arch": self.arch, "pretrained": self.pretrained}
        given |= {"library": found.version, "input_layer": "normalize" if constants else None}
        return replace(base, settings={**base.settings, **given}, named=self.name)

    def prepared(self, request: EvaluationRequest) -> tuple[EvaluationRequest, list[str]]:
        """The request for images as the network's library makes them of photographs, and what to
        warn of.

        Images whose name says how they are made, and those of no folder, stay as they are.
        UserError where the request is for gradients and the network has none.
        """
        plan, preparation, notes = getattr(request, "attack", None), self.found.preparation, []
        if (
            plan is not None
            and not isinstance(plan.attack.estimator, Stein)
            and isinstance(self.found.module, OnnxNetwork)
        ):
            self.found.module.refuse_gradients()
        if not self.pretrained:
            notes.append(
                f"{self.name} has random weights, drawn from --seed: good for nothing but to try "
                "things out"
            )
        kind, _, location = (
            request.images.partition(":") if isinstance(request.images, str) else ("", "", "")
        )
        if (
            preparation is not None
            and kind in _OF_PHOTOGRAPHS
            and split_location(location)[1] is None
        ):
            request = replace(request, images=prepared_name(f"{kind}:{location}", preparation))
            notes.append(
                f"images are resized and cropped as {self.name} expects: radii are about "
                f"{request.images}"
            )
        return request, notes

    def relabelled(self, dataset: ImageDataset) -> ImageDataset:
        """The images under the classes of the network; UserError where a class of theirs is none of
        the network.
        """
        shape, folders = dataset.description.image_shape, dataset.description.class_names
        if self.found.mean and len(self.found.mean) != shape[0]:
            fit = f"{self.name} takes images of {len(self.found.mean)} channels"
            raise UserError(f"{fit}, '{dataset.description.name}' has {shape[0]}")
        usual = self.found.usual_names or number_names(
            self.found.normalized, torch.full(shape, 0.5)
        )
        if usual == folders:
            return dataset
        labels = matched_classes(folders, self.found.class_names, len(usual), self.name)
        return (
            dataset
            if labels == list(range(len(usual)))
            else RelabelledImages(dataset, usual, labels)
        )


def number_names(network: torch.nn.Module, image: torch.Tensor) -> tuple[str, ...]:
    """The numbers of a network's classes, for an image [C, H, W], in place of their names."""
    return tuple(map(str, range(count_classes(network, image))))


def is_named(classifier: Path | torch.nn.Module) -> bool:
    """Whether the classifier of a request is a network by name, and no file."""
    return (
        isinstance(classifier, Path)
        and names_network(str(classifier))
        and not os.path.exists(classifier)
    )


def named_network(request: EvaluationRequest) -> NamedNetwork | None:
    """The network that a request names, random weights drawn from its seed; None where it names
    none.

    UserError where the network or its weights cannot be had, or the request says what is for
    checkpoints only.
    """
    name = str(request.classifier)
    if not is_named(request.classifier):
        if not request.pretrained:
            raise UsageError(
                "--no-pretrained is for networks by name, like timm:resnet18: leave it out"
            )
        return None
    if request.input_layer is not None:
        raise UsageError(
            f"{name} has the normalization that its library says: leave --input-layer out"
        )
    if "+" in name and all(map(names_network, name.split("+"))):
        raise UserError(f"{name}: an ensemble is of checkpoints, not of networks by name")
    arch = chosen_architecture(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_generator("cpu", request.seed).initial_seed())
        if arch not in plugins.FUNCTIONS:
            return NamedNetwork(
                name, arch, library_network(name, request.pretrained), request.pretrained
            )
        images = request.images
        description = (
            describe_dataset(images, request.data_dir)
            if isinstance(images, str)
            else images.description
        )
        names = tuple((name,) for name in description.class_names)
        found = LibraryNetwork(user_network(arch, description), "plug-in", names)
        return NamedNetwork(name, arch, found, request.pretrained)


def class_names_of(name: str, image: torch.Tensor) -> tuple[str, ...]:
    """The names of the classes of a library's network, or their numbers, for an image [C, H, W]; ()
    of a function.
    """
    found = None if plugins.names_function(name) else library_network(name, pretrained=False)
    return () if found is None else found.usual_names or number_names(found.module, image)
