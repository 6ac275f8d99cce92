"""Trains a classifier for any objective: fast, on one GPU or many, and resumable at every step."""

from smoothadv.training.evaluate import EvaluationSchedule
from smoothadv.training.execution import Execution
from smoothadv.training.loop import Data, TrainingRun
from smoothadv.training.processes import Processes, ended, join_processes
from smoothadv.training.run_folder import RunFolder
from smoothadv.training.schedule import Schedule

__all__ = [
    "Data",
    "EvaluationSchedule",
    "Execution",
    "Processes",
    "RunFolder",
    "Schedule",
    "TrainingRun",
    "ended",
    "join_processes",
]
