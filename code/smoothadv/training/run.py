"""A training run: its epochs and steps, its checkpoints and its history."""

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import torch

from smoothadv.architectures.denoisers import resized
from smoothadv.base.distributed import Processes
from smoothadv.base.errors import NonFiniteError, Terminated, counted
from smoothadv.datasets import Batches, DatasetDescription, ImageDataset
from smoothadv.noise import Purpose, derive_generator
from smoothadv.objectives import DataPolicy
from smoothadv.records.logs import flat
from smoothadv.training.folder import RunFolder
from smoothadv.training.graphed import GraphedUpdate
from smoothadv.training.schedule import (
    Schedule,
    Step,
    has_cuda_graphs,
    optimizer_of,
    steps_of_epoch,
)
from smoothadv.training.spec import TrainSpec
from smoothadv.training.teacher import NoisyVotes, Teacher, VotingTeacher, for_label
from smoothadv.training.trackers import TRACKERS, TrainingProgress, rate_and_long_start
from smoothadv.training.update import COUNTS, NOT_EVALUATED, Address, Update, means
from smoothadv.voting.classifier import end_compiling, is_compiling

# Several processes agree on whether to go on only once in so many steps.
_STEPS_BETWEEN_DECISIONS = 10
# Decisions; any other is the number of a signal: to save and then stop.
_GO_ON, _SAVE = 0, -1
_SECONDS_OF_ONE_REQUEST = 1.0


@dataclass(frozen=True)
class TrainingSetup:
    """A specification with all that it names; ``started_from`` says in a sentence which weights the
    model has, if not new. The ``model`` is trained behind a frozen ``denoiser``, of which
    ``behind`` is the record, if there is one. ``routes`` are fields of a batch, [N, ...], of which
    a router learns.
    """

    spec: TrainSpec
    training: ImageDataset
    test: ImageDataset
    pseudo_labelled: ImageDataset | None
    schedule: Schedule
    processes: Processes
    device: torch.device
    description: DatasetDescription
    input_layer: str | None
    model: torch.nn.Module
    started_from: str | None
    teacher: Teacher | None = None
    denoiser: torch.nn.Module | None = None
    behind: dict[str, Any] | None = None
    routes: Mapping[str, torch.Tensor] = field(default_factory=dict)


class TrainingRun:
    """Trains the model of a setup in place, from the last checkpoint in ``folder`` if it is
    resumed.

    Saves a checkpoint after every epoch and every ``checkpoint_minutes``. All random numbers of an
    update are functions of (seed, epoch, step), so that a resumed run ends with the weights of an
    uninterrupted one on the same hardware. Several processes must be connected; the first one has
    entered ``folder`` and writes there.

    Between steps the state is the history, and the sums and the duration so far of the present
    epoch.
    """

    def __init__(self, setup: TrainingSetup, folder: RunFolder) -> None:
        self.setup, self.folder, self.processes = setup, folder, setup.processes
        self.spec, self.schedule, self.device = setup.spec, setup.schedule, setup.device
        self.objective, self.execution = setup.spec.objective, setup.spec.execution
        self.model = self.execution.prepare(setup.model, setup.device)
        self.optimizer = optimizer_of(setup.schedule, self.model, setup.device)
        self._restore()
        self.steps = len(self._steps_of(0))
        # An attack on so many images takes the memory of an update.
        self.images_at_a_time = setup.schedule.micro_batch or setup.schedule.batch
        self.teacher = setup.teacher
        if self.teacher is not None and self.objective.TEACHER == "votes":
            votes = self._noisy_votes(self.teacher.network, setup.spec.teacher_noise)
            self.teacher = VotingTeacher(self.teacher, votes, setup.spec.teacher_draws)
        self.update = self._update()
        self.last_save = time.monotonic()

    def _restore(self) -> None:
        """The state of the folder's checkpoint, in all processes; or that of a new run."""
        saved = self.processes.received(self.folder.saved) or {}
        self.folder.saved = None  # it may be large
        if saved:
            self.folder.restore(saved, self.model, self.optimizer)
        self.processes.copy_from_first([*self.model.state_dict().values()])
        self.history: list[dict[str, float]] = saved.get("history", [])
        self.first_step, self.seconds = saved.get("step", 0), saved.get("seconds", 0.0)
        weights = saved.get("image_weights")
        self.weights: np.ndarray | None = None if weights is None else weights.numpy()
        sums = [0.0] * (1 + len(COUNTS) + len(self.objective.TERMS))
        if self.processes.is_first:  # it continues from the sums over all processes
            sums = saved.get("sums", sums)
        self.sums = torch.tensor(sums, dtype=torch.float64, device=self.device)

    def _update(self) -> Update:
        """The update of the model, as a CUDA graph where there are such."""
        images = self.setup.training
        own, _ = self.processes.share(torch.arange(self.schedule.batch))
        denoiser = self.setup.denoiser
        update = Update(
            self.model if self.spec.resize is None else resized(self.model, self.spec.resize),
            self.objective,
            self.optimizer,
            self.execution,
            self.processes,
            self.device,
            example=torch.stack([images[index][0] for index in range(min(2, len(images)))]),
            images_at_a_time=min(len(own), self.schedule.micro_batch or len(own)),
            teacher=self.teacher,
            denoiser=denoiser and self.execution.prepare(denoiser, self.device),
            clip_gradients=self.schedule.clip_gradients,
            routes=self.setup.routes,
        )
        is_graph = self.execution.cuda_graph is not False and not self.execution.synchronized_norm
        # A graph keeps the weight decay that it was recorded with.
        is_graph = is_graph and self.schedule.weight_decay_end is None
        if is_graph and has_cuda_graphs(self.device):
            update.compute = GraphedUpdate(update)
        return update

    def run_epochs(
        self, report: Callable[[str], None], trackers: Sequence[str] = ()
    ) -> list[dict[str, float]]:
        """Train, shown by the TRACKERS of these names: one row of TRAINING_COLUMNS per epoch."""
        is_first, epochs, done = self.processes.is_first, self.schedule.epochs, len(self.history)
        self.report = report if is_first else _say_nothing
        if done >= epochs:
            self.report(f"already trained for {counted(done, 'epoch')}: nothing to do")
            return self.history
        is_resumed = bool(done or self.first_step)
        if is_resumed:
            step = f", step {self.first_step} of {self.steps}" if self.first_step else ""
            self.report(f"resuming after epoch {done} of {epochs}{step}")
        shown_by = []
        if is_first:
            self.folder.record_arguments()
            about = self.folder.path, flat(self.folder.recipe), is_resumed
            shown_by = [TRACKERS[name](*about) for name in dict.fromkeys(trackers)]
        per_epoch = sum(len(step.indices) for step in self._steps_of(done))
        before = int((done + self.first_step / self.steps) * per_epoch)
        images = epochs * per_epoch
        progress = TrainingProgress(images, before, epochs, self.report, not is_first, shown_by)
        with noted_signals() as self.signals, contextlib.closing(progress):
            progress.draw(self.history)
            for epoch in range(done, epochs):
                row, long_start = self._epoch(epoch, progress)
                self.history.append(row)
                self.sums, self.first_step, self.seconds = torch.zeros_like(self.sums), 0, 0.0
                self._save(None)
                progress.finish_epoch(row, long_start)
                if epoch + 1 < epochs:
                    _stop_by(self._decision())
        return self.history

    def _epoch(self, epoch: int, progress: TrainingProgress) -> tuple[dict[str, float], float]:
        """One epoch of updates, and the evaluation after it: a row of the history, and the seconds
        of a first update that was a long one.
        """
        start, policy = time.monotonic(), self.spec.policy
        if policy is not None and not self.first_step:
            self._choose_images(policy, epoch)
        ends, sizes = [time.monotonic()], list[int]()
        # The checkpoint has a learning rate, also where no step is left.
        self._set_rates(epoch, max(0, self.first_step - 1))
        for number, step, (images, labels) in self._batches(epoch):
            self._set_rates(epoch, number)
            weight = self.spec.unlabelled_weight if step.source else 1.0
            address = Address(self.spec.seed, epoch, number)
            self.sums += self.update(images, labels, step.indices, address, weight)
            ends.append(time.monotonic())
            sizes.append(len(step.indices))
            if progress.advance(len(step.indices)):
                self._require_finite(epoch, with_weights=False)
                progress.show(
                    epoch, self.objective.epsilon(epoch), means(self.sums.tolist()), self.history
                )
            self._save_within_epoch(epoch, number + 1, time.monotonic() - start)
        self._require_finite(epoch)
        seconds = self.seconds + time.monotonic() - start
        rate, long_start = rate_and_long_start(ends, sizes)
        averages = means(self.processes.total(self.sums).tolist(), self.objective.TERMS)
        row = {
            "epoch": epoch,
            "time": round(seconds, 3),
            "lr": self.schedule.learning_rate_at(epoch, 0, self.steps),
            "epsilon": self.objective.epsilon(epoch),
            "train_loss": round(averages["loss"], 6),
            "train_accuracy": round(averages["accuracy"], 6),
            "train_unattacked_accuracy": round(averages["unattacked_accuracy"], 6),
            **self._tested(epoch),
            "images_per_second": round(rate, 1),
            **{f"train_{name}": round(averages[name], 6) for name in self.objective.TERMS},
        }
        return row, long_start

    def _set_rates(self, epoch: int, step: int) -> None:
        rate = self.schedule.learning_rate_at(epoch, step, self.steps)
        decay = self.schedule.weight_decay_at(epoch, step, self.steps)
        for group in self.optimizer.param_groups:
            group["weight_decay"] = decay * group.get("decays", True)
            scaled = rate * group.get("lr_scale", 1.0)
            is_tensor = torch.is_tensor(group["lr"])
            group["lr"] = group["lr"].fill_(scaled) if is_tensor else scaled

    def _tested(self, epoch: int) -> dict[str, float]:
        """What the evaluation after an epoch finds, if there is one."""
        tests, schedule, images = self.spec.tests, self.schedule, self.setup.test
        if (epoch + 1) % tests.every and epoch + 1 < schedule.epochs:
            return NOT_EVALUATED
        self.processes.share_buffers(self.model)
        batch = min(schedule.batch, self.images_at_a_time * self.processes.size)
        address = Address(self.spec.seed, epoch, self.steps)
        tested = self.update.evaluate(images, tests.chosen(len(images)), batch, address)
        # Running statistics may be too large where weights are finite.
        if tested["test_images"] and math.isnan(tested["test_loss"]):
            raise self._not_finite("test loss", epoch)
        return tested

    def _steps_of(self, epoch: int) -> list[Step]:
        """The steps of an epoch, without a last batch of fewer images than there are processes."""
        sizes = len(self.setup.training), len(self.setup.pseudo_labelled or ())
        return steps_of_epoch(
            self.schedule, *sizes, self.spec.seed, epoch, self.processes.size, self.weights
        )

    def _choose_images(self, policy: DataPolicy, epoch: int) -> None:
        """Set the weights of the training images as the policy asks before this epoch."""
        if policy.drops_before(epoch):
            everything = np.arange(len(self.setup.training))
            teacher = self.setup.teacher if self.objective.TEACHER == "drops" else None
            self.weights = policy.kept(
                self._votes_for_labels(everything, policy.drop_draws, epoch, teacher)
            )
            dropped = len(everything) - int(self.weights.sum())
            self.report(
                f"from epoch {epoch + 1} on, {dropped} of {len(everything)} training images are "
                "left out"
            )
        elif epoch == policy.from_epoch:
            self.weights = np.ones(len(self.setup.training))
        if self.weights is not None and policy.weighs_before(epoch):
            kept = np.flatnonzero(self.weights)
            self.weights[kept] = policy.weights(
                self._votes_for_labels(kept, policy.resample_draws, epoch)
            )

    def _votes_for_labels(
        self, indices: np.ndarray, draws: int, epoch: int, teacher: Teacher | None = None
    ) -> np.ndarray:
        """How many of so many noisy copies of each training image [n] the teacher classifies
        correctly, or the present model: [n].
        """
        votes = self._noisy_votes(self.update.folded_uncompiled, self.objective.noise_sd)
        if teacher is not None:
            votes = self._noisy_votes(teacher.network, self.spec.teacher_noise)
        self.model.eval()
        self.processes.share_buffers(self.model)
        self.update.refresh_folded()
        key = (self.spec.seed, epoch, draws, Purpose.TRAINING_VOTES)
        is_alone = self.processes.size == 1  # several would have to agree to stop
        with self.execution.autocast(self.device):
            return votes.count(
                indices,
                derive_generator("cpu", *key).initial_seed(),
                partial(for_label, draws),
                doing=f"looking at {len(indices)} training images before epoch {epoch + 1}",
                check=lambda: _stop_by(self.signals[-1] if is_alone and self.signals else _GO_ON),
            )

    def _noisy_votes(self, network: torch.nn.Module, noise_sd: float) -> NoisyVotes:
        """Those of a network, in passes as large as an update's."""
        batch = self.images_at_a_time * self.objective.copies
        return NoisyVotes(
            network, self.setup.training, noise_sd, self.device, batch, self.processes
        )

    def _batches(self, epoch: int) -> Iterator[tuple[int, Step, tuple[torch.Tensor, torch.Tensor]]]:
        """The remaining steps, with their numbers and this process's images and labels."""
        to_do = self._steps_of(epoch)[self.first_step :]
        sources: list[Batches] = []
        for source, dataset in enumerate((self.setup.training, self.setup.pseudo_labelled)):
            generator = derive_generator("cpu", self.spec.seed, epoch, source, Purpose.AUGMENTATION)
            own = [step.indices for step in to_do if step.source == source]
            parts = [self.processes.share(indices)[0] for indices in own]
            if dataset is not None:
                sources.append(iter(dataset.training_batches(parts, self.device, generator)))
        for number, step in enumerate(to_do, start=self.first_step):
            yield number, step, next(sources[step.source])

    def _save_within_epoch(self, epoch: int, done: int, seconds: float) -> None:
        """Save, and perhaps stop, if it is time to: the first process decides for all."""
        is_between = (epoch * self.steps + done) % _STEPS_BETWEEN_DECISIONS and done < self.steps
        if self.processes.size > 1 and is_between:
            return
        decision = self._decision()
        if decision != _GO_ON:
            sums = self.processes.total(self.sums).tolist()
            self._require_finite(epoch)
            self._save({"step": done, "sums": sums, "seconds": self.seconds + seconds})
            _stop_by(decision)

    def _decision(self) -> int:
        """The first process's decision: to go on, to save, or to stop."""
        is_time = time.monotonic() - self.last_save >= 60 * self.execution.checkpoint_minutes
        return self.processes.received([_SAVE if is_time else _GO_ON, *self.signals][-1])

    def _save(self, within_epoch: dict[str, Any] | None) -> None:
        if self.processes.is_first:
            if isinstance(self.update.compute, GraphedUpdate) and self.update.compute.is_used:
                self.folder.runs[-1]["cuda_graph"] = True
            if self.teacher is not None:
                self.teacher.keep()
            self.folder.save(self.model, self.optimizer, self.history, within_epoch, self.weights)
        self.last_save = time.monotonic()

    def _require_finite(self, epoch: int, with_weights: bool = True) -> None:
        """NonFiniteError if the last updates broke the model: it must not replace a good
        checkpoint.
        """
        weights = self.model.state_dict().values() if with_weights else ()
        if not self.sums[0].isfinite():
            broken = "loss"
        elif not all(bool(value.isfinite().all()) for value in weights):
            broken = "weights"
        else:
            return
        raise self._not_finite(broken, epoch)

    def _not_finite(self, broken: str, epoch: int) -> NonFiniteError:
        saved = "nothing was saved yet"
        if self.folder.has_checkpoint:
            saved = f"the last good checkpoint is {self.folder.checkpoint}"
        return NonFiniteError(
            f"the {broken} stopped being finite in epoch {epoch + 1}: try a smaller --lr or more "
            f"--warmup epochs; {saved}"
        )


def _say_nothing(line: str) -> None:
    """What other processes than the first report."""


def _stop_by(decision: int) -> None:
    if decision not in (_GO_ON, _SAVE):
        raise Terminated if decision == signal.SIGTERM else KeyboardInterrupt


@contextlib.contextmanager
def noted_signals() -> Iterator[list[int]]:
    """A context in which Ctrl-C and SIGTERM are only added to a list; a second Ctrl-C, a second
    later, stops at once.

    So does either one while the compiler is at work, which may take minutes: it works in the first
    update after a checkpoint.
    """
    signals: list[int] = []
    process, before, first = os.getpid(), {}, math.inf

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if os.getpid() != process:
            return  # a forked worker that reads files: the training process ends it
        # The terminal sends Ctrl-C to all processes, and torchrun forwards it: two signals for one
        # request.
        is_another = time.monotonic() - first > _SECONDS_OF_ONE_REQUEST
        if is_another and number == signal.SIGINT == signals[-1]:
            raise KeyboardInterrupt
        signals.append(number)
        if len(signals) == 1:
            first = time.monotonic()
        if is_compiling(frame):
            _stop_by(number)
        if len(signals) == 1 and number == signal.SIGINT and sys.stderr.isatty():
            print("\nsaving after this step; Ctrl-C again stops at once", file=sys.stderr)

    # Only the main thread may set handlers.
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, note)
    try:
        yield signals
    except (KeyboardInterrupt, Terminated):
        end_compiling()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
