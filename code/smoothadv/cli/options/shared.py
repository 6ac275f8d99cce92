"""What several commands do before they begin: threads, and a word on resized images."""

import contextlib
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

from smoothadv.base.cpus import suitable_threads, usable_cpus
from smoothadv.base.errors import UserError
from smoothadv.datasets import describe_dataset, source_of
from smoothadv.datasets.preparation import split_location
from smoothadv.records.logs import training_record


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


def use_threads(run: Any, resumed: Path | None = None) -> None:
    """Let PyTorch use the ``threads`` of a run, else OMP_NUM_THREADS, else those of the training
    in the folder ``resumed``: its bits depend on them; else those that suit the images.
    """
    import torch

    threads, most = run.threads, torch.get_num_threads()
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        threads = min(most, usable_cpus())
        # What cannot be read is for the command itself to complain about.
        with contextlib.suppress(UserError, OSError, LookupError, TypeError, ValueError):
            if run.dataset is not None:  # that of a log, which verify reads later
                shape = describe_dataset(run.dataset, run.data_dir).image_shape
                threads = suitable_threads(shape, most)
            if resumed is not None:
                threads = min(int(training_record(resumed)["runs"][-1]["torch_threads"]), most)
    torch.set_num_threads(threads or most)
