"""A job: train a model unless it is complete, then evaluate what is missing; and what state it is in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from smoothadv.sweeps.job_record import JobRecord
from smoothadv.sweeps.stages import EvaluationStage, Stage, TrainingStage, unmet_need


class StateKind(Enum):
    """The states of a job. ``STOPPED`` was begun, nobody works on it, and it did not fail; ``BLOCKED`` needs files."""

    WAITING = "waiting"
    BLOCKED = "blocked"
    RUNNING = "running"
    STOPPED = "stopped"
    FAILED = "failed"
    DONE = "done"


@dataclass(frozen=True)
class JobState:
    """The state of a job, and a sentence about it for people."""

    kind: StateKind
    detail: str = ""


@dataclass(frozen=True)
class Job:
    """One model of a sweep and all that becomes of it.

    ``name`` is its folder within the sweep's models and logs, ``cwd`` the folder from which all paths are meant,
    ``logs`` where its own log and record lie. ``processes`` share each stage, of ``threads`` threads each (None:
    PyTorch's choice).
    """

    name: str
    group: str
    cwd: Path
    logs: Path
    training: TrainingStage
    evaluations: tuple[EvaluationStage, ...]
    processes: int = 1
    threads: int | None = None

    @property
    def key(self) -> str:
        """What tells the job from those of other sweeps too."""
        return str(self.logs)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (self.training, *self.evaluations)

    @property
    def record(self) -> JobRecord:
        return JobRecord(self.cwd / self.logs)


def state_of(job: Job) -> JobState:
    """The state of a job by what is on the disk."""
    progress = [(stage, stage.progress()) for stage in job.stages]
    unfinished = [(stage, reached) for stage, reached in progress if not reached.is_complete]
    if not unfinished:
        return JobState(StateKind.DONE)
    stage, reached = unfinished[0]
    said = f"{stage.title}: {reached}"
    record = job.record
    if holder := record.holder():
        return JobState(StateKind.RUNNING, f"{said} (on {holder})")
    if conflict := next((reached.conflict for _, reached in unfinished if reached.conflict), ""):
        return JobState(StateKind.FAILED, conflict)
    content = record.read()
    if content.get("state") == "failed":
        return JobState(
            StateKind.FAILED, ": ".join(filter(None, [content.get("stage"), content.get("line") or "no word"]))
        )
    if reasons := [reason for stage, _ in unfinished for path in stage.needs if (reason := unmet_need(path))]:
        return JobState(StateKind.BLOCKED, reasons[0])
    if content.get("state") == "queued":
        return JobState(StateKind.WAITING, f"queued as {content.get('id')}")
    begun = any(reached.done for _, reached in progress) or "state" in content
    return JobState(StateKind.STOPPED if begun else StateKind.WAITING, said if begun else "")


def count_states(states: Sequence[JobState]) -> dict[StateKind, int]:
    """How many jobs are in each state, of the states that there are."""
    return {kind: number for kind in StateKind if (number := sum(state.kind is kind for state in states))}
