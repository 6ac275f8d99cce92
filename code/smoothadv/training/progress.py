"""What a training run shows: a progress bar, a line per epoch, curves in TensorBoard."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from smoothadv.base.progress import Progress, warn_of_hours

_SECONDS_BETWEEN_LINES = 5.0
_SECONDS_BETWEEN_LOOKS = 1.0
_NOT_CURVES = ("epoch", "test_images")


class TrainingProgress:
    """A bar that counts images, and lines that go to ``report``; ``silent`` turns both off.

    Curves for TensorBoard go to the folder ``curves``.
    """

    def __init__(
        self,
        images: int,
        done: int,
        epochs: int,
        report: Callable[[str], None],
        silent: bool,
        curves: Path | None = None,
    ) -> None:
        self._writer = None
        if curves is not None:
            from torch.utils.tensorboard import SummaryWriter

            # Written from the first epoch on, in place of the curves there: a kill may have left a
            # gap in them.
            self._writer = SummaryWriter(str(curves), purge_step=0)
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

    def close(self) -> None:
        """End the bar and the curves."""
        self._bar.close()
        if self._writer is not None:
            self._writer.close()

    def advance(self, images: int) -> bool:
        """Count so many more images; whether it is time to show the sums again, which waits for the
        device.
        """
        self._bar.update(images)
        is_time = time.monotonic() - self._looked >= _SECONDS_BETWEEN_LOOKS
        if is_time:
            self._looked = time.monotonic()
        return is_time

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
        accuracy, unattacked = averages["accuracy"], averages["unattacked_accuracy"]
        clean = [row["test_clean_accuracy"] for row in history if row["test_images"]]
        parts = [f"epoch {epoch + 1}/{self._epochs}", f"loss {averages['loss']:.3f}"]
        if math.isnan(unattacked):
            parts += _known(clean=(clean or [math.nan])[-1], noisy=accuracy)
        else:
            parts += _known(clean=(clean or [math.nan])[-1], noisy=unattacked, adversarial=accuracy)
            parts.append(f"epsilon {epsilon:.3g}")
        self._bar.set_postfix_str(", ".join(parts))

    def finish_epoch(self, row: dict[str, float]) -> None:
        """Report a line about an epoch, unless the previous line was reported shortly before."""
        self.draw([row])
        is_last = row["epoch"] + 1 == self._epochs
        is_time = time.monotonic() - self._printed >= _SECONDS_BETWEEN_LINES or is_last
        if not is_time or self._silent:
            return
        self._printed = time.monotonic()
        training, adversarial = row["train_accuracy"], row["test_adversarial_accuracy"]
        parts = [f"epoch {row['epoch'] + 1:3d}/{self._epochs}", f"lr {row['lr']:.2g}"]
        if row["epsilon"] or not math.isnan(adversarial):
            parts.append(f"epsilon {row['epsilon']:.3g}")
        parts.append(f"loss {row['train_loss']:.3{'g' if math.isnan(training) else 'f'}}")
        parts += _known(**{"training accuracy": training})
        if row["test_images"]:
            clean, noisy = row["test_clean_accuracy"], row["test_accuracy"]
            tested = _known(clean=clean, noisy=noisy, attacked=adversarial)
            tested = tested or [f"loss {row['test_loss']:.3g}"]
            parts.append(f"of {row['test_images']} test images {', '.join(tested)}")
        with self._bar.external_write_mode():
            self._report("  ".join([*parts, f"{row['images_per_second']:,.0f} images/s"]))

    def draw(self, rows: list[dict[str, float]]) -> None:
        """Add the values of epochs that are not nan to the curves."""
        if self._writer is None:
            return
        for row in rows:
            for name, value in row.items():
                if name not in _NOT_CURVES and not math.isnan(value):
                    self._writer.add_scalar(name.replace("_", "/", 1), value, row["epoch"])
        self._writer.flush()


def _known(**shares: float) -> list[str]:
    """The shares that are not nan, in percent."""
    return [f"{name} {share:.1%}" for name, share in shares.items() if not math.isnan(share)]
