"""Reads and writes checkpoints: this package's, and the released ones of SmoothAdv and of Cohen et
al.

A checkpoint is a dict with at least ``epoch`` (the next one), ``arch``, ``state_dict`` and
``optimizer``: the released format. This package adds what the released files leave out: the input
layer with its constants, the dataset, the recipe and the history of the run.
"""

import dataclasses
import importlib
import io
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from smoothadv.architectures import (
    ARCHITECTURES,
    INPUT_LAYERS,
    get_architecture,
    names_network,
    require_architecture,
)
from smoothadv.architectures.denoisers import DENOISERS, Denoised
from smoothadv.architectures.diffusion import PREFIX, load_diffusion
from smoothadv.architectures.ensemble import Ensemble
from smoothadv.architectures.exact import ExactNetwork, is_exact
from smoothadv.base import plugins
from smoothadv.base.digests import digest, file_digest
from smoothadv.base.errors import UserError, first_line, shown, warn
from smoothadv.base.files import refuse_to_inflate, write_atomically
from smoothadv.base.members import Members, members_of
from smoothadv.base.registry import Registry, UnknownNameError
from smoothadv.checkpoints.fields import checked
from smoothadv.datasets import describe_dataset
from smoothadv.datasets.description import DatasetDescription
from smoothadv.datasets.pickles import CarefulUnpickler

Weights = dict[str, torch.Tensor]
MODULE_PREFIX = "module:"
"""Begins the ``arch`` of a checkpoint whose network is no registered architecture; the name of its
class follows.
"""
INTEGER = "integer"
"""The field of a checkpoint of integers that describes its network; its ``arch`` begins with this
and a colon.
"""
_INTEGERS = "smoothadv.exact.network"
"""The annex that defines these networks, loaded only for such a checkpoint."""
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Where an object lies in memory, as Python prints it: another place in every process."""
_PICKLES_OF_AN_OLD_FILE = 5
_KINDS = (
    (torch.float32, torch.float64, torch.float16, torch.bfloat16),
    (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
)


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write ``content`` atomically; its ``state_dict`` gets the keys that the released code
    expects.
    """
    content = {**content, "state_dict": released_keys(content["state_dict"], content["arch"])}
    serialized = io.BytesIO()  # torch.save would not say why it cannot write to a full disk
    torch.save(content, serialized)
    write_atomically(path, lambda file: file.write(serialized.getbuffer()))


def read_checkpoint(path: str | Path, denoiser: bool = False) -> dict[str, Any]:
    """The dict in a checkpoint file, of a classifier or a ``denoiser``, tensors on the CPU.

    UserError if it is missing, damaged or something else, or if its architecture is unknown; this
    error names the plug-in that the checkpoint needs.
    """
    content = _content(Path(path))
    arch = str(content["arch"])
    if content.get("denoiser", arch in DENOISERS and arch not in ARCHITECTURES) != denoiser:
        advice = (
            "no denoiser: train_denoiser makes one"
            if denoiser
            else "a denoiser: name it with --denoiser"
        )
        raise UserError(f"checkpoint {path} is {advice}")
    registry: Registry[Any] = DENOISERS if denoiser else ARCHITECTURES
    require = DENOISERS.require if denoiser else require_architecture
    try:
        if not is_module(content) and INTEGER not in content:
            require(arch)
    except UnknownNameError as error:
        reason = plugins.missing(registry.kind, arch, content.get("plugins")) or str(error)
        raise UserError(f"checkpoint {path}: {reason}") from error
    for plugin in plugins.changed_provider(registry.kind, arch, content.get("plugins")):
        warn(f"checkpoint {path} was trained with another version of the plug-in {plugin.name}")
    return content


def read_members(path: str | Path) -> Members:
    """The checkpoint or the ensemble that ``path`` names, read as ``read_checkpoint`` does; no two
    may be the same.
    """
    members = members_of(path)
    members = dataclasses.replace(members, contents=tuple(map(read_checkpoint, members.paths)))
    seen: dict[str, Path] = {}
    for member in members.paths if members.mean else ():
        if (twin := seen.setdefault(file_digest(member), member)) is not member:
            raise UserError(
                f"ensemble {path}: {twin} and {member} are the same checkpoint: name it once"
            )
    return members


def missing_dataset_plugin(path: Path, dataset: str) -> str:
    """Which plug-in the checkpoint's dataset needs, as a sentence; "" if none, or if the checkpoint
    cannot be read.
    """
    try:
        contents = map(_content, members_of(path).paths)
        missing = (
            plugins.missing("dataset", dataset.partition(":")[0], each.get("plugins"))
            for each in contents
        )
        return next(filter(None, missing), "")
    except UserError:
        return ""


def _content(path: Path) -> dict[str, Any]:
    """What ``read_checkpoint`` returns, of whatever architecture."""
    if path.is_dir():
        raise UserError(
            f"{path} is a folder: name the checkpoint file in it, like "
            f"{path / 'checkpoint.pth.tar'}"
        )
    if not path.is_file():
        hint = ": no network by name can be here" * names_network(str(path))
        raise UserError(f"checkpoint {path} does not exist{hint}")
    refuse_to_inflate(path)
    try:
        _rehearse(path)
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # PyTorch warns about pickles, which the next line refuses
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can raise nearly anything
        asked = re.search(
            r"GLOBAL (\S{1,99})", str(error)
        )  # PyTorch's advice is about options that we lack
        reason = (
            f"it asks to load {asked[1]}"
            if asked
            else error.strerror
            if isinstance(error, OSError)
            else ""
        )
        raise UserError(
            f"checkpoint {path} cannot be read: it is damaged or no PyTorch checkpoint of plain "
            f"tensors{f' ({reason})' if reason else ''}"
        ) from error
    return checked(content, path)


class _Nothing(dict[Any, Any]):
    """Stands for whatever a pickle asks for."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(self, *arguments: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


class _Rehearsal(CarefulUnpickler):
    """Goes through a pickle of PyTorch, which PyTorch's own unpickler does without care for deep
    tuples.
    """

    def find_class(self, module: str, name: str) -> Any:
        return _Nothing

    def persistent_load(self, identifier: Any) -> Any:
        return _Nothing()


def _rehearse(path: Path) -> None:
    """Raises an exception where a pickle in a checkpoint would crash Python."""
    with path.open("rb") as file:
        if file.read(2) != b"PK":
            file.seek(0)
            for _ in range(_PICKLES_OF_AN_OLD_FILE):
                _Rehearsal(file).load()
            return
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith(".pkl"):
                with archive.open(name) as member:
                    _Rehearsal(member).load()


def is_module(content: dict[str, Any]) -> bool:
    """Whether a checkpoint holds the weights of a module of the user's own, which no architecture
    can rebuild.
    """
    return str(content["arch"]).startswith(MODULE_PREFIX)


def digest_of(value: Any) -> str:
    """A SHA-256 of tensors, arrays, text and numbers, also in dicts and lists."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        value = torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, torch.Tensor):
        return digest([f"tensor {value.dtype} {tuple(value.shape)}\n", bytes_of(value)])
    if isinstance(value, (Mapping, list, tuple)):
        pairs = sorted(value.items()) if isinstance(value, Mapping) else enumerate(value)
        parts = " ".join(f"{name!r} {digest_of(part)}" for name, part in pairs)
        return digest([f"parts {parts}"])
    return digest([f"{type(value).__name__} {ADDRESS.sub('', repr(value))}"])


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The values of a tensor; UserError if it has none in memory, or not one after the other."""
    try:
        return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    except (RuntimeError, TypeError, ValueError) as error:  # NotImplementedError is a RuntimeError
        kind = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
        raise UserError(
            f"the classifier has a tensor of {kind}, whose values cannot be read: make it dense"
        ) from error


def load_classifier(
    path: str | Path, dataset: str | DatasetDescription, input_layer: str | None = None
) -> torch.nn.Module:
    """The base classifier in a checkpoint: in eval mode, [0, 1] images [B, C, H, W] in, logits [B,
    K] out.

    ``path`` may name an ensemble, too (see ``ensembles``). ``dataset`` is the name or description
    of the dataset to be classified. ``input_layer`` ("normalize" or "center") must be given where
    the checkpoint does not record it and may be left out otherwise. UserError where the file, the
    dataset and the input layer do not fit together.
    """
    members = read_members(path)
    description = describe_dataset(dataset) if isinstance(dataset, str) else dataset
    return classifier_from_members(members, description, input_layer)


def classifier_from_members(
    members: Members, description: DatasetDescription, asked: str | None
) -> torch.nn.Module:
    """As ``load_classifier``, for checkpoints that have been read; ``asked`` is its input layer."""
    each = zip(members.contents, members.paths, members.input_layers(asked))
    loaded = [_load(content, path, description, layer) for content, path, layer in each]
    return loaded[0] if members.mean is None else Ensemble(loaded, members.mean).eval()


def _load(
    content: dict[str, Any], path: Path, description: DatasetDescription, asked: str | None
) -> torch.nn.Module:
    if is_module(content):
        name = content["arch"].removeprefix(MODULE_PREFIX)
        raise UserError(
            f"checkpoint {path} holds the weights of a {name}, which is no architecture: load its "
            "state_dict into that module and pass the module"
        )
    _check_recorded_images(content, path, description)
    if INTEGER in content:
        return integer_network(content, path, description.image_shape, description.num_classes)
    description = with_recorded_constants(content, path, description)
    model = get_architecture(
        content["arch"], description, recorded_input_layer(content, path, asked)
    )
    _load_weights(model, network_keys(content["state_dict"]), path, content["arch"], description)
    return model.eval()


def load_denoiser(
    path: str | Path, description: DatasetDescription
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The denoiser in a checkpoint, in eval mode, and what ``read_checkpoint`` returns.

    UserError where it does not fit the images.
    """
    content = read_checkpoint(path, denoiser=True)
    _check_recorded_images({**content, "classes": None}, path, description)
    network = DENOISERS[content["arch"]](description)
    _load_weights(network, network_keys(content["state_dict"]), path, content["arch"], description)
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
        facts = {"sha256": file_digest(denoiser), "arch": content["arch"]}
    image = torch.full((1, *description.image_shape), 0.5)
    try:
        with torch.inference_mode():
            found = list(network(image).shape)
    except (RuntimeError, ValueError, TypeError) as error:
        message = (
            f"--denoiser {denoiser} does not run on images of shape {list(image.shape[1:])}: "
            f"{first_line(error)}"
        )
        raise UserError(message) from error
    if found != list(image.shape):
        raise UserError(
            f"--denoiser {denoiser} makes {found[1:]} of an image of shape {list(image.shape[1:])}"
        )
    return Denoised(network, classifier).eval(), facts, content


def integer_network(
    content: dict[str, Any], path: Path, image_shape: Sequence[int], num_classes: int
) -> ExactNetwork:
    """The network in a checkpoint of integers, for images of this shape; UserError where it is
    damaged.
    """
    read = importlib.import_module(_INTEGERS).IntegerNetwork.read
    try:
        return read(content[INTEGER], content["state_dict"], image_shape, num_classes).eval()
    except ValueError as error:
        raise UserError(f"checkpoint {path}: {error}") from error


def start_from(
    model: torch.nn.Module,
    content: dict[str, Any],
    path: str | Path,
    arch: str,
    description: DatasetDescription,
) -> str:
    """Load a checkpoint's weights into ``model``, of the architecture ``arch``; returns a sentence
    on what was loaded.

    The last linear layer keeps its initial weights where the checkpoint was trained on other
    classes, or on another number of them; a denoiser has none. UserError where the other weights do
    not fit.
    """
    weights = network_keys(content["state_dict"])
    if arch in DENOISERS and arch not in ARCHITECTURES:
        _load_weights(model, weights, path, arch, description)
        return f"starting from {path} with all of its layers"
    last = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)][
        -1
    ]
    of_last = {key for key in model.state_dict() if key.startswith(f"{last}.")}
    fits = all(
        key in weights and weights[key].shape == model.state_dict()[key].shape for key in of_last
    )
    recorded = content.get("classes")
    is_new = not fits or (recorded is not None and list(recorded) != list(description.class_names))
    kept = {**weights, **{key: model.state_dict()[key] for key in of_last}} if is_new else weights
    _load_weights(model, kept, path, arch, description)
    layer = (
        f"a new classification layer for {description.num_classes} classes"
        if is_new
        else "all of its layers"
    )
    return f"starting from {path} with {layer}"


def recorded_input_layer(content: dict[str, Any], path: str | Path, asked: str | None) -> str:
    """The input layer that a checkpoint records, else the one asked for; UserError if neither or if
    they differ.
    """
    recorded = content.get("input_layer")
    input_layer = asked if recorded is None else recorded
    if input_layer is None:
        raise UserError(
            f"checkpoint {path} does not record its input layer, and a wrong one makes it useless: "
            "choose with --input-layer. The released SmoothAdv models under imagenet/ and cifar10/ "
            "use 'center', but those under imagenet32/, "
            "cifar10/finetune_cifar_from_imagenetPGD2steps/ and cifar10/self_training/ use "
            "'normalize', as do those of Cohen et al."
        )
    if recorded is not None and asked is not None and recorded != asked:
        raise UserError(
            f"checkpoint {path} was trained with input layer '{recorded}', not '{asked}': leave "
            "--input-layer out"
        )
    return INPUT_LAYERS.require(input_layer)


def released_keys(state_dict: Weights, arch: str) -> Weights:
    """Our keys, renamed as in the released code: it wraps resnet50 in a DataParallel, so ``1.x`` is
    ``1.module.x``.
    """
    if arch != "resnet50":
        return state_dict
    return {key.replace("1.", "1.module.", 1): value for key, value in state_dict.items()}


def network_keys(state_dict: Weights) -> Weights:
    """Released keys, renamed as ours: without the ``module`` that a DataParallel, inside or
    outside, adds.
    """
    return {
        ".".join(part for part in key.split(".") if part != "module"): value
        for key, value in state_dict.items()
    }


def _check_recorded_images(
    content: dict[str, Any], path: str | Path, description: DatasetDescription
) -> None:
    """UserError if the checkpoint records that it was trained on images of another shape or on
    other classes.
    """
    for field, found in (
        ("image_shape", description.image_shape),
        ("classes", description.class_names),
    ):
        recorded = content.get(field)
        if recorded is not None and list(recorded) != list(found):
            trained, has = (
                shown(f"[{', '.join(map(str, values))}]", 200) for values in (recorded, found)
            )
            raise UserError(
                f"checkpoint {path} does not fit dataset '{description.name}': it was trained with "
                f"{field} {trained}, the dataset has {has}"
            )


def with_recorded_constants(
    content: dict[str, Any], path: str | Path, description: DatasetDescription
) -> DatasetDescription:
    """The description with the normalization constants of the checkpoint's training, if it records
    them.

    UserError unless there is one of each for every channel of the images.
    """
    if not content.get("mean"):
        return description
    mean, std = tuple(content["mean"]), tuple(content["std"])
    if {len(mean), len(std)} != {description.image_shape[0]}:
        raise UserError(
            f"checkpoint {path} does not fit {_named(description)}: it records a mean of "
            f"{len(mean)} and a std of {len(std)} channels"
        )
    return dataclasses.replace(description, mean=mean, std=std)


def _named(description: DatasetDescription) -> str:
    shape = "x".join(map(str, description.image_shape))
    return f"dataset '{description.name}' ({description.num_classes} classes, images {shape})"


def _load_weights(
    model: torch.nn.Module,
    weights: Weights,
    path: str | Path,
    arch: str,
    description: DatasetDescription,
) -> None:
    """Load weights; UserError unless they have the names, shapes and kinds that the architecture
    ``arch`` expects.
    """
    if reason := misfit(weights, model.state_dict()):
        raise UserError(f"checkpoint {path} is not a {arch} for {_named(description)}: {reason}")
    model.load_state_dict(weights)


def misfit(weights: Weights, expected: Weights) -> str:
    """How the names, shapes and kinds (floating-point or whole numbers) of tensors differ, "" if
    they do not.
    """
    missing, extra = (
        sorted(expected.keys() - weights.keys()),
        sorted(weights.keys() - expected.keys()),
    )
    if missing or extra:
        names = [", ".join(name[:60] for name in some[:2]) for some in (missing, extra)]
        return (
            f"{len(missing)} weights missing ({names[0]}...), {len(extra)} unknown ({names[1]}...)"
        )
    for key, value in weights.items():
        found, needed = value.dtype, expected[key].dtype
        if value.shape != expected[key].shape:
            return f"{key} has shape {list(value.shape)}, expected {list(expected[key].shape)}"
        if found != needed and not any(found in kind and needed in kind for kind in _KINDS):
            return f"{key} is of type {found}, expected {needed}"
    return ""
