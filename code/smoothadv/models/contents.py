"""What is in a checkpoint: a file, or a repository on the Hugging Face hub. Neither may run code.

Programs save their arguments, NumPy's numbers and paths beside the weights, and PyTorch's safe
reader refuses the whole file for one of them. Here it gets a stand-in for each class and function
that it does not know: nothing is imported or called for the file, and a stand-in keeps nothing.

On the hub, ``hf-hub:OWNER/NAME[@REVISION]``, none is a pickle. The command ``push`` makes a
repository of ``model.safetensors``, the weights by the names that they have in the checkpoint, a
model card and ``config.json``:

smoothadv          the version of this form, 1
checkpoint_sha256  of the file that was pushed: logs of it and of the repository name one model
weights_sha256     of model.safetensors
checkpoint         the fields of the checkpoint that say what the model is

That the first digest belongs to these weights is what the repository states. A log has, beside it,
a digest of the weights themselves, so that none is continued with others.
"""

import json
import os
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from smoothadv.architectures.libraries import hub_asked_once
from smoothadv.base.errors import UserError, first_line
from smoothadv.base.files import digest, file_digest, read_json
from smoothadv.models.name import HUB, LIBRARY, is_on_hub, parse_model

WEIGHTS, CONFIG = "model.safetensors", "config.json"
_VERSION = 1
_NAME = re.compile(rf"{HUB}([\w.-]+/[\w.-]+)(?:@(.+))?", re.ASCII)
_PARTS = {"checkpoint_sha256": str, "weights_sha256": str, "checkpoint": dict}
_OTHERS = (
    "it was not made by smoothadv push; a network of timm is named timm:hf-hub:OWNER/NAME, one of "
    "transformers hf:OWNER/NAME"
)
_REASONS = {
    "RevisionNotFoundError": "the repository has no such revision",
    "GatedRepoError": "its owner has to grant access first",
    "RepositoryNotFoundError": "there is no such repository, or it is private and needs a token of "
    "yours (hf auth login, or HF_TOKEN)",
    "LocalEntryNotFoundError": "the hub cannot be reached, and the cache does not have it",
    "OfflineModeIsEnabled": "the hub cannot be reached, or HF_HUB_OFFLINE is set",
    "EntryNotFoundError": _OTHERS,
}
"""What exceptions of huggingface_hub mean, by their names."""
_REFUSALS = {
    401: "the hub does not accept the token (hf auth login, or HF_TOKEN)",
    403: "the token may not do that: it needs the permission to write there",
    409: "the repository exists already: leave --private out, its page on the hub says who sees it",
}
_UNKNOWN = re.compile(r"Unsupported global: GLOBAL (\S{1,200}) was not an allowed global")
_CONTAINER = re.compile(r"Can only (SETITEM|append|extend).* but got <class '(\S{1,200})'>")
_MOST_STAND_INS = 200
"""The most stand-ins for a file: each costs a reading."""
_DAMAGES = {
    "TorchScript": "it is TorchScript: load it in a plug-in, docs/networks.md",
    "Unsupported operand 149": "it has a pickle_protocol of its own: save it without one",
}


class Inert:
    """What stands for an object of an unknown class, whatever it is made of."""

    def __new__(cls, *arguments: Any) -> Any:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass

    def __repr__(self) -> str:
        return f"a {type(self).__module__}.{type(self).__qualname__}"


def _stand_in(name: str, container: type | None) -> type[Inert]:
    """A class that has the name of an unknown one; with a ``container``, a dict or a list, it makes
    empty ones.
    """
    module, _, own = name.rpartition(".")
    members: dict[str, Any] = {"__module__": module or "builtins"}
    if container is not None:
        members["__new__"] = lambda cls, *arguments: container()
    return type(own, (Inert,), members)


def _read_inertly(path: Path) -> Any:
    """What is in a checkpoint file, tensors on the CPU, with ``Inert`` in place of other objects.

    Raises what PyTorch does where the file is damaged, no checkpoint, or asks for the system.
    """
    known: dict[tuple[str, type | None], type[Inert]] = {}
    while True:
        # Later ones replace earlier ones of the same name.
        latest = {name: made for (name, _), made in known.items()}
        try:
            with warnings.catch_warnings(), torch.serialization.safe_globals([*latest.values()]):
                # PyTorch warns about pickles, which it refuses here.
                warnings.simplefilter("ignore")
                return torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            wanted: tuple[str, type | None]
            if unknown := _UNKNOWN.search(str(error)):
                wanted = (unknown[1], None)
            elif found := _CONTAINER.search(str(error)):
                wanted = (found[2], dict if found[1] == "SETITEM" else list)
            else:
                raise
            if wanted in known or len(known) >= _MOST_STAND_INS:
                raise
            known[wanted] = _stand_in(*wanted)


def content_of(path: Path) -> Any:
    """What is in a checkpoint, a file or on the hub, tensors on the CPU; UserError where it cannot
    be had, or is more than plain tensors.
    """
    if is_on_hub(path):
        return _pushed(str(path))
    if path.is_dir():
        raise UserError(
            f"{path} is a folder: name the checkpoint file in it, like "
            f"{path / 'checkpoint.pth.tar'}"
        )
    if not path.is_file():
        hint = ": no network by name can be here" * (parse_model(path).kind == LIBRARY)
        raise UserError(f"checkpoint {path} does not exist{hint}")
    try:
        return _read_inertly(path)
    except Exception as error:  # a damaged file can raise nearly anything
        reason = next(
            (reason for words, reason in _DAMAGES.items() if words in str(error)),
            getattr(error, "strerror", ""),
        )
        # The rest of PyTorch's advice is about options that we lack.
        if asked := re.search(r"GLOBAL (\S{1,99})", str(error)):
            reason = f"it asks to load {asked[1]}"
        raise UserError(
            f"checkpoint {path} cannot be read: it is damaged or no PyTorch checkpoint of plain "
            f"tensors{f' ({reason})' if reason else ''}"
        ) from error


@dataclass(frozen=True)
class Pulled:
    """A repository at one commit, which is in ``name``: its config.json, and where its weights
    are.
    """

    name: str
    config: dict[str, Any]
    weights: Path


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Within this context, what the hub's libraries raise becomes a UserError about ``name``."""
    try:
        yield
    except UserError:
        raise
    except ModuleNotFoundError as error:
        raise UserError(
            f"{name} needs the package {error.name}: pip install 'smoothadv[hub]'"
        ) from error
    except Exception as error:  # of the library, or of a network connection
        status = getattr(getattr(error, "response", None), "status_code", None)
        kinds = (_REASONS.get(kind.__name__) for kind in type(error).__mro__)
        reason = next(filter(None, kinds), _REFUSALS.get(status or 0, first_line(error)))
        raise UserError(f"{name}: {reason}") from error


@cache  # a name is one commit as long as the process lives
def _pulled(name: str) -> Pulled:
    if not (match := _NAME.fullmatch(name)):
        raise UserError(f"{name}: expected {HUB}OWNER/NAME or {HUB}OWNER/NAME@REVISION")
    repository, revision = match.groups()
    with hub_errors(name), hub_asked_once():
        from huggingface_hub import hf_hub_download

        path = Path(hf_hub_download(repository, CONFIG, revision=revision))
        config, commit = _read(path, name), path.parent.name
        weights = hf_hub_download(repository, WEIGHTS, revision=commit)
    return Pulled(f"{HUB}{repository}@{commit}", config, Path(os.path.realpath(weights)))


def _read(path: Path, name: str) -> dict[str, Any]:
    """A config.json; UserError unless it has what ``packed`` writes."""
    try:
        config = read_json(path)
    except ValueError:
        config = None
    version = config.get("smoothadv") if isinstance(config, dict) else None
    if version is None:
        raise UserError(f"{name}: {_OTHERS}")
    if version != _VERSION:
        raise UserError(
            f"{name} is of version {version!r:.20}, expected {_VERSION}: another smoothadv made it"
        )
    for field, kind in _PARTS.items():
        if not isinstance(config.get(field), kind):
            raise UserError(f"{name}: its {CONFIG} has no {field}, or one of another form")
    return config


def _pushed(name: str) -> dict[str, Any]:
    """The dict of a checkpoint on the hub, as far as it was pushed, tensors on the CPU.

    UserError where it cannot be had or was not made by ``push``, and where its weights are not
    those that were pushed.
    """
    pulled = _pulled(name)
    with hub_errors(f"{name}, {WEIGHTS}"):
        from safetensors.torch import load

        weights = pulled.weights.read_bytes()
        if digest([weights]) != pulled.config["weights_sha256"]:
            raise UserError(
                f"{name}: {WEIGHTS} is damaged, or not what was pushed: delete {pulled.weights} to "
                "have it downloaded again"
            )
        return {**pulled.config["checkpoint"], "state_dict": load(weights)}


def checkpoint_digest(path: str | Path) -> str:
    """The SHA-256 by which records know a checkpoint: of its file, or the one that was pushed."""
    if is_on_hub(path):
        return _pulled(str(path)).config["checkpoint_sha256"]
    return file_digest(path)


def pinned(name: str | Path) -> str:
    """The name of a checkpoint or an ensemble, with the commit of each that is on the hub."""
    pieces = str(name).split("+")
    return "+".join(_pulled(piece).name if is_on_hub(piece) else piece for piece in pieces)


def packed(weights: Mapping[str, Any], fields: Mapping[str, Any], sha256: str) -> dict[str, bytes]:
    """Weights and config.json of a repository, by file name; ``sha256`` is of the checkpoint.

    Exceptions of the libraries where the formats cannot hold something, like sparse tensors.
    """
    from safetensors.torch import save

    # A copy each: the format refuses tensors that share memory. It says itself why no sparse ones.
    tensors = save(
        {name: one if one.is_sparse else one.clone().contiguous() for name, one in weights.items()}
    )
    config = {
        "smoothadv": _VERSION,
        "checkpoint_sha256": sha256,
        "weights_sha256": digest([tensors]),
        "checkpoint": dict(fields),
    }
    return {WEIGHTS: tensors, CONFIG: json.dumps(config, indent=2).encode()}
