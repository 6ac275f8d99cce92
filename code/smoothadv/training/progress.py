"""What a training run shows: a progress bar, a line per epoch, curves in TensorBoard."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from smoothadv.base.errors import UserError
from smoothadv.base.progress import Progress, warn_of_hours

_SECONDS_BETWEEN_LINES = 5.0
_SECONDS_BETWEEN_LOOKS = 1.0
_NOT_CURVES = ("epoch", "test_images")


class TrainingProgress:
    """A bar that counts images, and lines that go to ``report``; ``silent`` turns both off."""

    def __init__(
        self, images: int, done: int, epochs: int, report: Callable[[str], None], silent: bool
    ) -> None:
        self._bar = Progress(
            total=images,
            initial=done,
            unit=" images",
            unit_scale=True,
            smoothing=0.05,
            quiet=silent,
        )
        self._epochs, self._report, self._silent = epochs, report, silent
        warn_of_hours(
            f"{epochs:,} epochs of {images // epochs:,} images", 0 if silent else images - done
        )
        self._printed = self._looked = -math.inf

    def __enter__(self) -> TrainingProgress:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    def advance(self, images: int) -> bool:
        """Count so many more images; whether it is time to show the sums again, which waits for the
        device.
        """
        self._bar.update(images)
        now = time.monotonic()
        if now - self._looked < _SECONDS_BETWEEN_LOOKS:
            return False
        self._looked = now
        return True

    def show(
        self,
        epoch: int,
        epsilon: float,
        averages: dict[str, float],
        history: list[dict[str, float]],
    ) -> None:
        """Show the means of the present epoch, and the accuracy without noise of the last
        evaluation.
        """
        parts = [f"epoch {epoch + 1}/{self._epochs}", f"loss {averages['loss']:.3f}"]
        clean = [
            row["test_clean_accuracy"]
            for row in history
            if not math.isnan(row["test_clean_accuracy"])
        ]
        if clean:
            parts.append(f"clean {clean[-1]:.1%}")
        if math.isnan(averages["unattacked_accuracy"]):
            parts += (
                [] if math.isnan(averages["accuracy"]) else [f"noisy {averages['accuracy']:.1%}"]
            )
        else:
            parts += [
                f"noisy {averages['unattacked_accuracy']:.1%}",
                f"adversarial {averages['accuracy']:.1%}",
            ]
            parts.append(f"epsilon {epsilon:.3g}")
        self._bar.set_postfix_str(", ".join(parts))

    def finish_epoch(self, row: dict[str, float]) -> None:
        """Report a line about an epoch, unless the previous line was reported shortly before."""
        if self._silent:
            return
        if (
            time.monotonic() - self._printed >= _SECONDS_BETWEEN_LINES
            or row["epoch"] + 1 == self._epochs
        ):
            self._printed = time.monotonic()
            with self._bar.external_write_mode():
                self._report(describe_epoch(row, self._epochs))


def describe_epoch(row: dict[str, float], epochs: int) -> str:
    """One line of text about a row of the history."""
    parts = [f"epoch {row['epoch'] + 1:3d}/{epochs}", f"lr {row['lr']:.2g}"]
    if row["epsilon"] or not math.isnan(row["test_adversarial_accuracy"]):
        parts.append(f"epsilon {row['epsilon']:.3g}")
    parts.append(f"loss {row['train_loss']:.3{'g' if math.isnan(row['train_accuracy']) else 'f'}}")
    parts += (
        []
        if math.isnan(row["train_accuracy"])
        else [f"training accuracy {row['train_accuracy']:.1%}"]
    )
    if row["test_images"]:
        accuracies = {
            "clean": "test_clean_accuracy",
            "noisy": "test_accuracy",
            "attacked": "test_adversarial_accuracy",
        }
        known = [
            f"{name} {row[column]:.1%}"
            for name, column in accuracies.items()
            if not math.isnan(row[column])
        ]
        known = known or [f"loss {row['test_loss']:.3g}"]
        parts.append(f"of {row['test_images']} test images {', '.join(known)}")
    return "  ".join([*parts, f"{row['images_per_second']:,.0f} images/s"])


class Board:
    """The history as curves in TensorBoard's format, in ``folder``; UserError where TensorBoard is
    not installed.
    """

    def __init__(self, folder: Path, history: list[dict[str, float]]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                "--tensorboard needs the package tensorboard: pip install tensorboard"
            ) from error
        # Written from the first epoch on, in place of the curves there: a kill may have left a gap
        # in them.
        self._writer = SummaryWriter(str(folder), purge_step=0)
        for row in history:
            self.add(row)

    def add(self, row: dict[str, float]) -> None:
        """Add the values of an epoch that are not nan."""
        for name, value in row.items():
            if name not in _NOT_CURVES and not math.isnan(value):
                self._writer.add_scalar(name.replace("_", "/", 1), value, row["epoch"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
