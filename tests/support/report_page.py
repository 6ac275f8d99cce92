"""A report read by a parser of HTML, and logs of all kinds for it."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from support import analyzed_folder

VOID = {
    "area",
    "base",
    "br",
    "col",
    "embed",
    "hr",
    "img",
    "input",
    "link",
    "meta",
    "source",
    "track",
    "wbr",
}
HOSTILE = ["<script>alert(1)</script>", "a&b", 'quote"s', "{{ 7 * 7 }}", "tick'`"]
MANIFEST = {
    "settings": {"sigma": 0.5, "N": 100, "alpha": 0.001},
    "runs": [
        {
            "command": ["smoothadv", "certify", "--<b>", "--token=of-an-old-manifest"],
            "smoothadv": "9.8.7",
            "git_commit": "0123456789abcdef",
            "packages": {"torch": "2.99"},
            "device": "NVIDIA H100",
            "started": "2031-02-03",
        }
    ],
}


class Page(HTMLParser):
    """The page's elements: tags with attributes, tables as rows of texts, and whether all that
    opens is closed.
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.texts: dict[str, list[str]] = {}
        self._rows: list[list[str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        assert len({name for name, _ in attributes}) == len(attributes)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self._rows = []
        if tag == "tr":
            self._rows.append([])
        if tag in ("td", "th"):
            self._rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag == "table":
            self.tables[self.texts["figcaption"][-1]] = self._rows

    def handle_data(self, text):
        cell = next((tag for tag in reversed(self.open) if tag in ("td", "th")), None)
        if cell:
            self._rows[-1][-1] += text.replace("\u00a0", " ")
        elif self.open:
            self.texts.setdefault(self.open[-1], []).append(text.strip())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def drawings(self) -> list[str]:
        """What figures are called."""
        return [
            attributes["aria-label"]
            for attributes in self.all("div")
            if attributes.get("class") == "drawing"
        ]

    def panels(self) -> list[dict[str, Any]]:
        """What the panels of all figures show beside the pointer."""
        figures = [
            attributes["data-panels"]
            for attributes in self.all("figure")
            if "data-panels" in attributes
        ]
        return [panel for text in figures for panel in json.loads(text)]

    def column(self, caption: str, title: str) -> list[str]:
        heading, *rows = self.tables[caption]
        return [row[heading.index(title)] for row in rows]


def certification(path: Path, outcomes: str, radius: float = 0.5) -> None:
    """A log of an example per letter: R for right, W for wrong, A for an abstention."""
    analyzed_folder.certification(path, [(letter, radius * (letter != "A")) for letter in outcomes])


def write_everything(root: Path) -> None:
    """All kinds of logs, under hostile names, one with a manifest and one that is torn beyond
    use.
    """
    for number, name in enumerate(HOSTILE):
        certification(
            root / f"logs/sigma_0.50_{name.replace('/', '_')}",
            "RRWA" + "R" * number,
            0.25 + 0.125 * number,
        )
    certification(root / "logs/sigma_0.50_ours.tsv", "RRRR")
    (root / "logs/sigma_0.50_ours.tsv.manifest.json").write_text(json.dumps(MANIFEST))
    (root / "logs/sigma_0.50_broken").write_text(
        "idx\tlabel\tpredict\tradius\tcorrect\n0\t1\t1\tx\t1\n"
    )
    for epsilon in ("0.250", "0.500"):
        path = root / f"logs/N100/PGD_{epsilon}/num_1/predictions"
        path.parent.mkdir(parents=True)
        path.write_text("idx\tlabel\tpredict\tcorrect\n0\t1\t1\t1\n20\t1\t-1\t0\n")
    (root / "logs/run").mkdir()
    header = "epoch\ttime\tlr\ttrain loss\ttrain accuracy\ttest loss\ttest accuracy\n"
    (root / "logs/run/log.txt").write_text(
        header + "0\t1\t0.1\t2.0\t0.4\t2.1\t0.3\n1\t1\t0.1\t1.0\t0.6\t1.1\t0.5\n"
    )
