"""Trains a classifier for an objective: fast, on one GPU or many, and resumable at any step; names no objective."""

from smoothadv.training.evaluate import Evaluation
from smoothadv.training.execution import Execution
from smoothadv.training.loop import Data, Training
from smoothadv.training.processes import Processes, ended, join_processes
from smoothadv.training.run_folder import RunFolder
from smoothadv.training.schedule import Schedule

__all__ = [
    "Data",
    "Evaluation",
    "Execution",
    "Processes",
    "RunFolder",
    "Schedule",
    "Training",
    "ended",
    "join_processes",
]
