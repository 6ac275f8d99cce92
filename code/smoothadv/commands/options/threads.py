"""The option --threads, and the threads with which PyTorch computes without it."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from smoothadv.cpus import suitable_threads
from smoothadv.datasets import describe_dataset
from smoothadv.errors import UserError
from smoothadv.files import read_json
from smoothadv.settings import number

_THREADS = "OMP_NUM_THREADS"
_number_of_threads = number(int, "a whole number from 1 to 1,024", lambda v: 1 <= v <= 1024)
THREADS = {
    "--threads N": (
        _number_of_threads,
        "threads of PyTorch on the CPU (default: OMP_NUM_THREADS; else those of the run that is continued; else one "
        "for each usable CPU, one in all on images as small as 8x8)",
    )
}


def use_threads(options: argparse.Namespace, records: Iterable[Path] = (), dataset: str | None = None) -> None:
    """Set how many threads PyTorch uses, as the help of --threads says.

    ``records`` are the manifests, or the records of a training, of what is continued or repeated: its bits may depend
    on the number of threads. ``dataset`` names the images (None: that of the options).
    """
    import torch

    threads = options.threads
    if threads is None and _THREADS not in os.environ:
        threads = next(_recorded(records, torch.get_num_threads()), None)
        if threads is None:
            with contextlib.suppress(UserError):  # the command itself will say what is wrong
                threads = default_threads(describe_dataset(dataset or options.dataset, options.data_dir).image_shape)
    if threads is not None:
        torch.set_num_threads(threads)


def default_threads(image_shape: tuple[int, ...]) -> int:
    """The threads of a new run on images [C, H, W]: OMP_NUM_THREADS, else those that suit, at most PyTorch's choice."""
    import torch

    most = torch.get_num_threads()
    return most if _THREADS in os.environ else min(most, suitable_threads(image_shape))


def _recorded(records: Iterable[Path], most: int) -> Iterator[int]:
    """The threads in the records that can be read: at most ``most``, unless they are a setting of the log."""
    for record in records:
        try:
            content = read_json(record)
            setting = content.get("settings", {}).get("threads")
            # Older trainings do not say: they took PyTorch's number.
            last = min(content["runs"][-1].get("torch_threads", most), most)
            yield _number_of_threads(str(setting or last))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, argparse.ArgumentTypeError):
            continue
