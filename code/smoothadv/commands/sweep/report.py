"""The report on a sweep: the page that analyze writes, about all of the sweep's complete logs."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from smoothadv.analysis.report import Report
from smoothadv.analysis.shared.logs import read_logs
from smoothadv.errors import UserError, warn
from smoothadv.files import PAGE, refuse_to_replace, write_text
from smoothadv.records import TRAINING_LOG
from smoothadv.sweeps.grid import Grid
from smoothadv.sweeps.jobs import Job


def write_report(grids: Sequence[Grid], jobs: Sequence[Job], report: Report, output: Path | None) -> None:
    """Write the page; incomplete logs are left out, with a warning, unless asked for. UserError if no log is left."""
    path = output or (grids[0].logs if len(grids) == 1 else Path("logs")) / "report.html"
    refuse_to_replace(path, *PAGE)
    arguments, unfinished = [], 0
    for job in tqdm(jobs, "checking files", unit="job", disable=None, delay=1):
        come = [(stage.logs, stage.progress()) for stage in job.evaluations]
        taken = [logs for logs, it in come if it.is_complete or (report.unfinished and it.done and not it.conflict)]
        paths = [log for logs in taken for log in logs if log.exists()]
        unfinished += len(taken) < len(come)
        if job.training and job.training.progress().is_complete:
            paths.append(job.training.folder / TRAINING_LOG)
        arguments += [
            f"{job.group}={path.relative_to(job.cwd) if path.is_relative_to(job.cwd) else path}" for path in paths
        ]
    if not arguments:
        names = " ".join(str(grid.path) for grid in grids)
        raise UserError(f"none of {len(jobs)} jobs has a finished log yet: python code/sweep.py run {names}")
    if unfinished:
        warn(f"{unfinished} of {len(jobs)} jobs are unfinished: their incomplete logs are left out")
    logs = read_logs(arguments, Report.kinds, warn=warn)
    if report.title == Report.title and len(grids) == 1:
        report = dataclasses.replace(report, title=grids[0].about)
    write_text(path, report(logs))
    print(f"wrote {path}")
