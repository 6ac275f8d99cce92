"""The folder of a training run: its files, and which runs may continue it."""

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from smoothadv.base.errors import UserError, counted
from smoothadv.base.files import (
    lock,
    make_folder,
    refuse_to_replace,
    write_json,
    write_text,
)
from smoothadv.models.checkpoint import (
    MODULE_PREFIX,
    misfit,
    network_keys,
    read_checkpoint,
    save_checkpoint,
)
from smoothadv.records.logs import (
    ARGUMENTS,
    CHECKPOINT_FILE,
    TRAINING_COLUMNS,
    TRAINING_LOG,
    differing_fields,
    training_record,
    tsv,
)
from smoothadv.training.low_rank import state_fields


class RunFolder:
    """The folder of a training run: its checkpoint, which holds the history, and the log made from
    it.

    ``facts`` go into every checkpoint in addition to the state (architecture, dataset, input layer,
    ...); ``recipe`` is the flat record of everything that decides the weights: a run is resumed
    only under an equal recipe. ``run`` describes this process (command, versions, ...): checkpoint
    and arguments file list every run that trained. ``existing`` says what to do with a run that is
    already there: "refuse", "resume" or "overwrite". A run with the same "launch" in ``run``, that
    of the same torchrun, is always resumed: torchrun restarted its processes. ``terms`` are columns
    of the log behind the usual ones.
    """

    def __init__(
        self,
        path: Path,
        facts: dict[str, Any],
        recipe: dict[str, Any],
        run: dict[str, Any],
        existing: str = "refuse",
        terms: Sequence[str] = (),
    ) -> None:
        self.path, self.facts, self.recipe, self.terms = path, facts, recipe, terms
        self.checkpoint = path / CHECKPOINT_FILE
        self.runs = [{"first_epoch": 0, "first_step": 0, **run}]
        self.existing = existing
        self.saved: dict[str, Any] | None = None
        self.has_checkpoint = False

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """A context in which the folder is locked, after a look for a run that is already there."""
        make_folder(self.path)
        with contextlib.ExitStack() as stack:
            if os.name != "nt":  # Windows cannot open folders as files
                descriptor = os.open(self.path, os.O_RDONLY)
                stack.callback(os.close, descriptor)
                lock(descriptor, self.path)
            if self.checkpoint.exists():
                self._open_existing()
            else:
                refuse_to_replace(self.path / TRAINING_LOG, "log of a training", b"epoch\t")
                refuse_to_replace(self.path / ARGUMENTS, "record of a training", b'{\n  "recipe"')
            yield

    def _open_existing(self) -> None:
        existing, launch = self.existing, self.runs[0]["launch"]
        if launch is not None and launch in [
            one.get("launch") for one in training_record(self.path)["runs"]
        ]:
            existing = "resume"
        if existing == "refuse":
            held = f"a trained model ({CHECKPOINT_FILE})"
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                epochs = training_record(self.path)["runs"][-1]["epochs"]
                done = len((self.path / TRAINING_LOG).read_text().splitlines()) - 1
                if done < epochs:
                    held = f"a training of which {done} of {counted(epochs, 'epoch')} are done"
            raise UserError(
                f"{self.path} already holds {held}: add --resume to continue it, --overwrite to "
                "start anew, or name another folder"
            )
        if existing == "overwrite":
            return  # the first checkpoint replaces the old one: until then nothing is lost
        saved = read_checkpoint(self.checkpoint, self.facts["denoiser"])
        if "recipe" not in saved:
            raise UserError(
                f"cannot resume {self.path}: its checkpoint was not written by smoothadv; name "
                "another folder"
            )
        if difference := differing_fields(saved["recipe"], self.recipe):
            raise UserError(
                f"cannot resume {self.path} with another recipe: {difference}; --overwrite "
                "starts anew"
            )
        self.runs[0].update(first_epoch=saved["epoch"], first_step=saved["step"])
        self.runs = [*saved["runs"], *self.runs]
        self.saved, self.has_checkpoint = saved, True
        self._write_log(saved["history"])

    def restore(
        self, saved: dict[str, Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Load the state of a run's checkpoint, ``RunFolder.saved``, into model and optimizer."""
        weights = saved.get("trained") or saved["state_dict"]
        weights = weights if saved["arch"].startswith(MODULE_PREFIX) else network_keys(weights)
        present = model.state_dict()
        if reason := misfit(weights, present):
            raise UserError(
                f"cannot resume: the checkpoint is of another module ({self.checkpoint}: {reason})"
            )
        model.load_state_dict(weights)
        # The settings of the optimizer are those of the recipe, which is the same.
        optimizer.load_state_dict({**optimizer.state_dict(), "state": saved["optimizer"]["state"]})

    def record_arguments(self) -> None:
        """Write the arguments file, unless another run that it would not describe is still there,
        to be overwritten.
        """
        if self.has_checkpoint or not self.checkpoint.exists():
            write_json(self.path / ARGUMENTS, {"recipe": self.recipe, "runs": self.runs})

    def save(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        history: list[dict[str, float]],
        within_epoch: dict[str, Any] | None = None,
        image_weights: np.ndarray | None = None,
    ) -> None:
        """Write a checkpoint; ``within_epoch`` holds the ``step`` and the sums so far of an
        unfinished epoch.

        The checkpoint is written before the log: a kill between the two loses a line that the next
        resume writes again.
        """
        state = optimizer.state_dict()
        # On a GPU, learning rates may be tensors.
        groups = [{**group, "lr": float(group["lr"])} for group in state["param_groups"]]
        content = {
            "epoch": len(history),
            "step": 0,
            **(within_epoch or {}),
            **state_fields(model),
            "optimizer": {**state, "param_groups": groups},
            "history": history,
            "recipe": self.recipe,
            "runs": self.runs,
            **self.facts,
        }
        if image_weights is not None:
            content["image_weights"] = torch.from_numpy(image_weights)
        self.path.mkdir(parents=True, exist_ok=True)  # somebody may have deleted it
        save_checkpoint(self.checkpoint, content)
        self.has_checkpoint = True
        self.record_arguments()
        self._write_log(history)

    def _write_log(self, history: list[dict[str, float]]) -> None:
        rows = [{**dict.fromkeys(self.terms, math.nan), **row} for row in history]
        write_text(self.path / TRAINING_LOG, tsv((*TRAINING_COLUMNS, *self.terms), rows))
