"""sweep: grids of models, from a file to a report, on this machine or a cluster."""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from smoothadv.analysis.reading import read_logs
from smoothadv.analysis.report import Report
from smoothadv.analysis.table_formats import FORMATS, Column, Table
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
from smoothadv.sweep.engines import ENGINES, Engine, SweepContext
from smoothadv.sweep.grid import MOST_MODELS, Grid, read_grid
from smoothadv.sweep.jobs import JobState, StateKind, SweepJob, state_of
from smoothadv.sweep.stages import EvaluationStage

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
    """A grid and its selected jobs."""

    grid: Grid
    jobs: list[SweepJob]


JobAndState = tuple[SweepJob, JobState]


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


def _read_grids(options: argparse.Namespace) -> list[Grid]:
    grids = [read_grid(path, options.max_models) for path in options.grids]
    for kind in ("models", "logs"):
        readers: dict[Path, Grid] = {}
        for grid in grids:
            folder = getattr(grid, kind)
            other = readers.setdefault(folder.resolve(), grid)
            if other is not grid:
                raise UserError(
                    f"grids {other.path} and {grid.path} have the same folder of {kind}, {folder}"
                )
    return grids


def _read_sweeps(options: argparse.Namespace, grids: Sequence[Grid] | None = None) -> list[Sweep]:
    """The ``grids`` (None: read from the files that the options name) with the jobs that --only
    selects, by default all.
    """
    grids = _read_grids(options) if grids is None else grids
    # Imports the commands of the jobs, and torch: the help and an error in a grid's file do not
    # wait for these.
    from smoothadv.cli.expectations import CommandReader
    from smoothadv.sweep.planning import plan_jobs

    commands = CommandReader()
    shared = {"--data-dir": options.data_dir, "--device": options.device}
    plugins = getattr(options, "plugin", ())
    sweeps = [Sweep(grid, plan_jobs(grid, commands, shared, plugins)) for grid in grids]
    if options.only is None:
        return sweeps

    def is_selected(job: SweepJob) -> bool:
        return any(fnmatch.fnmatchcase(job.name, pattern) for pattern in options.only)

    jobs = _jobs(sweeps)
    selected = [Sweep(sweep.grid, list(filter(is_selected, sweep.jobs))) for sweep in sweeps]
    selected = [sweep for sweep in selected if sweep.jobs]
    if not selected:
        raise UserError(
            f"--only {' '.join(options.only)}: matches none of {len(jobs)} jobs, like "
            f"{jobs[0].name}"
        )
    return selected


def _jobs(sweeps: Sequence[Sweep]) -> list[SweepJob]:
    return [job for sweep in sweeps for job in sweep.jobs]


def _with_bar(sweeps: Sequence[Sweep]) -> Iterable[SweepJob]:
    """All jobs, with a bar while the files of one after the other are read."""
    return Progress(_jobs(sweeps), "checking files", unit="job", delay=1)


def _with_states(sweeps: Sequence[Sweep]) -> list[JobAndState]:
    return [(job, state_of(job)) for job in _with_bar(sweeps)]


def _plan(parser: Parser, options: argparse.Namespace) -> None:
    sweeps = _read_sweeps(options)
    for sweep in sweeps:
        grid, jobs = sweep.grid, sweep.jobs
        columns = [Column(name, name, "text") for name in ("group", "folder", "then")]
        rows = [[job.group, job.name, ", ".join(_titles(job)) or "nothing"] for job in jobs]
        print(f"{grid.name}: {grid.about}; {len(jobs)} jobs")
        print(f"models in {grid.models}, logs in {grid.logs}")
        print(f"{len(grid.trained)} models = {grid.formula}\n")
        print(FORMATS[options.format](Table(columns, rows), 1))
        if not options.no_cost:
            from smoothadv.cli.expectations import CommandReader
            from smoothadv.sweep.costs import cost_table

            print(cost_table(grid, jobs, CommandReader(), options.device) + "\n")
    if len(sweeps) > 1:
        counts, names = zip(*((len(sweep.grid.trained), sweep.grid.name) for sweep in sweeps))
        print(f"{sum(counts)} models = {' + '.join(map(str, counts))}, of {', '.join(names)}")


def _titles(job: SweepJob) -> list[str]:
    """What follows the training, for people."""
    perhaps = [f"perhaps {table.command} {table.name}" for table in job.pending]
    return [*(stage.title for stage in job.evaluations), *perhaps]


def _status(parser: Parser, options: argparse.Namespace) -> None:
    sweeps = _read_sweeps(options)
    jobs = _with_states(sweeps)
    columns = [Column(name, name, "text") for name in ("state", "folder", "detail")]
    rows = [
        [state.kind.value, job.name if len(sweeps) == 1 else job.key, state.detail]
        for job, state in jobs
    ]
    print(FORMATS[options.format](Table(columns, rows), 1), end="")
    if options.format == "markdown":
        print(f"\n{_summary(sweeps, jobs)}")


def _summary(sweeps: Sequence[Sweep], jobs: Sequence[JobAndState]) -> str:
    counts = Counter(state.kind for _, state in jobs)
    counted = ", ".join(f"{counts[kind]} {kind.value}" for kind in StateKind if counts[kind])
    text = f"{', '.join(sweep.grid.name for sweep in sweeps)}: {len(jobs)} jobs: {counted}"
    names = dict.fromkeys(repr(table.name) for job, _ in jobs for table in job.pending)
    if names:
        text += f"; the best models, for {' and '.join(names)}, are not known yet"
    return text


def _work(parser: Parser, options: argparse.Namespace, *kinds: StateKind) -> None:
    """Run the jobs that are in one of these states; UserError if a job is not done in the end."""
    if os.name == "nt":
        raise UserError(
            f"sweep {options.action} needs the locks and signals of Linux or macOS; plan and "
            "report do not"
        )
    engine = compose_chosen(parser, ENGINES, options, "--engine")
    grids = _read_grids(options)  # once: their files may change while a sweep runs
    sweeps = _read_sweeps(options, grids)
    jobs = _with_states(sweeps)
    print(_summary(sweeps, jobs))
    wanted = [job for job, state in jobs if state.kind in kinds]
    queued = engine.already_has(wanted)
    if queued:
        print(f"{len(queued)} of them are in the engine's queue already")
    to_do = [job for job in wanted if job.key not in queued]
    if not to_do:
        print("nothing to do")
    started = {(job.key, len(job.stages)) for job in wanted}
    while to_do:
        _run_jobs(engine, to_do, _context(sweeps, options))
        # What these jobs made may be what others wait for: members of an ensemble, or logs that
        # tell the best models.
        sweeps = _read_sweeps(options, grids)
        jobs = _with_states(sweeps)
        wanted = [job for job, state in jobs if state.kind in kinds]
        to_do = [job for job in wanted if (job.key, len(job.stages)) not in started]
        started |= {(job.key, len(job.stages)) for job in to_do}
    _conclude(sweeps, jobs, options, is_detached=getattr(engine, "detach", False))


def _context(sweeps: Sequence[Sweep], options: argparse.Namespace) -> SweepContext:
    import torch

    name, folder = "-".join(sweep.grid.name for sweep in sweeps), sweeps[0].grid.logs
    if options.device == "cpu":
        return SweepContext(name, folder, (), wants_gpus=False)
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return SweepContext(name, folder, visible_gpus(named, torch.cuda.device_count()))


def visible_gpus(named: str | None, count: int) -> tuple[str, ...]:
    """The names of the ``count`` visible GPUs; ``named`` is the variable CUDA_VISIBLE_DEVICES."""
    names = [name.strip() for name in (named or "").split(",") if name.strip()] or [
        str(i) for i in range(count)
    ]
    return tuple(names[:count])


def _run_jobs(engine: Engine, jobs: list[SweepJob], context: SweepContext) -> None:
    """Let the engine run the jobs; prints a line as each ends."""
    start, numbers = time.monotonic(), itertools.count(1)
    with Progress(total=len(jobs), unit="job") as bar:

        def report_end(job: SweepJob, outcome: str) -> None:
            bar.update()
            elapsed = timedelta(seconds=round(time.monotonic() - start))
            with bar.external_write_mode():
                print(
                    f"{next(numbers):4d}/{len(jobs)}  {elapsed}  {outcome:8s}{job.name}", flush=True
                )

        with terminable():
            engine.run(jobs, context, report_end)


def _conclude(
    sweeps: Sequence[Sweep],
    jobs: Sequence[JobAndState],
    options: argparse.Namespace,
    is_detached: bool,
) -> None:
    """Print the state of the sweeps; UserError unless every job is done or, if detached, none has
    failed.
    """
    print(_summary(sweeps, jobs))
    plugins = [word for plugin in getattr(options, "plugin", ()) for word in ("--plugin", plugin)]
    grids = " ".join([*map(str, options.grids), *plugins])
    command = options.parser.prog.rpartition(" ")[0]  # as the user starts it, without the action
    kinds = Counter(state.kind for _, state in jobs)
    if set(kinds) == {StateKind.DONE}:
        print(f"report: {command} report {grids}")
        return
    warnings = [
        f"{state.kind.value}: {job.name}: {state.detail}; {job.record.log}"
        for job, state in jobs
        if state.kind in (StateKind.FAILED, StateKind.BLOCKED)
    ]
    for warning in warnings[:_MOST_WARNINGS]:
        warn(warning)
    if len(warnings) > _MOST_WARNINGS:
        warn(f"and {len(warnings) - _MOST_WARNINGS} more that failed or need files")
    if is_detached and StateKind.FAILED not in kinds:
        is_pending = any(job.pending or not job.training for job, _ in jobs)
        if is_pending or StateKind.BLOCKED in kinds:
            print(f"others wait for these jobs: then, run {command} run {grids} again")
        return
    advice = f"see {command} status {grids}"
    if kinds.keys() & {StateKind.WAITING, StateKind.STOPPED}:
        advice += f"; {command} run {grids} continues"
    if StateKind.FAILED in kinds:
        advice += f"; {command} retry {grids} runs the failed ones again"
    not_done = len(jobs) - kinds[StateKind.DONE]
    raise UserError(f"{not_done} of {len(jobs)} jobs are not done: {advice}")


def _report(parser: Parser, options: argparse.Namespace) -> None:
    """Write the page that analyze writes, about all logs of the sweeps that are complete; UserError
    if there is none.

    Others are left out, with a warning, unless asked for.
    """
    report = compose(parser, Report, options, "sweep report")
    sweeps = _read_sweeps(options)
    grids, jobs = [sweep.grid for sweep in sweeps], _jobs(sweeps)
    page = options.output or (grids[0].logs if len(grids) == 1 else Path("logs")) / "report.html"
    refuse_to_replace(page, *PAGE)
    arguments, unfinished = [], 0
    for job in _with_bar(sweeps):
        stages = [stage for stage in job.evaluations if _is_reported(stage, report.unfinished)]
        unfinished += len(stages) < len(job.evaluations)
        paths = [log for stage in stages for log in stage.logs if log.exists()]
        if job.training and job.training.progress().is_complete:
            paths.append(job.training.folder / TRAINING_LOG)
        for path in paths:
            name = path.relative_to(job.cwd) if path.is_relative_to(job.cwd) else path
            arguments.append(f"{job.group}={name}")
    if not arguments:
        run_first = f"{parser.prog.rpartition(' ')[0]} run {' '.join(map(str, options.grids))}"
        raise UserError(f"none of {len(jobs)} jobs has a finished log yet: {run_first}")
    if unfinished:
        warn(f"{unfinished} of {len(jobs)} jobs are unfinished: their incomplete logs are left out")
    if not options.only:
        _warn_of_other_logs(sweeps)
    logs = read_logs(arguments, Report.kinds, warn=warn)
    if report.title == Report.title and len(grids) == 1:
        report = replace(report, title=grids[0].about)
    write_text(page, report(logs))
    print(f"wrote {page}")


def _is_reported(stage: EvaluationStage, unfinished: bool) -> bool:
    reached = stage.progress()
    return reached.is_complete or (unfinished and reached.done > 0 and not reached.conflict)


def _warn_of_other_logs(sweeps: Sequence[Sweep]) -> None:
    """Warn of logs that no job makes, as that of a model that is no longer among the best."""
    known = {log for job in _jobs(sweeps) for stage in job.evaluations for log in stage.logs}
    paths = [path for sweep in sweeps for path in sorted(sweep.grid.logs.rglob("*.tsv"))]
    paths = [path for path in paths if not is_shard_folder(path.parent.name)]
    others = [path for path in paths if path.absolute() not in known]
    if others:
        more = f" and {len(others) - 1} more" if others[1:] else ""
        warn(f"logs that no job makes are left out: {others[0]}{more}")


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
