"""The short training runs of which test_train.py looks at the artefacts, and tests/data keeps the
classifiers.
"""

from pathlib import Path

from support.commands import succeed

EPOCHS = 3
RECIPES = {
    "gaussian": ("train", "--noise 0.25"),
    "PGD": (
        "train_pgd",
        "--noise 0.25 --attack PGD --epsilon 0.5 --num-steps 1 --num-noise-vec 2 --warmup 2",
    ),
    "DDN": (
        "train_pgd",
        "--noise 0.25 --attack DDN --epsilon 64/255 --num-steps 2 --num-noise-vec 1 --warmup 0",
    ),
}
RECIPES = {name: (command, options.split()) for name, (command, options) in RECIPES.items()}


def train_shortly(name: str, folder: Path, *further: object) -> None:
    """Train a classifier of digits on the CPU by the recipe ``name`` and further options."""
    command, options = RECIPES[name]
    usual = ["--epochs", EPOCHS, "--device", "cpu", *options]
    succeed(command, "digits", "digits_resnet8", folder, *usual, *further)
