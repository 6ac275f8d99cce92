"""Trains every model of a process with another seed than is asked for: the sum of that and
``SMOOTHADV_TEST_SEED``.

Python runs this file at the start of each process that has its folder in PYTHONPATH. Nothing is
loaded before it is needed. Recipes, logs and checkpoints name the seed that was asked for.
"""

import copy
import importlib.abc
import importlib.util
import os
import sys
from types import ModuleType

ADDED = int(os.environ.get("SMOOTHADV_TEST_SEED", 0))


def reseed_first_weights(module: ModuleType) -> None:
    """smoothadv.training.setup derives all generators from the seed of a request: those of new
    networks.
    """
    derive = module.derive_generator
    module.derive_generator = lambda device, seed: derive(device, seed + ADDED)


def reseed_run(module: ModuleType) -> None:
    """smoothadv.training.run hands the seed of a run on to whatever draws."""
    begin = module.TrainingRun.__init__

    def begin_reseeded(run: object, *arguments: object) -> None:
        begin(run, *arguments)
        run.spec = copy.copy(run.spec)  # that of the folder, which is recorded, keeps its seed
        object.__setattr__(run.spec, "seed", run.spec.seed + ADDED)

    module.TrainingRun.__init__ = begin_reseeded


class Reseeder(importlib.abc.MetaPathFinder):
    """Finds the two modules that read the seed of a training, and changes them once they are
    loaded.
    """

    changes = {
        "smoothadv.training.setup": reseed_first_weights,
        "smoothadv.training.run": reseed_run,
    }

    def find_spec(self, name: str, path: object, target: object = None) -> object:
        if name not in self.changes:
            return None
        change = self.changes.pop(name)
        specification = importlib.util.find_spec(name)
        load = specification.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            change(module)

        specification.loader.exec_module = load_and_change
        return specification


if ADDED:
    sys.meta_path.insert(0, Reseeder())
