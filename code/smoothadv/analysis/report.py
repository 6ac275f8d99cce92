"""report: one self-contained HTML page with the tables, the figures and the sources of their
logs.
"""

import html
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from smoothadv.analysis import ANALYSES, Analysis
from smoothadv.analysis.compare import Comparison, Gap
from smoothadv.analysis.examples import Examples, never_right
from smoothadv.analysis.facts import FIELDS, display
from smoothadv.analysis.figure_style import (
    SYMBOLS,
    as_element,
    legend_entries,
    readings,
    unbroken,
)
from smoothadv.analysis.figures import (
    CertifiedAccuracyPlot,
    EmpiricalPlot,
    EnvelopePlot,
    HeatMap,
    TrainingPlot,
)
from smoothadv.analysis.logs import Choosing, Log, Logs, comparison_warnings, groups_of, sizes_of
from smoothadv.analysis.radii import AtRadii
from smoothadv.analysis.reading import rounding_notes
from smoothadv.analysis.table_formats import (
    Cell,
    Column,
    Markup,
    Table,
    columns_of,
    display_cells,
    plain,
    titles,
    without_equal,
)
from smoothadv.analysis.tables import (
    Empirical,
    Envelope,
    HeldOut,
    ParametersTable,
    Probabilities,
    Summary,
    model_of,
)
from smoothadv.base.errors import UserError
from smoothadv.base.provenance import without_secrets
from smoothadv.base.settings import setting
from smoothadv.version import __version__

_MOST_CURVES = 8
_EXAMPLES_SHOWN = 15
_MOST_MAPS = 6
_MOST_PICTURES = 12
_LONGEST_NAME = 20
# The radius of an attack has a column of its own.
_OF_ATTACKS = ("attack", "num_steps", "num_noise_vec", "gradient", "restarts", "target")

Part = dict[str, Any]
"""A table or a figure in the form that the template takes."""


@dataclass(frozen=True)
class Section:
    """A part of the page: its heading, tables or figures in order, a sentence on how to read them
    unless the template has one for all parts of this title, and the name of the image set that it
    is about."""

    title: str
    parts: list[Part]
    text: str = ""
    images: str = ""


@ANALYSES.register("report")
@dataclass(frozen=True)
class Report(Choosing, AtRadii, Analysis):
    """one HTML page to send to a co-author: summary, tables, figures, examples, provenance and
    warnings
    """

    makes: ClassVar[str] = "page"
    kinds: ClassVar[tuple[str, ...]] = ("certification", "prediction", "training")
    title: str = setting("Certified robustness", parse=str, help="title of the page")

    def __call__(self, logs: Logs) -> str:
        certification, prediction = list[Log](), list[Log]()
        for alike in logs.by("images").values():
            certification += _with_short_names(alike.certification)
            prediction += _with_short_names(alike.prediction)
        logs = Logs(certification, prediction, logs.training, logs.left_out)
        warnings = comparison_warnings(logs) + [f"left out: {one}" for one in logs.left_out]
        return page(self.title, _facts(logs), warnings, list(self._sections(logs)))

    def _made(
        self,
        caption: str,
        analysis: Any,
        logs: Logs,
        is_optional: bool = False,
        **settings: Any,
    ) -> list[Part]:
        """What an analysis makes, with those settings of the page that it has, but for its title;
        nothing where it ``is_optional`` and needs other logs, or logs of the same images (the page
        warns of it).
        """
        names = {one.name for one in fields(analysis)} & {one.name for one in fields(self)}
        common = {name: getattr(self, name) for name in names - {"title"}}
        try:
            return [part(caption, analysis(**{**common, **settings})(logs))]
        except UserError:
            if is_optional:
                return []
            raise

    def _sections(self, logs: Logs) -> Iterator[Section]:
        certification = [*filter(self.takes, logs.certification)]
        chosen = "Chosen on some images, measured on others"
        if parts := self._made(chosen, HeldOut, Logs(certification), is_optional=True):
            yield Section("The best models on other images", parts)
        for name, alike in logs.by("images").items():
            # Below the name of the set, labels need not repeat it.
            here = Logs(
                [replace(log, images="") for log in alike.certification],
                [replace(log, images="") for log in alike.prediction],
            )
            attacked = filter(self.takes, alike.prediction)
            beside = Logs(certification, [_with_attack(log, certification) for log in attacked])
            for section in self._about(here, beside):
                yield replace(section, images=name)
        if logs.training:
            few, count = Logs(training=logs.training[:_MOST_CURVES]), len(logs.training)
            more = f" (the first {_MOST_CURVES} of {count})" if count > _MOST_CURVES else ""
            yield Section(
                "Training",
                self._made("Training", TrainingPlot, few),
                f"Loss and accuracy by epoch{more}.",
            )
        yield Section("Provenance", self._provenance(logs))

    def _about(self, logs: Logs, beside: Logs) -> Iterator[Section]:
        """What the logs of one image set say; ``beside`` has the predictions, and certificates to
        set beside them.
        """
        finished = logs.where(self.takes)
        if logs.certification:
            yield Section("Certified accuracy", self._certified_accuracy(logs))
        if finished.certification:
            yield Section("Best log by radius", self._best_of_groups(Logs(finished.certification)))
        if finished.prediction:
            parts = [
                *self._made("Accuracy under attack", EmpiricalPlot, finished),
                *self._made("By attack radius", Empirical, finished, confidence=0.95),
                *self._made("Certified and attacked, on the same images", Gap, beside, True),
            ]
            yield Section("Accuracy under attack", parts)
            found, cards = never_right(finished.prediction, _MOST_PICTURES)
            if cards:
                yield Section(
                    "Images that no model gets right under attack",
                    [{"kind": "pictures", "cards": cards}],
                    f"{len(cards)} of {found} images, each under the weakest attack whose examples "
                    "are saved.",
                )
        if logs.certification:
            parts = [
                one
                for procedure, alike in Logs(logs.certification).by("procedure").items()
                for end in ("worst", "best")
                for one in self._made(
                    _titled(end.capitalize(), procedure),
                    Examples,
                    alike,
                    True,
                    **{end: _EXAMPLES_SHOWN},
                )
            ]
            text = "" if parts else "Not shown: the logs are not on the same images."
            yield Section("Examples", parts, text)

    def _certified_accuracy(self, logs: Logs) -> list[Part]:
        parts, bands, note = list[Part](), dict[str, Any](), ""
        if len(logs.certification) <= 4 and self.high_probability is None:
            bands = {"confidence": 0.95, "bands": "dkw"}
            note = "; bands: 95 %, for all radii at once, over the choice of images"
        if len(logs.certification) <= _MOST_CURVES:
            by_p_a = {**bands, "of": "p_A", "norm": "l2", "high_probability": None}
            of_p_a = "Images by their lower bound of p_A"
            parts = [
                *self._made(
                    f"Certified accuracy of each log{note}", CertifiedAccuracyPlot, logs, **bands
                ),
                *self._made(of_p_a, CertifiedAccuracyPlot, logs, True, **by_p_a),
            ]
        caption = "Lower bounds of p_A, 0 if wrong, beside the average radius"
        return [
            *parts,
            *self._made("All logs", Summary, logs),
            *self._made(caption, Probabilities, logs, True),
            *self._made("The two on the same images", Comparison, Logs(logs.certification), True),
        ]

    def _best_of_groups(self, logs: Logs) -> list[Part]:
        certification = logs.certification
        caption = "Best certified accuracy, with the clean accuracy of the selected log raised"
        abstained = "Abstention rate of the selected logs"
        parts = [
            *self._made(caption, Envelope, logs),
            *self._made(abstained, Envelope, logs, show="abstention_rate"),
        ]
        drawn = 0
        for words, by in (("by group", ()), ("by sigma", ("sigma",))):
            count = len(groups_of(certification, by))
            # More curves than the figure before, but fewer than one per log, which the first
            # section draws.
            if drawn < count < len(certification) and count <= _MOST_CURVES:
                drawn = count
                parts += self._made(f"Upper envelopes {words}", EnvelopePlot, logs, group_by=by)
        if (selected := self._selected(certification)).rows:
            parts.append(part("Selected log at each radius", selected))
        for procedure, alike in logs.by("procedure").items():
            # A map of all logs, whatever their group, where both hyper-parameters vary; without
            # the largest radii, at which little is certified.
            some = alike.certification
            if all(len({log.facts.get(name) for log in some}) > 1 for name in ("sigma", "epsilon")):
                radii = self.chosen_radii(some)
                radii = radii[:: max(1, len(radii) // _MOST_MAPS)][:_MOST_MAPS]
                caption = "Best certified accuracy by sigma and epsilon, of all logs"
                parts += self._made(_titled(caption, procedure), HeatMap, alike, radii=radii)
        return parts

    def _selected(self, logs: Sequence[Log]) -> Table:
        """A row per radius and group of several logs: the best one, and its hyper-parameters where
        the logs differ.
        """
        radii, differing, rows = self.chosen_radii(logs), _differing(logs), list[list[Cell]]()
        for name, group in groups_of(logs, ()).items():
            best = self.select(group, radii) if len(group) > 1 else ()
            for radius, (log, share) in zip(radii, best):
                values = [
                    None if (value := log.facts.get(one)) is None else display(one, value)
                    for one in differing
                ]
                described = [*values, log.label] if share else [None] * (len(differing) + 1)
                rows.append([name, radius.text, share, *described])
        columns = [
            *columns_of("text", group="group", radius=self.heading),
            Column("certified_accuracy", "certified accuracy", "fraction"),
            *columns_of("text", **{name: FIELDS[name] for name in differing}, model="model"),
        ]
        return Table(columns, rows)

    def _provenance(self, logs: Logs) -> list[Part]:
        rows: list[list[Cell]] = [
            [
                *(log.label, str(log.path)),
                "; then ".join(map(_made_by, log.facts.runs)) or None,
                "; ".join([*log.notes, *(rounding_notes(log) if "radius" in log.table else [])])
                or None,
            ]
            for log in logs.all
        ]
        titles = {"log": "log", "file": "file", "made_by": "made by", "notes": "to keep in mind"}
        parts = [part("Where each log is from", Table(columns_of("text", **titles), rows))]
        if logs.certification or logs.prediction:
            parts += self._made("Hyper-parameters and how they are known", ParametersTable, logs)
        return parts


def page(
    title: str,
    facts: Sequence[tuple[str, str]],
    warnings: Sequence[str],
    sections: Sequence[Section],
) -> str:
    """The HTML page with these sections below its title, a few ``facts`` and the warnings."""
    return template("smoothadv.analysis", "report.html.jinja", autoescape=True).render(
        title=title,
        version=__version__,
        facts=facts,
        warnings=warnings,
        sections=sections,
        as_element=as_element,
        readings=readings,
        legend_entries=legend_entries,
    )


def template(package: str, name: str, autoescape: bool = False) -> Any:
    """The template of jinja2 that is in a package."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(package, ""),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment.get_template(name)


def _titled(*words: str) -> str:
    return ", ".join(filter(None, words))


def _differing(logs: Sequence[Log]) -> list[str]:
    """The hyper-parameters that differ among the logs, without what others tell: the noise of
    training where it is sigma in all, the objective where the name of the training has it."""
    differing = [name for name in FIELDS if len({log.facts.get(name) for log in logs}) > 1]
    is_sigma = all(log.facts.get("noise") == log.facts.get("sigma") for log in logs)
    repeated = {*["noise"] * is_sigma, *["objective"] * ("training" in differing)}
    return [name for name in differing if name not in repeated]


def _with_short_names(logs: list[Log]) -> list[Log]:
    """Logs of one image set, those with long names called by how they differ, if they do: "Ours:
    PGD, ε 1, σ 0.25".
    """
    differing, several, names = _differing(logs), len({log.group for log in logs}) > 1, []
    for log in logs:
        has_attack = "attack" in differing and log.facts.get("attack") is not None
        hidden = {"split", "method", *(["training"] if has_attack else [])}
        words = _described(log, [name for name in differing if name not in hidden])
        names.append(": ".join(filter(None, (log.group * several, words))))
    unique = {name for name, times in Counter(names).items() if times == 1}
    unique -= {"", *(log.name for log in logs)}
    return [
        replace(log, name=name) if len(log.name) > _LONGEST_NAME and name in unique else log
        for log, name in zip(logs, names)
    ]


def _described(log: Log, names: Sequence[str]) -> str:
    """Those of its hyper-parameters that are known: "PGD, ε 1, σ 0.25"."""
    return _titled(
        *(
            ("" if type(value) is str else f"{SYMBOLS[name]} ") + display(name, value)
            for name in names
            if (value := log.facts.get(name)) is not None
        )
    )


def _with_attack(log: Log, certification: Sequence[Log]) -> Log:
    """An attacked log titled by its attack, and by its model where one certification log is of
    it.
    """
    models = [one.name for one in certification if model_of(one) == model_of(log)]
    words = _described(log, _OF_ATTACKS)
    return replace(log, title=": ".join([*models[:1], words])) if words else log


def _facts(logs: Logs) -> list[tuple[str, str]]:
    """The logs of the page in a few numbers."""
    facts = [
        (f"{kind} logs", f"{len(some):,}")
        for kind in ("certification", "prediction", "training")
        if (some := getattr(logs, kind))
    ]
    if logs.certification:
        facts.append(("examples per log", sizes_of(logs.certification)))
    for name in ("dataset", "sigma", "N", "alpha", "method"):
        values = sorted({log.facts.get(name) for log in logs.certification} - {None}, key=str)
        texts = [f"{value:,}" if isinstance(value, int) else f"{value}" for value in values]
        facts += [(FIELDS[name], ", ".join(texts))] if texts else []
    return facts


def _made_by(run: dict[str, Any]) -> str:
    """Command, version, commit and device of a run."""
    facts = {
        "smoothadv": run.get("smoothadv"),
        "commit": str(run.get("git_commit") or "")[:12],
        "torch": run.get("packages", {}).get("torch"),
        "device": run.get("device"),
        "started": run.get("started"),
    }
    known = ", ".join(f"{name} {value}" for name, value in facts.items() if value)
    return f"{' '.join(without_secrets(run.get('command', [])))} ({known})"


def part(caption: str, made: Any) -> Part:
    """A figure or a table for the template: every cell as HTML, its value to sort by, and the whole
    name of a log; and what all rows have in common, which no column repeats.
    """
    if not isinstance(made, Table):
        return {"kind": "figure", "caption": caption, "figure": made}
    markup = Markup(
        bold=lambda text: f"<b>{text}</b>",
        raise_=lambda text: f"<sup>({text})</sup>",
        # A long path may be broken after each folder.
        escape=lambda text: unbroken(html.escape(text)).replace("/", "/<wbr>"),
    )
    common, table = without_equal(made.for_people or made, markup)
    shown, columns = display_cells(table, 1, markup), table.columns
    # The log comes first: there it stays in sight.
    order = sorted(range(len(columns)), key=lambda place: columns[place].key != "log")
    # Labels like "Ours: PGD" have the group.
    said = [
        place
        for place in order
        if shown and all(row[order[0]].startswith(f"{row[place]}: ") for row in shown)
    ]
    kept = [place for place in order if place not in said]
    rows = [
        [
            (texts[k], plain(values[k]), columns[k].kind, getattr(values[k], "full", None))
            for k in kept
        ]
        for texts, values in zip(shown, table.rows)
    ]
    names = titles(table)
    return {
        "kind": "table",
        "caption": caption,
        "common": common,
        "headings": [{"title": names[place], "kind": columns[place].kind} for place in kept],
        "rows": rows,
    }
