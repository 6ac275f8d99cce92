"""examples: one row per test image, over all logs: which images are easy, and which ones no model
gets right; pictures of adversarial examples.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from smoothadv.analysis import ANALYSES, Analysis
from smoothadv.analysis.logs import Log, Logs, refuse_other_images, refuse_several
from smoothadv.analysis.table_formats import Table, columns_of
from smoothadv.analysis.tables import attack_radius
from smoothadv.base.errors import UserError, warn
from smoothadv.base.files import write_atomically
from smoothadv.base.settings import SettingError, positive_int, setting
from smoothadv.records.logs import examples_path, pictures_folder
from smoothadv.records.readers import DataFrame, read_examples
from smoothadv.statistics import ABSTAIN

if TYPE_CHECKING:
    from PIL.Image import Image

_TALLEST_PICTURE = 96
_SMALLEST_SIDE = 128
_MARGIN = 6
_CAPTION = 30


@ANALYSES.register("examples")
@dataclass(frozen=True)
class Examples(Analysis):
    """a row per test image, worst first: how many logs certify it, its radii, and the class it is
    mistaken for
    """

    worst: int | None = setting(None, parse=positive_int, help="show only the K worst images")
    best: int | None = setting(
        None, parse=positive_int, help="show only the K best images, best first"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if None not in (self.worst, self.best):
            raise SettingError("--worst and --best show different images: give one of them")

    def __call__(self, logs: Logs) -> Table:
        refuse_several(logs.certification, "a mean over logs", "procedure")
        frame = example_statistics(logs.certification)
        frame = frame.iloc[: self.worst] if self.best is None else frame.iloc[::-1].head(self.best)
        columns = [
            *columns_of("text", idx="idx", label="label"),
            *columns_of("count", logs="logs", certified="correct in", abstained="abstained in"),
            *columns_of(
                "number",
                mean_radius="mean radius (l2, 0 if wrong)",
                largest_radius="largest radius (l2)",
            ),
            *columns_of(
                "text", best_log="log with the largest radius", taken_for="most often mistaken for"
            ),
        ]
        labels = {log.name: log.label for log in logs.certification}
        rows = [
            [*others, labels.get(best), taken_for]
            for *others, best, taken_for in frame.itertuples(index=False)
        ]
        return Table(columns, rows)


def example_statistics(logs: Sequence[Log]) -> DataFrame:
    """By idx: label, logs, certified, abstained, mean_radius and largest_radius of R * [correct],
    best_log, taken_for.

    Worst first: by mean radius, then by the number of logs that certify it. UserError if two logs
    give an example different labels.
    """
    import pandas as pd

    refuse_other_images(logs, "the logs")
    everything = pd.concat([log.table.assign(log=log.name) for log in logs], ignore_index=True)
    everything = everything.assign(
        credit=everything.radius * everything.correct, abstains=everything.predict.eq(-1)
    )
    frame = everything.groupby("idx").agg(
        label=("label", "min"),
        logs=("log", "size"),
        certified=("correct", "sum"),
        abstained=("abstains", "sum"),
        mean_radius=("credit", "mean"),
        largest_radius=("credit", "max"),
    )
    best = everything.loc[everything.groupby("idx").credit.idxmax()].set_index("idx")
    wrong = everything[(everything.predict >= 0) & (everything.correct == 0)]
    counts = wrong.groupby(["idx", "predict"]).size().reset_index(name="times")
    mistaken = (
        counts.sort_values(["times", "predict"], ascending=[False, True])
        .drop_duplicates("idx")
        .set_index("idx")
    )
    frame["best_log"] = best.log.where(best.credit > 0, None)
    frame["taken_for"] = mistaken.predict.astype("Int64").astype(str)
    frame = frame.reset_index().sort_values(["mean_radius", "certified", "idx"], ignore_index=True)
    return frame.astype({"idx": str, "label": str}).astype(object).where(frame.notna(), None)


def never_right(logs: Sequence[Log], most: int) -> tuple[int, list[dict[str, str]]]:
    """How many images are right in none of the prediction logs under attack, and cards of the first
    ones of which adversarial examples are saved: ``text`` and the address of an ``image``, under
    the weakest attack that has one."""
    attacked = sorted(
        (log for log in logs if log.facts.get("attack") is not None), key=attack_radius
    )
    right = {idx for log in attacked for idx in log.table.idx[log.table.correct == 1]}
    wrong = {idx for log in attacked for idx in log.table.idx} - right  # or an abstention
    cards: dict[int, dict[str, str]] = {}
    for log in attacked:
        try:
            if examples_path(log.path).exists():
                cards = {**_cards(log, wrong, most), **cards}
        except UserError as error:
            warn(f"{error}; its images are not shown")
    return len(wrong), [cards[idx] for idx in sorted(cards)[:most]]


def _cards(log: Log, wrong: set[int], most: int) -> dict[int, dict[str, str]]:
    """By index, cards of the first images among ``wrong`` of which a log's adversarial examples are
    saved.
    """
    path, predicted = examples_path(log.path), log.table.set_index("idx")
    listed = enumerate(read_examples(path, ())["idx"].tolist())
    rows = [row for row, idx in listed if idx in wrong and idx in predicted.index][:most]
    saved, cards = read_examples(path, rows), {}
    for idx, *images in zip(saved["idx"][rows].tolist(), saved["image"], saved["adversarial"]):
        label, taken = predicted.loc[idx, ["label", "predict"]]
        outcome = "abstention" if taken == ABSTAIN else f"taken for {taken}"
        text = (
            f"Image {idx}, class {label}: {outcome} within l2 radius {attack_radius(log):g}, "
            f"{log.label.text}"
        )
        cards[idx] = {"text": text, "image": _picture(*images)}
    return cards


def _picture(image: np.ndarray, adversarial: np.ndarray) -> str:
    """An address that holds a picture: two images float32 [C, H, W], and 10 times their difference
    on grey.
    """
    picture = _side_by_side(image, adversarial, 0.5 + 10 * (adversarial - image))
    picture.thumbnail((picture.width, _TALLEST_PICTURE))
    content = io.BytesIO()
    picture.save(content, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()


def write_pictures(log: Path, count: int) -> list[Path]:
    """PNGs of the first ``count`` examples of a finished log: image, adversarial image,
    perturbation magnified.
    """
    arrays = read_examples(examples_path(log), range(count))
    if not {"label", "predict"} <= arrays.keys():
        raise UserError(
            f"{examples_path(log)} lacks label or predict: no pictures can be made of it"
        )
    written = []
    for row in range(min(count, len(arrays["idx"]))):
        values = {name: array[row] for name, array in arrays.items()}
        path = pictures_folder(log) / f"{int(values['idx']):05d}.png"
        write_atomically(path, partial(_captioned(values).save, format="PNG"))
        written.append(path)
    for other in set(pictures_folder(log).glob("*.png")).difference(written):
        if other.stem.isdigit():  # of an earlier attack
            other.unlink()
    return written


def _captioned(example: dict[str, Any]) -> Image:
    """Three panels with white margins, enlarged to whole multiples where they are small, and with
    captions.
    """
    from PIL import ImageDraw, ImageOps

    perturbation = example["adversarial"].astype(np.float64) - example["image"]
    largest = float(np.abs(perturbation).max())
    magnified = 0.5 + (0.5 * perturbation / largest if largest else perturbation)
    panels = np.stack([example["image"], example["adversarial"], magnified])
    scale = max(1, -(-_SMALLEST_SIDE // min(panels.shape[2:])))
    panels = panels.repeat(scale, axis=2).repeat(scale, axis=3)
    right = [(0, 0), (0, 0), (0, 0), (0, _MARGIN)]
    row = _side_by_side(*np.pad(panels, right, constant_values=1)).convert("RGB")
    canvas = ImageOps.expand(row, (_MARGIN, _MARGIN, 0, _MARGIN + _CAPTION), "white")
    predicted = "abstains" if example["predict"] == -1 else f"predicts {example['predict']}"
    factor = f"x{0.5 / largest:.3g}" if largest else "none"
    title = f"image {example['idx']}, class {example['label']}"
    lines = [title, predicted, f"{factor}, l2 {np.linalg.norm(perturbation):.3f}"]
    draw = ImageDraw.Draw(canvas)
    for number, line in enumerate(lines):
        left = _MARGIN + number * row.width // len(lines)
        draw.text((left, row.height + 2 * _MARGIN), line, fill="black")
    return canvas


def _side_by_side(*images: np.ndarray) -> Image:
    """Images [C, H, W] in [0, 1] as one, from left to right."""
    from PIL import Image

    pixels = np.concatenate(images, axis=2)
    grey_levels = np.round(np.clip(np.nan_to_num(pixels), 0, 1) * 255).astype(np.uint8)
    return Image.fromarray(
        grey_levels[0] if len(grey_levels) != 3 else grey_levels.transpose(1, 2, 0)
    )
