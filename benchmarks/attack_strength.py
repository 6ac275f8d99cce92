"""How far attacks lower the probability of the label under smoothing: a finer measure than accuracy
under attack.

    python benchmarks/attack_strength.py digits models/quickstart/smoothadv/checkpoint.pth.tar \\
        0.25 \
        logs/attacked/m64/epsilon_0.5.npz logs/attacked/m1/epsilon_0.5.npz

For each archive of adversarial examples this prints the label's probability, averaged over images:
from the base classifier's decisions on noisy copies, and from its softmax. The draws are the same
for all archives, and no attack has seen them. It also prints the difference from the first archive,
with the standard error of the paired difference over images.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from smoothadv.checkpoints import load_classifier
from smoothadv.noise import GaussianNoise
from smoothadv.records.readers import read_examples
from smoothadv.voting.classifier import optimized_for_inference

_SEED = 20_190_604
_BATCH = 500


@torch.inference_mode()
def label_probabilities(
    classifier: torch.nn.Module, images: np.ndarray, labels: np.ndarray, draws: torch.Tensor
):
    """For each of the images [N, C, H, W] the share of decisions for its label, and its label's
    softmax: [2, N].
    """
    rows = []
    for image, label in tqdm(
        list(zip(torch.tensor(images), labels.tolist())), "images", disable=None, delay=2
    ):
        logits = torch.cat([classifier(image + part) for part in draws.split(_BATCH)])
        rows.append(
            [
                float((logits.argmax(1) == label).double().mean()),
                float(logits.softmax(1)[:, label].mean()),
            ]
        )
    return np.array(rows).T


def main() -> None:
    """Parse, measure, print a markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dataset")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("sigma", type=float)
    parser.add_argument("archives", type=Path, nargs="+")
    parser.add_argument("--draws", type=int, default=3000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    archives = {path: read_examples(path) for path in options.archives}
    first = next(iter(archives.values()))
    shape = torch.tensor(first["image"][0])
    classifier = optimized_for_inference(
        load_classifier(options.checkpoint, options.dataset), torch.device("cpu"), shape
    )
    draws = GaussianNoise(options.sigma, _SEED).stream(0, "cpu").draw(options.draws, shape)
    print(
        "| attack | images | decisions for the label (%) | over the first | softmax of the label "
        "(%) | over the first |"
    )
    print("|---|---:|---:|---:|---:|---:|")
    reference = None
    for path, arrays in archives.items():
        if not np.array_equal(arrays["idx"], first["idx"]):
            raise SystemExit(f"error: {path} has other images than {options.archives[0]}")
        found = label_probabilities(classifier, arrays["adversarial"], arrays["label"], draws)
        reference = found if reference is None else reference
        cells = [f"{path.parent.name}", str(len(arrays["idx"]))]
        for probabilities, base in zip(found, reference):
            difference = 100 * (probabilities - base)
            error = difference.std(ddof=1) / np.sqrt(len(difference))
            cells += [
                f"{100 * probabilities.mean():.2f}",
                f"{difference.mean():+.2f} ± {error:.2f}",
            ]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
