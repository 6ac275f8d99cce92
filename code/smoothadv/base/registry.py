"""Registries: they map the names that a command line uses to components."""

import difflib
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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
