"""Entry points of torch.hub: torch.hub.load(REPOSITORY, "classifier", checkpoint=..., dataset=...).

REPOSITORY is "OWNER/NAME" of a copy on GitHub, or with source="local" the folder of a clone.
"""

import sys as _sys
from pathlib import Path as _Path

dependencies = ["torch", "torchvision", "numpy", "scipy", "tqdm", "typing_extensions"]

# The last: code/ has modules like train, which must not hide the user's.
_sys.path.append(str(_Path(__file__).resolve().parent / "code"))


def classifier(checkpoint, dataset, **options):
    """The base classifier in a checkpoint: images [B, C, H, W] in [0, 1] in, logits [B, K] out.

    ``checkpoint`` is a path, "A.pth.tar+B.pth.tar" or "hf-hub:OWNER/NAME", ``dataset`` a name like
    "cifar10"; ``options`` are those of ``smoothadv.checkpoints.load_classifier``.
    """
    from smoothadv.checkpoints import load_classifier

    return load_classifier(checkpoint, dataset, **options)


def network(arch, dataset, input_layer="normalize"):
    """A network without training, such as "cifar_resnet110", behind its input layer, in train mode:
    ``smoothadv.architectures.get_architecture``.
    """
    from smoothadv.architectures import get_architecture

    return get_architecture(arch, dataset, input_layer)


def smoothed(checkpoint, dataset, sigma, **options):
    """The smoothed classifier of a checkpoint under noise of standard deviation ``sigma``, as a
    module with gradients; ``options`` are those of ``smoothadv.SmoothedModule``.
    """
    from smoothadv import SmoothedModule

    return SmoothedModule(classifier(checkpoint, dataset), sigma, **options)
