"""What a reader can do on a report's page: point at curves, find logs, look at images, all without
a request.
"""

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from smoothadv.records.logs import examples_path, manifest_path
from support.commands import call
from support.report_page import Page, certification

TITLE = "l2 radius (images in [0, 1])"


@pytest.fixture
def text_of(workplace, capsys):
    def make(*arguments: object) -> str:
        outcome = call(capsys, "analyze", "report", *arguments, "-o", "a.html")
        assert outcome.code == 0, outcome.err
        return Path("a.html").read_text()

    return make


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
    log, predict = Path(path), [{"R": 1, "W": 0, "A": -1}[letter] for letter in outcomes]
    log.parent.mkdir(parents=True, exist_ok=True)
    rows = "".join(
        f"{10 * row}\t1\t{found}\t{int(found == 1)}\n" for row, found in enumerate(predict)
    )
    log.write_text("idx\tlabel\tpredict\tcorrect\n" + rows)
    known = {"dataset": "cifar10", "sigma": 0.5, "N": 100, "alpha": 0.001}
    settings = {**known, "attack": {"name": "PGD", "epsilon": epsilon}}
    manifest_path(log).write_text(json.dumps({"settings": settings, "runs": []}))
    if shift is not None:
        np.savez(
            examples_path(log),
            idx=10 * np.arange(4),
            image=IMAGES,
            adversarial=IMAGES + np.float32(shift),
        )


def test_images_that_no_model_gets_right_are_shown(text_of, capsys):
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
    outcome = call(capsys, "analyze", "report", "logs", "-o", "a.html")
    assert (
        outcome.code == 0
        and "weak.npz cannot be read" in outcome.err
        and "its images are not shown" in outcome.err
    )
    assert "no model gets right" not in Path("a.html").read_text()
