"""The user's images: PATH/train/CLASS/* and PATH/test/CLASS/*, or PATH/CLASS/* to test on; of one
size or prepared.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from smoothadv.base.errors import UserError
from smoothadv.base.files import cached, digest
from smoothadv.datasets import DATASETS, SPLITS
from smoothadv.datasets.image_files import ImageFiles, StoredImages, class_folders
from smoothadv.datasets.stored import stored_source


class FolderImages(ImageFiles):
    """Later processes remember what was computed of the files while these stay as they are."""

    def remembered(self, what: str, indices: Sequence[int], compute: Callable[[], str]) -> str:
        import PIL

        facts = [what, PIL.__version__]
        for path, label in (self.files[index] for index in indices):
            now = path.stat()  # some number changes whenever a file is written or replaced
            facts.append(f"{path} {label} {now.st_size} {now.st_ctime_ns} {now.st_ino}")
        name = f"imagefolder-{digest([repr(facts)])}"
        return cached(name, lambda: compute().encode()).decode()


def _splits(path: str) -> dict[str, StoredImages]:
    root = Path(path).expanduser().resolve()
    if not root.is_dir():
        raise UserError(f"imagefolder: there is no folder {root}")
    folders = {split: root / split for split in SPLITS}
    if not any(folder.is_dir() for folder in folders.values()):
        folders = {"test": root}
    found = {split: class_folders(folder) for split, folder in folders.items()}
    splits = [split for split in found if found[split]]
    if not splits:
        held = ", ".join(sorted(path.name for path in root.iterdir())[:3]) or "nothing"
        raise UserError(
            f"imagefolder: {root} holds {held}, neither train/CLASS/ and test/CLASS/ folders nor "
            "CLASS/ folders: put images into a folder per class, or give them to `certify images`, "
            "which needs no classes"
        )
    classes = found[splits[0]]
    if odd := set(classes).symmetric_difference(found[splits[-1]]):
        raise UserError(
            f"imagefolder: the classes of {root}/train and {root}/test differ in "
            f"{', '.join(sorted(odd)[:5])}"
        )
    return {split: FolderImages(folders[split], classes) for split in splits}


DATASETS.register("imagefolder")(
    stored_source("imagefolder", _splits, {"train": "train/CLASS/", "test": "test/CLASS/"})
)
