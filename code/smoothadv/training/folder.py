"""The folder of a training run: its files, and which runs may continue it."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from smoothadv.base.errors import UserError
from smoothadv.base.files import lock, refuse_to_replace, write_json, write_text
from smoothadv.checkpoints import (
    is_module,
    misfit,
    network_keys,
    read_checkpoint,
    require_resumable,
    save_checkpoint,
)
from smoothadv.exact.training import state_fields
from smoothadv.objectives import DataPolicy
from smoothadv.records.logs import (
    ARGUMENTS,
    CHECKPOINT,
    TRAINING_COLUMNS,
    TRAINING_LOG,
    differing_fields,
    tsv,
)

_SGD_STATE = {"momentum_buffer": "momentum"}
_ADAM_STATE = {"exp_avg": "average", "exp_avg_sq": "variance", "step": "step"}
_LARGEST_WEIGHT = 1e6
"""Of a training image: a normal quantile is never near this."""


class RunFolder:
    """The folder of a training run: its checkpoint, which holds the history, and the log made from
    it.

    ``facts`` go into every checkpoint in addition to the state (architecture, dataset, input layer,
    ...); ``recipe`` is the flat record of everything that decides the weights: a run is resumed
    only under an equal recipe. ``run`` describes this process (command, versions, ...): checkpoint
    and arguments file list every run that trained. ``existing`` says what to do with a run that is
    already there: "refuse", "resume" or "overwrite". Entering the context locks the folder and
    looks for such a run. A run with the same "launch" in ``run``, that of the same torchrun, is
    always resumed: torchrun restarted its processes. ``terms`` are columns of the log behind the
    usual ones.
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
        self.checkpoint = path / CHECKPOINT
        self.runs = [{"first_epoch": 0, "first_step": 0, **run}]
        self.existing = existing
        self.saved: dict[str, Any] | None = None
        self.has_checkpoint = False
        self._lock = contextlib.ExitStack()

    def __enter__(self) -> RunFolder:
        with contextlib.ExitStack() as stack:
            self._hold(stack)
            if self.checkpoint.exists():
                self._open_existing()
            else:
                refuse_to_replace(self.path / TRAINING_LOG, "log of a training", b"epoch\t")
                refuse_to_replace(self.path / ARGUMENTS, "record of a training", b'{\n  "recipe"')
            self._lock = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._lock.close()

    def _hold(self, stack: contextlib.ExitStack) -> None:
        """Make the folder where there is none, and lock it until ``stack`` is closed."""
        self.path.mkdir(parents=True, exist_ok=True)
        if os.name != "nt":  # Windows cannot open folders as files
            self._descriptor = os.open(self.path, os.O_RDONLY)
            stack.callback(os.close, self._descriptor)
            lock(self._descriptor, self.path)

    def _is_held(self) -> bool:
        """Whether the folder is there and still the one that was locked; UserError if it is one
        with another model.
        """
        if os.name == "nt" or not self.path.is_dir():
            return self.path.is_dir()
        is_held = os.path.samestat(os.fstat(self._descriptor), self.path.stat())
        if not is_held and self.checkpoint.exists():
            raise UserError(
                f"{self.path} was replaced during the training by one with a model: nothing is "
                "saved there"
            )
        return is_held

    def _open_existing(self) -> None:
        launch, saved = self.runs[0].get("launch"), None
        if launch is not None:
            with contextlib.suppress(
                UserError
            ):  # a checkpoint that cannot be read is not of this launch
                saved = read_checkpoint(self.checkpoint, "denoiser" in self.facts)
                require_resumable(saved, self.checkpoint)
                if any(run.get("launch") == launch for run in saved["runs"]):
                    self.existing = "resume"
        if self.existing == "refuse":
            raise UserError(
                f"{self.path} already holds a trained model ({CHECKPOINT}): add --resume to "
                "continue it, --overwrite to start anew, or name another folder"
            )
        if self.existing == "overwrite":
            return  # the first checkpoint replaces the old one: until then nothing is lost
        saved = saved or read_checkpoint(self.checkpoint, "denoiser" in self.facts)
        if "recipe" not in saved:
            raise UserError(
                f"cannot resume {self.path}: its checkpoint was not written by smoothadv; name "
                "another folder"
            )
        require_resumable(saved, self.checkpoint)
        difference = differing_fields(saved["recipe"], self.recipe)
        if difference:
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
        weights = weights if is_module(saved) else network_keys(weights)
        present, state = model.state_dict(), saved["optimizer"]["state"]
        is_adam = isinstance(optimizer, torch.optim.AdamW)
        parameters = dict(enumerate(model.parameters()))
        momenta, needed, buffers = {}, {}, 0
        for number, entry in state.items():
            for name, title in _ADAM_STATE.items() if is_adam else _SGD_STATE.items():
                one, key = entry.get(name), f"{title} {number}"
                buffers += 1
                if one is not None:
                    momenta[key] = one
                if number in parameters and (is_adam or one is not None):
                    needed[key] = torch.zeros(()) if name == "step" else parameters[number]
        if reason := misfit({**weights, **momenta}, {**present, **needed}):
            raise UserError(
                f"cannot resume: the checkpoint is of another module ({self.checkpoint}: {reason})"
            )
        if is_adam and not (buffers and all(one["step"] >= 1 for one in state.values())):
            raise UserError(
                f"cannot resume: {self.checkpoint} lacks the state of AdamW, or its steps are "
                "below 1"
            )
        present.update(weights)
        model.load_state_dict(present)
        # The settings of the optimizer are those of the recipe, which is the same.
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})

    def image_weights(
        self, saved: dict[str, Any], images: int, policy: DataPolicy | None
    ) -> np.ndarray | None:
        """The weights [images] of a checkpoint's data policy; None where all images count alike.

        UserError where they are missing or wrong.
        """
        begun = len(saved["history"]) + (saved["step"] > 0)
        if policy is None or begun <= policy.from_epoch:
            return None
        weights, given = saved.get("image_weights"), np.zeros(0)
        if weights is not None and weights.is_floating_point():
            given = weights.detach().double().numpy()
        is_right = given.shape == (images,) and 0 < given.max() < _LARGEST_WEIGHT
        if not is_right or not (given >= 0).all():
            raise UserError(
                f"cannot resume: {self.checkpoint} lacks the weights of its {images} training "
                "images"
            )
        return given

    def take_saved(self) -> dict[str, Any] | None:
        """The checkpoint that the run is resumed from, None for a new run; only the first call
        returns it.
        """
        saved, self.saved = self.saved, None  # it may be large
        return saved

    def record_arguments(self) -> None:
        """Write the arguments file, unless another run that it would not describe is still there,
        to be overwritten.
        """
        if self.has_checkpoint or not self.checkpoint.exists():
            self._write_arguments()

    def _write_arguments(self) -> None:
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
        if not self._is_held():  # somebody has deleted it
            self._hold(self._lock)
        save_checkpoint(self.checkpoint, content)
        self._write_arguments()
        self.has_checkpoint = True
        self._write_log(history)

    def _write_log(self, history: list[dict[str, float]]) -> None:
        rows = [{**dict.fromkeys(self.terms, math.nan), **row} for row in history]
        write_text(self.path / TRAINING_LOG, tsv((*TRAINING_COLUMNS, *self.terms), rows))
