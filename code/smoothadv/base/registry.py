"""Registries: they map the names that a command line uses to components.

Annexes are folders of the package that the other parts do without, like that of ``sweep``. As a
plug-in does, the file ``plugin.py`` of such a folder registers what the annex adds, here. It
imports nothing but this module, and says where the rest is, which is imported when it is needed.
No other part of the package names an annex: without its folder, only what it adds is missing.
"""

import difflib
import functools
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from smoothadv.base.errors import UserError

Component = TypeVar("Component")


class UnknownNameError(UserError, KeyError):
    """A name that is not registered; the message lists the registered names."""


def did_you_mean(name: str, known: Iterable[str], shown: str = "'{}'") -> str:
    """A hint like " (did you mean 'PGD'?)" if ``name`` resembles a known one with the same first
    letter; else "".
    """
    names = {one.lower(): one for one in known if one[:1].lower() == name[:1].lower()}
    close = difflib.get_close_matches(name.lower(), names, n=1)
    return f" (did you mean {shown.format(names[close[0]])}?)" if close else ""


class Registry(dict[str, Component]):
    """From names to components; refuses duplicates.

    ``kind`` is the word that error messages use ("attack", "dataset", ...).
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def register(self, name: str) -> Callable[[Component], Component]:
        """Decorator that adds a component under ``name``; ValueError if the name is taken."""
        caller = sys._getframe(1)
        module, line = caller.f_globals.get("__name__", ""), caller.f_lineno

        def add(component: Component) -> Component:
            if name in self:
                raise ValueError(f"{self.kind} '{name}' is already registered")
            self[name] = component
            REGISTRATIONS.append(Registration(self, name, component, module, line))
            return component

        return add

    def __missing__(self, name: str) -> NoReturn:
        raise UnknownNameError(
            f"unknown {self.kind} '{name}'{did_you_mean(str(name), self)}; known: "
            f"{', '.join(self)}; --plugin FILE adds your own"
        )

    def require(self, name: str) -> str:
        """Return ``name`` if it is registered; UnknownNameError otherwise."""
        self[name]
        return name


@dataclass(frozen=True)
class Registration:
    """A ``component`` that a ``module``, in a ``line``, registered as ``name`` in ``registry``."""

    registry: Registry[Any]
    name: str
    component: Any
    module: str
    line: int


REGISTRATIONS: list[Registration] = []
"""Whatever was registered, in any registry, in this order; also what was removed since."""


def discover(package: str, path: list[str]) -> None:
    """Import every module of a package, so that each file's registrations take effect.

    A package calls ``discover(__name__, __path__)`` at the end of its ``__init__``: to add a
    component, add one file.
    """
    for module in pkgutil.iter_modules(path):
        importlib.import_module(f"{package}.{module.name}")


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


@functools.cache
def load_annexes() -> None:
    """Have all annexes register what they add."""
    for path in sorted(Path(__file__).parents[1].glob("*/plugin.py")):
        importlib.import_module(f"smoothadv.{path.parent.name}.plugin")


def diffusion_model(name: str | None) -> Addition | None:
    """What loads the diffusion model that a denoiser's name is, like openai:FILE; None if it is
    none.
    """
    load_annexes()
    return DIFFUSION.get(str(name).partition(":")[0])
