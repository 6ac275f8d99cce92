"""What certify and predict share: from options to a smoothed classifier, its test images and its log."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from smoothadv.checkpoints import classifier_from_checkpoint, file_digest, read_checkpoint, recorded_input_layer
from smoothadv.commands.components import warn
from smoothadv.commands.options import (
    add_dataset,
    add_examples,
    add_input_layer,
    add_running,
    default_device,
    device_name,
)
from smoothadv.commands.runner import Parser
from smoothadv.core import Smooth
from smoothadv.datasets import get_dataset
from smoothadv.datasets.images import ImageDataset
from smoothadv.evaluation import check_logged_examples, select_examples
from smoothadv.noise import GaussianNoise
from smoothadv.records import ExampleLog, provenance
from smoothadv.settings import positive_int, positive_noise_level, probability


def add_smoothing(parser: Parser, outfile: str, n: int, n_help: str) -> None:
    """DATASET CHECKPOINT SIGMA OUTFILE and the options that certify and predict share."""
    add_dataset(parser)
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", type=Path, help="checkpoint.pth.tar of a trained or released model"
    )
    parser.add_argument(
        "sigma",
        metavar="SIGMA",
        type=positive_noise_level,
        help="standard deviation of the smoothing noise on images in [0, 1]",
    )
    parser.add_argument("outfile", metavar="OUTFILE", type=Path, help=outfile)
    group = parser.add_argument_group("smoothing")
    group.add_argument("--N", type=positive_int, default=n, help=f"{n_help} (default: {n})")
    group.add_argument(
        "--alpha", type=probability, default=0.001, help="probability of a false statement per image (default: 0.001)"
    )
    group.add_argument(
        "--batch",
        type=positive_int,
        default=None,
        metavar="B",
        help="noisy images per forward pass (default: 1000 on an accelerator, 200 on a CPU); the noise does "
        "not depend on it",
    )
    add_input_layer(
        parser, None, "first layer of a model whose checkpoint does not record it, as the released ones do not"
    )
    add_examples(parser)
    add_running(parser)


@dataclass(frozen=True)
class SmoothingJob:
    """A smoothed classifier, the images to visit and where their noise comes from."""

    smooth: Smooth
    noise: GaussianNoise
    dataset: ImageDataset
    indices: range
    device: torch.device
    batch: int
    settings: dict[str, Any]

    def open_log(self, options: argparse.Namespace, columns: tuple[str, ...], settings: dict[str, Any]) -> ExampleLog:
        """The log of this job; ``settings`` joins what decides the numbers."""
        run = {
            "checkpoint": str(options.checkpoint),
            "skip": options.skip,
            "max": options.max,
            "batch": self.batch,
            "torch_threads": torch.get_num_threads(),
            "device": device_name(self.device),
            **provenance(options.command),
        }
        log = ExampleLog(options.outfile, columns, {**self.settings, **settings}, run, options.existing)
        check_logged_examples(log, self.indices)
        return log


def prepare(options: argparse.Namespace) -> SmoothingJob:
    """Load everything that certify and predict need; UserError where it does not fit together."""
    content = read_checkpoint(options.checkpoint)
    dataset = get_dataset(options.dataset, options.split, options.data_dir)
    device = options.device or default_device()
    classifier = classifier_from_checkpoint(content, options.checkpoint, dataset.description, options.input_layer).to(
        device
    )
    _warn_about_mismatch(content, options)
    settings = {
        "dataset": options.dataset,
        "split": options.split,
        "dataset_fingerprint": dataset.fingerprint(),
        "checkpoint_sha256": file_digest(options.checkpoint),
        "arch": content["arch"],
        "input_layer": recorded_input_layer(content, options.checkpoint, options.input_layer),
        "num_classes": dataset.description.num_classes,
        "sigma": options.sigma,
        "N": options.N,
        "alpha": options.alpha,
        "seed": options.seed,
        "training": content.get("recipe"),
        "noise": f"torch {device.type} generator, one stream per example",
    }
    return SmoothingJob(
        Smooth(classifier, dataset.description.num_classes, options.sigma),
        GaussianNoise(options.sigma, options.seed),
        dataset,
        select_examples(len(dataset), options.skip, options.max),
        device,
        options.batch or (200 if device.type == "cpu" else 1000),
        settings,
    )


def _warn_about_mismatch(content: dict[str, Any], options: argparse.Namespace) -> None:
    """Say what is allowed but probably a slip."""
    trained_on, trained_for = content.get("dataset"), content.get("noise_sd")
    if trained_on is not None and trained_on != options.dataset:
        warn(f"{options.checkpoint} was trained on '{trained_on}', not on '{options.dataset}'")
    if trained_for is not None and trained_for != options.sigma:
        warn(f"{options.checkpoint} was trained with noise {trained_for}; it is being smoothed with {options.sigma}")
