"""Networks of libraries, by names like ``timm:resnet18``; one library per file.

Each registers in ``LIBRARIES`` a function of a location (what follows the colon), of whether pretrained weights are
wanted, and of the images to fit: a DatasetDescription, or None for the classes and images of the library. It imports
the library when it is called, not before.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from smoothadv.datasets.description import DatasetDescription
from smoothadv.datasets.preparation import Preparation
from smoothadv.errors import UserError, first_line
from smoothadv.registry import Registry, did_you_mean, discover

T = TypeVar("T")


@dataclass(frozen=True)
class LibraryNetwork:
    """``module`` maps images [B, C, H, W], of this ``mean`` and ``std`` per channel, to logits, or to what holds them.

    ``version`` is the library's name and version. ``class_names`` has for each class all of its names, the usual one
    first; ``preparation`` is how the library makes images of photographs. Empty and None stand for what is not known.
    """

    module: nn.Module
    version: str
    class_names: tuple[tuple[str, ...], ...] = ()
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    preparation: Preparation | None = None


LIBRARIES: Registry[Callable[[str, bool, DatasetDescription | None], LibraryNetwork]] = Registry("architecture")
_EXTRAS = {"timm": "timm", "transformers": "transformers", "onnxruntime": "onnx"}


def library_network(name: str, pretrained: bool, images: DatasetDescription | None = None) -> LibraryNetwork:
    """The network called KIND:LOCATION, randomly initialised or ``pretrained``; for ``images``, or None: as it is.

    UserError where the library, the network or its weights cannot be had, or where it cannot be made for the images.
    """
    kind, _, location = name.partition(":")
    build = LIBRARIES[kind]
    if not location:
        raise UserError(f"'{name}' names no network: write {kind}:NAME")
    try:
        return build(location, pretrained, images)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get(str(error.name))
        if extra is None:
            raise
        raise UserError(f"{name} needs the package {error.name}: pip install 'smoothadv[{extra}]'") from error
    except UserError:
        raise
    except Exception as error:  # of a library, about whatever it was asked for
        fitted = "" if images is None else f" for images of shape {list(images.image_shape)}"
        raise UserError(f"{name} cannot be made{fitted}: {first_line(error)}") from error


def fetched(name: str, fetch: Callable[[], T], images: DatasetDescription | None, what: str = "weights") -> T:
    """What ``fetch`` returns, the weights of ``name`` or ``what`` else belongs to it; UserError if it cannot be had."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of each attempt
    try:
        return fetch()
    except ModuleNotFoundError:
        raise
    except Exception as error:  # of a network connection, a file system or a library
        instead = "leave --pretrained out for random ones" if images else "--no-pretrained takes random ones"
        advice = instead if what == "weights" else "check the name and the connection"
        raise UserError(f"the {what} of {name} cannot be had ({first_line(error)}): {advice}") from error


def require_known(name: str, known: list[str], is_known: bool | None = None) -> None:
    """UserError, with a hint, unless what follows the colon of ``name`` is among ``known``, or ``is_known``."""
    kind, _, location = name.partition(":")
    if not (location in known if is_known is None else is_known):
        hint = did_you_mean(location, known) or f"; there are {', '.join(known[:5])}, ... ({len(known)} in all)"
        raise UserError(f"{kind} has no network '{location}'{hint}")


discover(__name__, __path__)
