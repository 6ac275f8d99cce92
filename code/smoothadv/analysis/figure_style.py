"""One style for all figures: colours that differ in lightness, line styles, markers, and where
legends go.
"""

import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, TypeAlias

import numpy as np

from smoothadv.analysis.facts import FIELDS
from smoothadv.analysis.radii import round_numbers
from smoothadv.base.errors import UserError, escape
from smoothadv.base.settings import setting

if TYPE_CHECKING:
    from matplotlib import axes, figure, lines

Axes: TypeAlias = "axes.Axes"
Figure: TypeAlias = "figure.Figure"
Line2D: TypeAlias = "lines.Line2D"
"""For annotations: matplotlib takes long to load, and only functions that draw import it."""
SYMBOLS = {**FIELDS, "sigma": "σ", "epsilon": "ε"}
"""Hyper-parameters as the papers write them, where tables spell out the names."""

# Distinct to colour-blind readers (Wong, 2011); printed grey, markers and line styles distinguish
# them.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7A5C00")
# One fewer than colours, so that the pairs differ for 56 curves.
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_MARKS_PER_CURVE = 5
_STYLE = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.color": "0.9",
}
_ENTRIES_INSIDE = 6
_CHARACTERS_INSIDE = 28
_CHARACTERS_BESIDE_ANOTHER = 32
# In inches, and as a part of its size on paper: texts are legible on the screen of a phone too.
_PANEL_OF_A_PAGE, _MAP_OF_A_PAGE = (5.0, 3.5), 0.75


@dataclass(frozen=True)
class Titled:
    """An analysis that makes a figure, with a title."""

    makes: ClassVar[str] = "figure"
    title: str | None = setting(None, parse=str, help="title of the figure (default: none)")


def new_figure(panels: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with panels side by side, with faint lines behind their curves."""
    from matplotlib import figure, rc_context

    drawn = figure.Figure((6.0 if panels == 1 else 4.6 * panels, 4.0), layout="constrained")
    with rc_context(_STYLE):
        return drawn, [*drawn.subplots(1, panels, squeeze=False)[0]]


def line_styles(count: int) -> list[dict[str, Any]]:
    """Line properties for ``count`` curves: a colour and a marker each."""
    return [
        {"color": colour, "marker": marker, "markersize": 4.5, "linewidth": 1.6}
        for colour, marker, _ in zip(cycle(_COLOURS), cycle(_MARKERS), range(count))
    ]


def mark_every(corners: int, position: int, curves: int) -> tuple[int, int]:
    """Which points of a curve get markers, as (first, step); shifted by curve so that markers do
    not overlap.
    """
    step = max(1, corners // _MARKS_PER_CURVE)
    return (position * max(1, step // curves) % step, step)


def save(figure: Figure, file: BinaryIO, kind: str, salt: str = "smoothadv") -> None:
    """Write a figure as "png", "pdf" or "svg". Equal figures give equal bytes: without dates, names
    by ``salt``.
    """
    import matplotlib

    undated = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
    with matplotlib.rc_context({"svg.hashsalt": salt}):
        figure.savefig(file, format=kind, dpi=200, metadata=undated.get(kind))


def as_element(figure: Figure, salt: str) -> str:
    """The figure as an SVG element of an HTML page, in which data-curve numbers its curves.
    ``salt`` makes the names in it differ from those in other figures.

    Panels with curves are one below the other, without their legend: ``legend_entries`` has it.
    """
    from matplotlib import legend, rc_context

    for patch in (figure.patch, *(axes.patch for axes in figure.axes)):
        patch.set_visible(False)  # the page is the paper
    if legends := figure.findobj(legend.Legend):
        legends[0].remove()
        width, height = _PANEL_OF_A_PAGE
        figure.set_size_inches(width, height * len(figure.axes))
        for axes, place in zip(figure.axes, figure.add_gridspec(len(figure.axes), 1)):
            axes.set_subplotspec(place)
    else:
        figure.set_size_inches(_MAP_OF_A_PAGE * figure.get_size_inches())
    content = io.BytesIO()
    with rc_context({"svg.fonttype": "none"}):
        save(figure, content, "svg", salt)
    # In text, matplotlib writes &lt; for < and &gt; for >.
    inside = content.getvalue().decode().partition("<svg")[2].partition(">")[2]
    inside = re.sub("(?s)<(metadata|style).*?</(metadata|style)>|<!--.*?-->", "", inside)
    inside = re.sub(r'<g id="curve-(\d+)-\d+"', r'<g data-curve="\1"', inside)
    width, height = 72 * figure.get_size_inches()
    return f'<svg viewBox="0 0 {width:g} {height:g}">' + re.sub(r'<g id="[^"]*"', "<g", inside)


def legend_entries(figure: Figure) -> list[tuple[str, str, str]]:
    """The number of each curve in a figure, its label, and an SVG element with a piece of it."""
    lines = [line for axes in figure.axes for line in axes.get_lines() if line.get_gid()]
    return [
        (number, unbroken(_symbols(escape(line.get_label(), None))), _key(line))
        for number, line in {line.get_gid().split("-")[1]: line for line in lines}.items()
    ]


def _key(line: Line2D) -> str:
    from matplotlib import colors, markers, transforms

    marker, colour = markers.MarkerStyle(line.get_marker()), colors.to_hex(line.get_color())
    downwards = transforms.Affine2D().scale(8, -8)
    outline = marker.get_path().transformed(marker.get_transform() + downwards)
    points = [" ".join(f"{x:.1f},{y:.1f}" for x, y in shape) for shape in outline.to_polygons()]
    dashes = "; stroke-dasharray: 5 3" if line.get_linestyle() == "--" else ""
    return (
        '<svg class="key" viewBox="-18 -6 36 12" aria-hidden="true">'
        f'<path d="M-18 0H18" style="stroke: {colour}; stroke-width: 2{dashes}"/>'
        + "".join(f'<polygon points="{each}" style="fill: {colour}"/>' for each in points)
        + "</svg>"
    )


def unbroken(text: str) -> str:
    """The text with spaces at which no line ends between a word and its number, as in "sigma 0.25"
    and "sigma = 0.25"."""
    return re.sub(r"(?<=[^\W\d_]) (?=\d|= )|(?<= =) ", "\u00a0", text)


def readings(figure: Figure) -> list[dict[str, Any]]:
    """What a figure that was drawn says at which place, for each panel with curves.

    ``box`` is the panel's left and lower end, width and height, as parts of the figure's; ``ends``
    are those of its two axes; ``title`` is of the horizontal one, ``x`` are places on it: the
    points of curves, or round numbers if all are steps. ``curves`` are numbers, labels and values
    of four digits at these places, None where a curve has no point.
    """
    panels = []
    for axes in figure.axes:
        if lines := [line for line in axes.get_lines() if line.get_gid()]:
            points = [line.get_xdata() for line in lines if line.get_drawstyle() == "default"]
            x = np.unique(np.concatenate(points)) if points else round_numbers(axes.get_xlim()[1])
            title = axes.get_xlabel().replace("$", "").replace("\\ell_", "l")
            panels.append(
                {
                    "box": axes.get_position().bounds,
                    "ends": [*axes.get_xlim(), *axes.get_ylim()],
                    "x": x.tolist(),
                    "title": title.replace("\\infty", "_inf"),
                    "curves": [
                        [
                            int(line.get_gid().split("-")[1]),
                            escape(line.get_label(), None),
                            _values(line, x),
                        ]
                        for line in lines
                    ],
                }
            )
    return panels


def _values(line: Line2D, places: np.ndarray) -> list[float | None]:
    x, y = (np.asarray(values, dtype=float) for values in line.get_data())
    corners = np.minimum(np.searchsorted(x, places), len(x) - 1)
    known = (x[corners] == places) | (line.get_drawstyle() != "default")
    return [float(f"{value:.4g}") if there else None for value, there in zip(y[corners], known)]


def finished(
    figure: Figure, lines: list[Line2D], labels: tuple[str, str], largest: float, title: str | None
) -> Figure:
    """The figure of one panel with what belongs around its ``lines``: percent upwards, radii to the
    right.

    ``labels`` are those of radii and accuracies; ``largest`` is where the axis of radii ends.
    """
    (axes,) = figure.axes
    ends = (0, largest if largest > 0 else 1.0)
    axes.set(xlabel=labels[0], ylabel=labels[1], xlim=ends, ylim=(0, 100))
    add_legend(figure, axes, lines)
    add_title(axes.set_title, title)
    return figure


def add_title(put: Callable[[str], object], title: str | None) -> None:
    """``put`` a title where it belongs; $...$ in it is mathematics, UserError if that cannot be
    parsed.
    """
    from matplotlib.mathtext import MathTextParser

    try:
        MathTextParser("path").parse(title or "")
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"the title '{title}' cannot be typeset: {reason}") from error
    put(escape(title or "", None))


def add_legend(figure: Figure, axes: Axes, handles: list[Line2D], inside: bool = True) -> None:
    """A legend at the upper right, which falling curves leave free, or below the axes if it would
    cover curves there.

    A label may be any text: nothing in it is parsed as mathematics. In SVG, the groups curve-2-0,
    curve-2-1 ... are what was drawn under the label of entry 2.
    """
    labels = [_legible(escape(str(handle.get_label()), None)) for handle in handles]
    blanks = ["-"] * len(labels)  # matplotlib leaves out labels that start with an underscore
    lines = [line for label in labels for line in label.split("\n")]
    longest = max(map(len, lines), default=0)
    if inside and len(labels) <= _ENTRIES_INSIDE and longest <= _CHARACTERS_INSIDE:
        legend = axes.legend(
            handles, blanks, loc="upper right", framealpha=0.85, edgecolor="none", handlelength=3
        )
    else:
        columns = 2 if longest <= _CHARACTERS_BESIDE_ANOTHER else 1
        legend = figure.legend(
            handles,
            blanks,
            ncols=columns,
            loc="outside lower center",
            frameon=False,
            fontsize="small",
            handlelength=3.4,
        )
        width, height = figure.get_size_inches()
        figure.set_size_inches(width, height + 0.19 * -(-len(lines) // columns))
    drawn = [artist for axes in figure.axes for artist in axes.get_children()]
    for number, (handle, text) in enumerate(zip(handles, legend.get_texts())):
        text.set_text(labels[number])
        text.set_parse_math(False)
        curve = [artist for artist in drawn if artist.get_label() == handle.get_label()]
        for place, artist in enumerate(curve):
            artist.set_gid(f"curve-{number}-{place}")


def _legible(label: str) -> str:
    """A label with symbols; a long one on several lines, broken after a slash where there is
    one."""
    return "\n".join(re.findall(".{1,60}$|.{1,59}[/ ]|.{60}", _symbols(label)))


def _symbols(label: str) -> str:
    """A label with the letters of the papers in place of the names of hyper-parameters."""
    return re.sub(r"\b(sigma|epsilon)(?= = )", lambda match: SYMBOLS[match[1]], label)


def draw_steps(
    axes: Axes,
    curves: Sequence[tuple[str, np.ndarray, np.ndarray]],
    styles: Iterable[dict[str, Any]],
) -> list[Line2D]:
    """Curves (label, ascending radii, accuracies as fractions) that hold up to the radius on their
    right; with markers as far apart on each, shifted by curve so that they do not overlap.
    """
    lines: list[Line2D] = []
    for position, ((label, radii, accuracies), style) in enumerate(zip(curves, styles)):
        start = (position + 0.5) / len(curves) / _MARKS_PER_CURVE
        how = {"markevery": (start, 1 / _MARKS_PER_CURVE), **style}
        lines += axes.step(radii, 100 * accuracies, where="pre", label=label, **how)
    return lines
