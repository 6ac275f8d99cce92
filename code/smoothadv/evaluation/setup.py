"""Prepares an evaluation: its model, its images, its identity, and the engine that votes.

The identity is all that decides the numbers in a log; a log is continued only with an equal one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from smoothadv.base.cpus import MOST_THREADS
from smoothadv.base.devices import (
    LargestTensor,
    default_device,
    device_name,
    device_of_process,
)
from smoothadv.base.distributed import Processes, join_processes
from smoothadv.base.errors import NonFiniteError, UserError, counted, first_line, warn
from smoothadv.base.files import digest
from smoothadv.base.progress import warn_of_hours
from smoothadv.base.provenance import provenance
from smoothadv.checkpoints.hub import pinned
from smoothadv.datasets import ImageDataset
from smoothadv.datasets.images import changing_image
from smoothadv.evaluation.model import BaseClassifier, classifier_digest, load_model
from smoothadv.evaluation.specs import EvaluationSpec
from smoothadv.noise import (
    GaussianNoise,
    Noise,
    NoiseKey,
    Purpose,
    RoundedGaussianNoise,
    kernels_on,
)
from smoothadv.records import logs as records
from smoothadv.records.logs import CLASSIFIER, DENOISER, LOGITS, shards_of
from smoothadv.statistics.prediction import least_draws
from smoothadv.voting.classifier import (
    CompiledClassifier,
    VotingClassifier,
    default_batch,
    make_deterministic,
    optimized_for_inference,
)
from smoothadv.voting.counter import Poll, VoteCounter, check_exact, check_repeatable
from smoothadv.voting.stages import StagedCounter, StagedPoll

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

    ``classifier`` is the base classifier as trained, ``voter`` the form that votes, ``victim`` the
    form that is attacked. ``noise`` makes the noise of each image, keyed by ``key``; ``indices``
    select the images to evaluate. ``settings`` decide the numbers in the log, ``run_record`` is
    what the manifest says of this process. ``processes`` share the work. ``digests`` are those of
    the logits, by batch, as far as they were computed.

    Of a cascade, ``stages`` are the evaluations of its stages, and last that of its router, if it
    has one; the classifier, its forms and the noise are those of the last stage.
    """

    spec: EvaluationSpec
    log: Path | None
    classifier: torch.nn.Module
    voter: VotingClassifier
    victim: VotingClassifier
    noise: Noise
    key: NoiseKey
    dataset: ImageDataset
    indices: Sequence[int]
    device: torch.device
    batch: int
    settings: dict[str, Any]
    run_record: dict[str, Any]
    processes: Processes
    digests: dict[int, str | None] = field(default_factory=dict)
    stages: tuple[Evaluation, ...] = ()

    @property
    def parts(self) -> tuple[Evaluation, ...]:
        """The evaluations of single classifiers: this one, or those of the stages."""
        return self.stages or (self,)

    @property
    def attacked(self) -> Any:
        """The model that an attack gets; of a cascade, those of its stages."""
        return [stage.victim for stage in self.stages] or self.victim

    def poll(
        self, index: int, image: torch.Tensor, voting: Any, purpose: int = Purpose.VOTES
    ) -> Any:
        """A poll, for ``counter``, of an image [C, H, W] with this index, with new streams."""
        streams = tuple(one.noise.stream(index, self.device, purpose) for one in self.parts)
        if self.stages:
            return StagedPoll(image, streams, voting)
        return Poll(image, streams[0], voting)

    def counter(self, batch: int | None = None, consensus: bool = True) -> Any:
        """A new ``VoteCounter`` of ``voter.scores``, in batches of this size (None: the usual
        one); of a cascade, a ``StagedCounter``.
        """
        if self.stages:
            return StagedCounter([stage.counter(batch, consensus) for stage in self.stages])
        return VoteCounter(
            partial(self.voter.scores, consensus=consensus),
            self.dataset.description.num_classes,
            batch or self.batch,
            self.device,
            keep_batch=self.noise.is_sound and self.voter.integers is None,
            dtype=self.voter.dtype,
        )

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

    def logits_digest(self, batch: int) -> str | None:
        """As ``VoteCounter.logits_digest``, of all members of ``voter``; None if memory is too
        small for the batch.

        Of a network of integers it is that of its probe, whatever the batch.
        """
        if batch not in self.digests:
            self.digests[batch] = self._computed_digest(batch)
        return self.digests[batch]

    def _computed_digest(self, batch: int) -> str | None:
        if self.stages:
            digests = [stage.logits_digest(batch) for stage in self.stages]
            return None if None in digests else digest([" ".join(map(str, digests))])
        if self.device.type == "cpu" and self.spec.batch is not None:
            self._check_memory(batch)
        if self.voter.integers is not None:
            return self.voter.integers.probe
        counter = self.counter(batch, consensus=False)
        found = counter.logits_digest(self.dataset.description.image_shape)
        return found if counter.batch == batch else None

    @torch.inference_mode()
    def _check_memory(self, batch: int) -> None:
        """UserError where a batch needs more memory than this machine has: many systems end such a
        process without a word.
        """
        image = torch.zeros(1, *self.dataset.description.image_shape)
        with LargestTensor() as largest:
            self.victim.scores(image)
        # Of all that a pass holds at once, this is the least.
        each = self.voter.dtype.itemsize * (image.numel() + largest.elements)
        most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if batch * each > most:
            raise UserError(
                f"--batch {batch}: a pass needs at least {batch * each / 2**30:.1f} GiB of memory, "
                f"there are {most / 2**30:.1f}: give a smaller one, below {most // each + 1}"
            )

    def continuing(self, log: Path | None) -> Evaluation:
        """The same evaluation for ``log``, with the batch with which it was begun, if it was.

        Its digest of the logits is None until ``probed``: no pass is made for other settings.
        """
        recorded = settings_to_continue(self.spec, log)
        images = 0 if self.noise.is_sound else len(self.indices)
        batch = _batch_of(self.spec, recorded, images) or self.batch
        settings = {**self.settings, "batch": batch, LOGITS: None}
        # The gradients of an attack are float32.
        is_attacked = getattr(self.spec, "attack", None) is not None
        # A network of integers has the same votes on all machines.
        are_integers = all(one.voter.integers is not None for one in self.parts)
        if self.noise.is_sound and are_integers and not is_attacked:
            settings = {name: value for name, value in settings.items() if name not in _MACHINE}
        return replace(self, log=log, batch=batch, settings=settings)

    def probed(self) -> Evaluation:
        """The same evaluation with the digest of its logits; UserError with --sound, else a
        warning, where logits depend on the process or on the other images of a batch.
        """
        is_new = self.batch not in self.digests
        found = {LOGITS: self.logits_digest(self.batch)}
        for one in self.parts if is_new else ():
            _check_classifier(one)
        settings, run_record = {**self.settings, **found}, {**self.run_record, **found}
        return replace(self, settings=settings, run_record=run_record)


def warn_of_few_draws(spec: EvaluationSpec, top_k: int = 1) -> None:
    """Warn where the draws are so few that PREDICT always abstains."""
    least = least_draws(spec.alpha, top_k)
    if spec.n < least:
        warn(
            f"--N {spec.n} can decide nothing at --alpha {spec.alpha:g}, every image will "
            f"abstain: at least --N {least} is needed"
        )


def prepare(spec: EvaluationSpec, log: Path | None, sound: bool = False) -> Evaluation:
    """Load all that an evaluation needs; UserError where model, images and settings do not fit
    together.

    ``log`` is the log to be written (None: none): if it exists already, its batch is used again.
    ``sound`` as in ``CertifySpec``.
    """
    recorded, processes = settings_to_continue(spec, log), join_processes()
    device = _configured_device(spec, sound, recorded, processes)
    spec, dataset, base = load_model(spec)
    doubts = dataset.description.doubts()
    if (index := changing_image(dataset)) is not None:
        raise UserError(
            f"image {index} of '{dataset.description.name}' is another one each time it is read: "
            "leave random crops, mirror images and noise out of the Dataset"
        )
    processes, indices = processes.connect(), spec.chosen_indices(len(dataset))
    if processes.is_first:
        each = spec.n + getattr(spec, "n0", 0)
        if (attack := getattr(spec, "attack", None)) is not None:
            repeats = spec.num_noise_vec * spec.restarts  # type: ignore[attr-defined]
            each += attack.num_steps * repeats
        work = f"{counted(len(indices), 'image')}, each {counted(each, 'time')} with noise"
        warn_of_hours(work, each * len(indices))
        for doubt in (*base.doubts, *doubts, *_few_classes(spec, dataset, indices)):
            warn(doubt)
    key = NoiseKey(
        classifier_digest(base.module, {**base.settings, **spec.plugins(*base.architectures)}),
        dataset.fingerprint(),
        spec.sigma,
        spec.seed,
    )
    if getattr(spec, "fast", False):
        spec = _fast(spec, base, dataset, device, recorded, processes)
    noise = (RoundedGaussianNoise if sound else GaussianNoise)(spec.sigma, spec.seed, key=key)
    voter, victim = _forms(spec, base, dataset, device, processes.is_first)
    batch = _batch_of(spec, recorded, 0 if sound else len(indices))
    if batch is None:
        shape, is_shard = dataset.description.image_shape, spec.shard is not None
        batch = default_batch(voter, shape, device, of_total=is_shard, noise=noise)
    if spec.compile:
        voter = CompiledClassifier(voter)
    evaluation = Evaluation(
        spec=spec,
        log=log,
        classifier=base.module,
        voter=voter,
        victim=victim,
        noise=noise,
        key=key,
        dataset=dataset,
        indices=indices,
        device=device,
        batch=processes.received(batch),
        settings={},
        run_record={},
        processes=processes,
    )
    settings, run_record = _record(base, evaluation)
    return replace(evaluation, settings=settings, run_record=run_record).continuing(log)


def _batch_of(spec: EvaluationSpec, recorded: dict[str, Any], images: int) -> int | None:
    """The batch that is asked for, but no more than all draws of these images (0: any number), or
    else that of the log to be continued; None if neither says one.

    A log whose batch was cut for fewer images keeps that one.
    """
    asked, before = spec.batch, recorded.get("batch")
    each = recorded.get("N", spec.n) + recorded.get("N0", getattr(spec, "n0", 0))
    was_cut = bool(before and asked and before < asked) and before == _room(before // each * each)
    if was_cut or asked in (None, before):
        return before
    return min(asked, _room(images * each)) if images else asked


def _room(draws: int) -> int:
    """The rows of a batch with room for so many draws: kernels like multiples of 64."""
    return -(-draws // 64) * 64


def _few_classes(spec: EvaluationSpec, dataset: ImageDataset, indices: range) -> list[str]:
    """A warning where --max takes images of less than half of the classes that it could."""
    labels = getattr(dataset, "labels", None)
    if labels is None or spec.limit is None or not indices:
        return []
    labels = torch.as_tensor(labels).cpu()
    there, taken = (len(some.unique()) for some in (labels, labels[[*indices]]))
    if 2 * taken >= min(there, len(indices)):
        return []
    return [
        f"--max takes {counted(len(indices), 'image')} of {taken} of {counted(there, 'class')}: "
        f"--skip {len(dataset) // len(indices)} takes as many from the whole dataset"
    ]


def _configured_device(
    spec: EvaluationSpec,
    sound: bool,
    recorded: dict[str, Any],
    processes: Processes,
) -> torch.device:
    """The device of an evaluation, once PyTorch is set as it and the log ``recorded`` need;
    UserError where it cannot do what is asked for.
    """
    if processes.size > 1 and spec.shard is not None:
        raise UserError(
            "--shard is not read under torchrun, which shares the examples out by itself: leave it "
            "out"
        )
    if sound:
        make_deterministic()
    # A setting of the log, which nobody needs to repeat.
    threads = recorded.get("threads")
    if threads is not None and threads <= MOST_THREADS and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads)
    if getattr(spec, "attack", None) is not None:  # before the digest of the logits
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    device = device_of_process(spec.device or default_device(), processes.local_rank)
    if sound and spec.compile and device.type != "cpu":
        raise UserError(
            "--sound with --compile is for the CPU: elsewhere the compiler chooses kernels by speed"
        )
    return device


def _fast(
    spec: Any,
    base: BaseClassifier,
    dataset: ImageDataset,
    device: torch.device,
    recorded: dict[str, Any],
    processes: Processes,
) -> Any:
    """The spec with what --fast chooses: that of the log to be continued, if there is one."""
    chosen = {"precision": recorded.get("precision"), "compile": recorded.get("compiled")}
    draws = len(spec.chosen_indices(len(dataset))) * (spec.n0 + spec.n)
    if None in chosen.values() and draws:
        from smoothadv.evaluation.fastest import fastest

        if processes.is_first:
            chosen = fastest(spec, base.module, dataset[0][0], device, draws)
        chosen = processes.received(chosen)
    known = {name: value for name, value in chosen.items() if value is not None}
    return replace(spec, fast=False, **known)


def _forms(
    spec: EvaluationSpec,
    base: BaseClassifier,
    dataset: ImageDataset,
    device: torch.device,
    warns: bool,
) -> tuple[VotingClassifier, VotingClassifier]:
    """The forms of a classifier, which is moved to the device, that vote and that are attacked."""
    classifier = base.module.to(device)
    example = dataset[0][0] if len(dataset) else None
    voter = optimized_for_inference(classifier, device, example, spec.precision)
    if example is not None and "checkpoint_sha256" not in base.settings:
        _check_module(voter, example, base.name or type(spec.model).__name__, warns)
    if spec.compile and warns:
        print("compiling the classifier first, which may take a minute", file=sys.stderr)
    if spec.precision != "fp16":
        return voter, voter
    # The gradients of confident predictions underflow in fp16.
    return voter, optimized_for_inference(classifier, device, example)


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


def _record(base: BaseClassifier, evaluation: Evaluation) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings that decide the numbers, to which ``continuing`` adds the batch and the logits;
    and what a manifest says of this process besides.
    """
    spec, device, noise = evaluation.spec, evaluation.device, evaluation.noise
    description = evaluation.dataset.description
    settings = {
        **spec.identity(*base.architectures),
        "dataset_fingerprint": evaluation.key.dataset,
        **base.settings,
        "num_classes": description.num_classes,
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
    if kernels is not None and (not noise.is_sound or is_attacked):
        settings["noise_kernel"] = kernels.VERSION
    if noise.is_sound and device.type == "cpu":
        # --sound certifies the executed program, whose rounding these may change.
        settings["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
        settings["threads"] = torch.get_num_threads()
    run = {
        "checkpoint": base.name,
        **({} if spec.denoiser is None else {DENOISER: pinned(spec.denoiser)}),
        "skip": spec.skip,
        "max": spec.limit,
        "image_shape": list(description.image_shape),
        "torch_threads": torch.get_num_threads(),
        "device": device_name(device),
        **provenance(spec.command),
    }
    return settings, run


def settings_to_continue(spec: EvaluationSpec, log: Path | None) -> dict[str, Any]:
    """The settings that the log to be continued, or else one of its shards, records; {} if none."""
    settings: dict[str, Any] = {}
    if log is not None and spec.existing == "resume":
        for path in (log, *shards_of(log)):
            settings = {**(records.recorded_settings(path) if path.is_file() else {}), **settings}
    return settings


def _check_classifier(evaluation: Evaluation) -> None:
    found, processes = evaluation.logits_digest(evaluation.batch), evaluation.processes
    sound = evaluation.noise.is_sound
    if processes.received(found) != found:
        difference = (
            f"process {processes.rank} rounds the logits differently than process 0: {LOGITS} is "
            f"{found!r}"
        )
        if sound:
            raise UserError(
                f"{difference}; --sound needs processors and libraries that compute the same"
            )
        warn(f"{difference}; the manifest has the digest of each process")
    if not len(evaluation.indices):
        return
    if evaluation.voter.integers is not None:
        evaluation.voter.use_fast_form(partial(check_exact, evaluation.counter()))
        return
    if evaluation.device.type == "cpu" and not sound:
        return  # a CPU's kernels pass this check, and several passes of a large network take long
    first = evaluation.indices[0]
    image, _ = evaluation.dataset[first]
    evaluation.check_image(first, image)
    stream = evaluation.noise.stream(first, evaluation.device, Purpose.SELF_CHECK)
    try:
        check_repeatable(evaluation.counter(), image, stream)
    except UserError as error:
        if sound or isinstance(error, NonFiniteError):
            raise
        warn(f"{error}; a log may then depend on how its draws were packed")
