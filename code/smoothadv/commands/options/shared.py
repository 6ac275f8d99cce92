"""Options that several commands share: dataset, images, device, seed, what to do with earlier output."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from smoothadv.choices import INPUT_LAYER_NAMES
from smoothadv.commands.options.components import name_that
from smoothadv.commands.runner import Parser
from smoothadv.datasets import DATASETS, SPLITS, check_dataset_name
from smoothadv.errors import UserError
from smoothadv.settings import non_negative_int, positive_int

if TYPE_CHECKING:
    import torch


def add_dataset(parser: Parser, check: Callable[[str], object] = check_dataset_name) -> None:
    """The positional DATASET, whose name ``check`` refuses by a UserError."""
    names = ", ".join(
        f"{name}:PATH" if source.takes_location else name
        for name, source in ((name, DATASETS[name]) for name in DATASETS)
    )
    parser.add_argument("dataset", metavar="DATASET", type=name_that(check), help=f"one of {names}")


def add_running(parser: Parser, existing: str = "refuse") -> None:
    """Data folder, device, seed, and what to do with existing output (by default ``existing``)."""
    group = parser.add_argument_group("running")
    group.add_argument(
        "--data-dir", metavar="DIR", help="folder of the dataset's files (default: data; for imagenet IMAGENET_DIR)"
    )
    group.add_argument(
        "--device", type=_device, default=None, help="torch device like cpu or cuda:1 (default: cuda if there is one)"
    )
    group.add_argument("--seed", type=non_negative_int, default=0, help="seed of all randomness (default: 0)")
    choice = group.add_mutually_exclusive_group()
    choice.add_argument(
        "--resume",
        dest="existing",
        action="store_const",
        const="resume",
        default=existing,
        help="continue the output of an earlier run of the same command, if there is any"
        + (" (the default)" if existing == "resume" else ""),
    )
    choice.add_argument(
        "--overwrite",
        dest="existing",
        action="store_const",
        const="overwrite",
        help="replace the output of an earlier run",
    )


def _device(text: str) -> torch.device:
    from smoothadv.devices import usable_device  # imports torch, which only those who give --device wait for here

    try:
        return usable_device(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_input_layer(parser: argparse._ActionsContainer, default: str | None, help: str) -> None:
    """--input-layer, one of the registered input layers."""
    parser.add_argument("--input-layer", choices=INPUT_LAYER_NAMES, default=default, help=help)


def add_examples(parser: Parser) -> None:
    """The selection of images."""
    group = parser.add_argument_group("images")
    group.add_argument("--split", choices=SPLITS, default="test", help="images to use (default: test)")
    group.add_argument(
        "--skip", type=positive_int, default=1, metavar="K", help="take every K-th image (default: 1, all)"
    )
    group.add_argument(
        "--max", type=_maximum, default=None, metavar="M", help="stop after M images; -1, the default, takes all"
    )


def _maximum(text: str) -> int | None:
    return None if text == "-1" else positive_int(text)
