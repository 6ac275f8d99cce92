"""Prepares an evaluation: its model, its images, its identity, and the engine that votes.

The identity is all that decides the numbers in a log; a log is continued only with an equal one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from smoothadv.base.cpus import MOST_THREADS
from smoothadv.base.devices import default_device, device_name, device_of_process
from smoothadv.base.distributed import Processes, join_processes
from smoothadv.base.errors import NonFiniteError, UsageError, UserError, first_line, warn
from smoothadv.base.progress import warn_of_hours
from smoothadv.base.provenance import provenance
from smoothadv.datasets import DatasetDescription, ImageDataset
from smoothadv.evaluation.model import (
    BaseClassifier,
    classifier_digest,
    fit_to_model,
    load_images,
    load_model,
    open_model,
    warn_about_network,
)
from smoothadv.evaluation.shards import shards_of
from smoothadv.evaluation.specs import EvaluationSpec
from smoothadv.noise import (
    GaussianNoise,
    Noise,
    NoiseKey,
    NoiseStream,
    Purpose,
    RoundedGaussianNoise,
    kernels_on,
)
from smoothadv.records.logs import CLASSIFIER, DENOISER, LOGITS, recorded_settings
from smoothadv.statistics.prediction import least_draws
from smoothadv.voting.classifier import (
    CompiledClassifier,
    VotingClassifier,
    default_batch,
    make_deterministic,
    optimized_for_inference,
)
from smoothadv.voting.counter import VoteCounter, check_exact, check_repeatable

# Logits of an image that differ by more than this share of the largest one differ by more than
# rounding, also in bf16.
_FUNCTION = 0.02
_GENERATOR = "Philox4x32-10 at (classifier, dataset, sigma, seed; example, purpose, draw)"
# A log of a network of integers with --sound does not record these: its votes are the same on all
# machines.
_MACHINE = (
    "batch",
    "compiled",
    "folded",
    "fused",
    "device",
    "torch",
    "tf32",
    "cpu_capability",
    "threads",
)


@dataclass(frozen=True)
class Evaluation:
    """An evaluation ``spec`` with all that it needs, to write ``log``; None keeps the rows in
    memory.

    ``classifier`` is the base classifier as trained, ``voter`` the form that votes, ``attacked``
    the form that is attacked. ``noise`` makes the noise of each image, keyed by ``key``;
    ``indices`` select the images to evaluate. ``settings`` decide the numbers in the log,
    ``run`` describes this process. ``processes`` share the work.
    """

    spec: EvaluationSpec
    log: Path | None
    classifier: torch.nn.Module
    voter: VotingClassifier
    attacked: VotingClassifier
    noise: Noise
    key: NoiseKey
    dataset: ImageDataset
    indices: Sequence[int]
    device: torch.device
    batch: int
    settings: dict[str, Any]
    run: dict[str, Any]
    processes: Processes

    def counter(self, batch: int | None = None, consensus: bool = True) -> VoteCounter:
        """A new counter of ``voter.scores``, in batches of this size (None: the usual one)."""
        return VoteCounter(
            partial(self.voter.scores, consensus=consensus),
            self.dataset.description.num_classes,
            batch or self.batch,
            self.device,
            keep_batch=isinstance(self.noise, RoundedGaussianNoise) and not self.is_exact,
            dtype=self.voter.dtype,
        )

    def stream(self, index: int, purpose: int = Purpose.VOTES) -> NoiseStream:
        """The noise of an image."""
        return self.noise.stream(index, self.device, purpose)

    def check_integers(self, counter: VoteCounter) -> None:
        """UserError if a network of integers is not computed exactly in the batches of ``counter``,
        as far as seen.
        """
        if (network := self.voter.integers) is not None:
            self.voter.use_fast_form(partial(check_exact, counter, network))

    def check_image(self, index: int, image: torch.Tensor) -> None:
        """UserError if the noise cannot be used for this image: that of --sound needs images of 8
        bits.
        """
        try:
            self.noise.check_image(image)
        except ValueError as error:
            raise UserError(
                f"--sound certifies 8-bit images only; of {self.settings['dataset']}, example "
                f"{index}: {error}"
            ) from error

    @property
    def is_exact(self) -> bool:
        """Whether votes are the same on all machines, in all batches: the network and its noise are
        in integers.
        """
        return self.voter.integers is not None and isinstance(self.noise, RoundedGaussianNoise)

    def logits_digest(self, batch: int) -> str | None:
        """As ``VoteCounter.logits_digest``, of all members of ``voter``; None if memory is too
        small for the batch.

        Of a network of integers it is that of its probe, whatever the batch.
        """
        if self.voter.integers is not None:
            return self.voter.integers.probe
        if batch == self.batch and LOGITS in self.run:
            return self.run[LOGITS]
        counter = self.counter(batch, consensus=False)
        digest = counter.logits_digest(self.dataset.description.image_shape)
        return digest if counter.batch == batch else None

    def continuing(self, log: Path | None) -> Evaluation:
        """The same evaluation for ``log``, with the batch with which it was begun, if it was."""
        batch = self.spec.batch or recorded_setting(self.spec, log, "batch") or self.batch
        digest = self.logits_digest(batch)
        settings = {**self.settings, "batch": batch, LOGITS: digest}
        # The gradients of an attack are float32.
        if self.is_exact and getattr(self.spec, "attack", None) is None:
            settings = {name: value for name, value in settings.items() if name not in _MACHINE}
        run = {**self.run, LOGITS: digest}
        return replace(self, log=log, batch=batch, settings=settings, run=run)


def noise_kind(sound: bool) -> type[GaussianNoise] | type[RoundedGaussianNoise]:
    """The noise of a smoothing, with --sound or without."""
    return RoundedGaussianNoise if sound else GaussianNoise


def warn_of_few_draws(spec: EvaluationSpec, top_k: int = 1) -> None:
    """Warn where the draws are so few that PREDICT always abstains."""
    least = least_draws(spec.alpha, top_k)
    if spec.n < least:
        warn(
            f"--N {spec.n} can decide nothing at --alpha {spec.alpha:g}, every image will "
            f"abstain: at least --N {least} is needed"
        )


def check_top_k(top_k: int, description: DatasetDescription) -> None:
    """UsageError unless there are more classes than ``top_k``: any class is among the k most
    probable of k.
    """
    if top_k >= max(2, description.num_classes):
        raise UsageError(
            f"--top-k {top_k}: give a number below that of the classes, {description.num_classes}"
        )


def prepare(spec: EvaluationSpec, log: Path | None, sound: bool = False) -> Evaluation:
    """Load all that an evaluation needs; UserError where model, images and settings do not fit
    together.

    ``log`` is the log to be written (None: none): if it exists already, its batch is used again.
    ``sound`` as in ``CertifySpec``.
    """
    _set_up_torch(spec, log, sound)
    source = open_model(spec)  # first, since reading or downloading images takes longer
    asked, spec = spec, fit_to_model(spec, source)
    dataset = load_images(spec, source)
    base = load_model(spec, source, dataset.description)
    processes = _join_processes(spec)
    if processes.is_first:
        warn_about_network(source, asked, spec)
        _warn_of_hours(spec, len(dataset))
        base.warn_about_mismatch(spec.dataset_name, spec.sigma)
    key = NoiseKey(
        classifier_digest(base.module, {**base.settings, **spec.plugins(*base.architectures)}),
        dataset.fingerprint(),
        spec.sigma,
        spec.seed,
    )
    noise = noise_kind(sound)(spec.sigma, spec.seed, key=key)
    evaluation = _with_engine(spec, log, base, dataset, noise, key, processes)
    settings, run = _settings(base, evaluation), _run(base, evaluation)
    evaluation = replace(evaluation, settings=settings, run=run).continuing(log)
    _check_classifier(evaluation, sound)
    return evaluation


def _set_up_torch(spec: EvaluationSpec, log: Path | None, sound: bool) -> None:
    if sound:
        make_deterministic()
    # A setting of the log, which nobody needs to repeat.
    threads = recorded_setting(spec, log, "threads")
    if threads is not None and threads <= MOST_THREADS and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads)
    if getattr(spec, "attack", None) is not None:  # before the digest of the logits
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True


def _join_processes(spec: EvaluationSpec) -> Processes:
    processes = join_processes().connect()
    if processes.size > 1 and spec.shard is not None:
        raise UserError(
            "--shard is not read under torchrun, which shares the examples out by itself: leave it "
            "out"
        )
    return processes


def _warn_of_hours(spec: EvaluationSpec, size: int) -> None:
    each, images = spec.n + getattr(spec, "n0", 0), len(spec.chosen_indices(size))
    attack = getattr(spec, "attack", None)
    if attack is not None:
        each += attack.num_steps * spec.num_noise_vec * spec.restarts  # type: ignore[attr-defined]
    warn_of_hours(f"{images:,} images, each {each:,} times with noise", images * each)


def _with_engine(
    spec: EvaluationSpec,
    log: Path | None,
    base: BaseClassifier,
    dataset: ImageDataset,
    noise: Noise,
    key: NoiseKey,
    processes: Processes,
) -> Evaluation:
    """The evaluation with its device, the forms of its classifier and its batch, without
    settings.
    """
    device = _device(spec, log, processes)
    classifier = base.module.to(device)
    example = dataset[0][0] if len(dataset) else None
    voter = optimized_for_inference(classifier, device, example, spec.precision)
    if example is not None and base.members is None:
        name = base.name or type(spec.model).__name__
        _check_module(voter, example, name, processes.is_first)
    batch = spec.batch or recorded_setting(spec, log, "batch")
    if batch is None:
        shape, is_shard = dataset.description.image_shape, spec.shard is not None
        batch = default_batch(voter, shape, device, of_total=is_shard, noise=noise)
    # The gradients of confident predictions underflow in fp16.
    attacked = (
        optimized_for_inference(classifier, device, example) if spec.precision == "fp16" else voter
    )
    if spec.compile:
        _say_that_it_compiles(device, noise, processes.is_first)
    return Evaluation(
        spec=spec,
        log=log,
        classifier=classifier,
        voter=CompiledClassifier(voter) if spec.compile else voter,
        attacked=attacked,
        noise=noise,
        key=key,
        dataset=dataset,
        indices=spec.chosen_indices(len(dataset)),
        device=device,
        batch=processes.received(batch),
        settings={},
        run={},
        processes=processes,
    )


def _device(spec: EvaluationSpec, log: Path | None, processes: Processes) -> torch.device:
    """The device of this process; UserError where the log to be continued is from another one,
    whose batch may not fit into memory here.
    """
    local_rank = processes.local_rank if processes.size > 1 else None
    device = device_of_process(spec.device or default_device(), local_rank)
    recorded = recorded_setting(spec, log, "device")
    if recorded not in (None, device_name(device)):
        difference = f"device was {recorded!r}, now {device_name(device)!r}"
        raise UserError(
            f"cannot resume {log} with other settings: {difference}; --overwrite starts anew"
        )
    return device


def _say_that_it_compiles(device: torch.device, noise: Noise, is_first: bool) -> None:
    if isinstance(noise, RoundedGaussianNoise) and device.type != "cpu":
        raise UserError(
            "--sound with --compile is for the CPU: elsewhere the compiler chooses kernels by speed"
        )
    if is_first:
        print("compiling the classifier first, which may take a minute", file=sys.stderr)


def _agree_on_logits(evaluation: Evaluation, sound: bool) -> None:
    """UserError if ``sound``, else a warning, where this process computes other logits
    than torchrun's first process.
    """
    digest, processes = evaluation.run[LOGITS], evaluation.processes
    if processes.received(digest) == digest:
        return
    difference = (
        f"process {processes.rank} rounds the logits differently than process 0: {LOGITS} is "
        f"{digest!r}"
    )
    if sound:
        raise UserError(
            f"{difference}; --sound needs processors and libraries that compute the same"
        )
    warn(f"{difference}; the manifest has the digest of each process")


@torch.inference_mode()
def _check_module(voter: VotingClassifier, image: torch.Tensor, name: str, warns: bool) -> None:
    """UserError where a module of the user's own does not run in the form that votes; a warning if
    it is no function.

    An architecture of a checkpoint needs no such check.
    """
    device = next((weight.device for weight in voter.parameters()), torch.device("cpu"))
    first = image.to(device)
    try:
        logits = voter(torch.stack([first, 1 - first, first]))[0]
        again = voter(torch.stack([first, first / 2, 1 - first]))[0]
    except (RuntimeError, ValueError, TypeError) as error:
        message = (
            f"{name} does not run with weights and images of {voter.dtype}, batch 3: "
            f"{first_line(error)}"
        )
        raise UserError(message) from error
    scale = float(logits.abs().max())  # NaN: the votes will tell
    if (
        warns
        and scale == scale
        and not torch.allclose(logits, again, rtol=_FUNCTION, atol=_FUNCTION * scale)
    ):
        warn(
            f"the logits of {name} for an image depend on the other images in a batch, or on "
            "chance, in eval mode too: certificates are about a function of one image"
        )


def _settings(base: BaseClassifier, evaluation: Evaluation) -> dict[str, Any]:
    """The settings that decide the numbers; ``continuing`` adds the batch and the logits."""
    spec, device, noise = evaluation.spec, evaluation.device, evaluation.noise
    settings = {
        **spec.identity(*base.architectures),
        "dataset_fingerprint": evaluation.key.dataset,
        **base.settings,
        "num_classes": evaluation.dataset.description.num_classes,
        "noise": type(noise).__name__,
        "generator": _GENERATOR,
        CLASSIFIER: evaluation.key.classifier,
        "folded": evaluation.voter.is_folded,
        "device": device_name(device),
        "torch": torch.__version__,
    }
    if evaluation.voter.is_fused and not spec.compile:
        settings["fused"] = True
    if device.type == "cuda" and spec.precision == "fp32":
        settings["tf32"] = torch.backends.cudnn.allow_tf32
    kernels, is_attacked = kernels_on(device), getattr(spec, "attack", None) is not None
    if kernels is not None and (isinstance(noise, GaussianNoise) or is_attacked):
        settings["noise_kernel"] = kernels.VERSION
    if isinstance(noise, RoundedGaussianNoise) and device.type == "cpu":
        # --sound certifies the executed program, whose rounding these may change.
        settings["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
        settings["threads"] = torch.get_num_threads()
    return settings


def _run(base: BaseClassifier, evaluation: Evaluation) -> dict[str, Any]:
    """A description of this process for the manifest; it does not decide the numbers."""
    spec = evaluation.spec
    return {
        "checkpoint": base.name,
        **({} if spec.denoiser is None else {DENOISER: str(spec.denoiser)}),
        "skip": spec.skip,
        "max": spec.limit,
        "image_shape": list(evaluation.dataset.description.image_shape),
        "torch_threads": torch.get_num_threads(),
        "device": device_name(evaluation.device),
        **provenance(spec.command),
    }


def recorded_setting(spec: EvaluationSpec, log: Path | None, setting: str) -> Any:
    """A setting that the log to be continued or one of its shards records; None if none does."""
    if log is None or spec.existing != "resume":
        return None
    paths = (log, *shards_of(log))
    recorded = (recorded_settings(path).get(setting) for path in paths if path.is_file())
    return next((value for value in recorded if value is not None), None)


def _check_classifier(evaluation: Evaluation, sound: bool) -> None:
    """UserError if ``sound``, else a warning, where logits depend on the process or on the other
    images of a batch.
    """
    _agree_on_logits(evaluation, sound)
    if not len(evaluation.indices):
        return
    if evaluation.voter.integers is not None:
        evaluation.check_integers(evaluation.counter())
        return
    if evaluation.device.type == "cpu" and not sound:
        return  # a CPU's kernels pass this check, and several passes of a large network take long
    first = evaluation.indices[0]
    image, _ = evaluation.dataset[first]
    evaluation.check_image(first, image)
    stream = evaluation.stream(first, Purpose.SELF_CHECK)
    try:
        check_repeatable(evaluation.counter(), image, stream)
    except UserError as error:
        if sound or isinstance(error, NonFiniteError):
            raise
        warn(f"{error}; a log may then depend on how its draws were packed")
