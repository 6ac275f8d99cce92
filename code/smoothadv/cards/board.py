"""board: rankings of cards, with intervals, and paired tests of neighbours.

Cards stand in one ranking only where dataset, images (indices and labels), alpha and kind of
certificate are equal, so that the entries of a ranking can be paired image by image.
"""

import glob
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from smoothadv.analysis.compare import mcnemar_p_value
from smoothadv.analysis.logs import group_by
from smoothadv.analysis.reading import paths
from smoothadv.analysis.report import Section, page, part
from smoothadv.analysis.table_formats import (
    FORMATS,
    MARKDOWN,
    Annotated,
    Cell,
    Column,
    Table,
    columns_of,
    without_equal,
)
from smoothadv.base.errors import UserError, counted, warn
from smoothadv.base.files import PAGE, refuse_to_replace, write_text
from smoothadv.base.settings import (
    Checked,
    SettingError,
    output_file,
    positive_int,
    setting,
    takes,
)
from smoothadv.cards.card import AVERAGE, LEVEL, PER_UNIT, Card, kept_radius, read_card, shares
from smoothadv.records.logs import IMAGE_SET, MANIFEST

_HOW_TO_READ = (
    f"Accuracies are in percent, each with the ends of its {LEVEL:.0%} interval over the choice of "
    "images. Entries are in order of the average certified radius (ACR) in whole hundredths. "
    "p: of the two-sided test that an entry and the next one are equal, on the same images: of "
    "sign flips of the differences in radius (in hundredths), and of McNemar at a radius; both "
    "exact, each for one comparison alone."
)
_LEAST_P = 1e-12
FORMS = {".html": "html", ".md": "markdown", ".csv": "csv", ".json": "json"}
"""The forms of a board by the ending of its file."""


def _file(text: str) -> Path:
    if Path(text).suffix not in FORMS:
        raise SettingError(f"'{text}' does not end in one of {', '.join(FORMS)}")
    return output_file(text)


@dataclass(frozen=True, kw_only=True)
class BoardSpec(Checked):
    """rankings of cards: values with intervals, and paired tests of neighbours, of cards with the
    same dataset, images, alpha and kind of certificate
    """

    cards: tuple[str, ...] = setting(
        parse=str,
        flag="cards",
        metavar="CARD",
        keyword=False,
        help="cards, folders of them or globs",
    )
    radii: tuple[float, ...] | None = setting(
        None,
        parse=kept_radius,
        help="radii of the columns (default: those of the cards at which anything is certified)",
    )
    top: int | None = setting(
        None, parse=positive_int, metavar="K", help="only the first K of each ranking"
    )
    format: str = setting(
        "markdown",
        choices=tuple(FORMS.values()),
        keyword=False,
        help="format of standard output",
    )
    output: list[Path] = setting(
        (),
        parse=_file,
        flag="-o --output",
        metavar="FILE",
        keyword=False,
        help="FILE.html, a page with sorting and filters, or FILE.md, FILE.csv or FILE.json; may "
        "be given several times (default: standard output)",
    )

    def rankings(self) -> dict[str, list[Card]]:
        """The cards of each ranking in its order, by its name."""
        return {name: cards[: self.top] for name, cards in rankings(_read(self.cards)).items()}

    def table(self) -> Table:
        """All rankings as one table, for programs."""
        ranked = self.rankings()
        every = [card for cards in ranked.values() for card in cards]
        return _for_programs(ranked, self._radii(every))

    def text(self, form: str) -> str:
        """The board as one of FORMS: for people a table and the tests of each ranking, for
        programs one table of all.
        """
        ranked, every = self.rankings(), _read(self.cards)
        if form == "html":
            sections = [
                Section(
                    "Ranking",
                    [
                        part("Ranking", _for_people(cards, self._radii(cards))),
                        part("Each entry and the next", _neighbours(cards, self._radii(cards))),
                        part("Where each entry is from", _sources(cards)),
                    ],
                    " ".join([_HOW_TO_READ, _left_out(cards, every)]),
                    name,
                )
                for name, cards in ranked.items()
            ]
            facts = [
                ("entries", f"{sum(map(len, ranked.values())):,}"),
                ("rankings", f"{len(ranked):,}"),
            ]
            return page("Board of smoothed classifiers", facts, [], sections)
        write = FORMATS[form]
        if form != "markdown":
            return write(self.table())
        texts = list[str]()
        for name, cards in ranked.items():
            common, table = without_equal(
                _for_people(cards, self._radii(cards)), MARKDOWN, kept="entry"
            )
            said = f"In all rows: {common}.\n\n" if common else ""
            tests = [_neighbours(cards, self._radii(cards))] if len(cards) > 1 else []
            shown = "\n".join(write(one) for one in (table, *tests))
            others = _left_out(cards, every)
            texts.append(f"### {name}\n\n{said}{shown}" + f"\n{others}\n" * bool(others))
        return "\n".join(texts)

    def write(self) -> Iterator[str]:
        """Write the board; yields what was done, or the board itself if no file is named."""
        for path in self.output:
            starts = b"### ", b"ranking,", b'[\n  {\n    "ranking"'
            refuse_to_replace(path, "board", PAGE[1], *starts)
            write_text(path, self.text(FORMS[path.suffix]))
            yield f"wrote {path}"
        if not self.output:
            yield self.text(self.format).removesuffix("\n")

    def _radii(self, cards: Sequence[Card]) -> list[float]:
        if self.radii:
            return [*dict.fromkeys(self.radii)]
        known = {float(one) for card in cards for one in card.values["certified_accuracy"]}
        return [r for r in sorted(known) if any(card.certifies(r).any() for card in cards)]


@takes(BoardSpec)
def board(*cards: Any, **keywords: Any) -> Any:
    """Rankings of cards with the same dataset, images, alpha and kind of certificate.

    ``cards`` are files of cards, folders of them or globs, as strings or paths.

    Returns a DataFrame with a row per card. UserError where there are no cards.
    """
    try:
        files = paths(cards)
    except UserError:
        raise UserError("cards: give files, as analyze card -o FILE writes them") from None
    return BoardSpec(cards=files, **keywords).table().frame()


def _read(places: Sequence[str]) -> list[Card]:
    """The cards in files, folders and globs; UserError where there are none."""
    paths = dict[Path, None]()
    for place in places:
        is_folder = Path(place).is_dir()
        found = Path(place).glob("*.json") if is_folder else map(Path, glob.glob(place))
        ordered = sorted(path for path in found if not path.name.endswith(MANIFEST))
        if not ordered:
            raise UserError(f"{place} is no card, and no folder or glob of cards")
        paths |= dict.fromkeys(ordered)
    return [*map(read_card, paths)]


def rankings(cards: Sequence[Card]) -> dict[str, list[Card]]:
    """Cards that can be compared, by a name for people, in descending order of their average
    radius.

    Released logs state no fingerprint of the dataset: they stand with the first that does.
    """
    stated = dict[tuple[object, ...], object]()
    for card in cards:
        of_images = card["facts.dataset"], card["images.sha256"]
        stated[of_images] = stated.get(of_images) or card["images.fingerprint"]

    def conditions(card: Card) -> tuple[object, ...]:
        of_images = card["facts.dataset"], card["images.sha256"]
        fingerprint = card["images.fingerprint"] or stated[of_images]
        return *of_images, fingerprint, card["facts.alpha"], card["certificate"]

    found = dict[str, list[Card]]()
    for alike in group_by(cards, conditions).values():
        name, number = _name(alike[0]), 1
        while (title := name + f" (set {number})" * (number > 1)) in found:
            number += 1
        found[title] = sorted(alike, key=lambda card: -card.floors.mean())
        for one, two in pairwise(found[title]):
            if np.array_equal(one.hundredths, two.hundredths):
                warn(f"{one.path} and {two.path} have the same radii: is a model there twice?")
    return dict(sorted(found.items(), key=lambda one: -len(one[1])))


def _name(card: Card) -> str:
    first, skip, named = card["images.first"], card["images.skip"], card[f"facts.{IMAGE_SET}"]
    which = f" (one in {skip})" if skip and skip > 1 else ""
    which += f" from {first}" if first else ""
    which = f" ({named})" if named else which
    images = counted(card["images.count"], "image") + which
    words = card["facts.dataset"], images, f"alpha {card['facts.alpha']:g}", card["certificate"]
    return ", ".join(map(str, words))


def _left_out(ranking: Sequence[Card], every: Sequence[Card]) -> str:
    """Which cards of its dataset a ranking has not, and why, in words; "" if it has all."""
    first, there = ranking[0], {card.path for card in ranking}
    reasons = Counter(
        next(
            (
                f"with {what}"
                for place, what in (
                    ("images.sha256", "other images"),
                    ("facts.alpha", "another alpha"),
                    ("certificate", "another kind of certificate"),
                    ("images.fingerprint", "another version of the images"),
                )
                if None not in (card[place], first[place]) and card[place] != first[place]
            ),
            "below these",
        )
        for card in every
        if card["facts.dataset"] == first["facts.dataset"] and card.path not in there
    )
    texts = [f"{counted(count, 'card')} {why}" for why, count in reasons.items()]
    return f"Not in this ranking: {', '.join(texts)}." if texts else ""


def sign_flip_p_value(differences: np.ndarray) -> float:
    """The exact two-sided p-value of whole ``differences`` of pairs, int64 [pairs]: of sums with
    random signs, the share that is at least as far from 0 as theirs (Fisher, 1935).

    A sum is 2 V - T, where T is the sum of all |d_i| and V that of those with a positive sign, to
    which each contributes |d_i| or 0 with equal chances. The distribution of V is the convolution
    of theirs, in pairs. It errs by less than 1e-12, which stands for all p below.
    """
    from scipy.signal import fftconvolve

    sizes = np.sort(np.abs(differences[differences != 0]))
    chances = [np.ones(1), *(np.r_[0.5, np.zeros(size - 1), 0.5] for size in sizes)]
    while len(chances) > 1:
        pairs = [fftconvolve(*pair) for pair in zip(chances[::2], chances[1::2])]
        chances = pairs + chances[2 * len(pairs) :]
    sums = 2 * np.arange(len(chances[0])) - sizes.sum()
    far = chances[0][np.abs(sums) >= abs(differences.sum())].sum()
    return float(np.clip(far, _LEAST_P, 1))


def _tests(card: Card, other: Card, radii: Sequence[float]) -> list[float]:
    """p-values of two cards of the same images: of the average radius, and at each radius."""
    differences = np.rint(PER_UNIT * (card.floors - other.floors)).astype(np.int64)
    pairs = [(card.certifies(radius), other.certifies(radius)) for radius in radii]
    counts = [(int((one & ~two).sum()), int((two & ~one).sum())) for one, two in pairs]
    return [sign_flip_p_value(differences), *(mcnemar_p_value(*both) for both in counts)]


def _entry(card: Card) -> list[Cell]:
    """What tells an entry from others: see ``_ENTRY``."""
    known = [card[f"facts.{one}"] for one in ("sigma", "arch", "N")]
    return [
        card["name"],
        card["paper"],
        *known,
        card["extra_data"] or "none",
        card["procedure"],
        _verified(card),
    ]


def _verified(card: Card) -> str:
    """What checked its rows, and how many of them were drawn again and attacked."""
    names = "redrawn.rows", "attacked.certificates", "attacked.flipped"
    redrawn, attacked, flipped = (card[f"verified.{name}"] or 0 for name in names)
    texts = {
        card["verified.by"]: True,
        f"{redrawn:,} redrawn": redrawn > 0,
        f"{attacked:,} attacked, {flipped:,} flipped": attacked > 0,
    }
    return "; ".join(text for text, is_so in texts.items() if is_so)


_ENTRY = [
    *columns_of("text", entry="entry", paper="paper", sigma="sigma", arch="architecture"),
    Column("n", "n", "count"),
    *columns_of("text", extra_data="extra data", procedure="procedure", verified="verified"),
]


def _values(card: Card, radii: Sequence[float]) -> list[list[float]]:
    """The average radius, the clean accuracy and the accuracies at radii, each with its ends."""
    return [card[AVERAGE], *shares(card.hundredths, [0, *radii]).values()]


def _for_people(cards: Sequence[Card], radii: Sequence[float]) -> Table:
    kinds = [("ACR", "number"), ("clean", "percent"), *((f"{r:g}", "percent") for r in radii)]
    columns = [Column(name, name, kind, compared=True) for name, kind in kinds]
    rows = [
        [
            *(card["name"], rank, *_entry(card)[1:]),
            *(Annotated(one, interval=(low, high)) for one, low, high in _values(card, radii)),
        ]
        for rank, card in enumerate(cards, start=1)
    ]
    return Table([_ENTRY[0], Column("rank", "rank", "count"), *_ENTRY[1:], *columns], rows)


def _neighbours(cards: Sequence[Card], radii: Sequence[float]) -> Table:
    titles = "p of ACR", *(f"p at {radius:g}" for radius in radii)
    columns = [
        *columns_of("text", entry="entry", next="the next entry"),
        Column("difference", "difference of ACR", "signed"),
        *(Column(title, title, "probability") for title in titles),
    ]
    names = [f"{rank}. {card['name']}" for rank, card in enumerate(cards, start=1)]
    rows: list[list[Cell]] = [
        [names[k], names[k + 1], one[AVERAGE][0] - two[AVERAGE][0], *_tests(one, two, radii)]
        for k, (one, two) in enumerate(zip(cards, cards[1:]))
    ]
    return Table(columns, rows)


def _sources(cards: Sequence[Card]) -> Table:
    places = {"url": "url", "log": "log_sha256", "model": "model_sha256"}
    rows: list[list[Cell]] = [
        [
            card["name"],
            str(card.path.name),
            *(card[place] for place in places.values()),
            "; ".join(card["verified.notes"] or []),
        ]
        for card in cards
    ]
    titles = {"entry": "entry", "card": "card", **{one: one for one in places}, "notes": "notes"}
    return Table(columns_of("text", **titles), rows)


def _for_programs(ranked: dict[str, list[Card]], radii: Sequence[float]) -> Table:
    keys = "average_certified_radius", "clean_accuracy", *(f"{radius:g}" for radius in radii)
    kinds = "number", *["percent"] * (1 + len(radii))
    columns = [
        *(Column("ranking", "ranking", "text"), Column("rank", "rank", "count"), *_ENTRY),
        *(
            Column(f"{key}{end}", f"{key}{end}", "probability" if "p" in end else kind)
            for key, kind in zip(keys, kinds)
            for end in ("", "_low", "_high", *["_p_next"] * (key != "clean_accuracy"))
        ),
    ]
    rows: list[list[Cell]] = []
    for name, cards in ranked.items():
        for rank, card in enumerate(cards, start=1):
            tests: list[float | None] = [None] * (1 + len(radii))
            if rank < len(cards):
                tests = [*_tests(card, cards[rank], radii)]
            average, clean, *others = _values(card, radii)
            pairs = zip(others, tests[1:])
            cells = [*average, tests[0], *clean, *(c for one, p in pairs for c in (*one, p))]
            rows.append([name, rank, *_entry(card), *cells])
    return Table(columns, rows)
