"""Trackers show the rows of the log, each once, although a run is resumed; read back by each tool
itself.
"""

import math
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from smoothadv.training.trackers import TRACKERS, Tracker
from support.commands import call, refused, succeed, timeless
from support.optional import needs
from support.trainings import after_update, send

DIGITS = ("digits", "digits_resnet8")
SHORT = (
    *("--noise", 0.25, "--device", "cpu", "--batch", 32),
    *("--steps-per-epoch", 2, "--evaluate-images", 20),
)
Curves = dict[str, list[tuple[int, float]]]


def of_tensorboard(folder: Path) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {
        tag: sorted({(event.step, event.value) for event in read.Scalars(tag)})
        for tag in read.Tags()["scalars"]
    }


def records_of(content: bytes) -> Iterator[bytes]:
    """Those in a short file of W&B: a header of 7 bytes; then, of each, a checksum (4 bytes), the
    length (2) and the type (1).
    """
    place = 7
    while place < len(content):
        (length,) = struct.unpack_from("<H", content, place + 4)
        yield content[place + 7 : place + 7 + length]
        place += 7 + length


def of_wandb(folder: Path) -> Curves:
    """Of the files of all processes, in the order of W&B, which takes each step of a run once."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # which waits for the process that writes the files; the end of a run does not
    steps: dict[int, dict[str, float]] = {}
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    assert len({file.name for file in files}) == 1, "the processes write one run"
    for file in files:
        for content in records_of(file.read_bytes()):
            items = Record.FromString(content).history.item
            values = {"/".join(one.nested_key) or one.key: float(one.value_json) for one in items}
            if values:
                steps.setdefault(int(values.pop("epoch")), values)
    curves: Curves = {}
    for step, values in sorted(steps.items()):
        for name, value in values.items():
            if not name.startswith("_"):
                curves.setdefault(name, []).append((step, value))
    return curves


def runs_of_mlflow(folder: Path) -> tuple:
    """The client that reads them, and all runs."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(folder / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("smoothadv")
    return client, client.search_runs([experiment.experiment_id])


def of_mlflow(folder: Path) -> Curves:
    client, (run,) = runs_of_mlflow(folder)
    assert run.data.params["objective.noise_sd"] == "0.25" and run.info.status == "FINISHED"
    return {
        name: [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
        if name != "epoch"
    }


READERS: dict[str, Callable[[Path], Curves]] = {
    "tensorboard": of_tensorboard,
    "wandb": of_wandb,
    "mlflow": of_mlflow,
}


@pytest.fixture(autouse=True)
def at_home(monkeypatch, tmp_path):
    """No variable of the user says where to."""
    for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_DIR", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for place in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(place, str(tmp_path / "wandb_home"))


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(name)) for name in READERS])
def test_every_row_is_there_once_although_the_run_is_resumed(name, tmp_path):
    """Shown from its first epoch on, by a second process of which the first is repeated; and where
    the tracker comes later.
    """
    folder, options = tmp_path / "run", (*SHORT, "--evaluate-every", 2, "--track", name)
    if name == "tensorboard":
        succeed("train", *DIGITS, folder, *SHORT, "--evaluate-every", 2, "--epochs", 1)
    else:
        succeed("train", *DIGITS, folder, *options, "--epochs", 1)
    succeed("train", *DIGITS, folder, *options, "--epochs", 3, "--resume")
    expected: Curves = {}
    for row in timeless(folder / "log.txt"):
        for column, text in row.items():
            if column not in ("epoch", "test_images") and text and not math.isnan(float(text)):
                points = expected.setdefault(column.replace("_", "/", 1), [])
                points.append((int(row["epoch"]), float(text)))
    found = READERS[name](folder)
    assert {"train/loss", "test/clean_accuracy", "lr"} <= expected.keys()
    for curve, points in expected.items():
        assert [step for step, _ in found[curve]] == [step for step, _ in points], curve
        values = [value for _, value in points]
        assert [value for _, value in found[curve]] == pytest.approx(values, rel=1e-6), curve


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs(name)) for name in ("wandb", "mlflow")]
)
def test_training_that_is_resumed_within_its_first_epoch_is_one_run(name, tmp_path, capsys):
    folder, options = tmp_path / "run", (*SHORT, "--epochs", 1, "--track", name)
    with pytest.MonkeyPatch.context() as patch:
        after_update(patch, 1, send)
        assert call(capsys, "train", *DIGITS, folder, *options).code == 143
    succeed("train", *DIGITS, folder, *options, "--resume")
    assert [step for step, _ in READERS[name](folder)["train/loss"]] == [0]


@needs("mlflow")
def test_training_begun_anew_is_another_run_also_in_another_place_of_mlflow(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    for _ in range(2):
        options = ("--epochs", 1, "--track", "mlflow", "--overwrite")
        succeed("train", *DIGITS, tmp_path / "run", *SHORT, *options)
    assert len(runs_of_mlflow(tmp_path)[1]) == 2 and not (tmp_path / "run/mlruns").exists()


class Noted(Tracker):
    """A plug-in's, which notes what it is shown, and cannot write the second row."""

    def __init__(self, folder, settings, is_resumed):
        self.seen: list[object] = [(folder, settings["arch"], is_resumed)]
        MADE.append(self)

    def add(self, epoch, values):
        assert not any(map(math.isnan, values.values()))
        self.seen.append((epoch, "train/loss" in values, "epoch" in values))
        if epoch == 1:
            raise OSError("the disk is full")

    def close(self):
        self.seen.append("closed")


MADE: list[Noted] = []


@needs("tensorboard")
@pytest.mark.parametrize("epochs", [1, 3])
def test_tracker_of_a_plug_in_gets_each_row_and_the_end_unless_it_fails(
    epochs, tmp_path, monkeypatch, capsys
):
    """The training goes on, and so do the other trackers."""
    monkeypatch.setitem(TRACKERS, "noted", Noted)
    options = ("--track", "noted", "tensorboard", "--track", "tensorboard")
    outcome = call(capsys, "train", *DIGITS, tmp_path / "run", *SHORT, "--epochs", epochs, *options)
    about, first, *later = MADE[-1].seen
    assert (outcome.code, about, first) == (
        0,
        (tmp_path / "run", "digits_resnet8", False),
        (0, True, False),
    )
    assert later == (["closed"] if epochs == 1 else [(1, True, False)])
    assert outcome.err.count("Noted shows no further epochs: the disk is full") == (epochs > 1)
    assert len(of_tensorboard(tmp_path / "run")["train/loss"]) == epochs
    assert len([*(tmp_path / "run/tensorboard").iterdir()]) == 1, "named twice, written once"


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("tensorboard", "torch.utils.tensorboard", "tensorboard"),
        ("wandb", "wandb", "wandb"),
        ("mlflow", "mlflow", "mlflow-skinny"),
    ],
)
def test_package_that_is_not_installed_is_named_in_one_line(
    tmp_path, capsys, monkeypatch, name, module, package
):
    monkeypatch.setitem(sys.modules, module, None)
    flags = ("--epochs", 1, "--track", name)
    outcome = call(capsys, "train", *DIGITS, tmp_path / "run", *SHORT, *flags)
    assert refused(outcome, f"--track {name} needs the package {package}: pip install {package}")
    assert not (tmp_path / "run").exists()
