"""Loads the classifier and the images of a request, and collects all settings that decide the
numbers in a log.
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
from smoothadv.checkpoints import read_members
from smoothadv.datasets import DatasetDescription, ImageDataset, get_dataset
from smoothadv.evaluation.classifiers import (
    BaseClassifier,
    base_classifier,
    classifier_digest,
    with_denoiser,
)
from smoothadv.evaluation.named_networks import named_network
from smoothadv.evaluation.shards import shards_of
from smoothadv.evaluation.specs import AttackPlan, EvaluationRequest, select_examples
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
# What a log of a network of integers with --sound does not record: its votes are the same on all
# machines.
_OF_MACHINE = (
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
# The setting of logs whose Gaussian noise a kernel rounded: the version of Triton. Others have the
# noise of torch.
_KERNEL = "noise_kernel"


@dataclass(frozen=True)
class SmoothingJob:
    """All that a ``request`` needs for its log ``log``, loaded.

    ``classifier`` is the base classifier as trained, ``voter`` the form that votes, ``attacked``
    the form that is attacked. ``noise`` makes the noise of each image, keyed by ``key``;
    ``indices`` are those of the images to evaluate. ``settings`` decide the numbers in the log,
    ``run`` describes this process. ``processes`` share the work. Without a ``log`` the rows stay in
    memory.
    """

    request: EvaluationRequest
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
        """A new counter of ``voter.scores``, in batches of this size (None: that of the job)."""
        scores, classes = (
            partial(self.voter.scores, consensus=consensus),
            self.dataset.description.num_classes,
        )
        keep_batch = isinstance(self.noise, RoundedGaussianNoise) and not self.is_exact
        dtype = self.voter.dtype
        return VoteCounter(
            scores, classes, batch or self.batch, self.device, keep_batch=keep_batch, dtype=dtype
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
        """Whether votes are the same on all machines, in all batches: those of integers with noise
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

    def for_log(self, log: Path | None) -> SmoothingJob:
        """The same job for ``log``: with the batch with which that log was begun, where it was."""
        batch = self.request.batch or recorded_number(self.request, log, "batch") or self.batch
        digest = self.logits_digest(batch)
        settings = {**self.settings, "batch": batch, LOGITS: digest}
        if (
            self.is_exact and getattr(self.request, "attack", None) is None
        ):  # the gradients of an attack are float32
            settings = {name: value for name, value in settings.items() if name not in _OF_MACHINE}
        run = {**self.run, LOGITS: digest}
        return replace(self, log=log, batch=batch, settings=settings, run=run)


def noise_kind(sound: bool) -> type[GaussianNoise] | type[RoundedGaussianNoise]:
    """The noise of a smoothing, with --sound or without."""
    return RoundedGaussianNoise if sound else GaussianNoise


def warn_of_few_draws(request: EvaluationRequest, top_k: int = 1) -> None:
    """Warn where the draws are so few that PREDICT always abstains."""
    least = least_draws(request.alpha, top_k)
    if request.n < least:
        warn(
            f"--N {request.n} can decide nothing at --alpha {request.alpha:g}, every image will "
            f"abstain: at least --N {least} is needed"
        )


def _warn_of_hours(request: EvaluationRequest, images: int) -> None:
    plan: AttackPlan | None = getattr(request, "attack", None)
    each = request.n + getattr(request, "n0", 0)
    each += 0 if plan is None else plan.attack.num_steps * plan.num_noise_vec * plan.restarts
    warn_of_hours(f"{images:,} images, each {each:,} times with noise", images * each)


def check_top_k(top_k: int, description: DatasetDescription) -> None:
    """UsageError unless there are more classes than ``top_k``: any class is among the k most
    probable of k.
    """
    if top_k >= max(2, description.num_classes):
        raise UsageError(
            f"--top-k {top_k}: give a number below that of the classes, {description.num_classes}"
        )


def prepare(request: EvaluationRequest, log: Path | None, sound: bool = False) -> SmoothingJob:
    """Load all that a request needs; UserError where classifier, images and options do not fit
    together.

    ``log`` is the log to be written (None: none): if it exists already, its batch is used again.
    ``sound`` as in ``CertifyRequest``.
    """
    if sound:
        make_deterministic()
    threads = recorded_number(
        request, log, "threads"
    )  # a setting of the log, which nobody needs to repeat
    if threads is not None and threads <= MOST_THREADS and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads)
    if getattr(request, "attack", None) is not None:  # before the digest of the logits
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    # First, since reading or downloading images takes longer.
    named, given = named_network(request), request.classifier
    if named:
        request, notes = named.prepared(request)
    else:
        source, notes = given if isinstance(given, torch.nn.Module) else read_members(given), []
    images = request.images
    dataset = (
        get_dataset(images, request.split, request.data_dir) if isinstance(images, str) else images
    )
    if named:
        dataset = named.relabelled(dataset)
        base = named.base(dataset.description)
    else:
        base = base_classifier(source, dataset.description, request.input_layer)
    if request.denoiser is not None:
        base = with_denoiser(base, str(request.denoiser), dataset.description, request.sigma)
    processes = join_processes().connect()
    if processes.size > 1 and request.shard is not None:
        raise UserError(
            "--shard is not read under torchrun, which shares the examples out by itself: leave it "
            "out"
        )
    is_first = processes.is_first
    device = device_of_process(
        request.device or default_device(), processes.local_rank if processes.size > 1 else None
    )
    if (recorded := _recorded(request, log, "device")) not in (None, device_name(device)):
        # whose batch may not fit into memory here
        difference = f"device was {recorded!r}, now {device_name(device)!r}"
        raise UserError(
            f"cannot resume {log} with other settings: {difference}; --overwrite starts anew"
        )
    fingerprint = dataset.fingerprint()
    digest = classifier_digest(
        base.module, {**base.settings, **request.plugins(*base.architectures)}
    )
    key = NoiseKey(digest, fingerprint, request.sigma, request.seed)
    classifier = base.module.to(device)
    if is_first:
        for note in notes:
            warn(note)
        _warn_of_hours(request, len(select_examples(len(dataset), request.skip, request.maximum)))
        base.warn_about_mismatch(
            request.images if isinstance(request.images, str) else None, request.sigma
        )
    example = dataset[0][0] if len(dataset) else None
    voter = optimized_for_inference(classifier, device, example, request.precision)
    if example is not None and base.source is None:
        _check_module(voter, example, base.name or type(given).__name__, is_first)
    noise = noise_kind(sound)(request.sigma, request.seed, key=key)
    batch = request.batch or recorded_number(request, log, "batch")
    if batch is None:
        shape, is_shard = dataset.description.image_shape, request.shard is not None
        batch = default_batch(voter, shape, device, of_total=is_shard, noise=noise)
    # The gradients of confident predictions underflow in fp16.
    attacked = (
        optimized_for_inference(classifier, device, example)
        if request.precision == "fp16"
        else voter
    )
    if request.compile:
        if sound and device.type != "cpu":
            raise UserError(
                "--sound with --compile is for the CPU: elsewhere the compiler chooses kernels by "
                "speed"
            )
        if is_first:
            print("compiling the classifier first, which may take a minute", file=sys.stderr)
    batch = processes.received(batch)
    job = SmoothingJob(
        request=request,
        log=log,
        classifier=classifier,
        voter=CompiledClassifier(voter) if request.compile else voter,
        attacked=attacked,
        noise=noise,
        key=key,
        dataset=dataset,
        indices=select_examples(len(dataset), request.skip, request.maximum),
        device=device,
        batch=batch,
        settings={},
        run={},
        processes=processes,
    )
    job = replace(job, settings=_settings(base, job), run=_run(base, job)).for_log(log)
    _agree_on_logits(job, sound)
    if len(job.indices):
        _check_classifier(job, sound)
    return job


def _agree_on_logits(job: SmoothingJob, sound: bool) -> None:
    """UserError if ``sound``, else a warning, where this process's logits are not those of
    torchrun's first process.
    """
    digest = job.run[LOGITS]
    if job.processes.received(digest) == digest:
        return
    difference = (
        f"process {job.processes.rank} rounds the logits differently than process 0: {LOGITS} is "
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


def _settings(base: BaseClassifier, job: SmoothingJob) -> dict[str, Any]:
    """All settings that decide the numbers, but for those of ``for_log``: logs are continued only
    with equal ones.
    """
    request, device = job.request, job.device
    settings = {
        **request.stated_settings(*base.architectures),
        "dataset_fingerprint": job.key.dataset,
        **base.settings,
        "num_classes": job.dataset.description.num_classes,
        "noise": type(job.noise).__name__,
        "generator": _GENERATOR,
        CLASSIFIER: job.key.classifier,
        "folded": job.voter.is_folded,
        "device": device_name(device),
        "torch": torch.__version__,
    }
    if job.voter.is_fused and not request.compile:
        settings["fused"] = True
    if device.type == "cuda" and request.precision == "fp32":
        settings["tf32"] = torch.backends.cudnn.allow_tf32
    kernels = kernels_on(device)
    if kernels is not None and (
        isinstance(job.noise, GaussianNoise) or getattr(request, "attack", None) is not None
    ):
        settings[_KERNEL] = kernels.VERSION
    if isinstance(job.noise, RoundedGaussianNoise) and device.type == "cpu":
        # --sound certifies the executed program: what may change its rounding is part of the
        # settings.
        settings["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
        settings["threads"] = torch.get_num_threads()
    return settings


def _run(base: BaseClassifier, job: SmoothingJob) -> dict[str, Any]:
    """A description of this process for the manifest; it does not decide the numbers."""
    return {
        "checkpoint": base.name,
        **({} if job.request.denoiser is None else {DENOISER: str(job.request.denoiser)}),
        "skip": job.request.skip,
        "max": job.request.maximum,
        "image_shape": list(job.dataset.description.image_shape),
        "torch_threads": torch.get_num_threads(),
        "device": device_name(job.device),
        **provenance(job.request.command),
    }


def recorded_number(request: EvaluationRequest, log: Path | None, setting: str) -> int | None:
    """A setting, a whole number >= 1, that the log to be continued or one of its shards records;
    None if none does.
    """
    return _recorded(request, log, setting)


def _recorded(request: EvaluationRequest, log: Path | None, setting: str) -> Any:
    """A setting that the log to be continued or one of its shards records; None if none does."""
    if log is None or request.existing != "resume":
        return None
    paths = log, *shards_of(log)
    recorded = (recorded_settings(path).get(setting) for path in paths if path.is_file())
    return next((value for value in recorded if value is not None), None)


def _check_classifier(job: SmoothingJob, sound: bool) -> None:
    """Spot check that logits depend on one image only: UserError if ``sound``, else a warning,
    where they do not.
    """
    if job.device.type == "cpu" and not sound and job.voter.integers is None:
        return  # a CPU's kernels pass this check, and several passes of a large network take long
    if job.voter.integers is not None:
        job.check_integers(job.counter())
        return
    image, _ = job.dataset[job.indices[0]]
    job.check_image(job.indices[0], image)
    try:
        check_repeatable(job.counter(), image, job.stream(job.indices[0], Purpose.SELF_CHECK))
    except UserError as error:
        if sound or isinstance(error, NonFiniteError):
            raise
        warn(f"{error}; a log may then depend on how its draws were packed")
