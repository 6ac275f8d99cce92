"""Cards: what they say of a log by hand; a log with one false field gets none."""

import base64
import json
import zlib
from collections.abc import Callable
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import smoothadv
from smoothadv.base.files import file_digest
from smoothadv.cards import card as cards
from smoothadv.cards.board import BoardSpec
from smoothadv.cards.card import CardSpec, read_card
from support.analyzed_folder import certification
from support.commands import call, manifest_of, place_of, refused, rows, succeed
from support.refusals import refusal
from support.verifier import tampered

Rows = list[dict[str, str]]
Forgery = Callable[[Rows, dict], object]
PATH = "cifar10/resnet110/noise_0.50/test/sigma_0.50"


@pytest.fixture(scope="module")
def honest(checkpoint, tmp_path_factory) -> Path:
    """A log of all test images of digits."""
    log = tmp_path_factory.mktemp("honest") / "log.tsv"
    few = ("--N0", 20, "--N", 100, "--device", "cpu")
    succeed("certify", "digits", checkpoint, 0.25, log, *few)
    return log


@pytest.fixture(scope="module")
def written(honest) -> str:
    """The card of this log, in JSON."""
    return json.dumps(made(honest)[0])


def made(*logs: Path, **options: object) -> list[dict]:
    return [card for _, card in CardSpec(logs=[*map(str, logs)], **options).made()]


def field(name: str, change: Callable[[str], object]) -> Forgery:
    """Of the first right row."""

    def forge(table: Rows, manifest: dict) -> None:
        row = next(row for row in table if row["correct"] == "1")
        row[name] = str(change(row[name]))

    return forge


def setting(**values: object) -> Forgery:
    return lambda table, manifest: manifest["settings"].update(values)


def relabelled(table: Rows, manifest: dict) -> None:
    row = next(row for row in table if row["correct"] == "0" and row["predict"] != "-1")
    row.update(label=row["predict"], correct="1")


FORGERIES: dict[str, Forgery] = {
    "a larger radius": field("radius", lambda r: 1.01 * float(r)),
    "a smaller radius": field("radius", lambda r: 0.9 * float(r)),
    "more successes": field("successes", lambda s: int(s) + 1),
    "fewer successes": field("successes", lambda s: int(s) - 1),
    "another label": field("label", lambda label: (int(label) + 1) % 10),
    "another label, everywhere": relabelled,
    "an image of another set": field("idx", lambda idx: 400),
    "another n": setting(N=1000),
    "another alpha": setting(alpha=0.01),
    "a larger sigma": setting(sigma=0.3),
    "another procedure": setting(method="two-sided", alpha_share=0.9),
    "fewer classes": setting(num_classes=7),
    "training images": setting(split="train"),
    "no last row": lambda table, manifest: table.pop(),
    "no first row": lambda table, manifest: table.pop(0),
    "a row twice": lambda table, manifest: table.append(dict(table[5])),
    "another order": lambda table, manifest: table.insert(0, table.pop(7)),
    "another column": lambda table, manifest: [row.update(level="1") for row in table],
}
"""Every one but the last of a row's fields that nobody can tell from honest ones: with more votes
for a class, or another class as the prediction, only redrawn rows differ."""


def test_honest_log_has_a_card_which_is_its_own_and_no_other_s(honest, workplace, capsys):
    said = ("--method-name", "Plain | one", "--paper", "A, 2030", "--url", "https://a.example")
    succeed("analyze", "card", honest, *said, "-o", "a.json")
    content = read_card(Path("a.json")).content
    assert (content["name"], content["paper"], content["url"]) == (said[1], said[3], said[5])
    assert content["verified"]["by"] == "all rows recomputed"
    assert "labels those of the dataset" in content["verified"]["checked"]
    assert content["log_sha256"] == file_digest(honest)
    assert content["sources"]["sigma"] == "manifest" and content["draws"] == 359 * (20 + 100)
    assert call(capsys, "analyze", "card", honest, "--check", "a.json").code == 0
    assert smoothadv.card(honest, name=said[1], paper=said[3], url=said[5]) == [content]
    succeed("analyze", "board", "a.json", "-o", "board.csv")
    columns = Path("board.csv").read_text().partition("\n")[0].split(",")
    assert [*smoothadv.board("a.json")] == columns and len(smoothadv.board(["a.json"])) == 1
    for given in (content, [content]):
        refusal(smoothadv.board, given, names="cards: give files, as analyze card -o FILE writes")
    succeed("analyze", "card", honest, "-o", "cards")
    assert [*Path("cards").iterdir()] == [
        Path(f"cards/Gaussian_digits_0.25_{file_digest(honest)[:8]}.json")
    ]


@pytest.mark.parametrize("forgery", FORGERIES)
def test_forged_log_has_no_card(honest, workplace, capsys, forgery):
    log = tampered(honest, workplace / "log.tsv", FORGERIES[forgery])
    assert rows(log) != rows(honest) or manifest_of(log) != manifest_of(honest)
    outcome = call(capsys, "analyze", "card", log, "-o", "cards")
    assert refused(outcome, "no card: ", log) and not Path("cards").exists(), outcome


def test_second_witness_refuses_and_names_the_row(honest, workplace, monkeypatch):
    """A radius that the package would accept, since other versions of SciPy round otherwise, and
    the script does not; without a clone there is no script.
    """
    slightly, more = (
        tampered(
            honest, Path(f"{share}.tsv"), field("radius", lambda r, s=share: float(r) * (1 + s))
        )
        for share in (9e-9, 1e-7)
    )
    line = 2 + place_of(honest, "right", lambda row: row["correct"] == "1")
    message = refusal(made, slightly, names=f"{slightly}, line {line}: ")
    assert message.startswith("no card: ") and "verify_log" in message
    monkeypatch.setattr(cards, "_VERIFIER", workplace / "verify_log.py")
    assert made(slightly)[0]["verified"]["by"] == "all rows recomputed"
    assert "counts do not certify" in refusal(made, more, names="no card: ")


def test_stated_facts_do_not_win_over_a_manifest(honest):
    words = "manifest says dataset digits, --fact cifar10"
    refusal(made, honest, fact=["dataset=cifar10"], names=words)
    assert made(honest, fact=["dataset=digits"])[0]["facts"]["dataset"] == "digits"


def test_folder_of_images_is_named_without_its_path(honest, workplace):
    """Which images they are is stated, or unknown: a path of one machine says it to nobody. A copy
    of a log has a card, else the refusals above would show nothing.
    """
    log = tampered(honest, Path("log.tsv"), setting(dataset="imagefolder:/home/somebody/images"))
    card, stated = (made(log, fact=fact)[0] for fact in ([], ["dataset=digits as pictures"]))
    assert "somebody" not in json.dumps(card)
    assert card["facts"]["dataset"] == "imagefolder"
    assert (stated["facts"]["dataset"], stated["sources"]["dataset"]) == (
        "digits as pictures",
        "stated",
    )
    words = "manifest says arch digits_resnet8, --fact other"
    refusal(made, log, fact=["arch=other"], names=words)


def test_card_of_a_released_log_by_hand(workplace):
    """Radii .5, .25, .3 of right ones, .8 of a wrong one, and an abstention."""
    certification(PATH, [("R", 0.5), ("R", 0.25), ("R", 0.307), ("W", 0.8), ("A", 0.0)])
    (card,) = made(Path(PATH), extra_data="ImageNet")
    values = card["values"]
    for right, found in [
        (3, values["clean_accuracy"]),
        (3, values["certified_accuracy"]["0.25"]),
        (1, values["certified_accuracy"]["0.5"]),
        (0, values["certified_accuracy"]["0.75"]),
    ]:
        ends = stats.binomtest(right, 5).proportion_ci(0.95, "exact")
        assert found == pytest.approx([right / 5, ends.low, ends.high], abs=1e-6)
    radii = [0.5, 0.25, 0.307, 0.0, 0.0]
    ends = stats.t.interval(0.95, 4, np.mean(radii), stats.sem(radii))
    assert values["average_certified_radius"] == pytest.approx([np.mean(radii), *ends], abs=1e-6)
    assert values["abstention_rate"] == 0.2
    assert {**card["facts"], **card["images"]}.items() >= {
        **{"dataset": "cifar10", "arch": "resnet110", "sigma": 0.5, "N": 100_000, "N0": 100},
        **{"count": 5, "first": 0, "skip": 20, "fingerprint": None},
    }.items()
    assert card["verified"]["by"] == "no counts in the log" and card["extra_data"] == "ImageNet"
    assert "labels those of the dataset" not in card["verified"]["checked"]
    Path("a.json").write_text(json.dumps(card))
    assert read_card(Path("a.json")).hundredths.tolist() == [51, 26, 31, 0, 0]


@pytest.mark.parametrize(
    "forge, words",
    [
        (lambda text: text.replace("0.4\t", "1.95\t"), "above 1.90"),
        (lambda text: text + text.splitlines(keepends=True)[-1], "twice"),
        (lambda text: text.rstrip("\n"), "without an end"),
        (lambda text: text.replace("\n0\t", "\n60\t"), "out of order"),
        (lambda text: text.replace("\t1\t1\t0.4\t1", "\t1\t1\t0.4\t0"), "correct"),
    ],
)
def test_released_log_that_cannot_be_has_no_card(workplace, forge, words):
    certification(PATH, [("R", 0.4), ("R", 0.25), ("W", 0.8)])
    assert made(Path(PATH))
    Path(PATH).write_text(forge(Path(PATH).read_text()))
    assert words in refusal(made, Path(PATH), names="no card: ")


@pytest.mark.parametrize("name", ["dataset", "sigma"])
def test_log_that_does_not_say_what_it_is_of_needs_a_fact(workplace, name):
    certification("noise_0.5", [("R", 0.4)])
    facts = {"dataset=cifar10", "sigma=0.5"}
    few = [one for one in facts if not one.startswith(name)]
    refusal(made, Path("noise_0.5"), fact=few, names=f"says no {name}: add --fact {name}=")
    assert made(Path("noise_0.5"), fact=[*facts])


def radii_of(card: dict) -> np.ndarray:
    """0 or 1 + the radius in hundredths of each image: uint16 [count]."""
    both = np.frombuffer(zlib.decompress(base64.b64decode(card["radii"])), np.uint8)
    return both.reshape(2, -1).T.copy().view("<u2").reshape(-1)


def packed(radii: np.ndarray) -> str:
    both = radii.astype("<u2").view(np.uint8).reshape(-1, 2).T.tobytes()
    return base64.b64encode(zlib.compress(both)).decode()


def swapped(card: dict) -> None:
    """Two images with each other's radii change no value of a card."""
    radii = radii_of(card)
    one, other = np.flatnonzero(radii)[0], np.flatnonzero(radii != radii[radii > 0][0])[-1]
    radii[[one, other]] = radii[[other, one]]
    card["radii"] = packed(radii)


@pytest.mark.parametrize(
    "forge, words",
    [
        (swapped, "radii was"),
        (lambda card: card.update(log_sha256="0" * 64), "log_sha256 was '0000"),
        (lambda card: card.update(model_sha256="0" * 64), "model_sha256 was"),
        (lambda card: card["facts"].update(training="Better"), "facts.training was 'Better'"),
        (lambda card: card["verified"].update(by="no counts in the log"), "verified.by was"),
        (lambda card: card["sources"].update(sigma="assumed"), "sources.sigma was 'assumed'"),
        (lambda card: card.update(sources={"foo": "stated"}), "sources.foo was 'stated', now"),
        (lambda card: card.update(sources=[1]), "sources was [1], now None"),
        (lambda card: card.update(sources=None), "sources.dataset was None"),
    ],
)
def test_card_of_another_log_is_refused_by_check(honest, written, workplace, capsys, forge, words):
    card = json.loads(written)
    forge(card)
    Path("a.json").write_text(json.dumps(card))
    assert forge is not swapped or read_card(Path("a.json"))
    outcome = call(capsys, "analyze", "card", honest, "--check", "a.json")
    assert refused(outcome, "a.json is not the card of", words)


@pytest.mark.parametrize(
    "change", [lambda packed: zlib.compress(zlib.decompress(packed), 1), lambda packed: packed[:-1]]
)
def test_only_the_radii_count_however_they_are_packed(honest, written, workplace, change):
    card = json.loads(written)
    card["radii"] = base64.b64encode(change(base64.b64decode(card["radii"]))).decode()
    Path("a.json").write_text(json.dumps(card))
    succeed("analyze", "card", honest, "--check", "a.json")


AVERAGE = "values.average_certified_radius"
EDITS = [
    ("card", 2, "its card is 2"),
    ("name", None, "its name is null"),
    ("radii", "!", "is no card"),
    ("images.count", 358, "is no card"),
    ("facts.sigma", "0.5", "its facts.sigma"),
    ("facts.arch", [1], "its facts.arch is [1]; expected a text or"),
    ("verified.notes", [1], "its verified.notes is [1]; expected null or a list"),
    ("values.clean_accuracy", [0.8, 0.2, 0.9], "contradicts itself: its accuracy at 0"),
    ("values.certified_accuracy", {"0.25": [0.8, 0.2, 0.9]}, "its accuracy at 0.25 is"),
    ("values.certified_accuracy", {"1e400": [0.0, 0.0, 0.5]}, "'1e400' is not a multiple"),
    (AVERAGE, [0.75, 0.7, 0.8], "its average radius is 0.75"),
    (AVERAGE, [], "its average radius is []"),
    (AVERAGE, [0.21], "its average radius is [0.21], not a mean"),
    (AVERAGE, [0.21, 0.3, 0.1], "its average radius is [0.21, 0.3"),
    *(("values.abstention_rate", rate, "abstains on") for rate in (None, 0.9, 1.0)),
    *(("values.clean_accuracy", share, "") for share in ([0.5, 0.45, 0.55], [1.0, 0.99, 1.0])),
    ("verified.attacked", {"certificates": 3, "flipped": 9}, "flips"),
    ("verified.attacked", {"certificates": 360, "flipped": 0}, "attacked"),
    ("verified.attacked", {"certificates": None, "flipped": 1}, "flips"),
    ("verified.redrawn", {"rows": 360, "seed": 0}, "redrawn"),
    *(("verified.redrawn", rows, "redrawn") for rows in ({"rows": 3}, [359], "all")),
    *(("verified.checked", checked, "verified.checked") for checked in ([], ["every weight"])),
    *(("verified.by", who, f"'{who}'") for who in ("all rows recomputed by me", "a friend", "")),
    ("manifest_sha256", None, "all rows recomputed"),
    *(("draws", draws, f"{draws} draws") for draws in (358, 359 * 120 - 1, 359 * 100, 1)),
    *(("certificate", name, name) for name in ("two-sided", "cascade", "top-2")),
    *(("procedure", name, "") for name in ("adaptive", "exact, two-sided", "exact, on a grid")),
    *(("facts.method", name, name) for name in ("two-sided", "sequential", "top-k")),
    *(("facts.sigma", sigma, "") for sigma in (0.01, 0.1)),
    *(("facts.alpha", alpha, "") for alpha in (1e-9, 1e-30)),
    *(("facts.N", n, "") for n in (1, 10)),
    ("images.max", 358, "images"),
    *(("images.of", count, "images") for count in (358, 1, 360, 2.5)),
    ("images.sha256", "0" * 64, "labels"),
]


def test_board_takes_no_card_that_was_edited(written, workplace):
    card = json.loads(written)
    Path("a.json").write_text(written)
    assert read_card(Path("a.json"))
    radii = radii_of(card)
    radii[np.flatnonzero(radii)[0]] += 40
    radii_edited = [("radii", packed(radii), ""), ("radii", card["radii"][:8], "is no card")]
    for place, value, words in [*EDITS, *radii_edited]:
        edited = json.loads(json.dumps(card))
        *way, last = place.split(".")
        reduce(lambda part, name: part[name], way, edited)[last] = value
        Path("a.json").write_text(json.dumps(edited))
        assert words in refusal(read_card, Path("a.json"), names="a.json"), (place, value)


def test_average_that_is_a_little_too_large_is_ranked_no_better(workplace):
    """The radii of a card tell it to a hundredth: within that, the order is that of the radii."""
    for name, radius in (("a", 0.307), ("b", 0.304), ("c", 0.299)):
        certification(f"{name}/{PATH}", [("R", 0.5), ("R", radius)])
        (card,) = made(Path(name, PATH))
        if name == "c":
            average = card["values"]["average_certified_radius"]
            card["values"]["average_certified_radius"] = [each + 0.005 for each in average]
        Path(f"{name}.json").write_text(json.dumps(card))
    (ranked,) = BoardSpec(cards=["a.json", "b.json", "c.json"]).rankings().values()
    assert (
        ranked[-1].path.name == "c.json"
        and ranked[-1]["values.average_certified_radius"][0]
        > ranked[1]["values.average_certified_radius"][0]
    )


OF_ROWS = [{"redrawn": {"rows": rows, "seed": 0}} for rows in (13, -1, 10**6, "all", True, 1.5)]


@pytest.mark.parametrize("content", [{}, {"redrawn": {"rows": None, "seed": 0}}, *OF_ROWS], ids=str)
def test_more_redrawn_rows_than_a_log_has_are_refused(workplace, content):
    certification(PATH, [("R", 0.5)] * 12)
    content = {"log_sha256": file_digest(Path(PATH)), **content}
    Path("a.json").write_text(json.dumps(content))
    words = "a.json is not from certify verify --output"
    refusal(made, Path(PATH), redrawn=Path("a.json"), names=words)


def test_attacked_certificates_are_counted_from_a_log_about_this_one(honest, checkpoint, workplace):
    options = ("--num-steps", 1, "--num-noise-vec", 1, "--N", 100, "--max", 5, "--device", "cpu")
    attack = ("attack", "digits", checkpoint, 0.25, "out", "--against", honest, "--attack", "PGD")
    succeed(*attack, *options)
    against = Path("out/against.tsv")
    found = made(honest, attacked=against)[0]["verified"]["attacked"]
    assert found == {"certificates": len(rows(against)), "flipped": 0} and len(rows(against)) > 1
    certification(PATH, [("R", 0.5)])
    refusal(made, Path(PATH), attacked=against, names="is no log of attack --against")


def test_redrawn_rows_are_counted_from_what_verify_wrote_of_this_log(honest, workplace):
    succeed(
        "certify", "verify", honest, "--rows", 3, "--seed", 5, "--device", "cpu", "-o", "a.json"
    )
    card = made(honest, redrawn=Path("a.json"))[0]
    assert card["verified"]["redrawn"] == {"rows": 3, "seed": 5}
    Path("card.json").write_text(json.dumps(card))
    board = BoardSpec(cards=["card.json"]).text("csv")
    assert "all rows recomputed; 3 redrawn" in board
    certification(PATH, [("R", 0.5)])
    refusal(made, Path(PATH), redrawn=Path("a.json"), names=f"a.json is not of {PATH}")
