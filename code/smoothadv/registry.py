"""Registries: they map the names that a command line uses to components."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from smoothadv.errors import UserError

Component = TypeVar("Component")


class UnknownNameError(UserError, KeyError):
    """A name that is not registered; the message lists the registered names."""

    __str__ = Exception.__str__  # KeyError would print the message's repr


class Registry(Generic[Component]):
    """A mapping from name to component that refuses duplicates.

    ``kind`` is the word that error messages use ("attack", "dataset", ...).
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._components: dict[str, Component] = {}

    def register(self, name: str) -> Callable[[Component], Component]:
        """Decorator that adds a component under ``name``; ValueError if the name is taken."""

        def add(component: Component) -> Component:
            if name in self._components:
                raise ValueError(f"{self.kind} '{name}' is already registered")
            self._components[name] = component
            return component

        return add

    def __getitem__(self, name: str) -> Component:
        """The component registered as ``name``; UnknownNameError if there is none."""
        try:
            return self._components[name]
        except (KeyError, TypeError):  # TypeError: a name read from a file may have any type
            raise UnknownNameError(self._unknown(str(name))) from None

    def require(self, name: str) -> str:
        """Return ``name`` if it is registered; UnknownNameError otherwise."""
        self[name]
        return name

    def __contains__(self, name: object) -> bool:
        return name in self._components

    def __iter__(self) -> Iterator[str]:
        return iter(self._components)

    def __len__(self) -> int:
        return len(self._components)

    def _unknown(self, name: str) -> str:
        close = difflib.get_close_matches(name, self._components, n=1)
        hint = f" (did you mean '{close[0]}'?)" if close else ""
        return f"unknown {self.kind} '{name}'{hint}; known: {', '.join(self._components)}"


def discover(package: str, path: list[str]) -> None:
    """Import every module of a package, so that each file's registrations take effect.

    A package calls ``discover(__name__, __path__)`` at the end of its ``__init__``: to add a component, add one file.
    """
    for module in pkgutil.iter_modules(path):
        importlib.import_module(f"{package}.{module.name}")
