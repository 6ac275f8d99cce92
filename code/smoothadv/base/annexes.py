"""Annexes: folders of the package that the other parts do without, like that of ``sweep``.

As a plug-in does, the file ``plugin.py`` of such a folder registers what the annex adds, here. It
imports nothing but this module, and says where the rest is, which is imported when it is needed.
No other part of the package names an annex: without its folder, only what it adds is missing.
"""

import importlib
import pkgutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smoothadv.base.registry import Registry


@dataclass(frozen=True)
class Addition:
    """A function or a class that is imported when it is needed; ``place`` is "MODULE:NAME"."""

    place: str
    about: str = ""
    """What it does, for lists of commands."""

    def load(self) -> Any:
        """The function or the class itself."""
        return pkgutil.resolve_name(self.place)

    def __call__(self, *values: Any, **keywords: Any) -> Any:
        """What the function returns for these arguments."""
        return self.load()(*values, **keywords)


COMMANDS: Registry[Addition] = Registry("command")
"""Functions from the words behind a command's name to its exit code."""
ANALYSES: Registry[Addition] = Registry("analysis")
"""Specifications that ``analyze NAME`` makes of its options; their method ``write`` does what they
ask for, and yields texts for people.
"""
FUNCTIONS: Registry[Addition] = Registry("function")
"""Functions of ``smoothadv`` itself."""
LISTS: Registry[Addition] = Registry("list")
"""Functions that return names, which the command ``list`` prints below this one."""
INTEGERS: Registry[Addition] = Registry("function of networks of integers")
"""What ``architectures.integers`` says of them."""
DIFFUSION: Registry[Addition] = Registry("kind of diffusion model")
"""By the word before the colon in the name of a denoiser: functions from that name, the shape of
images, sigma and a timestep, to the denoiser and what a log records of it.
"""


def load() -> None:
    """Have all annexes register what they add."""
    for path in sorted(Path(__file__).parents[1].glob("*/plugin.py")):
        importlib.import_module(f"smoothadv.{path.parent.name}.plugin")


def diffusion_model(name: str | None) -> Addition | None:
    """What loads the diffusion model that a denoiser's name is, like openai:FILE; None if it is
    none.
    """
    load()
    return DIFFUSION.get(str(name).partition(":")[0])
