"""Images under the classes of a network that knows others, or knows them in another order."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from smoothadv.base.errors import UserError, warn
from smoothadv.base.files import digest
from smoothadv.datasets import Batches, ImageDataset, Indices
from smoothadv.datasets.images import Item
from smoothadv.datasets.sources.imagenet import SYNSETS


class RelabelledImages:
    """``images`` under the classes ``class_names``; in all else as ``images``.

    What was class k is class ``labels[k]``. With ``indices``, int64 [N], only these images remain,
    and the k-th of them is of class ``labels[k]``.
    """

    def __init__(
        self,
        images: ImageDataset,
        class_names: Sequence[str],
        labels: Sequence[int] | torch.Tensor,
        indices: torch.Tensor | None = None,
    ) -> None:
        self._is_whole = indices is None
        self.images, self._labels = images, torch.as_tensor(labels)
        self.stored = getattr(images, "stored", None) if indices is None else None
        self._indices = torch.arange(len(images)) if indices is None else indices
        self.description = replace(images.description, class_names=tuple(class_names))

    @property
    def labels(self) -> torch.Tensor | None:
        if not self._is_whole:
            return self._labels
        labels = self.images.labels
        return None if labels is None else self._labels[torch.as_tensor(labels).cpu()]

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Item:
        image, label = self.images[int(self._indices[index])]
        return image, int(self._labels[label if self._is_whole else index])

    def training_batches(
        self, batches: Indices, device: torch.device, generator: torch.Generator
    ) -> Batches:
        chosen = [self._indices[batch] for batch in batches]
        return self._relabelled(batches, self.images.training_batches(chosen, device, generator))

    def evaluation_batches(self, batches: Indices, device: torch.device) -> Batches:
        chosen = [self._indices[batch] for batch in batches]
        return self._relabelled(batches, self.images.evaluation_batches(chosen, device))

    def _relabelled(self, batches: Indices, found: Batches) -> Batches:
        for batch, (images, labels) in zip(batches, found):
            own = labels if self._is_whole else batch.to(labels.device)
            yield images, self._labels.to(labels.device)[own]

    def fingerprint(self) -> str:
        """See ``ImageDataset``; it changes with the choice of images and with the labels, too."""
        if self._is_whole:
            return digest([f"{self.images.fingerprint()} {self._labels.tolist()}"])
        return digest(
            [self.images.fingerprint(), torch.stack([self._indices, self._labels]).numpy()]
        )


def matched_classes(
    folders: Sequence[str], names: Sequence[Sequence[str]], count: int, who: str
) -> list[int]:
    """Which of the ``count`` classes of the network ``who`` each class of a dataset is, with
    ``names`` of each.

    Names are equal but for case and for '_' in place of a space; a part of one like "tench, Tinca
    tinca" is a name, and so are the class's number and, of a network of 1,000 or 1,001 classes,
    ImageNet's synset. Of a network without ``names`` equally many classes are taken in their order,
    but ImageNet's in that of the sorted synsets.
    UserError where a class is none of the network, or one of several, or where two classes of the
    dataset differ in case alone. Warns where synsets are classes of a network with other names.
    """

    def plain(name: str) -> str:
        return " ".join(name.replace("_", " ").lower().split())

    known: dict[str, set[int]] = {}
    for number, class_names in enumerate(names):
        for name in {plain(part) for full in class_names for part in (full, *full.split(","))}:
            known.setdefault(name, set()).add(number)
    numbers = {str(number): {number} for number in range(count)}
    are_synsets = sorted(folders) == list(SYNSETS)  # imagenet32 has them in another order
    is_in_order = not names and len(folders) == count and not are_synsets
    if is_in_order and numbers.keys().isdisjoint(folders):
        return list(range(count))
    first = count - len(SYNSETS)
    if first in (0, 1):  # the networks of TensorFlow begin with a class of background
        from torchvision.models import ResNet18_Weights

        # In their order, unless most of the names that are ImageNet's have other places.
        words = ResNet18_Weights.DEFAULT.meta["categories"]
        places = [known.get(plain(word), set()) for word in words]
        moved = [number not in place for number, place in enumerate(places, first) if place]
        if names and 2 * len(moved) < len(SYNSETS) and {*SYNSETS} & {*folders} - known.keys():
            warn(
                f"{who} has other classes than ImageNet's, or other names for them, like "
                f"'{names[0][0]}': the synsets of the images are taken for its classes in order"
            )
        for number, (synset, place) in enumerate(zip(SYNSETS, places), first):
            known.setdefault(synset, place if 2 * sum(moved) > len(moved) else {number})
    plains = [*map(plain, folders)]
    matches = [known.get(name) or numbers.get(one, set()) for name, one in zip(plains, folders)]
    if wrong := [
        f"'{folder}'"
        for folder, name, classes in zip(folders, plains, matches)
        if len(classes) != 1 or plains.count(name) > 1
    ]:
        found = ", ".join(wrong[:5]) + (f", ... ({len(wrong)} in all)" * (len(wrong) > 5))
        like = f" by its name, like '{names[0][0]}'," if names else ""
        raise UserError(
            f"{who} has no class, or several classes, called {found}: name each class of the "
            f"images{like} or by its number in the network, 0 to {count - 1}"
        )
    return [number for classes in matches for number in classes]
