"""Trained classifiers that are the same on every machine: checkpoints in tests/data, made by the
script there.
"""

from pathlib import Path

import torch

DATA = Path(__file__).parents[1] / "data"
Weights = dict[str, torch.Tensor]


def store(checkpoint: Path, name: str) -> None:
    """Keep a checkpoint of ``train`` as ``name`` in tests/data, with weights in float16.

    What says where it was made is left out, and what is for resuming alone.
    """
    content = torch.load(checkpoint, weights_only=True)
    content["optimizer"]["state"] = {}
    content["state_dict"] = _in(torch.float16, content["state_dict"])
    torch.save(
        {field: value for field, value in content.items() if field != "runs"},
        DATA / f"{name}.pth.tar",
    )


def restore(name: str, folder: Path) -> Path:
    """The checkpoint ``name`` of tests/data in a new ``folder``, with weights in float32, as
    ``train`` writes them.
    """
    content = torch.load(DATA / f"{name}.pth.tar", weights_only=True)
    content["state_dict"] = _in(torch.float32, content["state_dict"])
    folder.mkdir()
    torch.save(content, folder / "checkpoint.pth.tar")
    return folder / "checkpoint.pth.tar"


def _in(dtype: torch.dtype, weights: Weights) -> Weights:
    return {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in weights.items()
    }
