"""``analyze sets``: coverage and sizes of conformal sets, as a table or a figure. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from smoothadv.analysis.figure_style import Figure, add_legend, line_styles, new_figure, save
from smoothadv.analysis.table_formats import FORMATS, Annotated, Cell, Column, Table, columns_of
from smoothadv.base.errors import UserError, warn
from smoothadv.base.files import file_digest, refuse_to_replace, write_atomically, write_text
from smoothadv.base.settings import (
    Checked,
    SettingError,
    output_file,
    perturbation_size,
    probability,
    refuse_twice,
    setting,
)
from smoothadv.sets.scores import ScoreLog
from smoothadv.statistics.bounds import binomial_interval

_LEVEL, _ENDS = 0.95, ("coverage_low", "coverage_high")
_LATE = (
    "alpha and radius must be chosen before anybody sees the scores; where the log does not record "
    "that they were, nothing is guaranteed, and the column wanted is empty"
)
_FIGURES = {".png": b"\x89PNG\r\n", ".pdf": b"%PDF-", ".svg": b"<?xml"}
_TABLES = {".md": "markdown", ".tex": "latex", ".csv": "csv", ".json": "json"}
_STARTS = b"| log", b"\\begin{tabular}", b"log,", b'[\n  {\n    "log"'


def _file(text: str) -> Path:
    if Path(text).suffix.lower() not in {**_TABLES, **_FIGURES}:
        raise SettingError(f"'{text}' does not end in one of {', '.join({**_TABLES, **_FIGURES})}")
    return output_file(text)


@dataclass(frozen=True, kw_only=True)
class SetsTable(Checked):
    """coverage and size of conformal sets at each radius, of logs of the command sets, as a table
    or a figure
    """

    logs: tuple[Path, ...] = setting(
        parse=Path, flag="logs", metavar="LOG", help="logs of the command sets"
    )
    alpha: float | None = setting(
        None, parse=probability, help="another alpha than that of the logs"
    )
    radii: tuple[float, ...] = setting(
        (), parse=perturbation_size, help="other radii than those of the logs"
    )
    output: list[Path] = setting(
        (),
        parse=_file,
        flag="-o --output",
        metavar="FILE",
        help="table FILE.md, .tex, .csv or .json, or figure FILE.png, .pdf or .svg; may be given "
        "several times (default: a table on standard output)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_twice("--radii", self.radii)

    def table(self) -> Table:
        """A row for each log and radius. The interval of the coverage is over the images that are
        tested. ``wanted`` is None where nothing is guaranteed: where the attack goes beyond the
        radius, and where the log does not record alpha and radius as those chosen before it was
        made. UserError where two logs have the same rows.
        """
        columns = [
            Column("log", "log", "text"),
            *columns_of("text", attack="attack", radius="radius", threshold="threshold"),
            *columns_of("count", passes="passes", calibration="calibrate", tested="tested"),
            Column("wanted", "wanted", "fraction"),
            Column("coverage", f"coverage, {_LEVEL:.0%} interval", "fraction", ends=_ENDS),
            Column("size", "classes", "number"),
            *columns_of("fraction", single="one class", empty="no class"),
        ]
        rows, read = list[list[Cell]](), dict[str, ScoreLog]()
        for log in map(ScoreLog.read, self.logs):
            if (other := read.setdefault(file_digest(log.name), log)) is not log:
                raise UserError(f"{log.name} has the rows of {other.name}: leave one out")
            before = log.settings["alpha"], log.settings["radii"]
            alpha = before[0] if self.alpha is None else self.alpha
            for radius in self.radii or before[1]:
                sets = log.sets(radius, alpha)
                least = max(sets.threshold[0], 0.0)
                is_late = alpha != before[0] or radius not in before[1]
                if is_late:
                    warn(_LATE)
                interval = binomial_interval(int(sets.covered.sum()), len(sets), _LEVEL)
                shares = sets["size"].mean(), (sets["size"] == 1).mean(), (sets["size"] == 0).mean()
                rows.append(
                    [
                        *(log.name, log.epsilon, radius, int(least) if log.counted else least),
                        *(log.settings["N"], len(log.table) - len(sets), len(sets)),
                        None if is_late or log.epsilon > radius else 1 - alpha,
                        Annotated(sets.covered.mean(), interval=interval),
                        *map(float, shares),
                    ]
                )
        if len({(log.settings.get("dataset"), *log.table.idx) for log in read.values()}) > 1:
            warn("the logs are not all on the same images: they differ by chance too")
        return Table(columns, rows)

    def figure(self) -> Figure:
        """Coverage, with its interval, and size at each radius, a curve per log."""
        figure, (left, right) = new_figure(2)
        found, lines = self.table().frame(), []
        for path, style in zip(dict.fromkeys(found.log), line_styles(len(self.logs))):
            rows = found[found.log == path].sort_values("radius")
            epsilon = float(rows.attack.max())
            how = {"label": path + f", epsilon = {epsilon:g}" * (epsilon > 0), **style}
            lines += left.plot(rows.radius, 100 * rows.coverage, **how)
            ends = 100 * rows.coverage_low, 100 * rows.coverage_high
            left.fill_between(rows.radius, *ends, color=style["color"], alpha=0.12, linewidth=0)
            right.plot(rows.radius, rows["size"], **how)
        for wanted in {*found.wanted.dropna()}:
            left.axhline(100 * wanted, color="0.4", linestyle="--", linewidth=1)
        left.set(xlabel=r"$\ell_2$ radius", ylabel="coverage (%)")
        right.set(xlabel=r"$\ell_2$ radius", ylabel="classes in a set", ylim=(0, None))
        add_legend(figure, left, lines, inside=False)
        return figure

    def write(self) -> Iterator[str]:
        """Write the table or the figure; yields what was done, or the table if no file is named."""
        for path in self.output:
            refuse_to_replace(path, "table or figure", *_FIGURES.values(), *_STARTS)
            ending = path.suffix.lower()
            if ending in _FIGURES:
                write_atomically(path, partial(save, self.figure(), kind=ending[1:]))
            else:
                write_text(path, FORMATS[_TABLES[ending]](self.table()))
            yield f"wrote {path}"
        if not self.output:
            yield FORMATS["markdown"](self.table()).removesuffix("\n")
