"""Networks of libraries, by names like ``timm:resnet18``; one library per file.

Each registers in ``LIBRARIES`` a function of a location (what follows the colon), of whether
pretrained weights are wanted, and of the images to fit: a DatasetDescription, or None for the
classes and images of the library. It imports the library when it is called, not before.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from smoothadv.architectures.input_layers import Normalize
from smoothadv.base.digests import digest_bytes
from smoothadv.base.errors import UserError, first_line
from smoothadv.base.registry import Registry, discover
from smoothadv.datasets import DatasetDescription
from smoothadv.datasets.preparation import Preparation


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
        if self.mean is None or self.std is None:
            return self.module.eval()
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
    # This logger reports each attempt to reach the hub; an import resets the package's own level.
    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)
    try:
        found = LIBRARIES[kind](os.path.expanduser(location), pretrained, images)
    except UserError:
        raise
    except ModuleNotFoundError as error:
        extra = "transformers" if kind == "hf" else kind
        raise UserError(
            f"{name} needs the package {error.name}: pip install 'smoothadv[{extra}]'"
        ) from error
    except Exception as error:  # of a library, or of a network connection
        if not pretrained:
            raise UserError(f"{name} cannot be made: {first_line(error)}") from error
        advice = "--no-pretrained takes random ones"
        if images is not None:
            advice = "leave --pretrained out for random ones"
        raise UserError(
            f"the weights of {name} cannot be had ({first_line(error)}): {advice}"
        ) from error
    digest = torch.tensor(list(digest_bytes([found.version])), dtype=torch.uint8)
    found.module.register_buffer("version_sha256", digest, persistent=False)
    return found


discover(__name__, __path__)
