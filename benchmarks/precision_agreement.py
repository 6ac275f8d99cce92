"""How many certificates in lower precision differ from those in float32, for the same model, images
and noise.

    python benchmarks/precision_agreement.py cifar10 models/cifar10/pgd/checkpoint.pth.tar 0.5 \\
        logs/precision --skip 20

Options after the folder go to certify.py; images that are already certified are not certified
again. For each precision the table gives the number of images with another class, the number with
the same class and another radius, the largest and the mean difference of radii, and the differences
of certified accuracy.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from smoothadv.records.readers import read_certification_log
from smoothadv.voting.classifier import PRECISIONS

CERTIFY = Path(__file__).parent.parent / "code" / "certify.py"
REFERENCE = "fp32"
RADII = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Agreement:
    """How the certificates of a precision differ from the reference's, image by image.

    ``other_class`` counts images with another prediction (or where only one of the two abstains),
    ``other_radius`` those with the same prediction and another radius. ``largest`` and ``mean`` are
    over the absolute differences of radii of images with the same prediction, ``accuracy`` has the
    differences of certified accuracy at RADII, in points.
    """

    images: int
    other_class: int
    other_radius: int
    largest: float
    mean: float
    accuracy: tuple[float, ...]


def agreement(reference: pd.DataFrame, other: pd.DataFrame) -> Agreement:
    """Compare two logs of the same images; ValueError if their images differ."""
    if not np.array_equal(reference.idx, other.idx):
        raise ValueError("the logs are of different images")
    same = (reference.predict == other.predict).to_numpy()
    differences = np.abs(reference.radius - other.radius).to_numpy()[same]
    accuracies = [
        [100 * float(((log.correct == 1) & (log.radius >= radius)).mean()) for radius in RADII]
        for log in (reference, other)
    ]
    return Agreement(
        len(same),
        int((~same).sum()),
        int((differences > 0).sum()),
        float(differences.max(initial=0.0)),
        float(differences.mean()) if len(differences) else 0.0,
        tuple(after - before for before, after in zip(*accuracies)),
    )


def certified(options: argparse.Namespace, precision: str, further: list[str]) -> pd.DataFrame:
    """The log of a precision, after certify has made or continued it."""
    log = options.folder / f"{precision}.tsv"
    words = [
        options.dataset,
        options.checkpoint,
        options.sigma,
        log,
        "--precision",
        precision,
        *further,
    ]
    done = subprocess.run([sys.executable, CERTIFY, *map(str, words)])
    if done.returncode:
        raise SystemExit(done.returncode)
    return read_certification_log(log)


def table(found: dict[str, Agreement]) -> str:
    """The agreements as Markdown."""
    radii = " | ".join(f"{radius:.2f}" for radius in RADII)
    lines = [f"| precision | images | other class | other radius | largest | mean | {radii} |"]
    lines.append("|---|" + "---:|" * (5 + len(RADII)))
    for precision, each in found.items():
        points = " | ".join(f"{difference:+.1f}" for difference in each.accuracy)
        counts = f"{each.images} | {each.other_class} | {each.other_radius}"
        lines.append(
            f"| {precision} | {counts} | {each.largest:.4f} | {each.mean:.5f} | {points} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Certify in each precision, compare, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dataset")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("sigma")
    parser.add_argument("folder", type=Path, help="for the logs and agreement.md")
    parser.add_argument(
        "--precisions",
        nargs="+",
        choices=list(PRECISIONS),
        default=[name for name in PRECISIONS if name != REFERENCE],
    )
    options, further = parser.parse_known_args()
    reference = certified(options, REFERENCE, further)
    others = [name for name in options.precisions if name != REFERENCE]
    text = table({name: agreement(reference, certified(options, name, further)) for name in others})
    (options.folder / "agreement.md").write_text(f"{text}\n")
    print(text)


if __name__ == "__main__":
    main()
