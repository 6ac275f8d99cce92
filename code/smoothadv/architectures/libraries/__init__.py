"""Networks of libraries, by names like ``timm:resnet18``; one library per file.

Each registers in ``LIBRARIES`` a function of a location (what follows the colon), of whether
pretrained weights are wanted, and of the images to fit: a DatasetDescription, or None for the
classes and images of the library. It imports the library when it is called, not before.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from smoothadv.architectures.input_layers import Normalize
from smoothadv.base.errors import UserError, first_line
from smoothadv.base.files import digest
from smoothadv.base.registry import Registry, did_you_mean, discover
from smoothadv.datasets import DatasetDescription
from smoothadv.datasets.preparation import Preparation

_SECONDS_TO_REACH = 3.0


@dataclass(frozen=True)
class LibraryNetwork:
    """``module`` maps images [B, C, H, W], of this ``mean`` and ``std`` per channel, to logits, or
    to an object with logits.

    ``version`` is the library's name and version, and a digest of all settings that decide the
    function; the module has its SHA-256 as a buffer, for records. ``class_names`` has all names of
    each class, the usual one first; the library makes images of photographs by ``preparation``.
    An unknown fact is empty or None.
    """

    module: nn.Module
    version: str
    class_names: tuple[tuple[str, ...], ...] = ()
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    preparation: Preparation | None = None

    @property
    def usual_names(self) -> tuple[str, ...]:
        """The usual name of each class, as far as known."""
        return tuple(names[0] for names in self.class_names)

    @property
    def normalized(self) -> nn.Module:
        """The network, after the normalization of its library, if it has one; in eval mode."""
        self.module.eval()  # a user's own train() may return nothing
        if self.mean is None or self.std is None:
            return self.module
        return nn.Sequential(Normalize(self.mean, self.std), self.module).eval()


LIBRARIES: Registry[Callable[[str, bool, DatasetDescription | None], LibraryNetwork]] = Registry(
    "architecture"
)


def library_network(
    name: str, pretrained: bool, images: DatasetDescription | None = None
) -> LibraryNetwork:
    """The network called KIND:LOCATION, randomly initialised or ``pretrained``; for ``images``, or
    None: as it is.

    UserError where the library, the network or its weights cannot be had, or where it cannot be
    made for the images.
    """
    kind, _, location = name.partition(":")
    try:
        found = LIBRARIES[kind](os.path.expanduser(location), pretrained, images)
    except UserError:
        raise
    except ModuleNotFoundError as error:
        extra = f"'smoothadv[{'transformers' if kind == 'hf' else kind}]'"
        is_own = LIBRARIES[kind].__module__.startswith(f"{__name__}.")
        raise UserError(
            f"{name} needs the package {error.name}: pip install {extra if is_own else error.name}"
        ) from error
    except Exception as error:  # of a library, or of a network connection
        if not pretrained:
            raise UserError(f"{name} cannot be made: {first_line(error)}") from error
        advice = "--no-pretrained takes" if images is None else "leave --pretrained out for"
        raise UserError(
            f"the weights of {name} cannot be had ({first_line(error)}): {advice} random ones"
        ) from error
    version = torch.tensor(list(bytes.fromhex(digest([found.version]))), dtype=torch.uint8)
    found.module.register_buffer("version_sha256", version, persistent=False)
    return found


def require_known(name: str, location: str, known: Iterable[str]) -> None:
    """UserError where a ``location`` is none of those that a library knows; it calls the network
    ``name``.
    """
    if location not in (names := list(known)):
        raise UserError(f"there is no {name}{did_you_mean(location, names)}")


@contextmanager
def hub_asked_once() -> Iterator[None]:
    """A context in which huggingface_hub takes what it has where its server cannot be reached; it
    would try for a minute.
    """
    from huggingface_hub import constants, get_session

    # This logger reports each attempt to reach the hub; an import resets the package's own level.
    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)
    before = constants.HF_HUB_OFFLINE
    try:
        get_session().head(constants.ENDPOINT, timeout=_SECONDS_TO_REACH)
    except Exception:  # of the library for HTTP that this version takes
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


discover(__name__, __path__)
