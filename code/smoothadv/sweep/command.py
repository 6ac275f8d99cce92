"""sweep: grids of models, from a file to a report, on this machine or a cluster."""

import fnmatch
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from smoothadv.analysis.reading import read_logs
from smoothadv.analysis.report import Report
from smoothadv.analysis.table_formats import FORMATS, Column, Table
from smoothadv.base.errors import UserError, counted, warn
from smoothadv.base.files import PAGE, refuse_to_replace, write_text
from smoothadv.base.progress import Progress
from smoothadv.base.settings import Checked, options_of, output_file, positive_int, setting
from smoothadv.cli.runner import (
    Options,
    Parser,
    add_settings,
    compose,
    given_settings,
    group_of,
    refuse_foreign_settings,
    run,
    terminable,
)
from smoothadv.sweep.engines import ENGINES, Engine, SweepContext
from smoothadv.sweep.grid import MOST_MODELS, Grid, read_grids
from smoothadv.sweep.jobs import (
    BLOCKED,
    DONE,
    FAILED,
    STATES,
    STOPPED,
    WAITING,
    JobState,
    SweepJob,
    state_of,
    time_of_done_jobs,
)
from smoothadv.sweep.stages import Stage

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
_MOST_JOBS = 12  # in a plan for people, which fits a screen


@dataclass(frozen=True, kw_only=True)
class _SweepOptions(Checked):
    """What every action takes; ``command`` is how the user starts it, up to the action."""

    grids: tuple[Path, ...] = setting(
        parse=Path,
        flag="grids",
        metavar="GRID",
        help="file that describes a sweep, or a name from scripts/grids like digits-smoke",
    )
    only: tuple[str, ...] | None = setting(
        None,
        parse=str,
        metavar="PATTERN",
        help="only jobs whose folder matches one of these, like '*noise_0.25*'",
    )
    max_models: int = setting(
        MOST_MODELS, parse=positive_int, metavar="M", help="refuse a grid of more than M models"
    )
    data_dir: str | None = setting(
        None, parse=str, metavar="DIR", help="folder of the dataset's files, for all commands"
    )
    device: str | None = setting(
        None,
        choices=("cpu",),
        help="for all commands (default: GPUs where there are any, one for each process)",
    )
    plugins: Sequence[str] = ()
    command: str

    @property
    def words(self) -> str:
        """The words of another action on the same grids."""
        plugins = [word for plugin in self.plugins for word in ("--plugin", plugin)]
        return " ".join([*map(str, self.grids), *plugins])


@dataclass(frozen=True, kw_only=True)
class _StatusOptions(_SweepOptions):
    format: str = setting("markdown", choices=FORMATS, help="of the table")


@dataclass(frozen=True, kw_only=True)
class _RunOptions(_SweepOptions):
    engine: str = setting(
        "local",
        choices=ENGINES,
        metavar="NAME",
        group="engine",
        help="what runs the jobs: "
        + "; ".join(f"{name}: {str(one.__doc__).strip()}" for name, one in ENGINES.items()),
    )


@dataclass(frozen=True, kw_only=True)
class _ReportOptions(_SweepOptions):
    output: Path | None = setting(
        None,
        parse=output_file,
        flag="-o --output",
        metavar="FILE",
        help="page to write (default: report.html in the grid's folder of logs; for several grids "
        "logs/report.html)",
    )


Sweeps = list[tuple[Grid, list[SweepJob]]]
"""Grids, and the selected jobs of each."""
JobAndState = tuple[SweepJob, JobState]


def _make_parser() -> Parser:
    about = "Train, certify and attack a grid of models that a file describes, and report on it."
    parser = Parser(prog="sweep", epilog=_EXAMPLES, description=about)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, (kind, what, _) in _ACTIONS.items():
        action = actions.add_parser(
            name,
            prog=f"sweep {name}",
            help=what,
            description=f"{what[0].upper()}{what[1:]}.",
            kinds=[kind] if kind is not _ReportOptions else [kind, Report],
        )
        if kind is _RunOptions:
            engines = [one for engine in ENGINES.values() for one in options_of(engine)]
            add_settings(group_of(action, "engine"), engines)
    return parser


def _sweep(parser: Parser, options: Options, command: Sequence[str]) -> None:
    kind, _, act = _ACTIONS[options["action"]]
    asked = kind(
        **given_settings(kind, options), plugins=options.get("plugin", ()), command=parser.prog
    )
    act(asked, options)


def _read_sweeps(asked: _SweepOptions, grids: Sequence[Grid] | None = None) -> Sweeps:
    """The ``grids`` (None: read from the files that the options name) with the jobs that --only
    selects, by default all.
    """
    grids = read_grids(asked.grids, asked.max_models) if grids is None else grids
    # Imports the commands of the jobs, and torch: the help and an error in a grid's file do not
    # wait for these.
    from smoothadv.sweep.planning import CommandReader, plan_jobs

    commands = CommandReader()
    sweeps: Sweeps = []
    shared = {"--data-dir": asked.data_dir, "--device": asked.device}
    for grid in grids:
        jobs = [
            job
            for job in plan_jobs(grid, commands, shared, asked.plugins)
            if any(fnmatch.fnmatchcase(job.name, pattern) for pattern in asked.only or ["*"])
        ]
        if jobs or asked.only is None:
            sweeps.append((grid, jobs))
    if not sweeps:
        raise UserError(f"--only {' '.join(asked.only or ())}: matches no job; plan lists them")
    return sweeps


def _with_bar(sweeps: Sweeps) -> Progress:
    """All jobs, with a bar while the files of one after the other are read."""
    jobs = [job for _, jobs in sweeps for job in jobs]
    return Progress(jobs, "checking files", unit="job", delay=1)


def _with_states(sweeps: Sweeps, looks_for_images: bool = False) -> list[JobAndState]:
    from smoothadv.sweep.planning import CommandReader

    further = [CommandReader().lacking] if looks_for_images else []
    return [(job, state_of(job, *further)) for job in _with_bar(sweeps)]


def _print_table(names: Sequence[str], rows: list[list[str]], form: str) -> None:
    columns = [Column(name, name, "text") for name in names]
    print(FORMATS[form](Table(columns, rows), 1), end="")


def _plan(asked: _StatusOptions, options: Options) -> None:
    sweeps = _read_sweeps(asked)
    for grid, jobs in sweeps:
        # For people: what follows the training.
        rows = [[job.group, job.name, ", ".join(job.then) or "nothing"] for job in jobs]
        models = counted(len(grid.trained), "model")
        print(
            f"{grid.name}: {grid.about}\n{counted(len(jobs), 'job')}, {models} = {grid.formula}\n"
            f"models in {grid.models}, logs in {grid.logs}\n"
        )
        if text := time_of_done_jobs(jobs):
            print(f"{text}\n")
        most = _MOST_JOBS if asked.format == "markdown" else len(rows)
        _print_table(("group", "folder", "then"), rows[:most], asked.format)
        if most < len(rows):
            print(f"\nand {counted(len(rows) - most, 'more job')}; --format csv lists all")
        print()
    if len(sweeps) > 1:
        counts = [len(grid.trained) for grid, _ in sweeps]
        total = f"{counted(sum(counts), 'model')} = {' + '.join(map(str, counts))}"
        print(f"{total}, of {', '.join(grid.name for grid, _ in sweeps)}")


def _status(asked: _StatusOptions, options: Options) -> None:
    sweeps = _read_sweeps(asked)
    jobs = _with_states(sweeps)
    rows = [
        [state.kind, job.name if len(sweeps) == 1 else job.key, state.detail] for job, state in jobs
    ]
    _print_table(("state", "folder", "detail"), rows, asked.format)
    if asked.format == "markdown":
        print(f"\n{_summary(sweeps, jobs)}")


def _summary(sweeps: Sweeps, jobs: Sequence[JobAndState]) -> str:
    counts = Counter(state.kind for _, state in jobs)
    states = ", ".join(f"{counts[kind]} {kind}" for kind in STATES if counts[kind])
    text = f"{', '.join(grid.name for grid, _ in sweeps)}: {counted(len(jobs), 'job')}: {states}"
    names = dict.fromkeys(repr(table.name) for job, _ in jobs for table in job.pending)
    if names:
        text += f"; the best models, for {' and '.join(names)}, are not known yet"
    return text


def _work(asked: _RunOptions, options: Options) -> None:
    """Run the jobs that wait, or those that have failed; UserError if a job is not done in the
    end.
    """
    kinds = {FAILED} if options["action"] == "retry" else {WAITING, STOPPED}
    refuse_foreign_settings(options, ENGINES, "--engine", asked.engine)
    engine = compose(ENGINES[asked.engine], options, f"--engine {asked.engine}")
    grids = read_grids(asked.grids, asked.max_models)  # once: they may change while a sweep runs
    started: set[tuple[str, int]] = set()
    while True:
        sweeps = _read_sweeps(asked, grids)
        # A node of a cluster may have images that this machine lacks.
        jobs = _with_states(sweeps, looks_for_images=asked.engine == "local")
        wanted = {(job.key, len(job.stages)): job for job, state in jobs if state.kind in kinds}
        # What these jobs make may be what others wait for: members of an ensemble, or logs that
        # tell the best models.
        to_do = [job for key, job in wanted.items() if key not in started]
        if not started:
            print(_summary(sweeps, jobs))
            if queued := engine.already_has(to_do):
                print(f"{len(queued)} of them are in the engine's queue already")
                to_do = [job for job in to_do if job.key not in queued]
            if not to_do:
                print("nothing to do")
        if not to_do:
            break
        started |= wanted.keys()
        names = "-".join(grid.name for grid, _ in sweeps)
        _run_jobs(engine, to_do, context_of(names, sweeps[0][0].logs, asked.device))
    print(_summary(sweeps, jobs))
    _conclude(jobs, asked, is_detached=getattr(engine, "detach", False))


def context_of(name: str, folder: Path, device: str | None) -> SweepContext:
    """The context of a sweep that is started here, for ``device`` (None: GPUs where there are
    any).
    """
    import torch

    if device == "cpu":
        return SweepContext(name, folder, (), wants_gpus=False)
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = [name.strip() for name in named if name.strip()]
    count = torch.cuda.device_count()
    return SweepContext(name, folder, tuple(names or map(str, range(count)))[:count])


def _run_jobs(engine: Engine, jobs: list[SweepJob], context: SweepContext) -> None:
    """Let the engine run the jobs; prints a line as each ends."""
    start, numbers = time.monotonic(), itertools.count(1)
    with Progress(total=len(jobs), unit="job") as bar:

        def report_end(job: SweepJob, outcome: str) -> None:
            bar.update()
            elapsed = timedelta(seconds=round(time.monotonic() - start))
            line = f"{next(numbers):4d}/{len(jobs)}  {elapsed}  {outcome:8s}{job.name}"
            with bar.external_write_mode():
                print(line, flush=True)

        with terminable():
            engine.run(jobs, context, report_end)


def _conclude(jobs: Sequence[JobAndState], asked: _RunOptions, is_detached: bool) -> None:
    """Say how to go on; UserError unless every job is done or, if detached, none has failed."""
    command, words = asked.command, asked.words
    not_done = [(job, state) for job, state in jobs if state.kind != DONE]
    if not not_done:
        print(f"report: {command} report {words}")
        return
    has_failed = any(state.kind == FAILED for _, state in not_done)
    hindered = [(job, state) for job, state in not_done if state.kind in (FAILED, BLOCKED)]
    for job, state in hindered[:_MOST_WARNINGS]:
        log = f"; {job.record.log}" if state.kind == FAILED else ""
        warn(f"{state.kind}: {job.name}: {state.detail}{log}")
    if is_detached and not has_failed:
        print(f"when these jobs have ended, {command} run {words} does what waits for them")
        return
    raise UserError(
        f"{len(not_done)} of {counted(len(jobs), 'job')} not done: see {command} status {words}; "
        f"{command} run {words} continues, {command} retry {words} runs failed jobs again, too; "
        "where a model or log is in conflict, give the grid other models and logs, or remove that "
        "one"
    )


def _report(asked: _ReportOptions, options: Options) -> None:
    """Write the page that analyze writes, about all logs of the sweeps that are complete; UserError
    if there is none.

    Others are left out, with a warning, unless asked for.
    """
    report = compose(Report, options, "sweep report")
    sweeps = _read_sweeps(asked)
    grids = [grid for grid, _ in sweeps]
    page = asked.output or (grids[0].logs if len(grids) == 1 else Path("logs")) / "report.html"
    refuse_to_replace(page, *PAGE)
    jobs, arguments, unfinished = _with_bar(sweeps), [], 0
    for job in jobs:
        stages = [stage for stage in job.stages if _is_reported(stage, report.unfinished)]
        unfinished += len(stages) < len(job.stages)
        logs = [log for stage in stages for log in stage.logs if log.exists()]
        arguments += [f"{job.group}={os.path.relpath(log)}" for log in logs]
    if not arguments:
        raise UserError(
            f"none of {counted(len(jobs), 'job')} has a finished log yet: {asked.command} run "
            f"{asked.words}"
        )
    if unfinished:
        warn(
            f"{unfinished} of {counted(len(jobs), 'job')} unfinished: their incomplete logs are "
            "left out"
        )
    if report.title == Report.title and len(grids) == 1:
        report = replace(report, title=grids[0].about)
    write_text(page, report(read_logs(arguments, Report.kinds, warn=warn)))
    print(f"wrote {page}")


def _is_reported(stage: Stage, unfinished: bool) -> bool:
    reached = stage.progress()
    return reached.is_complete or (unfinished and reached.done > 0 and not reached.conflict)


_ACTIONS: dict[str, tuple[type[_SweepOptions], str, Callable[[Any, Options], None]]] = {
    "plan": (
        _StatusOptions,
        "print the jobs and their folders, and the time of those that are done",
        _plan,
    ),
    "run": (
        _RunOptions,
        "train, certify and attack whatever is missing; failed jobs are not run again",
        _work,
    ),
    "status": (
        _StatusOptions,
        "print whether each job is waiting, running, done or failed, and why",
        _status,
    ),
    "retry": (_RunOptions, "run the failed jobs again", _work),
    "report": (
        _ReportOptions,
        "write one HTML page about all complete logs: tables, curves, heat maps",
        _report,
    ),
}
"""Of each action: its options, what it does, and what carries it out."""
main = partial(
    run,
    "sweep",
    _make_parser,
    _sweep,
    interrupted="all progress is on the disk; run the same command again to continue",
)
