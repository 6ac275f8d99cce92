"""analyze: certification logs in; summaries, tables and plots out."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from smoothadv.analysis import ANALYSES
from smoothadv.analysis.figure_style import save
from smoothadv.analysis.reading import LogsSpec
from smoothadv.analysis.table_formats import FORMATS
from smoothadv.base import registry
from smoothadv.base.errors import UsageError
from smoothadv.base.files import (
    PAGE,
    refuse_to_replace,
    write_atomically,
    write_text,
)
from smoothadv.base.settings import (
    number,
    options_of,
    output_file,
    output_folder,
    refuse_any,
    setting,
)
from smoothadv.cli.runner import Options, Parser, add_settings, compose, given_settings, run

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
  python code/analyze.py card logs/pgd_0.25.tsv --paper "Salman et al., 2019" -o cards
  python code/analyze.py board cards -o board.html -o board.csv
"""

_OUTPUTS = {
    "table": "file to write, in the format of its ending; may be given several times (default: "
    "standard output)",
    "figure": "both FILE.png and FILE.pdf are written, whichever of the two FILE names; only "
    "FILE.svg if it names that",
    "page": "page to write, or the folder to write report.html to (default: this folder)",
}
_BY_ENDING = {
    **dict.fromkeys(("", ".md", ".txt"), "markdown"),
    **{".tex": "latex", ".csv": "csv", ".json": "json"},
}
_OTHER_PICTURES = tuple(".jpg .jpeg .gif .tif .tiff .webp .bmp .eps .ps .html".split())
# What may be replaced, and how it begins.
_REPLACED = {
    "png": ("PNG picture", b"\x89PNG\r\n"),
    "pdf": ("PDF document", b"%PDF-"),
    "svg": ("SVG drawing", b"<?xml"),
    "page": PAGE,
}


@dataclass(frozen=True, kw_only=True)
class AnalyzeOptions(LogsSpec):
    """Which logs an analysis reads, and what it writes."""

    output: list[Path] = setting(
        (),
        parse=Path,  # what an analysis makes says whether it is a file or a folder
        flag="-o --output",
        metavar="FILE",
        group="output",
        help="file to write",
    )
    format: str | None = setting(
        None,
        choices=FORMATS,
        group="output",
        help="format of a table (default: by FILE's ending .md, .txt, .tex, .csv or .json; "
        "on standard output markdown)",
    )
    decimals: int | None = setting(
        None,
        parse=number(int, "a whole number from 0 to 100", lambda v: 0 <= v <= 100),
        metavar="D",
        group="output",
        help="decimals of percentages in markdown and latex (default: 1)",
    )


def _make_parser() -> Parser:
    parser = Parser(
        prog="analyze",
        epilog=_EXAMPLES,
        description="Turn logs, ours or released ones, into summaries, tables, figures and "
        "reports. Accuracies are percent in markdown and latex, fractions in csv and json.",
    )
    subparsers = parser.add_subparsers(dest="analysis", required=True, metavar="ANALYSIS")
    added = {name: one.load() for name, one in registry.ANALYSES.items()}
    for name, component in {**ANALYSES, **added}.items():
        what = " ".join((component.__doc__ or name).split())
        command = subparsers.add_parser(
            name, prog=f"analyze {name}", help=what, description=what[0].upper() + what[1:] + "."
        )
        if name in added:
            add_settings(command, options_of(component))
            continue
        for one in options_of(AnalyzeOptions):
            if one.field == "output":
                parse = output_folder if component.makes == "page" else output_file
                one = replace(one, parse=parse, help=_OUTPUTS[component.makes])
            add_settings(command, [one])
        add_settings(command.add_argument_group(name), options_of(component))
    return parser


def _analyze(parser: Parser, options: Options, words: Sequence[str]) -> None:
    name = options["analysis"]
    if name in registry.ANALYSES:
        spec = registry.ANALYSES[name].load()
        for text in spec(**given_settings(spec, options)).write():
            print(text)
        return
    component = ANALYSES[name]
    analysis = compose(component, options, name)
    asked = AnalyzeOptions(**given_settings(AnalyzeOptions, options))
    files = _files(name, component.makes, asked)
    for form, path in files:
        refuse_to_replace(path, *_REPLACED[form])
    made: Any = analysis(asked.read(component.kinds, component.pairs_examples))
    if component.makes == "table":
        _write_table(made, asked)
    for form, path in files:
        if form == "page":
            write_text(path, made)
        else:
            write_atomically(path, partial(save, made, kind=form))
        print(f"wrote {path}")


def _write_table(table: Any, asked: AnalyzeOptions) -> None:
    decimals, key = 1 if asked.decimals is None else asked.decimals, table.columns[0].key
    # A table begins with its first column.
    starts = b"| ", b"\\begin{tabular}", f"{key},".encode(), f'[\n  {{\n    "{key}"'.encode(), b"[]"
    if not asked.output:
        sys.stdout.write(FORMATS[asked.format or "markdown"](table, decimals))
    forms = {path: asked.format or _BY_ENDING[path.suffix.lower()] for path in asked.output}
    texts = {path: FORMATS[form](table, decimals) for path, form in forms.items()}
    for path, text in texts.items():  # or as the format of a plug-in begins
        refuse_to_replace(path, "table", *starts, text[:10].encode() or b"| ")
    for path, text in texts.items():
        write_text(path, text)


def _files(name: str, makes: str, asked: AnalyzeOptions) -> list[tuple[str, Path]]:
    """Form and path of what is written: FILE if it is called .svg, else FILE.png and FILE.pdf,
    whichever of the two FILE names; a page to FILE if it is called .html, else to report.html in
    the folder FILE; of tables none, which may go to several files. A usage error where the options
    do not fit.
    """
    if makes == "table":
        for path in asked.output:
            if not asked.format and path.suffix.lower() not in _BY_ENDING:
                endings = ", ".join(filter(None, _BY_ENDING))
                raise UsageError(
                    f"-o {path}: found no ending of {endings}: --format names a format"
                )
        return []
    output = asked.output[0] if asked.output else Path()
    ending = output.suffix.lower()
    is_page = makes == "page"
    of_tables = f"is for tables: leave it out, {name} makes a {makes}"
    refuse_any(
        {
            f"--format {of_tables}": asked.format is not None,
            f"--decimals {of_tables}": asked.decimals is not None,
            f"-o takes one FILE here, got {len(asked.output)}": len(asked.output) > 1,
            f"{name} needs -o FILE: it writes FILE.png and FILE.pdf, or FILE.svg": (
                not is_page and not asked.output
            ),
            f"-o {output}: figures are PNG, PDF or SVG, not {ending[1:].upper()}": (
                not is_page and ending in _OTHER_PICTURES
            ),
        },
        UsageError,
    )
    if is_page:
        return [("page", output if output.suffix in (".html", ".htm") else output / "report.html")]
    if ending == ".svg":
        return [("svg", output)]
    stem = output.with_suffix("") if ending in (".png", ".pdf") else output
    return [(form, stem.with_name(f"{stem.name}.{form}")) for form in ("png", "pdf")]


main = partial(run, "analyze", _make_parser, _analyze)
