"""Options that several commands share: dataset, device, seed, what to do with earlier output."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from smoothadv.commands.options.components import add_options
from smoothadv.commands.runner import Parser
from smoothadv.datasets import DATASETS, check_dataset_name
from smoothadv.settings import non_negative_int

if TYPE_CHECKING:
    import torch


def add_dataset(parser: Parser, check: Callable[[str], object] = check_dataset_name) -> None:
    """The positional DATASET, whose name ``check`` refuses by a UserError."""

    def parse(text: str) -> str:
        check(text)
        return text

    names = ", ".join(f"{name}:PATH" if DATASETS[name].takes_location else name for name in DATASETS)
    add_options(parser, {"dataset DATASET": (parse, f"one of {names}")})


def add_running(parser: Parser, existing: str = "refuse") -> None:
    """Data folder, device, seed, and what to do with existing output (by default ``existing``)."""
    group = parser.add_argument_group("running")
    add_options(
        group,
        {
            "--data-dir DIR": (str, "folder of the dataset's files (default: data; for imagenet IMAGENET_DIR)"),
            "--device": (_device, "torch device like cpu or cuda:1 (default: cuda if there is one)"),
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


def _device(text: str) -> torch.device:
    from smoothadv.devices import usable_device  # imports torch, which only those who give --device wait for here

    return usable_device(text)
