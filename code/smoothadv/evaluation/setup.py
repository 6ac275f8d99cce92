"""Prepares an evaluation: its model, its images, its identity, and the engine that votes.

The identity is all that decides the numbers in a log; a log is continued only with an equal one.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from smoothadv.base.cpus import MOST_THREADS
from smoothadv.base.devices import LargestTensor, device_name, device_of_run, uses_tf32
from smoothadv.base.distributed import Processes, is_launched
from smoothadv.base.errors import NonFiniteError, UserError, counted, warn
from smoothadv.base.files import digest
from smoothadv.base.progress import warn_of_hours
from smoothadv.base.provenance import provenance
from smoothadv.datasets import ImageDataset, labels_of
from smoothadv.evaluation.specs import AttackedSpec, CertifySpec, EvaluationSpec
from smoothadv.evaluation.voters import (
    Loaded,
    Voter,
    joined,
    load_models,
    noise_keys,
    voter_of,
)
from smoothadv.models.contents import pinned
from smoothadv.models.load import BaseClassifier
from smoothadv.noise import NoiseStream, Purpose, kernels_on
from smoothadv.records.logs import (
    CLASSIFIER,
    DENOISER,
    IMAGE_SET,
    LOGITS,
    record_of,
    recorded_settings,
    shards_of,
)
from smoothadv.statistics.prediction import least_draws
from smoothadv.voting.classifier import (
    CompiledClassifier,
    default_batch,
    make_deterministic,
)
from smoothadv.voting.counter import VoteCounter, check_integers, check_repeatable

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

    ``voters`` are the classifier, the stages of a cascade, or the stages of a router and last the
    router. ``indices`` select the images to evaluate. ``settings`` decide the numbers in the log,
    ``run_record`` is what the manifest says of this process. ``processes`` share the work.
    ``digests`` are those of the logits, by batch, as far as they were computed.
    """

    spec: EvaluationSpec
    log: Path | None
    voters: tuple[Voter, ...]
    dataset: ImageDataset
    indices: Sequence[int]
    device: torch.device
    batch: int
    settings: dict[str, Any]
    run_record: dict[str, Any]
    processes: Processes
    digests: dict[int, str | None] = field(default_factory=dict)

    @property
    def last(self) -> Voter:
        """The classifier, or the last stage."""
        return self.voters[-1 if self.spec.router is None else -2]

    @property
    def is_sound(self) -> bool:
        """Whether certificates hold for the executed arithmetic."""
        return self.voters[0].noise.is_sound

    @property
    def are_integers(self) -> bool:
        """Whether all classifiers are networks of integers."""
        return all(voter.form.integers is not None for voter in self.voters)

    def streams(
        self, index: int, image: torch.Tensor, purpose: int = Purpose.VOTES
    ) -> tuple[NoiseStream, ...]:
        """New streams of noise of each voter, for an image [C, H, W] with this index.

        UserError where the noise cannot be used for it: that of --sound needs images of 8 bits.
        """
        self.voters[0].noise.check_image(
            image,
            f"--sound certifies 8-bit images only: example {index} of {self.settings['dataset']}",
        )
        return tuple(voter.noise.stream(index, self.device, purpose) for voter in self.voters)

    def counter(self, batch: int | None = None, consensus: bool = True) -> VoteCounter:
        """A new counter of votes, in batches of this size (None: the usual one)."""
        return VoteCounter(
            [partial(voter.form.scores, consensus=consensus) for voter in self.voters],
            [voter.num_classes for voter in self.voters],
            batch or self.batch,
            self.device,
            keep_batch=self.is_sound and not self.are_integers,
            dtype=self.voters[0].form.dtype,
        )

    def logits_digest(self, batch: int) -> str | None:
        """As ``VoteCounter.logits_digest``, of all members of all voters; None if memory is too
        small for the batch.

        Of a network of integers it is that of its probe, whatever the batch.
        """
        if batch in self.digests:
            return self.digests[batch]
        if self.device.type == "cpu" and (self.spec.batch is not None or len(self.voters) > 1):
            self._check_memory(batch)
        counter, shape = self.counter(batch, consensus=False), self.dataset.description.image_shape
        digests = [
            counter.logits_digest(shape, stage)
            if voter.form.integers is None
            else voter.form.integers.probe
            for stage, voter in enumerate(self.voters)
        ]
        found = digests[0] if len(digests) == 1 else digest([" ".join(digests)])
        self.digests[batch] = found if counter.batch == batch else None
        return self.digests[batch]

    @torch.inference_mode()
    def _check_memory(self, batch: int) -> None:
        """UserError where a batch needs more memory than this machine has: many systems end such a
        process without a word.
        """
        image = torch.zeros(1, *self.dataset.description.image_shape)
        with LargestTensor() as largest:
            for voter in self.voters:
                voter.victim.scores(image)
        # Of all that a pass holds at once, this is the least.
        each = self.voters[0].form.dtype.itemsize * (image.numel() + largest.elements)
        most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if batch * each > most:
            raise UserError(
                f"--batch {batch}: a pass needs at least {batch * each / 2**30:.1f} GiB of memory, "
                f"there are {most / 2**30:.1f}: give a smaller one, below {most // each + 1}"
            )

    def continuing(self, log: Path | None) -> "Evaluation":
        """The same evaluation for ``log``, with the batch with which it was started, if it exists.

        Its digest of the logits is None until ``probed``, which runs the model: first, other
        settings of a log are refused.
        """
        batch = self.spec.batch or settings_to_continue(self.spec, log).get("batch") or self.batch
        settings = {**self.settings, "batch": batch, LOGITS: None}
        # A network of integers has the same votes on all machines; the gradients of an attack are
        # float32.
        if self.is_sound and self.are_integers and self.spec.attack is None:
            settings = {name: value for name, value in settings.items() if name not in _MACHINE}
        return replace(self, log=log, batch=batch, settings=settings)

    def probed(self) -> "Evaluation":
        """The same evaluation with the digest of its logits; UserError with --sound, else a
        warning, where logits depend on the process or on the other images of a batch.
        """
        if self.batch not in self.digests:
            _check_voters(self)
        found = {LOGITS: self.logits_digest(self.batch)}
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


def prepare(
    spec: EvaluationSpec,
    log: Path | None,
    sound: bool = False,
    against: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Load all that an evaluation needs; UserError where model, images and settings do not fit
    together.

    ``log`` is the log to be written (None: none): if it exists already, its device and its batch
    are used again. ``sound`` as in ``CertifySpec``. ``against`` are the settings of a log whose
    device is used where there is none to be continued.
    """
    recorded, processes = settings_to_continue(spec, log), Processes(is_launched())
    device = _configured_device(spec, log, sound, recorded or against or {}, processes)
    loaded = load_models(spec)
    own, dataset, base = loaded[0]
    spec = own if spec.stages is None else spec
    processes, indices = processes.connect(), spec.chosen_indices(dataset)
    if processes.is_first:
        _warn_of_doubts(spec, loaded, indices)
    if isinstance(spec, CertifySpec) and spec.fast:
        spec = _fast(spec, base, dataset, device, recorded, processes)
    classifier, keys = noise_keys(loaded)
    voters = [
        voter_of(spec, each, key, device, sound, processes.is_first)
        for each, key in zip(loaded, keys)
    ]
    batch = spec.batch or recorded.get("batch")
    if batch is None:
        batch = default_batch(
            voters[0].form,
            dataset.description.image_shape,
            device,
            of_total=spec.shard is not None,
            noise=voters[0].noise,
        )
    if spec.compile:
        voters = [replace(voter, form=CompiledClassifier(voter.form)) for voter in voters]
    evaluation = Evaluation(
        spec=spec,
        log=log,
        voters=tuple(voters),
        dataset=dataset,
        indices=indices,
        device=device,
        batch=processes.received(batch),
        settings=_settings(spec, classifier, voters, dataset, indices, device),
        run_record=_run_record(spec, voters, dataset, device),
        processes=processes,
    )
    return evaluation.continuing(log)


def _warn_of_doubts(spec: EvaluationSpec, loaded: Sequence[Loaded], indices: Sequence[int]) -> None:
    """Warn of many hours, of what is doubtful about models and images, and where --max or --images
    takes images of less than half of the classes that it could.
    """
    dataset, each = loaded[0][1], spec.most_voters * (spec.n0 + spec.n)
    if isinstance(spec, AttackedSpec) and spec.attack is not None:
        each += spec.attack.num_steps * spec.num_noise_vec * spec.restarts * len(spec.classifiers)
    work = f"{counted(len(indices), 'image')}, each {counted(each, 'time')} with noise"
    warn_of_hours(work, each * len(indices))
    doubts = [doubt for *_, base in loaded for doubt in base.doubts]
    for doubt in (*doubts, *dataset.description.doubts()):
        warn(doubt)
    chosen_by = "--max" * (spec.limit is not None) + "--images" * (spec.image_set is not None)
    if not chosen_by or not indices or getattr(dataset, "labels", None) is None:
        return
    there, taken = (len({*labels_of(dataset, some)}) for some in (range(len(dataset)), [*indices]))
    if 2 * taken < min(there, len(indices)):
        warn(
            f"{chosen_by} takes {counted(len(indices), 'image')} of "
            f"{taken} of {counted(there, 'class')}: --skip {len(dataset) // len(indices)} takes "
            "as many from the whole dataset"
        )


def _configured_device(
    spec: EvaluationSpec,
    log: Path | None,
    sound: bool,
    recorded: Mapping[str, Any],
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
    if spec.attack is not None:  # before the digest of the logits
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    called, *_ = spec.command or ("",)
    says = log is not None and not called.startswith("smoothadv.")  # a function of Python
    device = device_of_run(spec, recorded, processes, says)
    if sound and spec.compile and device.type != "cpu":
        raise UserError(
            "--sound with --compile is for the CPU: elsewhere the compiler chooses kernels by speed"
        )
    return device


def _fast(
    spec: CertifySpec,
    base: BaseClassifier,
    dataset: ImageDataset,
    device: torch.device,
    recorded: dict[str, Any],
    processes: Processes,
) -> CertifySpec:
    """The spec with what --fast chooses: that of the log to be continued, if there is one."""
    chosen = {"precision": recorded.get("precision"), "compile": recorded.get("compiled")}
    draws = len(spec.chosen_indices(dataset)) * (spec.n0 + spec.n)
    if None in chosen.values() and draws:
        from smoothadv.evaluation.fastest import fastest

        if processes.is_first:
            chosen = fastest(spec, base.module, dataset[0][0], device, draws)
        chosen = processes.received(chosen)
    known = {name: value for name, value in chosen.items() if value is not None}
    return replace(spec, fast=False, **known)


def _settings(
    spec: EvaluationSpec,
    classifier: str,
    voters: Sequence[Voter],
    dataset: ImageDataset,
    indices: Sequence[int],
    device: torch.device,
) -> dict[str, Any]:
    """The settings that decide the numbers, to which ``continuing`` adds the batch and the logits;
    ``classifier`` is the digest of all voters.
    """
    bases = [voter.base for voter in voters]
    settings = {
        **spec.identity(*[arch for base in bases for arch in base.architectures]),
        "dataset_fingerprint": voters[0].key.dataset,
        **joined([base.settings for base in bases]),
        "num_classes": dataset.description.num_classes,
        "noise": type(voters[0].noise).__name__,
        "generator": _GENERATOR,
        CLASSIFIER: classifier,
        "folded": all(voter.form.is_folded for voter in voters),
        "device": device_name(device),
        "torch": torch.__version__,
        **({IMAGE_SET: record_of(spec.image_set, indices)} if spec.image_set else {}),
    }
    if len(voters) > 1:
        settings["sigmas"] = [voter.key.sigma for voter in voters]
    if all(voter.form.is_fused for voter in voters) and not spec.compile:
        settings["fused"] = True
    if device.type == "cuda" and voters[0].victim.dtype == torch.float32:
        settings["tf32"] = uses_tf32(device)
    kernels, is_sound = kernels_on(device), voters[0].noise.is_sound
    if kernels is not None and (not is_sound or spec.attack is not None):
        settings["noise_kernel"] = kernels.VERSION
    if is_sound and device.type == "cpu":
        # --sound certifies the executed program, whose rounding these may change.
        settings["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
        settings["threads"] = torch.get_num_threads()
    return settings


def _run_record(
    spec: EvaluationSpec, voters: Sequence[Voter], dataset: ImageDataset, device: torch.device
) -> dict[str, Any]:
    """What a manifest says of this process besides the settings."""
    model = spec.model and str(spec.model)
    return {
        "checkpoint": voters[0].base.name if spec.stages is None else model,
        **({} if spec.denoiser is None else {DENOISER: pinned(spec.denoiser)}),
        "skip": spec.skip,
        "max": spec.limit,
        "image_shape": list(dataset.description.image_shape),
        "torch_threads": torch.get_num_threads(),
        "device": device_name(device),
        **provenance(spec.command),
    }


def settings_to_continue(spec: EvaluationSpec, log: Path | None) -> dict[str, Any]:
    """The settings that the log to be continued, or else one of its shards, records; {} if none."""
    settings: dict[str, Any] = {}
    if log is not None and spec.existing == "resume":
        for path in (log, *shards_of(log)):
            settings = {**(recorded_settings(path) if path.is_file() else {}), **settings}
    return settings


def _check_voters(evaluation: Evaluation) -> None:
    found, processes = evaluation.logits_digest(evaluation.batch), evaluation.processes
    sound = evaluation.is_sound
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
    counter, first = evaluation.counter(), evaluation.indices[0]
    image, _ = evaluation.dataset[first]
    streams = evaluation.streams(first, image, Purpose.SELF_CHECK)
    for stage, voter in enumerate(evaluation.voters):
        voter.form.use_fast_form(partial(check_integers, counter, stage=stage))  # of integers
        if voter.form.integers is not None or (evaluation.device.type == "cpu" and not sound):
            continue  # a CPU's kernels pass this check, which takes long for a large network
        try:
            check_repeatable(counter, image, streams[stage], stage)
        except UserError as error:
            if sound or isinstance(error, NonFiniteError):
                raise
            warn(f"{error}; a log may then depend on how its draws were packed")
