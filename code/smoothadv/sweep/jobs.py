"""A job trains one model and then evaluates it, skipping what is complete; and the state that a job
is in.
"""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from smoothadv.base.members import Members
from smoothadv.sweep.grid import EvaluationTable, Model
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
class SweepJob:
    """One model of a sweep: its training, which an ensemble does not have, and its evaluations.

    ``name`` is its folder within the sweep's models and logs. All paths are relative to ``cwd``.
    The job's own log and record are in the folder ``logs``. ``trainings`` make the ``classifier``:
    of an ensemble, they are those of its members, done by other jobs. Each stage runs in
    ``processes`` processes of ``threads`` threads (None: PyTorch's choice).

    ``pending`` are the tables for which the model may yet be chosen as one of the best,
    ``possible`` the evaluations that it then gets.
    """

    name: str
    model: Model
    cwd: Path
    logs: Path
    classifier: Members
    trainings: tuple[TrainingStage, ...]
    evaluations: tuple[EvaluationStage, ...] = ()
    processes: int = 1
    threads: int | None = None
    pending: tuple[EvaluationTable, ...] = ()
    possible: tuple[EvaluationStage, ...] = ()

    @property
    def group(self) -> str:
        return self.model.group

    @property
    def training(self) -> TrainingStage | None:
        return None if self.classifier.mean else self.trainings[0]

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


def state_of(job: SweepJob) -> JobState:
    """The state of a job, judged by the files on the disk."""
    progress = [(stage, stage.progress()) for stage in job.stages]
    unfinished = [(stage, reached) for stage, reached in progress if not reached.is_complete]
    if not unfinished:
        return JobState(StateKind.DONE)
    stage, reached = unfinished[0]
    detail = f"{stage.title}: {reached}"
    if holder := job.record.holder():
        return JobState(StateKind.RUNNING, f"{detail} (on {holder})")
    for _, reached in unfinished:
        if reached.conflict:
            return JobState(StateKind.FAILED, reached.conflict)
    content = job.record.read()
    if content.get("state") == "failed":
        line = content.get("line") or "no word"
        return JobState(StateKind.FAILED, ": ".join(filter(None, [content.get("stage"), line])))
    for path in (path for stage, _ in unfinished for path in stage.needs):
        if reason := unmet_need(path):
            return JobState(StateKind.BLOCKED, reason)
    if content.get("state") == "queued":
        return JobState(StateKind.WAITING, f"queued as {content.get('id')}")
    if "state" in content or any(reached.done for _, reached in progress):
        return JobState(StateKind.STOPPED, detail)
    return JobState(StateKind.WAITING)
