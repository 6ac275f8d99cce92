"""Loads a model of any kind as a base classifier, perhaps behind a denoiser; and single images as
it takes them.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from smoothadv.architectures import get_architecture
from smoothadv.architectures.denoisers import DENOISERS, Denoised, LocallySmoothed, resized
from smoothadv.architectures.ensemble import Ensemble
from smoothadv.architectures.input_layers import build_input_layer
from smoothadv.architectures.integers import NetworkOfIntegers, is_of_integers, of_integers
from smoothadv.architectures.libraries import LibraryNetwork, library_network
from smoothadv.architectures.logits import frozen, logits_of, probe
from smoothadv.base.errors import UserError, first_line
from smoothadv.base.registry import diffusion_model
from smoothadv.datasets import (
    IMAGENET_TRAINING,
    DatasetDescription,
    ImageDataset,
    describe_dataset,
)
from smoothadv.datasets.given import files_in, read_images
from smoothadv.datasets.preparation import Preparation, split_location
from smoothadv.datasets.relabelled import matched_classes
from smoothadv.models.checkpoint import (
    INTEGER,
    MODULE_PREFIX,
    USED,
    check_recorded_images,
    digest_of,
    load_weights,
    read_checkpoint,
    read_members,
    recorded_input_layer,
    with_recorded_constants,
)
from smoothadv.models.contents import checkpoint_digest, pinned
from smoothadv.models.name import CHECKPOINT, LIBRARY, MODULE, ModelName, parse_model
from smoothadv.models.spec import DenoisedSpec, ModelSpec, Spec
from smoothadv.noise import derive_generator
from smoothadv.records.logs import DENOISER

RESIZE = "resize"
_PHOTOGRAPHS = ("imagefolder", "hf-dataset")


@dataclass(frozen=True)
class BaseClassifier:
    """A base classifier: maps images [B, C, H, W] in [0, 1] to logits [B, K]; in eval mode, on the
    CPU.

    ``settings`` identify it in a log's manifest. ``architectures`` are those of its checkpoints, or
    the module's class, and the denoiser's. ``name`` is the checkpoint's path, or its commit on the
    hub, or how an ensemble or a network is named; None of a module. ``doubts`` are warnings for the
    user. ``classes`` are None where they are those of the images; else their names, and which of
    them each class of the images is. ``contents`` is what its checkpoints
    say, without weights.
    """

    module: nn.Module
    settings: dict[str, Any]
    architectures: list[str]
    name: str | None = None
    doubts: tuple[str, ...] = ()
    classes: tuple[tuple[str, ...], list[int]] | None = None
    contents: tuple[dict[str, Any], ...] = ()


def load(spec: Spec) -> tuple[Spec, BaseClassifier]:
    """The base classifier of a spec, behind its denoiser; and the spec, which has photographs
    prepared as the library of a network by name does.

    It reads no images, since that may take long. UserError where the model cannot be had, or does
    not fit their description.
    """
    seen = spec
    if spec.resize is not None:
        seen = replace(spec, dataset=spec.seen(spec.description), resize=None)
    if spec.model.kind == LIBRARY:
        seen, base = _by_name(seen)
    elif spec.model.kind == MODULE:
        base = _from_module(spec.model.source, seen.description)
    else:
        base = _from_checkpoints(seen, spec.dataset_name)
    before = {
        "--denoiser": spec.denoiser,
        "--resize": spec.resize,
        "--local-noise": spec.local_noise,
    }
    if (given := [flag for flag in before if before[flag]]) and is_of_integers(base.module):
        raise UserError(
            "a network of integers reads noisy images in whole grey levels: leave "
            f"{' and '.join(given)} out"
        )
    if spec.local_noise is not None:
        base = _locally_smoothed(base, seen)
    if spec.resize is None:
        spec = seen
    else:
        settings = {**base.settings, RESIZE: spec.resize}
        base = replace(base, module=resized(base.module, spec.resize).eval(), settings=settings)
    others = [content["recipe"].get(RESIZE) for content in base.contents if "recipe" in content]
    if given := sorted({other for other in others if other not in (None, spec.resize)}):
        doubt = f"the model was trained with --resize {given[0]}, not {spec.resize}"
        base = replace(base, doubts=(*base.doubts, doubt))
    return spec, base if spec.denoiser is None else denoised(base, spec)


def _locally_smoothed(base: BaseClassifier, spec: ModelSpec) -> BaseClassifier:
    """The mean of a classifier's probabilities over noises that no seed of a log changes."""
    noise_sd, _, count = str(spec.local_noise).partition(":")
    generator = torch.Generator().manual_seed(42)  # as the released code
    shape = int(count), *spec.description.image_shape
    noise = float(noise_sd) * torch.randn(shape, generator=generator)
    settings = {**base.settings, "local_noise": spec.local_noise}
    return replace(base, module=LocallySmoothed(base.module, noise).eval(), settings=settings)


def load_classifier(
    path: str | Path,
    dataset: str | DatasetDescription,
    input_layer: str | None = None,
    arch: str | None = None,
    weights: str | None = None,
) -> nn.Module:
    """The base classifier in a checkpoint: in eval mode, [0, 1] images [B, C, H, W] in, logits [B,
    K] out.

    ``path`` may also name an ensemble, like A.pth.tar+B.pth.tar or a TOML file. ``dataset`` is the
    name or description of the dataset to be classified. ``input_layer`` ("normalize", "center" or
    "none") and ``arch``, the name of an architecture, must be given where the checkpoint does not
    record them and may be left out otherwise. ``weights`` is that of ``read_checkpoint``. UserError
    where the file, the dataset and these do not fit together.
    """
    images = describe_dataset(dataset) if isinstance(dataset, str) else dataset
    return load_checkpoint(path, images, input_layer=input_layer, arch=arch, weights=weights).module


def load_checkpoint(path: str | Path, images: Any, **asked: Any) -> BaseClassifier:
    """The classifier in a checkpoint or an ensemble, for images or what describes them; ``asked``
    are further fields of a ``ModelSpec``. UserError for a network by name, too.
    """
    return load(ModelSpec(dataset=images, model=ModelName(Path(path), CHECKPOINT), **asked))[1]


def _by_name(spec: Spec) -> tuple[Spec, BaseClassifier]:
    """The network that a spec names, and the spec with images as its library prepares them; random
    weights are drawn from the seed.
    """
    name, doubts = str(spec.model), list[str]()
    if "+" in name and all(parse_model(piece).kind == LIBRARY for piece in name.split("+")):
        raise UserError(f"{name}: an ensemble is of checkpoints, not of networks by name")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_generator("cpu", spec.seed).initial_seed())
        network = library_network(name, spec.pretrained)
    if not spec.pretrained:
        doubts.append(
            f"{name} has random weights, drawn from --seed: use it only to try things out"
        )
    kind, _, location = (spec.dataset_name or "").partition(":")
    is_open = kind in _PHOTOGRAPHS and split_location(location)[1] is None
    if is_open and network.preparation is not None:
        spec = replace(spec, dataset=f"{spec.dataset}@{network.preparation}")
        doubts.append(
            f"images are resized and cropped as {name} expects: radii are about {spec.dataset}"
        )
    has, takes = spec.description.image_shape[0], len(network.mean or ())
    if takes not in (0, has):
        raise UserError(
            f"{name} takes images of {takes} channels, '{spec.description.name}' has {has}"
        )
    if spec.input_layer is not None:
        layer = build_input_layer(spec.input_layer, spec.description)
        module = nn.Sequential(layer, network.module)
        network = replace(network, module=module, mean=None, std=None)
    names, labels = _classes(network, spec.description, name)
    base = _from_module(network.normalized, replace(spec.description, class_names=names))
    settings = {**base.settings, "arch": name}
    settings |= {"pretrained": spec.pretrained, "library": network.version}
    settings["input_layer"] = spec.input_layer
    if network.mean and network.std:
        settings |= {"mean": [*network.mean], "std": [*network.std], "input_layer": "normalize"}
    classes = None if labels == [*range(len(names))] else (names, labels)
    return spec, BaseClassifier(base.module, settings, [name], name, tuple(doubts), classes)


def _classes(
    network: LibraryNetwork, images: DatasetDescription, name: str
) -> tuple[tuple[str, ...], list[int]]:
    """The names of a network's classes, and which of them each class of the images is; UserError
    where one is none of them.
    """
    usual = network.usual_names
    if not usual:
        image = torch.full(images.image_shape, 0.5)
        usual = tuple(map(str, range(probe(network.normalized, image, name)[1])))
    if usual == images.class_names:
        return usual, [*range(len(usual))]
    return usual, matched_classes(images.class_names, network.class_names, len(usual), name)


def _from_checkpoints(spec: ModelSpec, dataset: str | None) -> BaseClassifier:
    """The classifier in checkpoints; the settings of an ensemble list the members' settings.

    How their outputs are averaged is in what keys the noise, and in what tells one model from
    another.
    """
    members = read_members(spec.model.source, spec.arch, spec.weights)
    images, layers = spec.description, members.input_layers(spec.input_layer)
    loaded, facts, doubts = list[nn.Module](), list[dict[str, Any]](), list[str]()
    for path, content, asked in zip(members.paths, members.contents, layers):
        arch = content["arch"]
        if arch.startswith(MODULE_PREFIX):
            raise UserError(
                f"checkpoint {path} holds the weights of a {arch.removeprefix(MODULE_PREFIX)}, "
                "which is no architecture: load its state_dict into that module and pass the module"
            )
        check_recorded_images(content, path, images)
        layer = recorded_input_layer(content, path, asked)
        if INTEGER in content:
            shape, classes = images.image_shape, images.num_classes
            loaded.append(integer_network(content, path, shape, classes))
        else:
            fitting = with_recorded_constants(content, path, images)
            network = get_architecture(arch, fitting, layer)
            load_weights(network, content["state_dict"], path, arch, images)
            loaded.append(network.eval())
        facts.append(
            {
                "checkpoint_sha256": checkpoint_digest(path),
                "arch": arch,
                "input_layer": layer,
                "training": content.get("recipe"),
            }
        )
        is_behind, is_denoised = "behind" in content, spec.denoiser is not None
        if is_behind and not is_denoised:
            doubts.append(f"{path} was trained behind a denoiser, and none (--denoiser) is here")
        # The noise of training is compared with sigma only where both had a denoiser, or neither.
        sigma = spec.sigma if is_behind == is_denoised else content.get("noise_sd")
        doubts += _doubts(str(path), content, dataset, sigma)
    module, settings, architectures = loaded[0], facts[0], [fact["arch"] for fact in facts]
    if members.mean:
        module = Ensemble(loaded, members.mean).eval()
        settings = {name: [fact[name] for fact in facts] for name in facts[0]}
        settings["arch"] = f"{'+'.join(architectures)} (mean of {members.mean})"
        settings["checkpoint_sha256"] = {members.mean: settings["checkpoint_sha256"]}
    # Weights and the state of an optimizer need not stay in memory.
    told = tuple({name: one[name] for name in one.keys() & USED} for one in members.contents)
    name = pinned(members.name)
    return BaseClassifier(module, settings, architectures, name, tuple(doubts), contents=told)


def integer_network(
    content: dict[str, Any], path: Path, image_shape: Sequence[int], num_classes: int
) -> NetworkOfIntegers:
    """The network in a checkpoint of integers, for images of this shape; UserError where it is
    damaged.
    """
    read = of_integers("read", path)
    try:
        return read(content[INTEGER], content["state_dict"], image_shape, num_classes).eval()
    except ValueError as error:
        raise UserError(f"checkpoint {path}: {error}") from error


def _from_module(module: nn.Module, description: DatasetDescription) -> BaseClassifier:
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
            f"{type(module).__name__} cannot be copied: {first_line(error)}; make it in "
            "a plug-in (docs/networks.md), or let it hold weights and layers alone"
        ) from error
    arch = f"{type(module).__module__}.{type(module).__qualname__}"
    settings = {
        "module_sha256": digest_of([repr(module), module.state_dict()]),
        "arch": arch,
        "input_layer": None,
        "training": None,
    }
    return BaseClassifier(logits_of(copied, description), settings, [arch])


def load_denoiser(
    path: str | Path, description: DatasetDescription
) -> tuple[nn.Module, dict[str, Any]]:
    """The denoiser in a checkpoint, in eval mode, and what ``read_checkpoint`` returns.

    UserError where it does not fit the images.
    """
    content = read_checkpoint(path, denoiser=True)
    check_recorded_images({**content, "classes": None}, path, description)
    network = DENOISERS[content["arch"]](description)
    load_weights(network, content["state_dict"], path, content["arch"], description)
    return network.eval(), content


def denoised(base: BaseClassifier, spec: ModelSpec) -> BaseClassifier:
    """The classifier behind the denoiser of a spec."""
    denoiser, facts, doubts = denoiser_before(spec, spec.description, spec.sigma)
    for behind in [content["behind"] for content in base.contents if "behind" in content]:
        if any(behind.get(name) != facts.get(name) for name in ("sha256", "timestep")):
            doubts.append("the model was trained behind another denoiser, or another step of it")
    return replace(
        base,
        module=Denoised(denoiser, base.module).eval(),
        settings={**base.settings, DENOISER: facts},
        architectures=[*base.architectures, facts["arch"]],
        doubts=(*base.doubts, *doubts),
    )


def denoiser_before(
    spec: DenoisedSpec, images: DatasetDescription, sigma: float
) -> tuple[nn.Module, dict[str, Any], list[str]]:
    """The denoiser of a spec for images with noise of sigma, a checkpoint or a diffusion model, in
    eval mode; what a log records of it; and warnings. UserError where it does not fit the images.
    """
    name, content = str(spec.denoiser), dict[str, Any]()
    if (diffusion := diffusion_model(name)) is not None:
        network, facts = diffusion(name, images.image_shape, sigma, spec.timestep)
    else:
        network, content = load_denoiser(name, images)
        facts = {"sha256": checkpoint_digest(name), "arch": content["arch"]}
    image = torch.full((1, *images.image_shape), 0.5)
    try:
        with torch.inference_mode():
            made = network(image)
            found = list(made.shape)
    except (RuntimeError, ValueError, TypeError) as error:
        raise UserError(
            f"--denoiser {name} does not run on images of shape {list(image.shape[1:])}: "
            f"{first_line(error)}"
        ) from error
    if found != list(image.shape):
        raise UserError(
            f"--denoiser {name} makes {found[1:]} of an image of shape {list(image.shape[1:])}"
        )
    if not made.isfinite().all():
        raise UserError(f"--denoiser {name} makes an image with NaN: its weights are damaged")
    return network, facts, _doubts("the denoiser", content, spec.dataset_name, sigma)


def _doubts(
    name: str, content: dict[str, Any], dataset: str | None, sigma: float | None
) -> list[str]:
    """What to warn of, where the checkpoint of a network was trained on another dataset, or with
    other noise.
    """
    doubts, trained_on, noise_sd = [], content.get("dataset"), content.get("noise_sd")
    if None not in (trained_on, dataset) and trained_on != dataset:
        doubts.append(f"{name} was trained on '{trained_on}', not on '{dataset}'")
    if None not in (noise_sd, sigma) and noise_sd != sigma:
        doubts.append(f"{name} was trained with noise {noise_sd}; here it gets noise {sigma:g}")
    return doubts


def loose_images(spec: ModelSpec, paths: Sequence[Path]) -> tuple[list[Path], ImageDataset, str]:
    """The files in files and folders, and their images for the model of a spec, whose dataset says
    what the model was trained on; also what was changed of them, in words.
    """
    files, description = files_in(paths), spec.description
    _, preparation = split_location(spec.dataset.partition(":")[2])
    if preparation is None and description.defaults is IMAGENET_TRAINING:
        preparation = Preparation(description.image_shape[1])
    if spec.model.kind == LIBRARY:
        network = library_network(str(spec.model), pretrained=False)
        preparation = preparation or network.preparation
        if network.usual_names:
            description = replace(description, class_names=network.usual_names)
    return files, *read_images(files, description, preparation)


def classifier_digest(module: nn.Module, settings: Mapping[str, Any]) -> str:
    """A SHA-256, in hexadecimal, of all of a classifier but the code of its module, to key its
    noise.

    That is the weights, all buffers, also those that ``state_dict`` leaves out, and the
    architecture, input layer, plug-ins, denoiser and resizing in ``settings``.
    """
    named = {name: settings.get(name) for name in ("arch", "input_layer", "plugins")}
    named |= {name: settings[name] for name in (DENOISER, RESIZE) if name in settings}
    tensors = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    return digest_of([named, {**dict(tensors), **module.state_dict()}])
