"""report: one HTML page that contains all it shows, states its sources, and is correct for any
name; what a reader can do on it: point at curves, find logs, look at images, all without a request.
"""

import base64
import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from smoothadv import __version__
from smoothadv.analysis.figure_style import unbroken
from smoothadv.records.logs import examples_path
from support.analyzed_folder import log
from support.report_page import HOSTILE, Page, certification, write_everything


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    """The page of all logs."""
    from smoothadv.cli.analyze import main

    root = tmp_path_factory.mktemp("report")
    write_everything(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert main(["report", "logs", "-o", "page.html", "--title", "Ours & <others>"]) == 0
        assert [path.name for path in root.iterdir() if path.name != "logs"] == ["page.html"], (
            "one file"
        )
    return (root / "page.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(text) -> Page:
    return Page(text)


def test_page_is_well_formed_and_says_its_encoding_and_language(text, page):
    assert text.startswith("<!DOCTYPE html>") and page.all("html") == [{"lang": "en"}]
    assert {"charset": "utf-8"} in page.all("meta")
    assert page.texts["title"] == page.texts["h1"] == ["Ours & <others>"]


def test_page_needs_nothing_but_itself(text, page):
    """Links of elements and of styles lead inside the page."""
    targets = [
        value or ""
        for tag, attributes in page.tags
        for name, value in attributes.items()
        if name in ("src", "href", "xlink:href", "srcset", "data", "poster", "action")
        and tag != "td"
    ]
    targets += map("".join, re.findall(r"url\(([^)]*)\)|@import\s+(\S+)", text))
    assert all(str(target).startswith(("#", "data:")) for target in targets)
    assert "http:" not in text and "https:" not in text
    assert page.all("link") == page.all("iframe") == page.all("object") == []
    assert [attributes for attributes in page.all("script") if attributes] == []
    assert "fetch(" not in text and "XMLHttpRequest" not in text and "import(" not in text


def test_every_legend_entry_names_a_curve_that_has_its_values(text):
    figures, labels = re.findall(r"<figure class=\"curves\".*?</figure>", text, re.DOTALL), []
    assert len(figures) == text.count("<svg viewBox") >= 4
    for figure in figures:
        entries, curves = (
            re.findall(f'<{tag} data-{name}="([0-9]+)"', figure)
            for tag, name in (("div", "entry"), ("g", "curve"))
        )
        panels = Page(figure).panels()
        assert len(entries) == len(set(entries)) > 0, "once, however many panels have the curve"
        assert (
            set(entries)
            == set(curves)
            == {str(number) for panel in panels for number, _, _ in panel["curves"]}
        )
        labels += [label for panel in panels for _, label, _ in panel["curves"]]
        for panel in panels:
            assert panel["x"] == sorted(set(panel["x"])) and all(
                0 <= part <= 1 for part in panel["box"]
            )
            assert {len(values) for _, _, values in panel["curves"]} == {len(panel["x"])}
    assert all(any(name.replace("/", "_") in label for label in labels) for name in HOSTILE)
    ids = [attributes["id"] for _, attributes in Page(text).tags if "id" in attributes]
    assert len(ids) == len(set(ids)), "a figure must not use what is defined in another one"
    assert {*re.findall(r'(?:url\(|href=")#([^")]+)', text)} <= {*ids}


def test_values_of_points_are_at_the_points(page):
    panels = page.panels()
    (training,) = [
        panel for panel in panels if panel["title"] == "epoch" and panel["ends"][3] != 100
    ]
    assert training["x"] == [1, 2] and [values for _, _, values in training["curves"]] == [
        [2.0, 1.0],
        [2.1, 1.1],
    ]
    (attacked,) = [
        panel for panel in panels if any("under attack" in label for _, label, _ in panel["curves"])
    ]
    assert attacked["x"] == [0.25, 0.5] and [50, 50] in [
        values for _, _, values in attacked["curves"]
    ]


def test_names_are_text_whatever_they_are(text, page):
    logs = page.column("All logs", "log")
    for name in HOSTILE:
        assert any(name.replace("/", "_") in log for log in logs), name
    assert len(page.all("script")) == 1, "the page's own"
    assert "alert(1)" not in "".join(page.texts["script"])
    assert "&amp;lt;" not in text and "&amp;amp;" not in text, "escaped once"


def test_every_table_is_sortable_by_a_value_beside_what_is_shown(page):
    """A number's is the number itself: percent signs, raised numbers and thousands' commas would
    not sort.
    """
    cells = page.all("td")
    assert cells and all("data-value" in cell for cell in cells)
    numbers = [
        cell for cell in cells if cell["class"] in ("count", "fraction", "percent", "number")
    ]
    assert len(numbers) > 50
    for cell in numbers:
        assert cell["data-value"] == "" or float(cell["data-value"]) >= 0
    headings, tables = page.all("th"), page.all("table")
    assert len(tables) == len(page.all("thead")) == len(page.all("tbody")) == len(page.tables), (
        "captions differ"
    )
    assert all(heading["scope"] == "col" and heading["class"] for heading in headings)
    for rows in page.tables.values():
        assert {len(row) for row in rows} == {len(rows[0])}, "no cell is missing"


def test_provenance_names_every_log_its_file_and_its_run(page):
    caption = "Where each log is from"
    files = page.column(caption, "file")
    assert len(files) == 6 + 2 + 1 and len(set(files)) == 9
    assert any(file.endswith("sigma_0.50_a&b") for file in files)
    (made_by,) = [cell for cell in page.column(caption, "made by") if cell != "–"]
    facts = ["smoothadv certify --<b> --token=*** (", "9.8.7", "0123456789ab", "2.99"]
    facts = [*facts, "NVIDIA H100", "2031-02-03"]
    assert [fact for fact in facts if fact not in made_by] == []
    sources = page.column("Hyper-parameters and how they are known", "known from")
    assert any("manifest" in source for source in sources) and any(
        "path" in source for source in sources
    )


def test_warnings_are_on_the_page(page):
    notes = " ".join(page.texts["li"])
    assert "not all on the same test images" in notes
    assert "sigma_0.50_broken" in notes and "left out" in notes
    assert __version__ in " ".join(page.texts["footer"])


@pytest.fixture
def text_of(analyze, monkeypatch):
    """The text of the page of some logs, in which figures are empty."""
    monkeypatch.setattr("smoothadv.analysis.report.as_element", lambda *_: "<svg></svg>")

    def make(*arguments: object) -> str:
        outcome = analyze("report", *arguments, "-o", "a.html")
        assert outcome.code == 0, outcome.err
        return Path("a.html").read_text()

    return make


TRAINED = "{}/cifar10/resnet110/noise_{}/test/sigma_{}"


def trained(root: str, sigma: str, outcomes: str, radius: float) -> None:
    certification(Path(TRAINED.format(root, sigma, sigma)), outcomes, radius)


def write_two_groups() -> None:
    """By hand, at radius 0.25 the best of ours is T = 2 with 100 %, at 0.5 T = 10 with 75 %; of
    Cohen's sigma 0.50.
    """
    trained("ours/PGD_2steps/eps_64", "0.25", "RRRR", 0.25)
    trained("ours/PGD_10steps/eps_512", "0.50", "RRRW", 0.75)
    trained("cohen", "0.25", "RWWA", 0.25)
    trained("cohen", "0.50", "RRWA", 0.25)


SELECTED = "Selected log at each radius"


def test_selected_logs_are_shown_with_what_tells_them_apart(text_of, workplace):
    write_two_groups()
    page = Page(text_of("Ours=ours", "Cohen=cohen", "--radii", 0.25, 0.5))
    heading, *rows = page.tables[SELECTED]
    assert (
        heading[:3] == ["group", "l2 radius", "certified accuracy (%)"] and heading[-1] == "model"
    )
    assert "group" not in page.tables["All logs"][0], "the log's name begins with it"
    named = ["training", "attack", "epsilon", "T", "m", "sigma"]
    assert heading[3:-1] == named, (
        "no data set, no n, and no noise of training, which is sigma in all"
    )
    assert [row[:3] + row[5:7] + row[8:9] for row in rows] == [
        ["Ours", "0.25", "100.0", "0.25", "2", "0.25"],
        ["Ours", "0.50", "75.0", "2", "10", "0.50"],
        ["Cohen", "0.25", "50.0", "–", "–", "0.50"],
        ["Cohen", "0.50", "0.0", "–", "–", "–"],
    ]
    models = [row[-1] for row in rows]
    assert models[:3] == ["Ours: PGD, ε 0.25, T 2, m 1, σ 0.25", "Ours: PGD, ε 2, T 10, m 1, σ "
    "0.50",
                          "Cohen: Gaussian, σ 0.50"]  # fmt: skip
    assert set(rows[-1][3:]) == {"–"}, "where nothing is certified, no log is better than another"


def test_what_all_rows_have_in_common_is_said_once(text_of, workplace):
    certification(workplace / "a/one", "RRWA")
    certification(workplace / "b/two", "RRRA")
    page = Page(text_of("A=a", "B=b", "--radii", 0.25, 2))
    heading, *rows = page.tables["All logs"]
    assert heading[:2] == ["log", "group"] and "examples" not in heading, "the log stays in sight"
    assert "In all rows: examples 4" in page.texts["span"]
    assert [row[-1] for row in rows] == ["0.0", "0.0"], "a result is in every row"
    alone = Page(text_of("A=a")).tables["All logs"]
    assert "examples" in alone[0], "a single row has all columns"


def test_no_line_ends_between_a_word_and_its_number(text_of, workplace):
    write_two_groups()
    text = text_of("Ours=ours", "Cohen=cohen")
    assert "<span>Cohen: Gaussian, σ\u00a00.50</span>" in text, "in the legend"
    assert ">Cohen: Gaussian, σ\u00a00.50</td>" in text, "in tables"
    assert unbroken("Ours, σ = 0.25, 3 of 4") == "Ours, σ\u00a0=\u00a00.25, 3 of\u00a04"


def test_panels_with_curves_are_one_below_the_other(page):
    """So that they are legible on a narrow screen; beside or below them is their legend."""
    loss, accuracy = [panel["box"] for panel in page.panels() if panel["title"] == "epoch"]
    assert loss[0] == pytest.approx(accuracy[0], abs=0.05) and loss[2] > 0.7
    assert loss[1] > accuracy[1] + accuracy[3]


def test_logs_are_selected_where_there_are_several(text_of, workplace):
    write_two_groups()
    one = Path("cohen/cifar10/resnet110/noise_0.50")
    rows = Page(text_of("Ours=ours", f"Cohen={one}", "--radii", 0.25)).tables[SELECTED]
    assert [row[0] for row in rows[1:]] == ["Ours"], "a group of one log has nothing to select from"
    assert SELECTED not in Page(text_of(f"Cohen={one}")).tables


def test_heat_map_is_shown_where_both_hyper_parameters_vary(text_of, workplace):
    write_two_groups()
    caption = "Best certified accuracy by sigma and epsilon, of all logs"
    for number, logs in [
        (1, ["Ours=ours"]),
        (0, ["Cohen=cohen"]),  # no epsilon
        (0, ["ours/PGD_2steps", "cohen/cifar10/resnet110/noise_0.25"]),  # one sigma
        (1, ["ours/PGD_2steps", "cohen/cifar10/resnet110/noise_0.50"]),  # an epsilon, or none
    ]:
        assert Page(text_of(*logs)).drawings().count(caption) == number, logs


TITLE = "l2 radius (images in [0, 1])"


def curve(panel: dict, label: str) -> dict[float, float]:
    (values,) = [values for _, name, values in panel["curves"] if name == label]
    return dict(zip(panel["x"], values))


def test_values_beside_the_pointer_are_those_of_the_tables(text_of):
    """Three quarters up to a radius of 0.5, which a step at a place that is not round would
    miss.
    """
    certification(Path("a/one"), "RRWR", 0.5)
    certification(Path("a/two"), "RRWA", 0.75)
    certification(Path("b/three"), "RWWA", 0.25)
    panels = [panel for panel in Page(text_of("A=a", "B=b")).panels() if panel["title"] == TITLE]
    each, envelopes = panels
    one, best = curve(each, "a/one"), curve(envelopes, "A")
    assert [one[radius] for radius in (0, 0.5, 0.501, 0.75)] == [75, 75, 0, 0]
    assert [best[radius] for radius in (0, 0.5, 0.501, 0.75, 0.751)] == [75, 75, 50, 50, 0]


def test_every_set_of_images_has_its_sections_below_its_name(text_of):
    certification(Path("logs/cifar10/sigma_0.50"), "RRWA")
    certification(Path("logs/imagenet/sigma_0.50"), "RW")
    page = Page(text_of("logs"))
    sets = ["cifar10, 4 images", "imagenet, 2 images"]
    assert (
        page.texts["h2"] == [*sets, "Provenance"] and page.texts["h3"] == page.texts["h3"][:3] * 2
    )
    assert [each["data-images"] for each in page.all("section")] == [sets[0]] * 3 + [
        sets[1]
    ] * 3 + [""]
    links, ids = [each["href"] for each in page.all("a")], [each.get("id") for _, each in page.tags]
    assert len(links) == 2 + 7 and all(link[1:] in ids for link in links)
    assert not any("images" in label for panel in page.panels() for _, label, _ in panel["curves"])


def test_long_names_are_short_and_files_beside_them(text_of):
    """Where hyper-parameters tell two logs apart: else their names stay."""
    path = "ours/PGD_{}steps_multiNoiseSamples/4-multitrain/{}/sigma_0.25"
    for steps, more in [(2, "eps_64"), (10, "eps_64"), (2, "eps_255"), (2, "eps_255/again")]:
        certification(Path(path.format(steps, more)), "RRWA")
    cells = [each for each in Page(text_of("ours")).all("td") if "title" in each]
    names = {each["title"]: each["data-value"] for each in cells}
    assert names[path.format(2, "eps_64")] == "ε 0.25, T 2" and names[
        path.format(10, "eps_64")
    ].endswith("T 10")
    assert (
        len(names) == len({*names.values()}) == 4
        and "/again" in names[path.format(2, "eps_255/again")]
    )


IMAGES = np.linspace(0, 0.6, 4 * 3 * 32 * 32, dtype=np.float32).reshape(4, 3, 32, 32)


def attacked(path: str, epsilon: float, outcomes: str, shift: float | None) -> None:
    """A log of an attack; its examples are each image, shifted, unless ``shift`` is None."""
    signs = [{"R": 1.0, "W": -1.0, "A": 0.0}[letter] for letter in outcomes]
    log(path, signs, range(0, 40, 10), run={}, attack=epsilon, dataset="cifar10")
    if shift is not None:
        images = {"image": IMAGES, "adversarial": IMAGES + np.float32(shift)}
        np.savez(examples_path(Path(path)), idx=10 * np.arange(4), **images)


def test_images_that_no_model_gets_right_are_shown(text_of, analyze):
    """0 and 30 are wrong under every attack; the weakest that is saved shifts by 0.01, which is 0.1
    when magnified.
    """
    attacked("logs/weakest.tsv", 0.25, "WWRA", None)
    attacked("logs/weak.tsv", 0.5, "WRWA", 0.01)
    attacked("logs/strong.tsv", 1.0, "WWWW", 0.03)
    text = text_of("logs")
    page = Page(text)
    assert (
        "Images that no model gets right under attack" in page.texts["h2"]
        and "2 of 2 images" in text
    )
    told = [words for words in page.texts["figcaption"] if words.startswith("Image ")]
    assert (
        told[0].startswith("Image 0, class 1: taken for 0 within l2 radius 0.5, ")
        and "weak" in told[0]
    )
    assert (
        told[1].startswith("Image 30, class 1: abstention within l2 radius 0.5, ")
        and len(told) == 2
    )
    for picture, image in zip(page.all("img"), IMAGES[[0, 3]]):
        content = base64.b64decode(
            picture["src"].removeprefix("data:image/png;base64,"), validate=True
        )
        pixels = np.asarray(Image.open(io.BytesIO(content))).astype(int)
        wanted = np.concatenate([image, image + 0.01, np.full_like(image, 0.6)], axis=2).transpose(
            1, 2, 0
        )
        assert pixels.shape == (32, 96, 3) and np.abs(pixels - 255 * wanted).max() <= 1
    examples_path(Path("logs/weak.tsv")).write_bytes(b"PK of something else")
    assert "within l2 radius 1, " in text_of("logs"), "the other archive is whole"
    examples_path(Path("logs/strong.tsv")).unlink()
    outcome = analyze("report", "logs", "-o", "a.html")
    assert (
        outcome.code == 0
        and "weak.npz cannot be read" in outcome.err
        and "its images are not shown" in outcome.err
    )
    assert "no model gets right" not in Path("a.html").read_text()
