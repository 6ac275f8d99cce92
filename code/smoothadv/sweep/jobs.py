"""A job trains one model and then evaluates it, skipping what is complete; and the state that a job
is in.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from smoothadv.sweep.job_record import JobRecord
from smoothadv.sweep.stages import EvaluationStage, Stage, TrainingStage, unmet_need


class StateKind(Enum):
    """The states of a job. ``STOPPED``: begun, not failed, and nobody works on it. ``BLOCKED``: a
    file is missing.
    """

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
    """One model of a sweep: its training, None for an ensemble of models of other jobs, and its
    evaluations.

    ``name`` is its folder within the sweep's models and logs. All paths are relative to ``cwd``.
    The job's own log and record are in the folder ``logs``. Each stage runs in ``processes``
    processes of ``threads`` threads (None: PyTorch's choice).
    """

    name: str
    group: str
    cwd: Path
    logs: Path
    training: TrainingStage | None
    evaluations: tuple[EvaluationStage, ...]
    processes: int = 1
    threads: int | None = None

    @property
    def key(self) -> str:
        """A text that is unique among the jobs of all sweeps."""
        return str(self.logs)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (*([self.training] if self.training else []), *self.evaluations)

    @property
    def record(self) -> JobRecord:
        return JobRecord(self.cwd / self.logs)


def state_of(job: Job) -> JobState:
    """The state of a job, judged by the files on the disk."""
    progress = [(stage, stage.progress()) for stage in job.stages]
    unfinished = [(stage, reached) for stage, reached in progress if not reached.is_complete]
    if not unfinished:
        return JobState(StateKind.DONE)
    stage, reached = unfinished[0]
    detail = f"{stage.title}: {reached}"
    record = job.record
    if holder := record.holder():
        return JobState(StateKind.RUNNING, f"{detail} (on {holder})")
    if conflict := next((reached.conflict for _, reached in unfinished if reached.conflict), ""):
        return JobState(StateKind.FAILED, conflict)
    content = record.read()
    if content.get("state") == "failed":
        what = [content.get("stage"), content.get("line") or "no word"]
        return JobState(StateKind.FAILED, ": ".join(filter(None, what)))
    if reasons := [
        reason for stage, _ in unfinished for path in stage.needs if (reason := unmet_need(path))
    ]:
        return JobState(StateKind.BLOCKED, reasons[0])
    if content.get("state") == "queued":
        return JobState(StateKind.WAITING, f"queued as {content.get('id')}")
    begun = any(reached.done for _, reached in progress) or "state" in content
    return JobState(StateKind.STOPPED if begun else StateKind.WAITING, detail if begun else "")


def count_states(states: Sequence[JobState]) -> dict[StateKind, int]:
    """How many jobs are in each state; states without a job are left out."""
    return {
        kind: number
        for kind in StateKind
        if (number := sum(state.kind is kind for state in states))
    }
