"""plot_empirical: accuracy under attack (dashed) against certified accuracy (solid), as in the paper's Figure 3."""

from dataclasses import dataclass
from typing import ClassVar

from smoothadv.analysis import ANALYSES, Analysis
from smoothadv.analysis.empirical import empirical_curve, model_of
from smoothadv.analysis.plot import EnvelopePlot
from smoothadv.analysis.shared.figure_style import Figure, draw_steps, finished, looks, mark_every, new_figure
from smoothadv.analysis.shared.log_statistics import accuracy
from smoothadv.analysis.shared.logs import Log, Logs
from smoothadv.analysis.shared.selection import Choosing, grouping, groups_of, refuse_several
from smoothadv.errors import UserError, warn
from smoothadv.settings import probability, setting

_BESIDE = 0.005


@ANALYSES.register("plot_empirical")
@dataclass(frozen=True)
class EmpiricalPlot(Choosing, Analysis):
    """accuracy under attack of each group (dashed) and the envelope of certification logs of the same images (solid),
    as PNG and PDF"""

    makes: ClassVar[str] = "figure"
    kinds: ClassVar[tuple[str, ...]] = ("certification", "prediction")
    group_by: list[str] | None = grouping("the dashed curves: num_noise_vec, N or gradient")
    confidence: float | None = setting(
        None, parse=probability, help="LEVEL of intervals over images, as vertical bars, like 0.95 (default: none)"
    )
    title: str | None = setting(None, parse=str, help="title of the plot (default: none)")

    def __call__(self, logs: Logs) -> Figure:
        if not logs.prediction:
            raise UserError("plot_empirical needs prediction logs, made by predict under attack; there are only others")
        predictions, certification = map(self.taking_part, (logs.prediction, logs.certification))
        sets = {log.images for log in predictions}
        if any(log.images in sets for log in certification):
            refuse_several(predictions, "accuracy under attack beside certified accuracy", "images")
        if others := [str(log.path) for log in certification if log.images not in sets]:
            warn(f"not drawn, since they are not about the images that were attacked: {', '.join(others)}")
        certified = groups_of([log for log in certification if log.images in sets], [])
        if unrelated := _unrelated(certified, predictions):
            warn(f"no attack is known on models certified in {', '.join(unrelated)}: NAME=LOG names both kinds alike")
        named = len(certified) > 1 or bool(unrelated)
        attacked = groups_of(predictions, self.group_by or [], name_group=named)
        figure, (axes,) = new_figure()
        lines = looks(len(certified) + len(attacked))
        curves = {name: empirical_curve(group) for name, group in attacked.items()}
        largest = max(max(curve) for curve in curves.values())
        name_of = "{}, certified" if named else "certified"
        solid = [(name_of.format(name), *EnvelopePlot().envelope_curve(group)) for name, group in certified.items()]
        drawn = draw_steps(axes, solid, [{**look, "marker": "", "linewidth": 2.2} for look in lines], largest)
        colours = {name: look["color"] for name, look in zip(certified, lines)} if len(certified) > 1 else {}
        for position, ((name, curve), look) in enumerate(zip(curves.items(), lines[len(certified) :])):
            look = {**look, "color": colours.get(name, look["color"]), "linewidth": 1.2}
            shares = [100 * accuracy(best.log.table) for best in curve.values()]
            label = "under attack" if name == "all" else f"{name}, under attack" if not self.group_by else name
            marks = mark_every(len(curve), position, len(curves))
            drawn += axes.plot(list(curve), shares, label=label, linestyle="--", markevery=marks, **look)
            if self.confidence is not None:
                ends = [best.interval(self.confidence) for best in curve.values()]
                # Side by side, where one curve's bars would cover another's.
                beside = [radius + _BESIDE * largest * (position - (len(curves) - 1) / 2) for radius in curve]
                lower, upper = ([100 * end for end in side] for side in zip(*ends))
                axes.vlines(beside, lower, upper, color=look["color"], label=label)
        labels = (r"$\ell_2$ radius (images in [0, 1])", "accuracy (%)")
        return finished(figure, drawn, labels, 1.02 * largest, self.title)


def _unrelated(certified: dict[str, list[Log]], predictions: list[Log]) -> list[str]:
    """The groups of certificates, or their first logs, that share neither name nor model with an attack."""
    groups, models = ({of(log) for log in predictions} - {""} for of in (lambda log: log.group, model_of))
    return [
        logs[0].group or str(logs[0].path)
        for logs in certified.values()
        if not any(log.group in groups or model_of(log) in models for log in logs)
    ]
