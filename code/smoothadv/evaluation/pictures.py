"""Pictures of adversarial examples. No torch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from smoothadv.base.errors import UserError
from smoothadv.base.files import write_atomically
from smoothadv.records.logs import examples_path, pictures_folder
from smoothadv.records.readers import read_examples

if TYPE_CHECKING:
    from PIL import Image

_SMALLEST_SIDE = 128
_MARGIN = 6
_CAPTION = 30


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
        picture = _picture(values)
        path = pictures_folder(log) / f"{int(values['idx']):05d}.png"
        write_atomically(path, partial(picture.save, format="PNG"))
        written.append(path)
    for other in set(pictures_folder(log).glob("*.png")).difference(written):
        if other.stem.isdigit():  # of an earlier attack
            other.unlink()
    return written


def _picture(example: dict[str, Any]) -> Image.Image:
    """Three panels side by side, with captions."""
    from PIL import Image, ImageDraw

    perturbation = example["adversarial"].astype(np.float64) - example["image"]
    largest = float(np.abs(perturbation).max())
    magnified = 0.5 + (0.5 * perturbation / largest if largest else perturbation)
    panels = [_panel(pixels) for pixels in (example["image"], example["adversarial"], magnified)]
    width, height = panels[0].size
    canvas = Image.new("RGB", (3 * width + 4 * _MARGIN, height + 2 * _MARGIN + _CAPTION), "white")
    predicted = "abstains" if example["predict"] == -1 else f"predicts {example['predict']}"
    factor = f"x{0.5 / largest:.3g}" if largest else "none"
    title = f"image {example['idx']}, class {example['label']}"
    lines = [title, predicted, f"{factor}, l2 {np.linalg.norm(perturbation):.3f}"]
    draw = ImageDraw.Draw(canvas)
    for number, (panel, line) in enumerate(zip(panels, lines)):
        left = _MARGIN + number * (width + _MARGIN)
        canvas.paste(panel, (left, _MARGIN))
        draw.text((left, height + 2 * _MARGIN), line, fill="black")
    return canvas


def _panel(pixels: np.ndarray) -> Image.Image:
    """Pixels [C, H, W] in [0, 1] as an image, enlarged to whole multiples where it is small."""
    from PIL import Image

    grey_levels = np.round(np.clip(pixels, 0, 1) * 255).astype(np.uint8)
    channels, height, width = grey_levels.shape
    image = Image.fromarray(
        grey_levels[0] if channels != 3 else grey_levels.transpose(1, 2, 0)
    ).convert("RGB")
    scale = max(1, -(-_SMALLEST_SIDE // min(height, width)))
    return image.resize((width * scale, height * scale), Image.Resampling.NEAREST)
