"""Trackers: other tools that show the rows of a training: TensorBoard, Weights & Biases, MLflow.

A plug-in registers a further one in ``TRACKERS``. Nothing leaves this machine unless the tool's own
environment variables say so.
"""

import contextlib
import math
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from smoothadv.base.errors import optional_module
from smoothadv.base.files import read_json, write_json
from smoothadv.base.registry import Registry

_NOT_CURVES = ("epoch", "test_images")
_RUNS = "trackers.json"
_PROJECT = "smoothadv"


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
