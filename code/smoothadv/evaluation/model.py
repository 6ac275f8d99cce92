"""The model of an evaluation, and the images as that model takes them.

A model is a checkpoint, an ensemble, a network by name or a module, perhaps behind a denoiser.
"""

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from smoothadv.architectures import chosen_architecture, names_network, user_network
from smoothadv.architectures.denoisers import DENOISERS, Denoised
from smoothadv.architectures.diffusion import PREFIX, load_diffusion
from smoothadv.architectures.exact import is_exact
from smoothadv.architectures.libraries import LibraryNetwork, library_network
from smoothadv.architectures.logits import logits_of, probe
from smoothadv.attacks.estimators import frozen
from smoothadv.base import plugins
from smoothadv.base.errors import UsageError, UserError, first_line
from smoothadv.base.members import Members
from smoothadv.checkpoints import (
    check_recorded_images,
    classifier_from_members,
    digest_of,
    load_weights,
    network_keys,
    read_checkpoint,
    read_members,
    recorded_input_layer,
)
from smoothadv.checkpoints.hub import checkpoint_digest, pinned
from smoothadv.datasets import (
    IMAGENET_TRAINING,
    DatasetDescription,
    ImageDataset,
    describe_dataset,
    get_dataset,
)
from smoothadv.datasets.loose import image_files, read_images
from smoothadv.datasets.preparation import Preparation, split_location
from smoothadv.datasets.relabelled import RelabelledImages, matched_classes
from smoothadv.evaluation.specs import EvaluationSpec
from smoothadv.noise import derive_generator
from smoothadv.records.logs import DENOISER

_PHOTOGRAPHS = ("imagefolder", "hf-dataset")


@dataclass(frozen=True)
class BaseClassifier:
    """A base classifier: maps images [B, C, H, W] in [0, 1] to logits [B, K]; in eval mode, on the
    CPU.

    ``settings`` identify it in a log's manifest. ``architectures`` are those of its checkpoints, or
    the module's class, and the denoiser's. ``name`` is the checkpoint's path, or its commit on the
    hub, or how an ensemble or a network is named; None of a module. ``doubts`` are warnings for the
    user.
    """

    module: torch.nn.Module
    settings: dict[str, Any]
    architectures: list[str]
    name: str | None = None
    doubts: tuple[str, ...] = ()


def is_named(model: str | Path | torch.nn.Module) -> bool:
    """Whether a model is a network by name, and no file."""
    return isinstance(model, Path) and names_network(str(model)) and not os.path.exists(model)


def load_model(spec: EvaluationSpec) -> tuple[EvaluationSpec, ImageDataset, BaseClassifier]:
    """The images of a spec, under the classes of its model, and the base classifier, behind the
    denoiser; the spec has photographs prepared as the model's library does.

    UserError where one cannot be had, or where they do not fit together.
    """
    model, members, doubts = spec.model, None, list[str]()
    if is_named(model):
        arch, network = _named_network(spec)
        if not spec.pretrained:
            doubts.append(
                f"{model} has random weights, drawn from --seed: use it only to try things out"
            )
        kind, _, location = (spec.dataset_name or "").partition(":")
        is_open = kind in _PHOTOGRAPHS and split_location(location)[1] is None
        if is_open and network.preparation is not None:
            spec = replace(spec, dataset=f"{spec.dataset}@{network.preparation}")
            doubts.append(
                f"images are resized and cropped as {model} expects: radii are about {spec.dataset}"
            )
    elif not spec.pretrained:
        raise UsageError(
            "--no-pretrained is for networks by name, like timm:resnet18: leave it out"
        )
    elif not isinstance(model, torch.nn.Module):
        # First, since reading or downloading images takes longer.
        members = read_members(model, spec.arch, spec.weights)
        if isinstance(spec.dataset, str):
            described = describe_dataset(spec.dataset, spec.data_dir)
            for path, content in zip(members.paths, members.contents):
                check_recorded_images(content, path, described)
    dataset = spec.dataset
    if isinstance(dataset, str):
        dataset = get_dataset(dataset, spec.split, spec.data_dir)
    if members is not None:
        base = _from_members(members, dataset.description, spec)
    elif isinstance(model, torch.nn.Module):
        base = _from_module(model, dataset.description)
    else:
        dataset = _relabelled(dataset, network, str(model))
        base = _from_module(network.normalized, dataset.description)
        given = {"arch": arch, "pretrained": spec.pretrained, "library": network.version}
        if network.mean and network.std:
            given |= {"mean": [*network.mean], "std": [*network.std], "input_layer": "normalize"}
        settings = {**base.settings, **given}
        base = BaseClassifier(base.module, settings, [arch], str(model), tuple(doubts))
    return spec, dataset, base if spec.denoiser is None else _denoised(base, dataset, spec)


def loose_images(
    spec: EvaluationSpec, paths: Sequence[Path]
) -> tuple[list[Path], ImageDataset, str]:
    """The files in files and folders, and their images for the model of a spec, whose dataset says
    what the model was trained on; also what was changed of them, in words.
    """
    files, description = image_files(paths), describe_dataset(spec.dataset, spec.data_dir)
    _, preparation = split_location(spec.dataset.partition(":")[2])
    if preparation is None and description.defaults is IMAGENET_TRAINING:
        preparation = Preparation(description.image_shape[1])
    if is_named(spec.model) and not plugins.names_function(str(spec.model)):
        network = library_network(str(spec.model), pretrained=False)
        preparation = preparation or network.preparation
        if network.usual_names:
            description = replace(description, class_names=network.usual_names)
    return files, *read_images(files, description, preparation)


def _named_network(spec: EvaluationSpec) -> tuple[str, LibraryNetwork]:
    """The network that a spec names, and the name in records; random weights are drawn from its
    seed.
    """
    name = str(spec.model)
    if spec.input_layer is not None:
        raise UsageError(
            f"{name} has the normalization that its library says: leave --input-layer out"
        )
    for given in ("arch", "weights"):
        if getattr(spec, given) is not None:
            raise UsageError(f"--{given} is for checkpoints: leave it out for {name}")
    if "+" in name and all(map(names_network, name.split("+"))):
        raise UserError(f"{name}: an ensemble is of checkpoints, not of networks by name")
    arch = chosen_architecture(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_generator("cpu", spec.seed).initial_seed())
        if arch not in plugins.FUNCTIONS:
            return arch, library_network(name, spec.pretrained)
        images = spec.dataset
        is_name = isinstance(images, str)
        description = describe_dataset(images, spec.data_dir) if is_name else images.description
        names = tuple((name,) for name in description.class_names)
        return arch, LibraryNetwork(user_network(arch, description), "plug-in", names)


def _relabelled(dataset: ImageDataset, network: LibraryNetwork, name: str) -> ImageDataset:
    """The images under the classes of a network; UserError where a class of theirs is none of the
    network.
    """
    shape, folders = dataset.description.image_shape, dataset.description.class_names
    if network.mean and len(network.mean) != shape[0]:
        fit = f"{name} takes images of {len(network.mean)} channels"
        raise UserError(f"{fit}, '{dataset.description.name}' has {shape[0]}")
    usual = network.usual_names
    if not usual:
        usual = tuple(map(str, range(probe(network.normalized, torch.full(shape, 0.5))[1])))
    if usual == folders:
        return dataset
    labels = matched_classes(folders, network.class_names, len(usual), name)
    if labels == list(range(len(usual))):
        return dataset
    return RelabelledImages(dataset, usual, labels)


def _from_members(
    members: Members, description: DatasetDescription, spec: EvaluationSpec
) -> BaseClassifier:
    """The classifier in checkpoints; the settings of an ensemble list the members' settings.

    How their outputs are averaged is in what keys the noise, and in what tells one model from
    another.
    """
    module = classifier_from_members(members, description, spec.input_layer)
    layers, doubts = members.input_layers(spec.input_layer), list[str]()
    facts = []
    for path, content, layer in zip(members.paths, members.contents, layers):
        facts.append(
            {
                "checkpoint_sha256": checkpoint_digest(path),
                "arch": content["arch"],
                "input_layer": recorded_input_layer(content, path, layer),
                "training": content.get("recipe"),
            }
        )
        # A denoiser before the classifier removes the noise.
        noise_sd = content.get("noise_sd") if spec.denoiser is None else None
        doubts += _doubts(str(path), content.get("dataset"), noise_sd, spec)
    settings, architectures = facts[0], [fact["arch"] for fact in facts]
    if members.mean:
        settings = {name: [fact[name] for fact in facts] for name in facts[0]}
        settings["arch"] = f"{'+'.join(architectures)} (mean of {members.mean})"
        settings["checkpoint_sha256"] = {members.mean: settings["checkpoint_sha256"]}
    return BaseClassifier(module, settings, architectures, pinned(members.name), tuple(doubts))


def _from_module(module: torch.nn.Module, description: DatasetDescription) -> BaseClassifier:
    """The classifier that a copy of a module is."""
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise UserError(
            f"{type(module).__name__} is TorchScript, which cannot be copied whole: give the "
            "module itself"
        )
    try:
        with frozen(module):
            copied = copy.deepcopy(module).cpu()
    except (RuntimeError, TypeError) as error:  # of locks, files and computed tensors
        raise UserError(
            f"{type(module).__name__} cannot be copied: {first_line(error)}; make it in a "
            "FILE.py:FUNCTION, or let it hold weights and layers alone"
        ) from error
    arch = f"{type(module).__module__}.{type(module).__qualname__}"
    settings = {
        "module_sha256": digest_of([repr(module), module.state_dict()]),
        "arch": arch,
        "input_layer": None,
        "training": None,
    }
    classifier = logits_of(copied, description)
    return BaseClassifier(classifier, settings, [arch])


def _denoised(base: BaseClassifier, dataset: ImageDataset, spec: EvaluationSpec) -> BaseClassifier:
    """The classifier behind the denoiser of a spec."""
    module, facts, content = denoised_classifier(
        base.module, str(spec.denoiser), dataset.description, spec.sigma
    )
    doubts = _doubts("the denoiser", content.get("dataset"), content.get("noise_sd"), spec)
    return replace(
        base,
        module=module,
        settings={**base.settings, DENOISER: facts},
        architectures=[*base.architectures, facts["arch"]],
        doubts=(*base.doubts, *doubts),
    )


def load_denoiser(
    path: str | Path, description: DatasetDescription
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The denoiser in a checkpoint, in eval mode, and what ``read_checkpoint`` returns.

    UserError where it does not fit the images.
    """
    content = read_checkpoint(path, denoiser=True)
    check_recorded_images({**content, "classes": None}, path, description)
    network = DENOISERS[content["arch"]](description)
    load_weights(network, network_keys(content["state_dict"]), path, content["arch"], description)
    return network.eval(), content


def denoised_classifier(
    classifier: torch.nn.Module, denoiser: str, description: DatasetDescription, sigma: float
) -> tuple[torch.nn.Module, dict[str, Any], dict[str, Any]]:
    """The classifier behind a denoiser, a checkpoint or diffusers:PATH, for noise of sigma.

    Also what a log records of the denoiser, and what its checkpoint does. UserError where it does
    not fit the images.
    """
    if is_exact(classifier):
        raise UserError(
            "a network of integers reads noisy images in whole grey levels: leave --denoiser out"
        )
    content: dict[str, Any] = {"noise_sd": sigma}
    if denoiser.startswith(PREFIX):
        network, facts = load_diffusion(denoiser, description.image_shape, sigma)
    else:
        network, content = load_denoiser(denoiser, description)
        facts = {"sha256": checkpoint_digest(denoiser), "arch": content["arch"]}
    image = torch.full((1, *description.image_shape), 0.5)
    try:
        with torch.inference_mode():
            found = list(network(image).shape)
    except (RuntimeError, ValueError, TypeError) as error:
        raise UserError(
            f"--denoiser {denoiser} does not run on images of shape {list(image.shape[1:])}: "
            f"{first_line(error)}"
        ) from error
    if found != list(image.shape):
        raise UserError(
            f"--denoiser {denoiser} makes {found[1:]} of an image of shape {list(image.shape[1:])}"
        )
    return Denoised(network, classifier).eval(), facts, content


def _doubts(
    name: str, dataset: str | None, noise_sd: float | None, spec: EvaluationSpec
) -> list[str]:
    """What to warn of, where a network was trained on another dataset, or with other noise, than
    those of a spec.
    """
    doubts = []
    if None not in (dataset, spec.dataset_name) and dataset != spec.dataset_name:
        doubts.append(f"{name} was trained on '{dataset}', not on '{spec.dataset_name}'")
    if noise_sd is not None and noise_sd != spec.sigma:
        doubts.append(
            f"{name} was trained with noise {noise_sd}; it is being smoothed with {spec.sigma}"
        )
    return doubts


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
