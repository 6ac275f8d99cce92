"""Epochs, learning rate, evaluation, checkpoints and logs of a training run; names no objective."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from tqdm import tqdm

from smoothadv.checkpoints import network_keys, read_checkpoint, save_checkpoint
from smoothadv.datasets.images import ImageDataset
from smoothadv.errors import NonFiniteError, UserError
from smoothadv.noise import Purpose, derive_generator, training_noise
from smoothadv.objectives import Objective
from smoothadv.records import (
    ARGUMENTS,
    CHECKPOINT,
    TRAINING_COLUMNS,
    TRAINING_LOG,
    differing_fields,
    lock,
    tsv,
    write_json,
    write_text,
)

_STEPS_BETWEEN_CHECKS = 50
_LAST_GOOD = "; the last checkpoint is still good"
_SECONDS_BETWEEN_LINES = 5.0


@dataclass(frozen=True)
class Schedule:
    """The optimizer and its course: SGD with momentum, the learning rate divided in steps.

    ``batch`` counts images, each trained on in all of its noisy copies. Epoch e, from 0, uses
    learning_rate * learning_rate_factor^floor(e / learning_rate_step) (SmoothAdv, appendix A).
    """

    epochs: int
    batch: int
    learning_rate: float
    learning_rate_step: int
    learning_rate_factor: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4

    def learning_rate_at(self, epoch: int) -> float:
        return self.learning_rate * self.learning_rate_factor ** (epoch // self.learning_rate_step)


class RunFolder:
    """The folder of a training run: its checkpoint, which holds the history, and the log made from it.

    ``facts`` go into every checkpoint beside the state (architecture, dataset, input layer, ...);
    ``recipe`` is the flat record of all that decides the weights: a run is resumed only under an equal
    one. ``run`` describes this process (command, versions, ...): checkpoint and arguments file list every
    run that trained. ``existing`` says what to do with a run that is already there: "refuse", "resume" or
    "overwrite". It is found out on entering the context, which holds the folder's lock.
    """

    def __init__(
        self,
        folder: Path,
        facts: dict[str, Any],
        recipe: dict[str, Any],
        run: dict[str, Any],
        existing: str = "refuse",
    ) -> None:
        self.folder, self.facts, self.recipe = folder, facts, recipe
        self.checkpoint = folder / CHECKPOINT
        self.runs = [{"first_epoch": 0, **run}]
        self.existing = existing
        self._saved: dict[str, Any] | None = None
        self._lock = contextlib.ExitStack()

    def __enter__(self) -> RunFolder:
        self.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            if os.name != "nt":  # Windows cannot open folders as files
                descriptor = os.open(self.folder, os.O_RDONLY)
                stack.callback(os.close, descriptor)
                lock(descriptor, self.folder)
            if self.checkpoint.exists():
                self._open_existing()
            self._lock = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._lock.close()

    def _open_existing(self) -> None:
        if self.existing == "refuse":
            raise UserError(
                f"{self.folder} already holds a trained model ({CHECKPOINT}): add --resume to continue it, "
                "--overwrite to start anew, or name another folder"
            )
        if self.existing == "overwrite":
            return  # the first epoch's checkpoint takes the old one's place: until then nothing is lost
        self._saved = read_checkpoint(self.checkpoint)
        if "recipe" not in self._saved:
            raise UserError(
                f"cannot resume {self.folder}: its checkpoint was not written by smoothadv; name another folder"
            )
        difference = differing_fields(self._saved["recipe"], self.recipe)
        if difference:
            raise UserError(f"cannot resume {self.folder} with another recipe: {difference}; --overwrite starts anew")

    def restore(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        """Load a resumed run's checkpoint into model and optimizer; returns the history of its epochs, [] if new."""
        if self._saved is None:
            return []
        self.runs[0]["first_epoch"] = len(self._saved["history"])
        self.runs = [*self._saved["runs"], *self.runs]
        model.load_state_dict(network_keys(self._saved["state_dict"]))
        optimizer.load_state_dict(self._saved["optimizer"])
        self._write_log(self._saved["history"])
        return self._saved["history"]

    def record_arguments(self) -> None:
        """Write what was asked for, before the first epoch is through."""
        write_json(self.folder / ARGUMENTS, {"recipe": self.recipe, "runs": self.runs})

    def save(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, history: list[dict[str, Any]]) -> None:
        """Checkpoint first, log second: a kill between the two loses a line that the next resume writes again."""
        save_checkpoint(
            self.checkpoint,
            {
                "epoch": len(history),
                "state_dict": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "history": history,
                "recipe": self.recipe,
                "runs": self.runs,
                **self.facts,
            },
        )
        self._write_log(history)

    def _write_log(self, history: list[dict[str, Any]]) -> None:
        write_text(self.folder / TRAINING_LOG, tsv(TRAINING_COLUMNS, history))


class _Tally:
    """Sums of loss and hits on the device, read only now and then: reading makes the device wait."""

    def __init__(self, device: torch.device) -> None:
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._correct = torch.zeros((), dtype=torch.int64, device=device)
        self._examples = 0

    def add(self, mean_loss: torch.Tensor, correct: torch.Tensor, examples: int) -> None:
        self._loss += mean_loss.detach() * examples
        self._correct += correct
        self._examples += examples

    def means(self) -> tuple[float, float]:
        """Mean loss and accuracy so far."""
        return self._loss.item() / self._examples, self._correct.item() / self._examples


def train(
    model: torch.nn.Module,
    objective: Objective,
    training_set: ImageDataset,
    test_set: ImageDataset,
    schedule: Schedule,
    seed: int,
    device: torch.device,
    run: RunFolder,
    report: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Train ``model`` in place up to ``schedule.epochs``, from the run's last checkpoint if it is resumed.

    Saves a checkpoint and the log after every epoch. Each epoch draws from streams of (seed, epoch), so that
    a resumed run ends with the weights of an uninterrupted one on the same hardware. Returns the
    history: one row of TRAINING_COLUMNS per epoch. NonFiniteError if the loss stops being finite.
    """
    model.to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), schedule.learning_rate, momentum=schedule.momentum, weight_decay=schedule.weight_decay
    )
    history = run.restore(model, optimizer)
    if len(history) >= schedule.epochs:
        report(f"already trained for {len(history)} epochs: nothing to do")
        return history
    run.record_arguments()
    if history:
        report(f"resuming after epoch {len(history)} of {schedule.epochs}")
    printed = -math.inf
    steps = math.ceil(len(training_set) / schedule.batch)
    with tqdm(total=schedule.epochs * steps, initial=len(history) * steps, unit="step", disable=None) as progress:
        for epoch in range(len(history), schedule.epochs):
            start = time.monotonic()
            learning_rate = schedule.learning_rate_at(epoch)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            loss, accuracy = _train_epoch(
                model, objective, optimizer, training_set, schedule.batch, epoch, seed, device, progress
            )
            test_loss, test_accuracy = _evaluate(
                model, test_set, objective.noise_sd, schedule.batch, epoch, seed, device
            )
            _require_finite(model, test_loss, epoch)
            history.append(
                {
                    "epoch": epoch,
                    "time": round(time.monotonic() - start, 3),
                    "lr": learning_rate,
                    "epsilon": objective.epsilon(epoch),
                    "train_loss": round(loss, 6),
                    "train_accuracy": round(accuracy, 6),
                    "test_loss": round(test_loss, 6),
                    "test_accuracy": round(test_accuracy, 6),
                }
            )
            run.save(model, optimizer, history)
            if time.monotonic() - printed >= _SECONDS_BETWEEN_LINES or epoch + 1 == schedule.epochs:
                printed = time.monotonic()
                with progress.external_write_mode():
                    report(describe_epoch(history[-1], schedule.epochs))
    return history


def _require_finite(model: torch.nn.Module, test_loss: float, epoch: int) -> None:
    """NonFiniteError if the epoch's last updates broke the model: it must not replace a good checkpoint."""
    broken = [name for name, value in model.state_dict().items() if not value.isfinite().all()]
    if broken or not math.isfinite(test_loss):
        raise NonFiniteError(
            f"the weights stopped being finite in epoch {epoch + 1} ({len(broken)} tensors, test loss {test_loss}): "
            f"try a smaller --lr or more --warmup epochs{_LAST_GOOD if epoch else ''}"
        )


def describe_epoch(row: dict[str, Any], epochs: int) -> str:
    """One line for a person about a row of the history."""
    return (
        f"epoch {row['epoch'] + 1:3d}/{epochs}  lr {row['lr']:.2g}  epsilon {row['epsilon']:.3g}  "
        f"loss {row['train_loss']:.3f}  training accuracy {row['train_accuracy']:.1%}  "
        f"test accuracy under noise {row['test_accuracy']:.1%}  {row['time']:.1f} s"
    )


def _train_epoch(
    model: torch.nn.Module,
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    training_set: ImageDataset,
    batch: int,
    epoch: int,
    seed: int,
    device: torch.device,
    progress: tqdm,
) -> tuple[float, float]:
    """One epoch of updates; the mean loss and accuracy over all noisy copies."""
    model.train()
    torch.manual_seed(derive_generator("cpu", seed, epoch, Purpose.LAYERS).initial_seed())  # for dropout
    order = derive_generator("cpu", seed, epoch, Purpose.DATA_ORDER)
    generator = derive_generator(device, seed, epoch, Purpose.OBJECTIVE)
    steps = math.ceil(len(training_set) / batch)
    tally = _Tally(device)
    for step, (images, labels) in enumerate(training_set.training_batches(batch, device, order), start=1):
        outcome = objective(model, images, labels, epoch, generator)
        optimizer.zero_grad(set_to_none=True)
        outcome.loss.backward()
        optimizer.step()
        tally.add(outcome.loss, outcome.correct, outcome.examples)
        progress.update()
        if step % _STEPS_BETWEEN_CHECKS == 0 or step == steps:
            loss, accuracy = tally.means()
            if not math.isfinite(loss):
                raise NonFiniteError(
                    f"the loss stopped being finite in epoch {epoch + 1}, by step {step} of {steps}: try a "
                    f"smaller --lr or more --warmup epochs{_LAST_GOOD if epoch else ''}"
                )
            progress.set_postfix_str(f"epoch {epoch + 1}, loss {loss:.3f}, accuracy {accuracy:.1%}")
    return loss, accuracy


@torch.inference_mode()
def _evaluate(
    model: torch.nn.Module,
    test_set: ImageDataset,
    noise_sd: float,
    batch: int,
    epoch: int,
    seed: int,
    device: torch.device,
) -> tuple[float, float]:
    """Loss and accuracy of the base classifier on one noisy copy of each test image: for the log, not for selection."""
    model.eval()
    generator = derive_generator(device, seed, epoch, Purpose.EVALUATION)
    tally = _Tally(device)
    for images, labels in test_set.evaluation_batches(batch, device):
        logits = model(images + training_noise(images, 1, noise_sd, generator)[:, 0])
        tally.add(F.cross_entropy(logits, labels), (logits.argmax(1) == labels).sum(), len(labels))
    return tally.means()


def recipe_of(schedule: Schedule) -> dict[str, Any]:
    """The part of a recipe that the schedule states; the number of epochs may grow between resumes."""
    return {key: value for key, value in asdict(schedule).items() if key != "epochs"}
