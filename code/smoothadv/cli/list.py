"""list: what the package and its plug-ins make known, by the names that commands take."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from smoothadv.analysis import ANALYSES
from smoothadv.architectures import ARCHITECTURES
from smoothadv.architectures.denoisers import DENOISERS
from smoothadv.architectures.libraries import LIBRARIES
from smoothadv.attacks import ATTACKS
from smoothadv.attacks.estimators import ESTIMATORS
from smoothadv.base import plugins, registry
from smoothadv.cli.options.recipes import recipe_names
from smoothadv.cli.runner import Options, Parser, run
from smoothadv.datasets import DATASETS
from smoothadv.objectives import OBJECTIVES
from smoothadv.statistics import PROCEDURES
from smoothadv.training.trackers import TRACKERS

_EXAMPLES = """examples:
  python code/list.py
With --plugin FILE, the names that FILE adds are among them.
"""


_make_parser = partial(
    Parser,
    prog="list",
    epilog=_EXAMPLES,
    description="List all components by kind and name: datasets, architectures, objectives, ...",
)


def _list(parser: Parser, options: Options, command: Sequence[str]) -> None:
    names: dict[str, Iterable[Any]] = {
        "datasets": DATASETS,
        "architectures": [*ARCHITECTURES, *(f"{library}:NAME" for library in LIBRARIES)],
        "denoisers": DENOISERS,
        "objectives": OBJECTIVES,
        "recipes": recipe_names(),
        "attacks": ATTACKS,
        "gradients": ESTIMATORS,
        "procedures": PROCEDURES,
        "trackers": TRACKERS,
        "analyses": ANALYSES,
        **{kind: names() for kind, names in registry.LISTS.items()},
        "plug-ins": [plugin.name for plugin in plugins.loaded()] or ["none"],
    }
    for kind, known in names.items():
        print(f"{kind:14s} {', '.join(known)}")


main = partial(run, "list", _make_parser, _list)
