"""Makes the trained classifiers beside this file: digits_resnet8 after three epochs of each recipe.

    python tests/data/make_classifiers.py

A test that needs a trained classifier takes one of these, since one that it trains itself differs
from machine to machine, and with it every vote. Another machine makes other weights here too: run
all tests after that.
"""

import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent / "code"), str(TESTS)]

from support.classifiers import store  # noqa: E402
from support.recipes import RECIPES, train_shortly  # noqa: E402

if __name__ == "__main__":
    for name in RECIPES:
        with tempfile.TemporaryDirectory() as folder:
            train_shortly(name, Path(folder))
            store(Path(folder, "checkpoint.pth.tar"), name)
