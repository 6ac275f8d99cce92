"""Options that several commands share: dataset, device, seed, what to do with earlier output."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from smoothadv.commands.options.components import add_options
from smoothadv.commands.runner import Parser
from smoothadv.datasets import DATASETS, check_dataset_name
from smoothadv.errors import UsageError, UserError
from smoothadv.settings import non_negative_int

if TYPE_CHECKING:
    import torch


def add_dataset(parser: Parser) -> None:
    """The positional DATASET, whose name ``check_dataset`` checks once all options are known."""
    names = ", ".join(f"{name}:PATH" if DATASETS[name].takes_location else name for name in DATASETS)
    add_options(parser, {"dataset DATASET": (str, f"one of {names}")})


def check_dataset(name: str, checkpoint: Path | None = None) -> None:
    """A usage error if the dataset is unknown; a ``checkpoint`` may say which plug-in is missing."""
    try:
        check_dataset_name(name)
    except UserError as error:
        from smoothadv.checkpoints import missing_dataset_plugin  # imports torch

        reason = checkpoint and missing_dataset_plugin(checkpoint, name)
        reason = f"checkpoint {checkpoint}: {reason}" if reason else str(error)
        raise UsageError(f"argument DATASET: {reason}") from error


def add_running(parser: Parser, existing: str = "refuse") -> None:
    """Data folder, device, seed, and what to do with existing output (by default ``existing``)."""
    group = parser.add_argument_group("running")
    add_options(
        group,
        {
            "--data-dir DIR": (str, "folder of the dataset's files (default: data; for imagenet IMAGENET_DIR)"),
            "--device": (device, "torch device like cpu or cuda:1 (default: cuda if there is one)"),
            "--seed": (non_negative_int, "seed of all randomness (default: 0)", 0),
        },
    )
    choice = group.add_mutually_exclusive_group()
    texts = {
        "resume": "continue the output of an earlier run of the same command, if there is any",
        "overwrite": "replace the output of an earlier run",
    }
    for name, text in texts.items():
        default = " (the default)" if existing == name else ""
        choice.add_argument(
            f"--{name}", dest="existing", action="store_const", const=name, default=existing, help=text + default
        )


def device(text: str) -> torch.device:
    """argparse type: a device that can be used."""
    from smoothadv.devices import usable_device  # imports torch, which only those who give --device wait for here

    return usable_device(text)
