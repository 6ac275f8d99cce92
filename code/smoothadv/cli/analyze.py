"""analyze: certification logs in; summaries, tables and plots out."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from smoothadv.analysis import ANALYSES
from smoothadv.analysis.facts import FIELDS
from smoothadv.analysis.figure_style import save
from smoothadv.analysis.reading import read_logs
from smoothadv.analysis.selection import comparison_warnings, restrict
from smoothadv.analysis.table_formats import FORMATS, Table
from smoothadv.base.errors import warn
from smoothadv.base.files import PAGE, refuse_to_replace, write_atomically, write_text
from smoothadv.base.settings import (
    number,
    options_of,
    output_file,
    output_folder,
    positive_int,
    positive_noise_level,
    probability,
)
from smoothadv.cli.options.components import add_options, add_settings, compose
from smoothadv.cli.runner import Parser, run

_EXAMPLES = """examples:
  python code/analyze.py summary logs/quickstart
  python code/analyze.py table logs/*.tsv --radii 0 0.25 0.5 0.75 --format latex -o table.tex
  python code/analyze.py envelope Cohen=data/certify/cohen SmoothAdv=data/certify/ours \\
      --radii 0.25 0.5 0.75 1
  python code/analyze.py envelope SmoothAdv=data/certify/ours --norm linf --radii 2/255
  python code/analyze.py compare logs/gaussian.tsv logs/smoothadv.tsv
  python code/analyze.py plot logs/gaussian.tsv logs/smoothadv.tsv --confidence 0.95 -o curves.png
  python code/analyze.py plot_envelope Cohen=logs/cohen Ours=logs/ours --group-by sigma \\
      --baseline Cohen \\
      --split-baseline -o per_sigma.png
  python code/analyze.py heat_map logs/cifar10 --rows sigma --columns epsilon \\
      --radii 0.25 0.5 1 -o map.png
  python code/analyze.py report logs/quickstart -o logs/report
"""

_FILES = {
    "table": (
        output_file,
        "file to write, in the format of its ending; may be given several times (default: standard "
        "output)",
    ),
    "figure": (
        output_file,
        "both FILE.png and FILE.pdf are written, whichever of the two FILE names; only FILE.svg if "
        "it names that",
    ),
    "page": (
        output_folder,
        "page to write, or the folder to write report.html to (default: this folder)",
    ),
}
_OUTPUT = {
    "--format": (list(FORMATS), "format of a table (default: by FILE's ending, else markdown)"),
    "--decimals D": (
        number(int, "a whole number from 0 to 100", lambda v: 0 <= v <= 100),
        "decimals of percentages in markdown and latex (default: 1)",
    ),
}
_LOGS = {
    "logs LOG...": (
        str,
        "files, folders (searched throughout) or globs; NAME=LOG puts them into the group NAME",
    )
}
_STATED = {
    "--sigma S": (positive_noise_level, "sigma"),
    "--N N": (positive_int, "N"),
    "--alpha A": (probability, "alpha"),
    "--dimension D": (positive_int, "number of coordinates of an image, for l_inf radii"),
}
# What may be replaced, and how it begins; a table also by its first column.
_TABLE = ("table", b"| ", b"\\begin{tabular}")
_REPLACED = {
    "png": ("PNG picture", b"\x89PNG\r\n"),
    "pdf": ("PDF document", b"%PDF-"),
    "svg": ("SVG drawing", b"<?xml"),
    "page": PAGE,
}


def _make_parser() -> Parser:
    parser = Parser(
        prog="analyze",
        epilog=_EXAMPLES,
        description="Turn logs, ours or released ones, into summaries, tables, figures and "
        "reports. Accuracies are percent in markdown and latex, fractions in csv and json.",
    )
    subparsers = parser.add_subparsers(dest="analysis", required=True, metavar="ANALYSIS")
    for name in ANALYSES:
        what = ANALYSES[name].__doc__ or name
        command = subparsers.add_parser(
            name, prog=f"analyze {name}", help=what, description=what[0].upper() + what[1:] + "."
        )
        _add_input(command)
        output = command.add_argument_group("output")
        kind, what = _FILES[ANALYSES[name].makes]
        output.add_argument(
            "-o", "--output", metavar="FILE", type=kind, action="append", default=[], help=what
        )
        add_options(output, _OUTPUT)
        add_settings(command.add_argument_group(name), options_of(ANALYSES[name]))
        command.set_defaults(parser=command)
    return parser


def _add_input(command: Parser) -> None:
    group = command.add_argument_group("logs")
    add_options(group, _LOGS)
    group.add_argument(
        "--where",
        type=_condition,
        nargs="+",
        action="extend",
        default=[],
        metavar="FIELD=VALUE",
        help=f"use only logs with these hyper-parameters ({', '.join(FIELDS)})",
    )
    ending = "for logs that do not state it, or state it wrongly"
    add_options(
        group, {words: (parse, f"{what}, {ending}") for words, (parse, what) in _STATED.items()}
    )


def _condition(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or name not in FIELDS:
        raise argparse.ArgumentTypeError(
            f"'{text}' is not FIELD=VALUE with a FIELD among {', '.join(FIELDS)}"
        )
    return name, value


def _analyze(parser: Parser, options: argparse.Namespace, words: Sequence[str]) -> None:
    component = ANALYSES[options.analysis]
    analysis = compose(options.parser, component, options, options.analysis)
    _check_output(options, component.makes)
    stated = {name: getattr(options, name) for name in ("sigma", "N", "alpha", "dimension")}
    logs = restrict(read_logs(options.logs, component.kinds, stated, warn), options.where)
    for note in comparison_warnings(logs, component.pairs_examples):
        warn(note)
    made: Any = analysis(logs)
    if component.makes == "table":
        _write_table(made, options)
        return
    for form, path in _files(options, component.makes):
        write_atomically(path, partial(save, made, kind=form)) if form != "page" else write_text(
            path, made
        )
        print(f"wrote {path}")


def _check_output(options: argparse.Namespace, makes: str) -> None:
    """A usage error, before logs are read, where the options do not fit the output of the
    analysis.
    """
    if makes == "table":
        return
    for flag, given in (("--format", options.format), ("--decimals", options.decimals)):
        if given is not None:
            options.parser.error(
                f"{flag} is for tables: leave it out, {options.analysis} makes a {makes}"
            )
    if len(options.output) > 1:
        options.parser.error(f"-o takes one FILE here, got {len(options.output)}")
    if makes == "figure" and not options.output:
        options.parser.error(
            f"{options.analysis} needs -o FILE: it writes FILE.png and FILE.pdf, or FILE.svg"
        )
    for form, path in _files(options, makes):
        refuse_to_replace(path, *_REPLACED[form])


def _write_table(table: Table, options: argparse.Namespace) -> None:
    by_ending = {".tex": "latex", ".csv": "csv", ".json": "json"}
    decimals = 1 if options.decimals is None else options.decimals
    key = table.columns[0].key
    for path in options.output:
        refuse_to_replace(path, *_TABLE, f"{key},".encode(), f'[\n  {{\n    "{key}"'.encode())
    if not options.output:
        sys.stdout.write(FORMATS[options.format or "markdown"](table, decimals))
    for path in options.output:
        write_text(
            path, FORMATS[options.format or by_ending.get(path.suffix, "markdown")](table, decimals)
        )


def _files(options: argparse.Namespace, makes: str) -> list[tuple[str, Path]]:
    """Form and path of what is written: FILE if it is called .svg, else FILE.png and FILE.pdf,
    whichever of the two FILE names; a page to FILE if it is called .html, else to report.html in
    the folder FILE."""
    (output,) = options.output or [Path()]
    if makes == "page":
        return [("page", output if output.suffix in (".html", ".htm") else output / "report.html")]
    if output.suffix == ".svg":
        return [("svg", output)]
    stem = output.with_suffix("") if output.suffix in (".png", ".pdf") else output
    return [(form, stem.with_name(f"{stem.name}.{form}")) for form in ("png", "pdf")]


main = partial(run, "analyze", _make_parser, _analyze)
