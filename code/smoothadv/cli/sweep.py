"""sweep: grids of models, from a file to a report, on this machine or a cluster."""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from smoothadv.analysis.report import Report
from smoothadv.analysis.shared.logs import read_logs
from smoothadv.analysis.shared.table_formats import FORMATS, Column, Table
from smoothadv.base.errors import UserError, warn
from smoothadv.base.files import PAGE, refuse_to_replace, write_text
from smoothadv.base.progress import Progress
from smoothadv.base.settings import options_of, output_file, positive_int
from smoothadv.cli.options.components import (
    add_components,
    add_options,
    add_settings,
    compose,
    compose_chosen,
)
from smoothadv.cli.runner import Parser, run, terminable
from smoothadv.records.logs import TRAINING_LOG, is_shard_folder
from smoothadv.sweep.engines import ENGINES, Engine, Site
from smoothadv.sweep.grid import MOST_MODELS, Grid, read_grid
from smoothadv.sweep.jobs import Job, JobState, StateKind, count_states, state_of

if TYPE_CHECKING:
    from smoothadv.sweep.planning import Plan

_EXAMPLES = """examples:
  python code/sweep.py plan scripts/grids/paper-cifar10-pgd.toml
  python code/sweep.py run scripts/grids/digits-smoke.toml
  python code/sweep.py run scripts/grids/paper-cifar10-pgd.toml --only '*noise_0.25*'
  python code/sweep.py run scripts/grids/paper-cifar10-pgd.toml --engine slurm --partition gpu \\
      --sbatch account=vision
  python code/sweep.py run scripts/grids/paper-cifar10-pgd.toml --engine ray --address 10.0.0.1:6379
  python code/sweep.py status scripts/grids/digits-smoke.toml
  python code/sweep.py retry scripts/grids/digits-smoke.toml
  python code/sweep.py report scripts/grids/digits-smoke.toml
Run the same command again after any interruption: it does what is missing. docs/sweeps.md says
what a grid can hold.
"""
_MOST_WARNINGS = 10
_SHARED = {
    "grids GRID...": (
        Path,
        "file that describes a sweep, or a name from scripts/grids like digits-smoke",
    ),
    "--only PATTERN...": (str, "only jobs whose folder matches one of these, like '*noise_0.25*'"),
    "--max-models M": (
        positive_int,
        f"refuse a grid of more than M models (default: {MOST_MODELS:,})",
        MOST_MODELS,
    ),
    "--data-dir DIR": (str, "folder of the dataset's files, for all commands"),
    "--device": (
        ("cpu",),
        "for all commands (default: GPUs where there are any, one for each process)",
    ),
}
_FORMAT = {"--format": (list(FORMATS), "of the table (default: markdown)", "markdown")}
_NO_COST = {"--no-cost": (None, "do not measure and estimate what the jobs will cost")}


@dataclass(frozen=True)
class Sweep:
    """A grid and the plans of its selected jobs."""

    grid: Grid
    plans: list[Plan]


def main(arguments: Sequence[str]) -> int:
    """Run the command ``sweep`` with these ``arguments``; returns the exit code."""
    hint = "all progress is on the disk; run the same command again to continue"
    return run(
        "sweep",
        _make_parser,
        lambda _, options, words: options.act(options.parser, options),
        arguments,
        hint,
    )


def _make_parser() -> Parser:
    about = "Train, certify and attack a grid of models that a file describes, and report on it."
    parser = Parser(prog="sweep", epilog=_EXAMPLES, description=about)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, (what, add, act) in _ACTIONS.items():
        action = actions.add_parser(
            name, prog=f"sweep {name}", help=what, description=f"{what[0].upper()}{what[1:]}."
        )
        add_options(action, _SHARED)
        add(action)
        action.set_defaults(parser=action, act=act)
    return parser


def _add_engine(parser: Parser) -> None:
    group = parser.add_argument_group("engine")
    engines = "; ".join(f"{name}: {engine.__doc__}" for name, engine in ENGINES.items())
    add_components(group, "--engine", ENGINES, f"what runs the jobs: {engines}", "local")


def _add_report(parser: Parser) -> None:
    page = (
        "page to write (default: report.html in the grid's folder of logs; for several grids "
        "logs/report.html)"
    )
    add_options(parser, {"-o --output FILE": (output_file, page)})
    add_settings(parser, options_of(Report))


def _read(options: argparse.Namespace) -> list[Sweep]:
    """The grids with the jobs that --only selects, by default all."""
    return _planned([read_grid(path, options.max_models) for path in options.grids], options)


def _planned(grids: Sequence[Grid], options: argparse.Namespace) -> list[Sweep]:
    """As ``_read``, of grids that have been read: their files may change while a sweep runs."""
    # Imports the commands of the jobs, and torch: the help and an error in a grid's file do not
    # wait for these.
    from smoothadv.sweep.planning import plan_sweep

    shared = {"--data-dir": options.data_dir, "--device": options.device}
    sweeps = [
        Sweep(grid, plan_sweep(grid, shared, getattr(options, "plugin", ()))) for grid in grids
    ]
    _refuse_shared_folders([sweep.grid for sweep in sweeps])
    if options.only is None:
        return sweeps

    def matches(plan: Plan) -> bool:
        return any(fnmatch.fnmatchcase(plan.job.name, pattern) for pattern in options.only)

    chosen = [Sweep(sweep.grid, list(filter(matches, sweep.plans))) for sweep in sweeps]
    if not any(sweep.plans for sweep in chosen):
        jobs = _jobs(sweeps)
        raise UserError(
            f"--only {' '.join(options.only)}: matches none of {len(jobs)} jobs, like "
            f"{jobs[0].name}"
        )
    return [sweep for sweep in chosen if sweep.plans]


def _refuse_shared_folders(grids: Sequence[Grid]) -> None:
    """UserError if two grids would write into one folder."""
    for kind in ("models", "logs"):
        grid_of: dict[Path, Grid] = {}
        for grid in grids:
            folder = getattr(grid, kind)
            other = grid_of.setdefault(folder.resolve(), grid)
            if other is not grid:
                raise UserError(
                    f"grids {other.path} and {grid.path} have the same folder of {kind}, {folder}"
                )


def _shown(jobs: Sequence[Job]) -> Iterable[Job]:
    """The jobs, with a bar while the files of one after the other are looked at."""
    return Progress(jobs, "checking files", unit="job", delay=1)


def _states(jobs: Sequence[Job]) -> list[JobState]:
    return [state_of(job) for job in _shown(jobs)]


def _plan(parser: Parser, options: argparse.Namespace) -> None:
    sweeps = _read(options)
    for sweep in sweeps:
        grid, plans = sweep.grid, sweep.plans
        columns = [Column(name, name, "text") for name in ("group", "folder", "then")]
        rows = [
            [plan.job.group, plan.job.name, ", ".join(_then(plan)) or "nothing"] for plan in plans
        ]
        print(
            f"{grid.name}: {grid.about}; {len(plans)} jobs\nmodels in {grid.models}, logs in "
            f"{grid.logs}"
        )
        print(f"{len(grid.trained)} models = {grid.formula}\n")
        print(FORMATS[options.format](Table(columns, rows), 1))
        if not options.no_cost:
            from smoothadv.sweep.costs import cost_table

            print(cost_table(grid, plans, options.device) + "\n")
    if len(sweeps) > 1:
        counts, names = zip(*((len(sweep.grid.trained), sweep.grid.name) for sweep in sweeps))
        print(f"{sum(counts)} models = {' + '.join(map(str, counts))}, of {', '.join(names)}")


def _then(plan: Plan) -> list[str]:
    """What follows the training, for people."""
    perhaps = [f"perhaps {table.command} {table.name}" for table in plan.pending]
    return [*(stage.title for stage in plan.job.evaluations), *perhaps]


def _status(parser: Parser, options: argparse.Namespace) -> None:
    sweeps = _read(options)
    jobs = _jobs(sweeps)
    states = _states(jobs)
    columns = [Column(name, name, "text") for name in ("state", "folder", "detail")]
    names = [job.name if len(sweeps) == 1 else job.key for job in jobs]
    rows = [[state.kind.value, name, state.detail] for name, state in zip(names, states)]
    print(FORMATS[options.format](Table(columns, rows), 1), end="")
    if options.format == "markdown":
        print(f"\n{_summary(sweeps, states)}")


def _jobs(sweeps: Sequence[Sweep]) -> list[Job]:
    return [plan.job for sweep in sweeps for plan in sweep.plans]


def _summary(sweeps: Sequence[Sweep], states: Sequence[JobState]) -> str:
    counted = ", ".join(f"{number} {kind.value}" for kind, number in count_states(states).items())
    names = dict.fromkeys(
        table.name for sweep in sweeps for plan in sweep.plans for table in plan.pending
    )
    later = (
        f"; the best models, for {' and '.join(map(repr, names))}, are not known yet"
        if names
        else ""
    )
    return f"{', '.join(sweep.grid.name for sweep in sweeps)}: {len(states)} jobs: {counted}{later}"


def _work(parser: Parser, options: argparse.Namespace, *kinds: StateKind) -> None:
    """Run the jobs that are in one of these states; UserError if a job is not done in the end."""
    if os.name == "nt":
        raise UserError(
            f"sweep {options.action} needs the locks and signals of Linux or macOS; plan and "
            "report do not"
        )
    engine = compose_chosen(parser, ENGINES, options, "--engine")
    grids = [read_grid(path, options.max_models) for path in options.grids]
    sweeps = _planned(grids, options)
    jobs = _jobs(sweeps)
    states = _states(jobs)
    print(_summary(sweeps, states))
    wanted = [job for job, state in zip(jobs, states) if state.kind in kinds]
    queued = engine.already_has(wanted)
    if queued:
        print(f"{len(queued)} of them are in the engine's queue already")
    to_do = [job for job in wanted if job.key not in queued]
    if not to_do:
        print("nothing to do")
    taken = {(job.key, len(job.stages)) for job in wanted}
    while to_do:
        _hand_over(engine, to_do, _site(sweeps, options))
        # What these jobs made may be what others wait for: members of an ensemble, or logs that
        # tell the best models.
        sweeps = _planned(grids, options)
        jobs = _jobs(sweeps)
        to_do = [
            job
            for job in jobs
            if (job.key, len(job.stages)) not in taken and state_of(job).kind in kinds
        ]
        taken |= {(job.key, len(job.stages)) for job in to_do}
    _conclude(sweeps, options, is_detached=getattr(engine, "detach", False))


def _site(sweeps: Sequence[Sweep], options: argparse.Namespace) -> Site:
    import torch

    wants_gpus = options.device != "cpu"
    gpus = (
        visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count())
        if wants_gpus
        else ()
    )
    return Site(
        "-".join(sweep.grid.name for sweep in sweeps), sweeps[0].grid.logs, gpus, wants_gpus
    )


def visible_gpus(named: str | None, count: int) -> tuple[str, ...]:
    """The names of the ``count`` visible GPUs; ``named`` is the variable CUDA_VISIBLE_DEVICES."""
    names = [name.strip() for name in (named or "").split(",") if name.strip()] or [
        str(i) for i in range(count)
    ]
    return tuple(names[:count])


def _hand_over(engine: Engine, jobs: list[Job], site: Site) -> None:
    """Let the engine run the jobs; prints a line as each ends."""
    start, numbers = time.monotonic(), itertools.count(1)
    with Progress(total=len(jobs), unit="job") as bar:

        def report_end(job: Job, outcome: str) -> None:
            bar.update()
            elapsed = timedelta(seconds=round(time.monotonic() - start))
            with bar.external_write_mode():
                print(
                    f"{next(numbers):4d}/{len(jobs)}  {elapsed}  {outcome:8s}{job.name}", flush=True
                )

        with terminable():
            engine.run(jobs, site, report_end)


def _conclude(sweeps: Sequence[Sweep], options: argparse.Namespace, is_detached: bool) -> None:
    """Print the state of the sweeps; UserError unless every job is done or, if detached, none has
    failed.
    """
    plugins = [word for plugin in getattr(options, "plugin", ()) for word in ("--plugin", plugin)]
    jobs, grids = _jobs(sweeps), " ".join([*map(str, options.grids), *plugins])
    command = options.parser.prog.rpartition(" ")[0]  # as the user starts it, without the action
    states = _states(jobs)
    counted = count_states(states)
    print(_summary(sweeps, states))
    if set(counted) == {StateKind.DONE}:
        print(f"report: {command} report {grids}")
        return
    failed = [
        (job, state)
        for job, state in zip(jobs, states)
        if state.kind in (StateKind.FAILED, StateKind.BLOCKED)
    ]
    for job, state in failed[:_MOST_WARNINGS]:
        warn(f"{state.kind.value}: {job.name}: {state.detail}; {job.record.log}")
    if len(failed) > _MOST_WARNINGS:
        warn(f"and {len(failed) - _MOST_WARNINGS} more that failed or need files")
    if is_detached and StateKind.FAILED not in counted:
        is_pending = any(
            plan.pending or not plan.job.training for sweep in sweeps for plan in sweep.plans
        )
        if is_pending or StateKind.BLOCKED in counted:
            print(f"others wait for these jobs: then, run {command} run {grids} again")
        return
    advice = f"see {command} status {grids}"
    if counted.keys() & {StateKind.WAITING, StateKind.STOPPED}:
        advice += f"; {command} run {grids} continues"
    if StateKind.FAILED in counted:
        advice += f"; {command} retry {grids} runs the failed ones again"
    raise UserError(
        f"{len(jobs) - counted.get(StateKind.DONE, 0)} of {len(jobs)} jobs are not done: {advice}"
    )


def _report(parser: Parser, options: argparse.Namespace) -> None:
    """Write the page that analyze writes, about all logs of the sweeps that are complete; UserError
    if there is none.

    Others are left out, with a warning, unless asked for.
    """
    report = compose(parser, Report, options, "sweep report")
    sweeps = _read(options)
    grids, jobs = [sweep.grid for sweep in sweeps], _jobs(sweeps)
    path = options.output or (grids[0].logs if len(grids) == 1 else Path("logs")) / "report.html"
    refuse_to_replace(path, *PAGE)
    arguments, unfinished = [], 0
    for job in _shown(jobs):
        come = [(stage.logs, stage.progress()) for stage in job.evaluations]
        taken = [
            logs
            for logs, it in come
            if it.is_complete or (report.unfinished and it.done and not it.conflict)
        ]
        paths = [log for logs in taken for log in logs if log.exists()]
        unfinished += len(taken) < len(come)
        if job.training and job.training.progress().is_complete:
            paths.append(job.training.folder / TRAINING_LOG)
        arguments += [
            f"{job.group}={log.relative_to(job.cwd) if log.is_relative_to(job.cwd) else log}"
            for log in paths
        ]
    if not arguments:
        run_first = f"{parser.prog.rpartition(' ')[0]} run {' '.join(map(str, options.grids))}"
        raise UserError(f"none of {len(jobs)} jobs has a finished log yet: {run_first}")
    if unfinished:
        warn(f"{unfinished} of {len(jobs)} jobs are unfinished: their incomplete logs are left out")
    known = {log for job in jobs for stage in job.evaluations for log in stage.logs}
    there = [
        log
        for grid in grids
        for log in sorted(grid.logs.rglob("*.tsv"))
        if not is_shard_folder(log.parent.name)
    ]
    found = [log for log in there if log.absolute() not in known]
    if found and not options.only:  # as that of a model that is no longer among the best
        warn(
            "logs that no job makes are left out: "
            f"{found[0]}{f' and {len(found) - 1} more' if found[1:] else ''}"
        )
    logs = read_logs(arguments, Report.kinds, warn=warn)
    if report.title == Report.title and len(grids) == 1:
        report = replace(report, title=grids[0].about)
    write_text(path, report(logs))
    print(f"wrote {path}")


_ACTIONS: dict[
    str, tuple[str, Callable[[Parser], None], Callable[[Parser, argparse.Namespace], None]]
] = {
    "plan": (
        "print the jobs, their folders and their estimated time, from updates measured on this "
        "machine",
        lambda parser: add_options(parser, {**_NO_COST, **_FORMAT}),
        _plan,
    ),
    "run": (
        "train, certify and attack whatever is missing; failed jobs are not run again",
        _add_engine,
        lambda parser, options: _work(parser, options, StateKind.WAITING, StateKind.STOPPED),
    ),
    "status": (
        "print whether each job is waiting, running, done or failed, and why",
        lambda parser: add_options(parser, _FORMAT),
        _status,
    ),
    "retry": (
        "run the failed jobs again",
        _add_engine,
        lambda parser, options: _work(parser, options, StateKind.FAILED),
    ),
    "report": (
        "write one HTML page about all complete logs: tables, curves, heat maps",
        _add_report,
        _report,
    ),
}
"""Of each action: what it does, what adds its own options, and what carries it out."""
