"""What certify, predict and attack share: from options to a smoothed classifier, its images, what decides numbers."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from smoothadv.bounds import minimum_trials_to_predict
from smoothadv.checkpoints import classifier_from_checkpoint, file_digest, read_checkpoint, recorded_input_layer
from smoothadv.commands.options.components import warn
from smoothadv.commands.options.shared import (
    add_dataset,
    add_examples,
    add_input_layer,
    add_running,
    default_device,
    device_name,
)
from smoothadv.commands.runner import Parser
from smoothadv.datasets import get_dataset
from smoothadv.datasets.images import ImageDataset
from smoothadv.errors import UserError
from smoothadv.evaluation.loop import select_examples
from smoothadv.evaluation.shards import shard, shards_of
from smoothadv.evaluation.workers import Workers, join_workers, own_device
from smoothadv.noise import GaussianNoise, Noise, NoiseStream, Purpose, RoundedGaussianNoise
from smoothadv.records import provenance, recorded_settings
from smoothadv.settings import batch_size, number, positive_noise_level, probability
from smoothadv.smoothing.classifier import (
    PRECISIONS,
    Arrangement,
    VotingClassifier,
    arrange,
    compiled,
    default_batch,
    make_deterministic,
)
from smoothadv.smoothing.voting import VoteCounter, check_repeatable

PREDICTION_DRAWS = 100_000
"""What PREDICT takes unless --N says so."""
_draws = number(int, "a whole number from 1 to 4,000,000,000", lambda v: 1 <= v <= 4_000_000_000)


def add_smoothing(parser: Parser, outfile: str, n_help: str, output: str = "outfile") -> None:
    """DATASET CHECKPOINT SIGMA OUTFILE and the options that certify, predict and attack share."""
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
    parser.add_argument(output, metavar=output.upper(), type=Path, help=outfile)
    group = parser.add_argument_group("smoothing")
    group.add_argument("--N", type=_draws, default=None, help=n_help)
    group.add_argument(
        "--alpha", type=probability, default=0.001, help="probability of a false statement per image (default: 0.001)"
    )
    add_input_layer(
        parser, None, "first layer of a model whose checkpoint does not record it, as the released ones do not"
    )
    add_examples(parser)
    add_running(parser, existing="resume")
    _add_speed(parser)


def _add_speed(parser: Parser) -> None:
    group = parser.add_argument_group("speed")
    group.add_argument(
        "--batch",
        type=batch_size,
        default=None,
        metavar="B",
        help="noisy images per forward pass (default: 16 to 200 on a CPU, by free memory on an accelerator); the "
        "noise does not depend on it, the rounding of the logits may",
    )
    group.add_argument(
        "--precision",
        choices=list(PRECISIONS),
        default="fp32",
        help="of weights and activations; less is a different base classifier (default: fp32, whose convolutions "
        "use TF32 on GPUs that have it, as is PyTorch's default)",
    )
    group.add_argument("--compile", action="store_true", help="compile the classifier first: a minute, then faster")
    group.add_argument(
        "--shard",
        type=shard,
        default=None,
        metavar="K/N",
        help="do only the K-th of N shares of the examples, K from 0; `merge OUTFILE` joins them",
    )


@dataclass(frozen=True)
class SmoothingJob:
    """A base classifier, as trained, as it votes and as it is attacked, the images and where their noise comes from.

    ``settings`` is what decides the numbers, ``run`` describes this process.
    """

    classifier: torch.nn.Module
    voter: torch.nn.Module
    attacked: VotingClassifier
    noise: Noise
    dataset: ImageDataset
    indices: Sequence[int]
    device: torch.device
    batch: int
    settings: dict[str, Any]
    run: dict[str, Any]
    workers: Workers | None

    def counter(self) -> VoteCounter:
        """What puts the images to the vote."""
        keep_batch = isinstance(self.noise, RoundedGaussianNoise)
        return VoteCounter(
            self.voter, self.dataset.description.num_classes, self.batch, self.device, keep_batch=keep_batch
        )

    def stream(self, index: int, purpose: int = Purpose.VOTES) -> NoiseStream:
        return self.noise.stream(index, self.device, purpose)

    def check_image(self, index: int, image: torch.Tensor) -> None:
        """UserError if the noise is not made for this image."""
        try:
            self.noise.check_image(image)
        except ValueError as error:
            raise UserError(
                f"--sound certifies 8-bit images only; of {self.settings['dataset']}, example {index}: {error}"
            ) from error

    @property
    def noise_distance(self) -> float:
        return self.noise.distance(math.prod(self.dataset.description.image_shape))


def warn_of_few_draws(options: argparse.Namespace) -> None:
    """Say so where --N draws can decide nothing."""
    if options.N < minimum_trials_to_predict(options.alpha):
        warn(
            f"--N {options.N} can decide nothing at --alpha {options.alpha:g}, every image will abstain: "
            f"at least --N {minimum_trials_to_predict(options.alpha)} is needed"
        )


def prepare(options: argparse.Namespace, sound: bool = False) -> SmoothingJob:
    """Load everything that certify and predict need; UserError where it does not fit together."""
    if sound:
        make_deterministic()
    content = read_checkpoint(options.checkpoint)
    dataset = get_dataset(options.dataset, options.split, options.data_dir)
    workers = join_workers()
    if workers is not None and options.shard is not None:
        raise UserError("--shard is not read under torchrun, which shares the examples out by itself: leave it out")
    device = own_device(options.device or default_device(), workers and workers.local_rank)
    classifier = classifier_from_checkpoint(content, options.checkpoint, dataset.description, options.input_layer).to(
        device
    )
    if workers is None or workers.rank == 0:
        _warn_about_mismatch(content, options)
    example = dataset[0][0] if len(dataset) else None
    voter = arrange(classifier, Arrangement(options.precision), device, example)
    batch, attacked = _batch(options, voter, dataset, device), voter
    if options.precision == "fp16":  # in which the gradients of confident answers underflow
        attacked = arrange(classifier, Arrangement("fp32"), device, example)
    if options.compile:
        if sound and device.type != "cpu":
            raise UserError("--sound with --compile is for the CPU: elsewhere the compiler chooses kernels by a race")
        if workers is None or workers.rank == 0:
            print("compiling the classifier first, which may take a minute", file=sys.stderr)
        voter = compiled(voter)
    noise = (RoundedGaussianNoise if sound else GaussianNoise)(options.sigma, options.seed)
    job = SmoothingJob(
        classifier=classifier,
        voter=voter,
        attacked=attacked,
        noise=noise,
        dataset=dataset,
        indices=select_examples(len(dataset), options.skip, options.max),
        device=device,
        batch=batch if workers is None else workers.agree("batch", batch),
        settings={},
        run=_run(options, device),
        workers=workers,
    )
    job.settings.update(_settings(options, content, job))
    if len(job.indices):
        _check_classifier(job, sound)
    return job


def _settings(options: argparse.Namespace, content: dict[str, Any], job: SmoothingJob) -> dict[str, Any]:
    settings = {
        "dataset": options.dataset,
        "split": options.split,
        "dataset_fingerprint": job.dataset.fingerprint(),
        "checkpoint_sha256": file_digest(options.checkpoint),
        "arch": content["arch"],
        "input_layer": recorded_input_layer(content, options.checkpoint, options.input_layer),
        "num_classes": job.dataset.description.num_classes,
        "sigma": options.sigma,
        "alpha": options.alpha,
        "seed": options.seed,
        "training": content.get("recipe"),
        "noise": type(job.noise).__name__,
        "generator": "Philox4x32-10 at (seed, example, purpose, draw)",
        "batch": job.batch,
        "precision": options.precision,
        "compiled": options.compile,
        "folded": job.voter.is_folded,
        "device": device_name(job.device),
        "torch": torch.__version__,
    }
    if job.device.type == "cuda" and options.precision == "fp32":
        settings["tf32"] = torch.backends.cudnn.allow_tf32
    if isinstance(job.noise, RoundedGaussianNoise) and job.device.type == "cpu":
        # The certified classifier is the executed program: whatever may change its rounding belongs to it.
        settings["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
        settings["threads"] = torch.get_num_threads()
    return settings


def _run(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    return {
        "checkpoint": str(options.checkpoint),
        "skip": options.skip,
        "max": options.max,
        "torch_threads": torch.get_num_threads(),
        "device": device_name(device),
        **provenance(options.command),
    }


def _batch(options: argparse.Namespace, voter: torch.nn.Module, dataset: ImageDataset, device: torch.device) -> int:
    """The batch asked for, else that of the log to be continued, or of its shards, else what suits the device."""
    chosen = options.batch or recorded_number(options, "batch")
    return chosen or default_batch(voter, dataset.description.image_shape, device, alike=options.shard is not None)


def recorded_number(options: argparse.Namespace, setting: str) -> int | None:
    """A setting, of at least 1, of the log to be continued or of its shards; None where there is none."""
    if options.existing == "resume":
        for log in (options.outfile, *shards_of(options.outfile)):
            recorded = recorded_settings(log).get(setting)
            if isinstance(recorded, int) and recorded >= 1:
                return recorded
    return None


def _check_classifier(job: SmoothingJob, sound: bool) -> None:
    """UserError, or without --sound a warning, where the classifier is no function of one image on this device."""
    if job.device.type == "cpu" and not sound:
        return  # its kernels are known to be, and several passes of a large network take long
    image, _ = job.dataset[job.indices[0]]
    job.check_image(job.indices[0], image)
    try:
        check_repeatable(job.counter(), image, job.stream(job.indices[0], Purpose.SELF_CHECK))
    except UserError as error:
        if sound:
            raise
        warn(f"{error}; a log may then depend on how its draws were packed")


def _warn_about_mismatch(content: dict[str, Any], options: argparse.Namespace) -> None:
    """Say what is allowed but probably a slip."""
    trained_on, trained_for = content.get("dataset"), content.get("noise_sd")
    if trained_on is not None and trained_on != options.dataset:
        warn(f"{options.checkpoint} was trained on '{trained_on}', not on '{options.dataset}'")
    if trained_for is not None and trained_for != options.sigma:
        warn(f"{options.checkpoint} was trained with noise {trained_for}; it is being smoothed with {options.sigma}")
