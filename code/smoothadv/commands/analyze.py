"""analyze: certification logs in; summaries, tables and plots out."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from smoothadv.analysis import ANALYSES
from smoothadv.analysis.logs import read_logs
from smoothadv.analysis.tables import FORMATS, Table
from smoothadv.commands.components import add_settings, compose, warn
from smoothadv.commands.runner import Parser, run
from smoothadv.records import write_atomically, write_text
from smoothadv.settings import settings_of

_EXAMPLES = """examples:
  python code/analyze.py summary logs/quickstart
  python code/analyze.py table logs/*.tsv --radii 0 0.25 0.5 0.75 --format latex -o table.tex
  python code/analyze.py plot logs/gaussian.tsv logs/smoothadv.tsv -o curves.png
"""


def main(arguments: list[str] | None = None) -> int:
    """The command ``analyze``: runs it with ``arguments`` (None: the process's) and returns the exit code."""
    parser = Parser(
        prog="analyze",
        epilog=_EXAMPLES,
        description="Turn certification logs, ours or released ones, into summaries, "
        "tables and plots. Accuracies are percent in markdown and latex, fractions in csv and json.",
    )
    subparsers = parser.add_subparsers(dest="analysis", required=True, metavar="ANALYSIS")
    for name in ANALYSES:
        what = ANALYSES[name].__doc__
        command = subparsers.add_parser(
            name, prog=f"analyze {name}", help=what, description=what[0].upper() + what[1:] + "."
        )
        command.add_argument("logs", metavar="LOG", nargs="+", help="files, folders (searched throughout) or globs")
        command.add_argument(
            "-o", "--output", metavar="FILE", type=Path, help="file to write (default: standard output for tables)"
        )
        command.add_argument(
            "--format", choices=list(FORMATS), help="of a table (default: markdown, or what FILE's ending says)"
        )
        add_settings(command, settings_of(ANALYSES[name]))
    return run(parser, lambda options: _analyze(parser, options), arguments)


def _analyze(parser: Parser, options: argparse.Namespace) -> None:
    analysis = compose(parser, ANALYSES[options.analysis], options, options.analysis)
    result = analysis(read_logs(options.logs, warn))
    if isinstance(result, Table):
        _write_table(result, options)
    else:
        _write_figure(parser, result, options)


def _write_table(table: Table, options: argparse.Namespace) -> None:
    by_ending = {".tex": "latex", ".csv": "csv", ".json": "json"}
    ending = options.output.suffix if options.output else ""
    text = FORMATS[options.format or by_ending.get(ending, "markdown")](table)
    if options.output:
        write_text(options.output, text)
    else:
        sys.stdout.write(text)


def _write_figure(parser: Parser, figure: Figure, options: argparse.Namespace) -> None:
    """PNG and PDF beside each other, whichever of the two FILE names."""
    if options.output is None:
        parser.error(f"{options.analysis} needs -o FILE: it writes FILE.png and FILE.pdf")
    if options.format:
        parser.error(f"--format is for tables: leave it out, {options.analysis} writes PNG and PDF")
    stem = options.output.with_suffix("") if options.output.suffix in (".png", ".pdf") else options.output
    for kind in ("png", "pdf"):
        path = stem.with_name(f"{stem.name}.{kind}")
        # No date in the file: the same logs give the same bytes.
        metadata = {"CreationDate": None} if kind == "pdf" else None
        write_atomically(path, partial(figure.savefig, format=kind, dpi=200, metadata=metadata))
        print(f"wrote {path}")
