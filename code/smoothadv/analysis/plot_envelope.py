"""plot_envelope: the upper envelope of each group, as in the paper's Figures 1, 2, 4, 5 and 6."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from smoothadv.analysis import ANALYSES, Analysis
from smoothadv.analysis.shared.figure_style import Figure, draw_steps, finished, looks, mark_radii, new_figure
from smoothadv.analysis.shared.logs import Log, Logs
from smoothadv.analysis.shared.radii import Norm, round_numbers
from smoothadv.analysis.shared.selection import Choosing, grouping, groups_of
from smoothadv.errors import UserError
from smoothadv.settings import setting

_POINTS = 1500


@ANALYSES.register("plot_envelope")
@dataclass(frozen=True)
class EnvelopePlot(Choosing, Norm, Analysis):
    """the best certified accuracy of each group and image set, with a dashed baseline, written as PNG and PDF"""

    makes: ClassVar[str] = "figure"
    group_by: list[str] | None = grouping("the curves, like sigma")
    baseline: str | None = setting(
        None,
        parse=str,
        help="group to draw dashed: in the colours of the others with --split-baseline, else as one curve",
    )
    split_baseline: bool = setting(False, help="let --group-by split the baseline too, for one curve per sigma")
    title: str | None = setting(None, parse=str, help="title of the plot (default: none)")

    def __post_init__(self) -> None:
        if self.split_baseline and not self.baseline:
            raise ValueError("--split-baseline needs --baseline NAME: there is no baseline to split")

    def __call__(self, logs: Logs) -> Figure:
        part = self.taking_part(logs.certification)
        baseline = [log for log in part if log.group == self.baseline] if self.baseline else []
        if self.baseline and not baseline:
            known = ", ".join(dict.fromkeys(log.group for log in part))
            raise UserError(f"no group is called '{self.baseline}'; there are {known}")
        others = [log for log in part if log not in baseline]
        if not others:
            raise UserError("there is nothing but the baseline to draw")
        by = self.group_by or []
        solid = groups_of(others, by, name_group=bool(baseline))
        dashed = groups_of(baseline, by if self.split_baseline else [], name_group=True)
        lines = looks(len(solid) + (0 if self.split_baseline else len(dashed)))
        if self.split_baseline:
            like = {_key(group, by): look for group, look in zip(solid.values(), lines)}
            lines += [like.get(_key(group, by), {"color": "0.45", "linewidth": 1.6}) for group in dashed.values()]
        curves = [(name, *self.envelope_curve(group)) for name, group in [*solid.items(), *dashed.items()]]
        largest = max(radii[-1] for _, radii, _ in curves)
        figure, (axes,) = new_figure()
        drawn = []
        for position, ((name, radii, accuracies), look) in enumerate(zip(curves, lines)):
            look = {**look, "linestyle": "-" if position < len(solid) else "--"}
            marks = mark_radii(radii, largest, position, len(curves))
            drawn.append(draw_steps(axes, radii, accuracies, label=name, markevery=marks, **look))
        return finished(figure, drawn, (self.axis_title, "certified accuracy (%)"), 1.04 * largest, self.title)

    def envelope_curve(self, group: Sequence[Log]) -> tuple[np.ndarray, np.ndarray]:
        """A fine grid of radii, with round ones and the largest one of each log, and the largest accuracy of the logs
        there."""
        ends = np.concatenate([self.certified_by(log, [log.table.radius.max()]) for log in group])
        fine = [np.linspace(0, ends.max(), _POINTS), round_numbers(ends.max())]
        grid = np.unique(np.concatenate([*fine, ends, np.nextafter(ends, np.inf)]))
        best = np.max([self.accuracies(log, grid, models=len(group)) for log in group], axis=0)
        return grid, best


def _key(group: Sequence[Log], by: Sequence[str]) -> tuple[object, ...]:
    return group[0].procedure, *(group[0].parameters.get(name) for name in by)
