"""Reads and writes checkpoints: this package's, and the released ones of SmoothAdv and of Cohen et
al.

A checkpoint is a dict with at least ``epoch`` (the next one), ``arch``, ``state_dict`` and
``optimizer``: the released format. This package adds what the released files leave out: the input
layer with its constants, the dataset, the recipe and the history of the run. A file of weights
alone, as ``torch.save(model.state_dict(), path)`` writes it, is one too where the caller names its
architecture.
"""

import dataclasses
import io
import os
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from smoothadv.architectures import (
    ARCHITECTURES,
    INPUT_LAYERS,
    LIBRARIES,
    require_architecture,
)
from smoothadv.architectures.denoisers import DENOISERS
from smoothadv.base import plugins
from smoothadv.base.errors import UserError, counted, escape, warn
from smoothadv.base.files import digest, write_atomically
from smoothadv.base.registry import UnknownNameError
from smoothadv.datasets import DatasetDescription
from smoothadv.models.contents import Inert, content_of
from smoothadv.models.name import Members, members_of

Weights = dict[str, torch.Tensor]
MODULE_PREFIX = "module:"
"""Begins the ``arch`` of a checkpoint whose network is no registered architecture; the name of its
class follows.
"""
INTEGER = "integer"
"""The field of a checkpoint of integers that describes its network; its ``arch`` begins with this
and a colon.
"""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Where an object lies in memory, as Python prints it: another place in every process."""
_FIELDS: dict[str, tuple[str, Any, Any]] = {
    "epoch": ("a whole number", int, None),
    **dict.fromkeys(("arch", "dataset", "input_layer"), ("text", str, None)),
    "noise_sd": ("a number", (int, float), None),
    **dict.fromkeys(("recipe", "integer", "behind"), ("a dict", dict, None)),
    "state_dict": ("a dict of tensors", dict, torch.Tensor),
    **dict.fromkeys(("mean", "std"), ("a list of numbers", (list, tuple), (int, float))),
    "image_shape": ("a list of whole numbers", (list, tuple), int),
    "classes": ("a list of texts", (list, tuple), str),
    "denoiser": ("True or False", bool, None),
    "plugins": ("a list of dicts", (list, tuple), dict),
}
"""What a field is for whoever uses the model: in words, its type, and that of its entries."""
USED = _FIELDS.keys() - {"state_dict"}
"""The fields, beside the weights, that say what the model is; others tell of its runs."""
_COUNTERS = ("n_averaged", "total_ops", "total_params")
"""What torch's AveragedModel and thop keep beside the weights of a network."""
_HINTS = {
    "weight_mask": "it is pruned: call torch.nn.utils.prune.remove and save it again",
    **dict.fromkeys(
        ("mean", "std", "mu", "sigma"),
        "it normalizes by itself: let --arch name an architecture of a plug-in that does",
    ),
    **dict.fromkeys(
        ("weight_g", "original0", "weight_u"),
        "its weights are parametrized: remove that (torch.nn.utils.parametrize) and save it again",
    ),
}
"""What unknown names tell of a network."""
_PART = (
    "where it holds several networks, --weights KEY of certify, predict and attack chooses one by "
    "what its names begin with"
)
_KINDS = (
    (torch.float32, torch.float64, torch.float16, torch.bfloat16),
    (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
)


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write ``content`` atomically; its ``state_dict`` gets the keys that the released code
    expects.
    """
    state = content["state_dict"]
    if content["arch"] == "resnet50":  # the released code wraps it in a DataParallel
        state = {key.replace("1.", "1.module.", 1): value for key, value in state.items()}
    serialized = io.BytesIO()  # torch.save would not say why it cannot write to a full disk
    torch.save({**content, "state_dict": state}, serialized)
    write_atomically(path, lambda file: file.write(serialized.getbuffer()))


def read_checkpoint(
    path: str | Path,
    denoiser: bool | None = False,
    arch: str | None = None,
    weights: str | None = None,
) -> dict[str, Any]:
    """The dict in a checkpoint, of a classifier or a ``denoiser`` (None: of either), tensors on the
    CPU.

    ``arch`` is the architecture of a file that does not record one, or that another program wrote:
    it then has ``arch`` and ``state_dict`` alone. ``weights`` is the key of one of several sets of
    weights, with dots where it is nested; they become the ``state_dict``. UserError if the file is
    missing, damaged or something else, or if its architecture is unknown; this error names the
    plug-in that the checkpoint needs.
    """
    content = _content(Path(path), arch and require_architecture(arch), weights)
    arch = str(content["arch"])
    denoises = content.get("denoiser", arch in DENOISERS and arch not in ARCHITECTURES)
    if denoiser not in (None, denoises):
        found = "no denoiser: train_denoiser makes one"
        if not denoiser:
            found = "a denoiser: name it with --denoiser"
        raise UserError(f"checkpoint {path} is {found}")
    kind, recorded = DENOISERS.kind if denoises else ARCHITECTURES.kind, content.get("plugins", [])
    try:
        if not arch.startswith(MODULE_PREFIX) and INTEGER not in content:
            (DENOISERS.require if denoises else require_architecture)(arch)
    except UnknownNameError as error:
        reason = plugins.missing(kind, arch.partition(":")[0], recorded) or str(error)
        raise UserError(f"checkpoint {path}: {reason}") from error
    for plugin in plugins.changed({one["name"]: one["sha256"] for one in recorded}):
        warn(f"checkpoint {path} was trained with another version of the plug-in {plugin.name}")
    return content


def read_members(path: str | Path, arch: str | None = None, weights: str | None = None) -> Members:
    """The checkpoint or the ensemble that ``path`` names, read as ``read_checkpoint`` does."""
    members = members_of(path)
    contents = tuple(read_checkpoint(one, arch=arch, weights=weights) for one in members.paths)
    return dataclasses.replace(members, contents=contents)


def missing_dataset_plugin(path: Path, dataset: str) -> str:
    """Which plug-in a checkpoint says that its dataset needs, as a sentence; "" if none, or if the
    checkpoint cannot be read.
    """
    try:
        contents = map(_content, members_of(path).paths)
        missing = (
            plugins.missing("dataset", dataset.partition(":")[0], each.get("plugins"))
            for each in contents
        )
        reason = next(filter(None, missing), "")
    except UserError:
        return ""
    return f"checkpoint {path}: {reason}" if reason else ""


def _content(path: Path, arch: str | None = None, chosen: str | None = None) -> dict[str, Any]:
    """What ``read_checkpoint`` returns, of whatever architecture."""
    content = content_of(path)
    if isinstance(content, Inert):
        raise UserError(f"checkpoint {path} is {content} as a whole: save its state_dict() instead")
    pairs = content.items() if isinstance(content, dict) else ()
    content = {
        name: value
        for name, value in pairs
        if value is not None and (name == "state_dict" or not isinstance(value, Inert))
    }
    weights = _weights_in(content, path, chosen)
    if chosen is not None:
        content["state_dict"] = weights
    missing = [name for name in ("epoch", "arch", "state_dict") if name not in content]
    recorded = str(content.get("arch"))
    is_ours = (
        recorded in ARCHITECTURES
        or recorded in DENOISERS
        or recorded.startswith((MODULE_PREFIX, f"{INTEGER}:", *(f"{one}:" for one in LIBRARIES)))
    )
    if arch is not None and not is_ours:
        fields = {} if all(map(torch.is_tensor, content.values())) else content
        content = {**fields, "arch": arch, "state_dict": weights}
        missing = [] if weights else ["a dict of named tensors"]
    if "arch" in missing and weights:
        way = "certify, predict and attack take it with --arch NAME and --input-layer"
        if "time_embed.0.weight" in weights:
            way = f"--denoiser openai:{path} takes a U-Net of OpenAI's"
        raise UserError(
            f"checkpoint {path} holds weights, but not the name of their architecture: {way}"
        )
    if missing:
        held = [f"{key}: {one}" if isinstance(one, Inert) else str(key) for key, one in pairs]
        raise UserError(
            f"checkpoint {path} lacks {', '.join(missing)}; expected a dict with epoch, arch, "
            "state_dict and optimizer, or a state_dict alone; it has "
            f"{escape(', '.join(held), 200) or 'nothing'}"
        )
    if arch not in (None, content["arch"]):
        raise UserError(
            f"checkpoint {path} is of architecture '{content['arch']}', not '{arch}': leave --arch "
            "out"
        )
    for name in content.keys() & _FIELDS.keys():
        value, (expected, kind, entry) = content[name], _FIELDS[name]
        fits = isinstance(value, kind)
        if fits and entry is not None:
            parts = value.values() if isinstance(value, dict) else value
            fits = all(isinstance(one, entry) for one in parts)
        if not fits:
            found = escape(str(value) if isinstance(value, Inert) else reprlib.repr(value), 80)
            raise UserError(f"checkpoint {path}: its {name} is {found}, expected {expected}")
    return content


def _weights_in(content: dict[str, Any], path: Path, chosen: str | None) -> Weights | None:
    """The weights in a file: those ``chosen``, all of it, its ``state_dict``, or the only ones in
    it; None if there are none. Counters that lie between them are left out.

    Warns where others may be meant, too; UserError where nothing says which are.
    """
    # What a training goes on with is another form of the state_dict.
    states = _states({k: v for k, v in content.items() if k != "trained"}, "", 3)
    most = max(map(len, states.values()), default=0)
    likely = [name for name, state in states.items() if 2 * len(state) >= most]
    if chosen is None and len(likely) > 1:
        advice = f"--weights KEY chooses, of {', '.join(likely)}"
        if "state_dict" not in likely:
            raise UserError(f"checkpoint {path} holds several sets of weights: {advice}")
        warn(f"checkpoint {path} holds several sets of weights, and state_dict is taken: {advice}")
        likely = ["state_dict"]
    weights = states[likely[0]] if likely else {}
    if chosen is not None:
        # A state may hold several networks, each under a name of its own.
        weights = {
            full.removeprefix(f"{chosen}."): state[key]
            for name, state in states.items()
            for key in state
            if (full := f"{name}.{key}".removeprefix(".")).startswith(f"{chosen}.")
        }
        if not weights:
            parts = [
                f"{name}.{key.partition('.')[0]}".removeprefix(".")
                for name, state in states.items()
                for key in state
            ]
            found = ", ".join(states if len(states) > 1 else dict.fromkeys(parts))
            raise UserError(
                f"checkpoint {path} has no weights '{chosen}'; it has "
                f"{escape(found, 200) or 'none'}"
            )
    return {k: v for k, v in weights.items() if k.rpartition(".")[2] not in _COUNTERS} or None


def _states(content: dict[str, Any], prefix: str, depth: int) -> dict[str, Weights]:
    """The sets of named tensors in a dict, by their keys, joined by dots."""
    texts = {key: value for key, value in content.items() if isinstance(key, str)}
    if texts and len(texts) == len(content) and all(map(torch.is_tensor, texts.values())):
        return {prefix: content}
    states = dict[str, Weights]()
    for key, value in texts.items() if depth else ():
        if isinstance(value, dict):
            states |= _states(value, f"{prefix}.{key}".removeprefix("."), depth - 1)
    return states


def digest_of(value: Any) -> str:
    """A SHA-256 of tensors, arrays, text and numbers, also in dicts and lists."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        value = torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, torch.Tensor):
        kind = f"tensor {value.dtype} {tuple(value.shape)}\n"
        try:
            numbers = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        except (RuntimeError, TypeError, ValueError) as error:  # also NotImplementedError
            raise UserError(
                f"the classifier has a tensor of {value.dtype}, {value.layout}, on {value.device}, "
                "whose values cannot be read: make it dense"
            ) from error
        return digest([kind, numbers])
    if isinstance(value, (Mapping, list, tuple)):
        pairs = sorted(value.items()) if isinstance(value, Mapping) else enumerate(value)
        parts = " ".join(f"{name!r} {digest_of(part)}" for name, part in pairs)
        return digest([f"parts {parts}"])
    return digest([f"{type(value).__name__} {_ADDRESS.sub('', repr(value))}"])


def start_from(
    model: nn.Module,
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
    weights = keys_as_in(model.state_dict(), content["state_dict"])
    if arch in DENOISERS and arch not in ARCHITECTURES:
        load_weights(model, weights, path, arch, description)
        return f"starting from {path} with all of its layers"
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    initial = {
        key: value for key, value in model.state_dict().items() if key.startswith(f"{layers[-1]}.")
    }
    classes = list(content.get("classes", description.class_names))
    fits = classes == list(description.class_names) and all(
        key in weights and weights[key].shape == value.shape for key, value in initial.items()
    )
    load_weights(model, weights if fits else {**weights, **initial}, path, arch, description)
    kept = "all of its layers"
    if not fits:
        kept = f"a new classification layer for {counted(description.num_classes, 'class')}"
    return f"starting from {path} with {kept}"


def recorded_input_layer(content: dict[str, Any], path: str | Path, asked: str | None) -> str:
    """The input layer that a checkpoint records, else the one asked for; UserError if neither or if
    they differ.
    """
    recorded = content.get("input_layer")
    input_layer = asked if recorded is None else recorded
    if input_layer is None:
        released = (
            "The released SmoothAdv models under imagenet/ and cifar10/ use 'center', but those "
            "under imagenet32/, cifar10/finetune_cifar_from_imagenetPGD2steps/ and "
            "cifar10/self_training/ use 'normalize', as do those of Cohen et al.; those of MNIST "
            "use 'none'."
        )
        alone = (
            "'normalize' if it was trained on images that were normalized with the dataset's mean "
            "and standard deviation, 'none' if it takes images in [0, 1] as they are"
        )
        raise UserError(
            f"checkpoint {path} does not record its input layer, and a wrong one makes it useless: "
            f"choose with --input-layer. {released if 'optimizer' in content else alone}"
        )
    if recorded is not None and asked is not None and recorded != asked:
        raise UserError(
            f"checkpoint {path} was trained with input layer '{recorded}', not '{asked}': leave "
            "--input-layer out"
        )
    return INPUT_LAYERS.require(input_layer)


def network_keys(state_dict: Weights) -> Weights:
    """Released keys, renamed as ours: without the ``module`` that a DataParallel, inside or
    outside, adds, and the ``_orig_mod`` of torch.compile.
    """
    return {
        ".".join(part for part in key.split(".") if part not in ("module", "_orig_mod")): value
        for key, value in state_dict.items()
    }


def keys_as_in(expected: Weights, state_dict: Weights) -> Weights:
    """Weights under the ``expected`` keys, if theirs are the same but for what they begin with: the
    place of the network behind an input layer, or within other objects. Else those of
    ``network_keys``.

    What counts batches, which no evaluation reads, may be missing, as before PyTorch 0.4.1.
    """
    renamed = network_keys(state_dict)
    counts = {key: one for key, one in expected.items() if key.endswith("num_batches_tracked")}
    begin, *starts = (
        re.sub(r"[^.]*$", "", os.path.commonprefix([*names]))
        for names in (expected, state_dict, renamed)
    )
    for weights, start in zip((state_dict, renamed), starts):
        form = {begin + key.removeprefix(start): value for key, value in weights.items()}
        if {**counts, **form}.keys() == expected.keys() and len(form) == len(state_dict):
            return {**counts, **form}
    return renamed if len(renamed) == len(state_dict) else state_dict


def check_recorded_images(
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
            trained, now = (
                escape(f"[{', '.join(map(str, values))}]", 200) for values in (recorded, found)
            )
            is_square = field == "image_shape" and recorded[1:2] == recorded[2:]
            has_size = is_square and recorded[0] == found[0]
            hint = f"; --resize {recorded[-1]} of certify, predict and attack resizes" * has_size
            raise UserError(
                f"checkpoint {path} does not fit dataset '{description.name}': it was trained with "
                f"{field} {trained}, {'here are' if has_size else 'the dataset has'} {now}{hint}"
            )


def with_recorded_constants(
    content: dict[str, Any], path: str | Path, description: DatasetDescription
) -> DatasetDescription:
    """The description with the normalization constants of the checkpoint's training, if it records
    them.

    UserError unless there is one of each for every channel of the images.
    """
    mean, std = tuple(content.get("mean", ())), tuple(content.get("std", ()))
    if not mean and not std:
        return description
    if {len(mean), len(std)} != {description.image_shape[0]}:
        raise UserError(
            f"checkpoint {path} records a mean of {len(mean)} and a std of {len(std)} channels, "
            f"which does not fit the images of '{description.name}'"
        )
    return dataclasses.replace(description, mean=mean, std=std)


def load_weights(
    model: nn.Module,
    weights: Weights,
    path: str | Path,
    arch: str,
    description: DatasetDescription,
) -> None:
    """Load weights; UserError unless they have the names, shapes and kinds that the architecture
    ``arch`` expects.
    """
    weights = keys_as_in(model.state_dict(), weights)
    reason = misfit(weights, model.state_dict())
    try:
        if not reason:
            model.load_state_dict(weights)
    except RuntimeError as error:  # sparse or quantized weights
        reason = " ".join(str(error).split())
    if reason:
        shape = "x".join(map(str, description.image_shape))
        raise UserError(
            f"checkpoint {path} is not a {arch} for dataset '{description.name}' "
            f"({description.num_classes} classes, images {shape}): {reason}"
        )


def misfit(weights: Weights, expected: Weights) -> str:
    """How the names, shapes and kinds (floating-point or whole numbers) of tensors differ, "" if
    they do not.
    """
    without_layer = {f"1.{key}": value for key, value in weights.items()}
    is_without = len(expected.keys() & without_layer.keys()) >= len(
        expected.keys() & weights.keys()
    )
    # Messages have the names in the file, which does not number the input layer.
    prefix = "1." * is_without
    weights = without_layer if is_without else weights
    missing = sorted(expected.keys() - weights.keys())
    extra = sorted(weights.keys() - expected.keys())
    if missing or extra:
        parts = [
            f"{len(keys)} {kind} ({', '.join(key.removeprefix(prefix)[:60] for key in keys[:2])}"
            f"{', ...' * (len(keys) > 2)})"
            for keys, kind in ((missing, "weights missing"), (extra, "unknown"))
            if keys
        ]
        hints = [_PART] * (len(missing) == len(expected)) + [
            _HINTS[end] for key in extra if (end := key.rpartition(".")[2]) in _HINTS
        ]
        return "; ".join([", ".join(parts), *hints[:1]])
    for key, value in weights.items():
        found, needed = value.dtype, expected[key].dtype
        if value.shape != expected[key].shape:
            return (
                f"{key.removeprefix('1.')} has shape {list(value.shape)}, expected "
                f"{list(expected[key].shape)}"
            )
        if found != needed and not any(found in kind and needed in kind for kind in _KINDS):
            return f"{key} is of type {found}, expected {needed}"
    return ""
