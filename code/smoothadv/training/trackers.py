"""What a training run shows: a progress bar, a line per epoch, and rows for trackers, which are
other tools: TensorBoard, Weights & Biases, MLflow.

A plug-in registers a further one in ``TRACKERS``. Nothing leaves this machine unless the tool's own
environment variables say so.
"""

import contextlib
import math
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, ClassVar

from smoothadv.base.errors import counted, first_line, optional_module, warn
from smoothadv.base.files import read_json, write_json
from smoothadv.base.progress import Progress, warn_of_hours
from smoothadv.base.registry import Registry

_NOT_CURVES = ("epoch", "test_images")
_RUNS = "trackers.json"
_PROJECT = "smoothadv"
_SECONDS_BETWEEN_LINES = 5.0
_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_OF_A_LONG_START = 10.0
_TIMES_OF_A_LONG_START = 3.0


class Tracker(ABC):
    """Shows a training in OUTDIR ``folder``, whose recipe is ``settings``, flat.

    A run that goes on, ``is_resumed``, first shows the rows of the epochs that are done again: none
    of them must appear twice. Only the first process has trackers.
    """

    NEEDS: ClassVar[tuple[str, str]] = ("", "")
    """The module that it imports, and the package that has it."""

    @classmethod
    def check(cls, name: str) -> None:
        """UserError where its package is not installed."""
        module, package = cls.NEEDS
        optional_module(
            module or __name__,
            f"--track {name} needs the package {package}: pip install {package}",
        )

    @abstractmethod
    def __init__(self, folder: Path, settings: Mapping[str, Any], is_resumed: bool) -> None: ...

    @abstractmethod
    def add(self, epoch: int, values: Mapping[str, float]) -> None:
        """Show the values of an epoch, by names like ``train/loss``; none is nan."""

    @abstractmethod
    def close(self) -> None:
        """Write what is not written yet: there are no further rows."""

    def show(self, row: Mapping[str, float]) -> None:
        """Show a row of the training's log."""
        values = {
            name.replace("_", "/", 1): value
            for name, value in row.items()
            if name not in _NOT_CURVES and not math.isnan(value)
        }
        self.add(int(row["epoch"]), values)


TRACKERS: Registry[type[Tracker]] = Registry("tracker")


@TRACKERS.register("tensorboard")
class TensorBoard(Tracker):
    """Curves in OUTDIR/tensorboard."""

    NEEDS = "torch.utils.tensorboard", "tensorboard"

    def __init__(self, folder: Path, settings: Mapping[str, Any], is_resumed: bool) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Written from the first epoch on, in place of the curves there: a kill may have left a gap
        # in them.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=0)

    def add(self, epoch: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, epoch)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


@TRACKERS.register("wandb")
class WeightsAndBiases(Tracker):
    """A run in OUTDIR/wandb, offline unless WANDB_MODE says otherwise.

    A resumed training writes the same run again, of which W&B takes each step once.
    """

    NEEDS = "wandb", "wandb"

    def __init__(self, folder: Path, settings: Mapping[str, Any], is_resumed: bool) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self._run = wandb.init(
            dir=str(folder),
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=folder.name,
            id=_run_of(folder, "wandb", is_resumed, partial(secrets.token_hex, 8)),
            resume="allow",
            mode=mode,
            config=dict(settings),
            settings=wandb.Settings(silent=True, x_disable_stats=True, console="off"),
        )

    def add(self, epoch: int, values: Mapping[str, float]) -> None:
        self._run.log({"epoch": epoch, **values}, step=epoch)

    def close(self) -> None:
        self._run.finish()


@TRACKERS.register("mlflow")
class MLflow(Tracker):
    """A run in the experiment "smoothadv" of files in OUTDIR/mlruns, or of MLFLOW_TRACKING_URI."""

    NEEDS = "mlflow", "mlflow-skinny"

    def __init__(self, folder: Path, settings: Mapping[str, Any], is_resumed: bool) -> None:
        from mlflow import MlflowClient

        place = os.environ.get("MLFLOW_TRACKING_URI")
        if not place:
            place = (folder / "mlruns").absolute().as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = client = MlflowClient(tracking_uri=place)

        def new_run() -> str:
            found = client.get_experiment_by_name(_PROJECT)
            experiment = found.experiment_id if found else client.create_experiment(_PROJECT)
            run: str = client.create_run(experiment, run_name=folder.name).info.run_id
            for key, value in settings.items():
                client.log_param(run, key, value)
            return run

        self._run = _run_of(folder, "mlflow", is_resumed, new_run)
        self._done = client.get_run(self._run).data.metrics.get("epoch", -1.0)

    def add(self, epoch: int, values: Mapping[str, float]) -> None:
        if epoch > self._done:
            # The epoch is the last metric: where it is there, the others are, too.
            for name, value in (*values.items(), ("epoch", epoch)):
                self._client.log_metric(self._run, name, value, step=epoch)

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _run_of(folder: Path, name: str, is_resumed: bool, begin: Callable[[], str]) -> str:
    """The run of the tracker ``name`` that an earlier process of this training began, or else the
    one that ``begin`` does.
    """
    runs: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError, TypeError):
        runs = {**read_json(folder / _RUNS)}
    if not is_resumed or name not in runs:
        runs[name] = begin()
        write_json(folder / _RUNS, runs)
    return runs[name]


def rate_and_long_start(ends: Sequence[float], images: Sequence[int]) -> tuple[float, float]:
    """Images per second of updates, without the first of several, which reads images and makes
    kernels; and the seconds of that one if it took much longer than the mean of the others, else 0.

    ``ends`` has the time at which each update ended, behind that at which the first one began;
    ``images`` how many images each was on.
    """
    left_out = 1 if len(images) > 1 else 0
    start, others = ends[left_out] - ends[0], ends[-1] - ends[left_out]
    is_long = start * len(images[left_out:]) >= _TIMES_OF_A_LONG_START * others
    is_long = is_long and start >= _SECONDS_OF_A_LONG_START
    return sum(images[left_out:]) / max(others, 1e-9), start if is_long else 0.0


class TrainingProgress:
    """A bar that counts images, and lines that go to ``report``; ``silent`` turns both off.

    ``trackers`` are shown the rows, too.
    """

    def __init__(
        self,
        images: int,
        done: int,
        epochs: int,
        report: Callable[[str], None],
        silent: bool,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        self._trackers = [*trackers]
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
            f"{counted(epochs, 'epoch')} of {counted(images // epochs, 'image')}",
            0 if silent else images - done,
        )
        self._printed = self._looked = -math.inf

    def close(self) -> None:
        """End the bar and the trackers."""
        self._bar.close()
        self._tell(methodcaller("close"))

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

    def finish_epoch(self, row: dict[str, float], start: float = 0.0) -> None:
        """Report a line about an epoch, unless the previous line was reported shortly before.

        ``start`` is the time in seconds of a long first update, which its rate leaves out.
        """
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
            parts.append(f"of {counted(row['test_images'], 'test image')} {', '.join(tested)}")
        parts.append(f"{row['images_per_second']:,.0f} images/s")
        if start:
            parts.append(f"(without the first update, which took {start:,.0f} s)")
        with self._bar.external_write_mode():
            self._report("  ".join(parts))

    def draw(self, rows: list[dict[str, float]]) -> None:
        """Show the trackers the rows of epochs."""
        for row in rows:
            self._tell(methodcaller("show", row))

    def _tell(self, act: Callable[[Tracker], object]) -> None:
        """Let each tracker act; one that fails is left out from then on, with a warning."""
        for tracker in [*self._trackers]:
            try:
                act(tracker)
            except Exception as error:  # of another package: the training goes on
                self._trackers.remove(tracker)
                warn(f"{type(tracker).__name__} shows no further epochs: {first_line(error)}")


def _known(**shares: float) -> list[str]:
    """The shares that are not nan, in percent."""
    return [f"{name} {share:.1%}" for name, share in shares.items() if not math.isnan(share)]
