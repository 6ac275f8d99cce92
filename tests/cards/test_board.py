"""Boards: who stands with whom, exact paired tests beside plain ones, and all that a page shows."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from smoothadv.cards.board import rankings, sign_flip_p_value
from smoothadv.cards.card import Card, CardSpec, file_name, read_card
from smoothadv.records.logs import record_of
from support.analyzed_folder import log, records
from support.commands import call, refused
from support.report_page import Page

RADII = {"good": [0.75] * 8 + [0.0, 0.5], "near": [0.75] * 7 + [0.5] * 3, "poor": [0.25] * 10}


def card(name: str, radii: Sequence[float] = (0.5,) * 10, released: bool = False, **settings):
    """A card in the file NAME.json of a log that is right within each radius."""
    path = log(f"logs/{name}/cifar10/sigma_0.50", radii, **{"dataset": "cifar10", **settings})
    if released:
        path.with_name(f"{path.name}.manifest.json").unlink()
    (made,) = CardSpec(logs=(str(path),), name=name).made()
    Path(f"{name}.json").write_text(json.dumps(made[1]))
    return read_card(Path(f"{name}.json"))


def by_name(name: str, text: str, idx: Sequence[int]) -> Card:
    run = {"images": 20, "skip": 1, "max": None}
    return card(name, [0.5] * 7, idx=idx, run=run, image_set=record_of(text, [*idx]))


@pytest.fixture
def unverified(monkeypatch, workplace):
    """The script refuses these logs, which have no counts and hardly a manifest."""
    monkeypatch.setattr("smoothadv.cards.card._run_verifier", lambda path: None)
    return workplace


@pytest.fixture
def three(unverified) -> list[Card]:
    return [card(name, radii) for name, radii in RADII.items()]


def names(cards: Sequence[Card]) -> dict[str, list[str]]:
    return {name: [each["name"] for each in some] for name, some in rankings(cards).items()}


def test_only_comparable_cards_stand_in_one_ranking_which_says_what_it_lacks(unverified, capsys):
    """Another dataset, images, selection, alpha and kind of certificate; a released log, whose
    dataset has no fingerprint, stands with the first."""
    found = names(
        [
            card("one", [0.25] * 10),
            card("two", [0.75] * 10, N=500),
            card("released", [0.5] * 10, released=True),
            card("data", dataset="cifar100"),
            card("version", dataset_fingerprint="cd"),
            card("images", idx=range(1, 21, 2)),
            card("fewer", [0.5] * 9, run={"images": 18, "skip": 2, "max": None}),
            card("alpha", alpha=0.01),
            card("two-sided", method="two-sided", alpha_share=0.9),
            by_name("named", "3-9", range(3, 10)),
            by_name("same", "3,4,5-9", range(3, 10)),
            by_name("others", "4-10", range(4, 11)),
        ]
    )
    alpha = "alpha 0.001, one-sided"
    assert found == {
        f"cifar10, 10 images (one in 2), {alpha}": ["two", "released", "one"],
        f"cifar100, 10 images (one in 2), {alpha}": ["data"],
        f"cifar10, 10 images (one in 2), {alpha} (set 2)": ["version"],
        f"cifar10, 10 images (one in 2) from 1, {alpha}": ["images"],
        f"cifar10, 9 images (one in 2), {alpha}": ["fewer"],
        f"cifar10, 7 images (3-9), {alpha}": ["named", "same"],
        f"cifar10, 7 images (4-10), {alpha}": ["others"],
        "cifar10, 10 images (one in 2), alpha 0.01, one-sided": ["alpha"],
        "cifar10, 10 images (one in 2), alpha 0.001, two-sided": ["two-sided"],
    }
    printed = call(capsys, "analyze", "board", ".", "--top", 1).out
    first = printed[printed.index("two ") :].split("###")[0].partition("Not in this ranking: ")[2]
    assert {one.strip(" .\n") for one in first.split(",")} == {
        "2 cards below these",
        "5 cards with other images",
        "1 card with another alpha",
        "1 card with another kind of certificate",
        "1 card with another version of the images",
    }
    assert "Not in this" not in printed.partition("### cifar100")[2].partition("###")[0]
    call(capsys, "analyze", "board", ".", "-o", "board.html")
    assert "1 card with another version of the images" in Path("board.html").read_text()


@pytest.mark.parametrize("seed", range(6))
def test_sign_flips_are_those_counted_one_by_one(seed):
    differences = np.random.default_rng(seed).integers(-3 * seed, 4 + 2 * seed, 9)
    sums = [differences @ signs for signs in itertools.product([-1, 1], repeat=9)]
    share = np.mean([abs(one) >= abs(differences.sum()) for one in sums])
    assert sign_flip_p_value(differences) == pytest.approx(share, abs=1e-11)


def test_sign_flips_of_many_images_are_nearly_normal_and_find_a_shift():
    generator = np.random.default_rng(0)
    values = generator.integers(-40, 42, 10_000)
    z = abs(values.sum()) / np.sqrt((values**2).sum())
    assert sign_flip_p_value(values) == pytest.approx(2 * stats.norm.sf(z), abs=0.01)
    assert sign_flip_p_value(values + 2) <= 1e-11
    assert sign_flip_p_value(np.zeros(5, np.int64)) == 1


def test_neighbours_are_tested_on_the_same_images(three, capsys):
    rows = records(call(capsys, "analyze", "board", ".", "--format", "json"))
    assert [row["entry"] for row in rows] == ["near", "good", "poor"]
    hundredths = {
        name: np.round(100 * np.array(radii)).astype(int) for name, radii in RADII.items()
    }
    for row, (one, two) in zip(rows, itertools.pairwise(row["entry"] for row in rows)):
        difference = hundredths[one] - hundredths[two]
        assert row["average_certified_radius_p_next"] == sign_flip_p_value(difference)
        for radius in ("0.25", "0.5", "0.75"):
            first, second = (hundredths[name] >= 100 * float(radius) for name in (one, two))
            only = int((first & ~second).sum()), int((second & ~first).sum())
            p = stats.binomtest(only[0], sum(only)).pvalue if sum(only) else 1.0
            assert row[f"{radius}_p_next"] == pytest.approx(p)
    assert rows[1]["0.5_p_next"] < 0.01 < rows[0]["0.5_p_next"] and rows[2]["0.5_p_next"] is None


def test_page_has_every_entry_with_numbers_to_sort_by(three, capsys):
    assert call(capsys, "analyze", "board", ".", "-o", "board.html").code == 0
    page = Page(Path("board.html").read_text())
    (ranking,) = (table for caption, table in page.tables.items() if caption == "Ranking")
    assert [row[0] for row in ranking[1:]] == ["near", "good", "poor"]
    assert [float(row[ranking[0].index("ACR")].split()[0]) for row in ranking[1:]] == [
        *(0.675, 0.65, 0.25)
    ]
    sorted_by = [one["data-value"] for one in page.all("td") if one["class"] == "number"]
    assert [*map(float, sorted_by)] == [0.675, 0.65, 0.25]


def test_top_and_radii_choose_rows_and_columns(three, capsys):
    (row,) = records(
        call(capsys, "analyze", "board", ".", "--top", 1, "--radii", 0.6, "--format", "json")
    )
    assert (row["0.6"], row["entry"], row["rank"]) == (0.7, "near", 1) and "0.25" not in row


PUBLISHED = {
    ("Sun et al., 2024", "ACR weakness"): (0.564, 0.760, 0.844),
    ("Cohen et al., 2019, by Sun et al., 2024", "Gaussian"): (0.487, 0.571, 0.543),
    ("Salman et al., 2019, by Sun et al., 2024", "SmoothAdv"): (0.545, 0.703, 0.796),
    ("Jeong et al., 2021", "SmoothMix"): (0.553, 0.736),
    ("Jeong et al., 2023", "CAT-RS"): (0.562, 0.757, 0.815),
    ("Jeong and Shin, 2020", "Consistency + SmoothAdv"): (0.548, 0.726, 0.816),
}
"""Average radii of ResNet-110 on all test images of CIFAR-10, by sigma."""
BEST = {"0.25": 0.690, "0.5": 0.593, "0.75": 0.485, "1": 0.389, "1.5": 0.299, "2": 0.206}
"""The best certified accuracies there without further training data."""


def test_committed_cards_have_the_published_values(repository):
    cards = [read_card(path) for path in sorted(repository.glob("docs/board/*.json"))]
    ranked = rankings(cards)
    everything = ranked["cifar10, 10,000 images, alpha 0.001, one-sided"]
    for (paper, name), averages in PUBLISHED.items():
        some = [one for one in everything if (one["paper"], one["name"]) == (paper, name)]
        ordered = sorted(some, key=lambda one: one["facts.sigma"])
        assert (
            tuple(round(one["values.average_certified_radius"][0], 3) for one in ordered)
            == averages
        )
    plain = [one for one in everything if one["extra_data"] is None]
    for radius, best in BEST.items():
        accuracies = [one.values["certified_accuracy"][radius][0] for one in plain]
        assert max(accuracies) == pytest.approx(best, abs=5.1e-4), radius
    of_imagenet = ranked["imagenet, 500 images (one in 100), alpha 0.001, one-sided"]
    assert [round(one["values.average_certified_radius"][0], 3) for one in of_imagenet][:2] == [
        1.071,
        1.047,
    ]
    assert len({one["log_sha256"] for one in cards}) == len(cards)
    page = (repository / "docs/board.md").read_text()
    assert all(
        f"{round(one['values.average_certified_radius'][0], 3):.3f} (" in page
        for one in [one for one in everything if one["facts.sigma"] == 0.5][:3]
    )


def test_copied_entry_is_noticed(three, capsys):
    card("copy", RADII["near"])
    assert "have the same radii" in call(capsys, "analyze", "board", ".").err


@pytest.mark.parametrize(
    "words, code, says",
    [
        (["nowhere"], 1, "nowhere is no card"),
        (["."], 1, ". is no card, and no folder"),
        (["log.tsv"], 1, "log.tsv is no card of version 1"),
        (["a.json", "--radii", "0.333"], 2, "'0.333' is not a multiple of 0.01 from 0 to 100"),
        (["a.json", "-o", "board.tex"], 2, "does not end in one of .html, .md, .csv, .json"),
    ],
)
def test_bad_input_has_one_line(workplace, capsys, words, code, says):
    log("log.tsv", [0.5])
    assert refused(call(capsys, "analyze", "board", *words), says, code=code)


def test_files_are_named_by_what_a_person_would_look_for(three):
    content = {**three[0].content, "name": "A/B & c: d"}
    assert file_name(content) == f"A-B-c-d_cifar10_0.5_{content['log_sha256'][:8]}.json"
