"""Options that several commands share: dataset, device, seed, what to do with earlier output."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

from smoothadv.base.cpus import suitable_threads, usable_cpus
from smoothadv.base.errors import UsageError, UserError
from smoothadv.base.files import read_json
from smoothadv.base.settings import any_seed
from smoothadv.cli.options.components import add_options
from smoothadv.cli.runner import Parser
from smoothadv.datasets import DATASETS, describe_dataset, source_of
from smoothadv.datasets.preparation import parsed, prepared_name, split_location
from smoothadv.datasets.spec import device, thread_count

THREADS = {
    "--threads N": (
        thread_count,
        "threads of PyTorch on the CPU (default: OMP_NUM_THREADS, else as many as suit the images "
        "and the usable CPUs)",
    )
}


def add_dataset(parser: Parser) -> None:
    """The positional DATASET, whose name ``check_dataset`` checks once all options are known, and
    --image-size.
    """
    names = ", ".join(
        f"{name}:PATH" if DATASETS[name].takes_location else name for name in DATASETS
    )
    size = (
        "resize images to S x S first, cropped around the centre: the same as DATASET@S "
        "(docs/photographs.md)"
    )
    add_options(
        parser, {"dataset DATASET": (str, f"one of {names}"), "--image-size S": (parsed, size)}
    )


def check_dataset(options: argparse.Namespace, checkpoint: Path | None = None) -> None:
    """A usage error if the dataset is unknown; a ``checkpoint`` may say which plug-in is missing.

    --image-size, if it is given, goes behind the dataset's name in ``options``.
    """
    try:
        source, location = source_of(options.dataset)
        if options.image_size is not None:
            if not source.takes_preparation or split_location(location)[1] is not None:
                raise UserError(
                    f"--image-size: images of '{options.dataset}' have a size already: leave it out"
                )
            options.dataset, options.image_size = (
                prepared_name(options.dataset, options.image_size),
                None,
            )
    except UserError as error:
        from smoothadv.checkpoints import missing_dataset_plugin  # imports torch

        reason = checkpoint and missing_dataset_plugin(checkpoint, options.dataset)
        reason = f"checkpoint {checkpoint}: {reason}" if reason else str(error)
        raise UsageError(f"argument DATASET: {reason}") from error
    say_what_is_certified(options.dataset)


@cache
def say_what_is_certified(dataset: str) -> None:
    """Once for each dataset of resized images, however many commands of a sweep or processes of
    torchrun are about it.
    """
    source, location = source_of(dataset)
    is_resized = source.takes_preparation and split_location(location)[1] is not None
    if is_resized and os.environ.get("RANK", "0") == "0":
        print(
            f"{dataset}: noise, perturbations and radii are those of the resized images",
            file=sys.stderr,
        )


def add_running(parser: Parser, existing: str = "refuse") -> None:
    """Data folder, device, threads, seed, and what to do with existing output (by default
    ``existing``).
    """
    group = parser.add_argument_group("running")
    add_options(
        group,
        {
            "--data-dir DIR": (
                str,
                "folder of the dataset's files (default: data; for imagenet IMAGENET_DIR)",
            ),
            "--device": (device, "torch device like cpu or cuda:1 (default: cuda if there is one)"),
            **THREADS,
            "--seed": (any_seed, "seed of all randomness (default: 0)", 0),
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
            f"--{name}",
            dest="existing",
            action="store_const",
            const=name,
            default=existing,
            help=text + default,
        )


def use_threads(run: Any, resumed: Path | None = None) -> None:
    """Let PyTorch use the ``threads`` of a run, else OMP_NUM_THREADS, else those of the training
    whose record is ``resumed``: its bits depend on them; else those that suit the images.
    """
    import torch

    threads, most = run.threads, torch.get_num_threads()
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        threads = min(most, usable_cpus())
        # What cannot be read is for the command itself to complain about.
        with contextlib.suppress(
            UserError, OSError, ValueError, LookupError, TypeError, AttributeError
        ):
            threads = suitable_threads(
                describe_dataset(run.dataset, run.data_dir).image_shape, most
            )
            if resumed is not None:
                threads = max(1, min(int(read_json(resumed)["runs"][-1]["torch_threads"]), most))
    torch.set_num_threads(threads or most)
