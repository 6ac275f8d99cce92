"""Training images per second and core: whole batches cropped and mirrored, against one image at a
time with Pillow.

    python benchmarks/input_pipeline.py

Both return float32 batches of 256 random crops of 32x32 images padded by 4 pixels, mirrored with
probability 1/2. The plain way is that of the released code: torchvision's transforms on Pillow
images in a DataLoader, here without worker processes, so that all of its work is counted. Both
alternate in one process of one thread; printed is the median of the rounds' ratios.
"""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from timing import in_turns, parsed, parser_of, print_rates
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from smoothadv.datasets import CIFAR_MEAN, CIFAR_STD, CIFAR_TRAINING, DatasetDescription
from smoothadv.datasets.images import InMemoryImages

BATCH = 256


class PlainImages(Dataset):
    """A dataset like torchvision's CIFAR10 with the usual transforms."""

    def __init__(self, images: np.ndarray, labels: list[int]) -> None:
        self.images, self.labels = images, labels
        self.transform = transforms.Compose(
            [
                transforms.RandomCrop(32, padding=4),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
            ]
        )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


def main() -> None:
    """Parse, measure, print."""
    parser = parser_of(__doc__, rounds=7)
    parser.add_argument("--images", type=int, default=10_000)
    options = parsed(parser)
    pixels = np.random.default_rng(0).integers(0, 256, (options.images, 32, 32, 3), dtype=np.uint8)
    labels = torch.arange(options.images) % 10
    classes = tuple("0123456789")
    description = DatasetDescription(
        "random", classes, (3, 32, 32), CIFAR_MEAN, CIFAR_STD, CIFAR_TRAINING
    )
    batched = InMemoryImages(torch.from_numpy(pixels).permute(0, 3, 1, 2), labels, description)
    loader = DataLoader(PlainImages(pixels, labels.tolist()), BATCH, shuffle=True)

    def plain() -> None:
        assert sum(len(images) for images, _ in loader) == options.images

    def ours() -> None:
        batches = torch.randperm(options.images).split(BATCH)
        epoch = batched.training_batches(batches, torch.device("cpu"), torch.Generator())
        assert sum(len(images) for images, _ in epoch) == options.images

    times = in_turns({"plain": plain, "ours": ours}, options)
    print_rates(times, "plain", options.images, "images/s", width=6)


if __name__ == "__main__":
    main()
