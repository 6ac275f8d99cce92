"""What networks of integers cost in certified accuracy, and the tables in docs/results/integer.md.

    python benchmarks/integer_accuracy.py digits 0.25 \\
        models/quickstart/gaussian/checkpoint.pth.tar \\
        models/quickstart/smoothadv/checkpoint.pth.tar --tune
    python benchmarks/integer_accuracy.py imagefolder:FOLDER 0.25 CHECKPOINT --N 2000 \\
        --skip 50 --name cifar10

Each float network is quantized with weights of 7 and of 8 bits, and the first one is perhaps tuned
with --finetune-quantized. All are certified with --sound on the same images, with draws of their
own. Brackets are paired differences to the float network. The script runs the commands that a user
would type.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import numpy as np
from comparing import ROOT, call, cell, certified_radii, resampled, write_between

ATTACK = ["--attack", "PGD", "--epsilon", "0.5", "--num-steps", "4", "--num-noise-vec", "2"]


def checkpoints(options: argparse.Namespace, model: Path) -> dict[str, tuple[Path, str]]:
    """The networks made of a float network, by the name of their row, with the equal votes."""
    found, name = {"float": (model, "")}, f"{options.name}_{model.parent.name}"
    for bits in ("7", "8"):
        made = options.folder / f"{name}_{bits}.pth.tar"
        words = [options.dataset, str(model), str(options.sigma), str(made), "--overwrite"]
        said = re.search(r"([\d.]+)% of votes", call("quantize", *words, "--weight-bits", bits))
        assert said is not None
        found[f"{bits} bits"] = (made, f"{said[1]} %")
    if options.tune:
        tuned, has_attack = options.folder / f"{name}_tuned", model.parent.name == "smoothadv"
        command, more = ("train_pgd", ATTACK) if has_attack else ("train", [])
        words = [options.dataset, options.arch, str(tuned), "--noise", str(options.sigma), *more]
        words += ["--pretrained-model", str(found["7 bits"][0]), "--finetune-quantized"]
        call(command, *words, "--epochs", "2", "--lr", "0.01", "--overwrite")
        found["tuned"] = (tuned / "checkpoint.pth.tar", "")
    return found


def radii_of(options: argparse.Namespace, row: str, model: Path) -> np.ndarray:
    """The radius of each image, in order; -1 where the class is wrong or there is none."""
    log = options.folder / f"{options.name}_{row}.tsv"
    words = [options.dataset, str(model), str(options.sigma), str(log), "--sound", "--overwrite"]
    call("certify", *words, "--N", str(options.N), "--skip", str(options.skip))
    return certified_radii(log)


def table(options: argparse.Namespace) -> str:
    """The rows of all models."""
    heads = [f"{radius:g}" for radius in options.radii]
    lines = [
        f"| certified accuracy (%) at | {' | '.join(heads)} | average certified radius | equal "
        "votes |",
        "|---" * (len(heads) + 3) + "|",
    ]
    for model in options.models:
        base: list[np.ndarray] = []
        for kind, (checkpoint, votes) in checkpoints(options, model).items():
            row = f"{model.parent.name}_{kind.split()[0]}"
            radii = radii_of(options, row, checkpoint)
            draws = resampled(len(radii))
            values = [100.0 * (radii >= radius) for radius in options.radii] + [radii.clip(0)]
            base, cells = base or values, []
            for value, before, digits in zip(values, base, [1] * len(heads) + [3]):
                change = f" ({cell(value - before, draws, digits, '+')})"
                cells.append(f"{value.mean():.{digits}f}{change if kind != 'float' else ''}")
            lines.append(f"| {model.parent.name}, {kind} | {' | '.join(cells)} | {votes} |")
            print(lines[-1], flush=True)
    return "\n".join(lines)


def main() -> None:
    """Quantize, certify, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dataset")
    parser.add_argument("sigma", type=float)
    parser.add_argument("models", nargs="+", type=Path, help="checkpoints of float networks")
    parser.add_argument("--N", type=int, default=10_000)
    parser.add_argument("--skip", type=int, default=1)
    parser.add_argument("--radii", nargs="+", type=float, default=[0.0, 0.25, 0.5, 0.75])
    parser.add_argument("--tune", action="store_true", help="train two epochs with rounding, too")
    parser.add_argument("--arch", default="digits_resnet8", help="of the models, for --tune")
    parser.add_argument("--name", default="digits", help="of the table on the page")
    parser.add_argument("--folder", type=Path, default=Path("logs/integer_accuracy"))
    page = ROOT / "docs" / "results" / "integer.md"
    parser.add_argument("--page", type=Path, default=page)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    write_between(options.page, table(options), options.name)


if __name__ == "__main__":
    main()
