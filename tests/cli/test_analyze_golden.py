"""analyze prints, byte for byte, what tests/data/analyses.txt has.

There, a line ``$ ARGUMENTS`` is followed by the output of ``analyze ARGUMENTS`` in the folder that
support.golden_folder fills, by its warnings or its error after ``! ``, and by its exit status after
``= `` unless it is 0. Of a figure it has what ``describe`` says of it.
``SMOOTHADV_WRITE_GOLDEN=1`` writes the outputs anew.
"""

import os
import shlex
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from smoothadv.analysis import ANALYSES
from support.commands import call
from support.golden_folder import golden_folder as golden_folder

_MOST_POINTS = 12


def describe(figure: Figure) -> str:
    """Lines of text: first those of the figure, then those of each of its axes."""
    legends = [*figure.legends, *filter(None, (axes.get_legend() for axes in figure.axes))]
    names = [[text.get_text() for text in legend.get_texts()] for legend in legends]
    lines = [
        figure.get_suptitle(),
        figure.get_supxlabel(),
        *[f"legend: {' | '.join(some)}" for some in names],
        *[line for axes in figure.axes for line in _of_axes(axes)],
    ]
    return "".join(line.replace("\n", "\\n") + "\n" for line in lines if line)


def _of_axes(axes: Axes) -> list[str]:
    names = axes.get_title(), axes.get_xlabel(), axes.get_ylabel()
    lines = [f"axes: {' | '.join(names)}: {_numbers(axes.get_xlim())}; {_numbers(axes.get_ylim())}"]
    for line in axes.get_lines():
        label = line.get_label().removeprefix("_child0")
        style = [to_hex(line.get_color()), line.get_linestyle(), line.get_marker()]
        points = "; ".join(map(_numbers, line.get_data()))
        lines.append(f"{line.get_drawstyle()} {label} {' '.join(style)}: {points}")
    for shape in [] if axes.get_label() == "<colorbar>" else axes.collections:
        if (values := shape.get_array()) is not None:
            scale = _numbers(shape.get_clim())
            lines.append(f"cells: {'; '.join(map(_numbers, values.filled(-1)))} of {scale}")
            continue
        colour = to_hex([*shape.get_facecolor(), *shape.get_edgecolor()][0])
        corners = np.concatenate([path.vertices for path in shape.get_paths()]).T
        lines.append(f"band {shape.get_label()} {colour}: {'; '.join(map(_numbers, corners))}")
    if axes.texts or axes.patches:
        ticks = [
            [text.get_text() for text in axis.get_ticklabels()] for axis in (axes.xaxis, axes.yaxis)
        ]
        lines += [f"ticks: {' '.join(names)}" for names in ticks]
    for text in axes.texts:
        lines.append(f"{text.get_text()} at {_numbers(text.get_position())} {text.get_color()}")
    lines += [f"{patch.get_hatch()} at {_numbers(patch.get_xy())}" for patch in axes.patches]
    return lines


def _numbers(values: Iterable[float]) -> str:
    """Four digits of at most so many of the values, from the first to the last."""
    values = np.asarray([*values], dtype=float)
    places = np.unique(np.linspace(0, len(values) - 1, _MOST_POINTS).astype(int))
    return " ".join(f"{value:.4g}" for value in values[places] + 0.0)


GOLDEN = Path(__file__).parents[1] / "data/analyses.txt"
SECTIONS = dict(part.split("\n", 1) for part in GOLDEN.read_text().split("\n$ ")[1:])


@pytest.mark.parametrize("command", SECTIONS)
def test_analyze_prints_what_is_stored(command, golden_folder, capsys, monkeypatch):
    monkeypatch.chdir(golden_folder)
    words, drawn = shlex.split(command), []
    is_figure = ANALYSES[words[0]].makes == "figure"
    monkeypatch.setattr("smoothadv.cli.analyze.save", lambda made, *_, **__: drawn.append(made))
    outcome = call(capsys, "analyze", *words, *(["-o", "figure.svg"] if is_figure else []))
    printed = "".join(map(describe, drawn)) if is_figure else outcome.out
    printed += "".join(f"! {line}\n" for line in outcome.err.splitlines())
    printed += f"= {outcome.code}\n" if outcome.code else ""
    if "SMOOTHADV_WRITE_GOLDEN" in os.environ:
        start = f"\n$ {command}\n"
        GOLDEN.write_text(
            GOLDEN.read_text().replace(start + SECTIONS[command].rstrip(), start + printed.rstrip())
        )
    assert printed.rstrip() == SECTIONS[command].rstrip()


def test_every_table_and_figure_is_stored():
    assert {*ANALYSES} - {"report"} <= {command.split()[0] for command in SECTIONS}
