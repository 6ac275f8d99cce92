"""Plug-ins: a user's own files and modules that register datasets, architectures, attacks,
objectives and the like.

A command loads those that ``--plugin FILE_OR_MODULE`` names, and those that installed distributions
declare as entry points of the group ``smoothadv.plugins``. In Python, ``load`` does the same.
Records name the plug-ins that took part, each with a digest of its source code. No torch, unless a
plug-in imports it.
"""

import dataclasses
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from smoothadv.base.errors import UsageError, UserError, first_line, warn
from smoothadv.base.files import digest
from smoothadv.base.registry import REGISTRATIONS, Registration

GROUP = "smoothadv.plugins"
"""The entry-point group in which a distribution names its plug-in modules."""
_DATACLASSES = "attack", "objective", "certification procedure", "analysis"


@dataclass(frozen=True)
class Plugin:
    """A plug-in that is loaded.

    ``name`` is that of the file, like "mine.py", or of the module; ``source`` is the path of the
    file as given, or the module. ``sha256`` is that of the file; for a module in a package, of all
    Python files of the package. ``is_installed`` if an entry point names it. ``provides`` has what
    it registered.
    """

    name: str
    source: str
    sha256: str
    is_installed: bool
    provides: tuple[Registration, ...]

    @property
    def record(self) -> dict[str, Any]:
        """What a checkpoint says of it."""
        provides = [f"{one.registry.kind} '{one.name}'" for one in self.provides]
        return {"name": self.name, "sha256": self.sha256, "provides": provides}


_loaded: dict[str, Plugin] = {}  # by its name


def load(name: str | Path, is_installed: bool = False) -> Plugin:
    """Import a plug-in, a file or a module by its dotted name, and so register what it defines.

    A plug-in that is loaded already is not imported again. UsageError if there is no such file or
    module; UserError if it raises an exception, registers nothing, takes a name that is taken, or
    if another plug-in of its name is loaded, or another version of it.
    """
    source, registered = str(name), len(REGISTRATIONS)
    called, sha256, module, run = (_file if is_file_name(source) else _module)(source)
    failure = f"plug-in {source} cannot be loaded: "
    if known := _loaded.get(called):
        if known.sha256 != sha256:
            raise UserError(
                f"{failure}{known.source} is loaded, whose name is the same and whose code is not; "
                "start Python again, or rename the file"
            )
        return known
    if module in sys.modules:
        raise UserError(f"{failure}it was imported before, or another module '{module}' was")
    try:
        run()
        # It may be the first to import a part of this package, which registers its own.
        provides = tuple(
            one for one in REGISTRATIONS[registered:] if one.module.partition(".")[0] != "smoothadv"
        )
        if not provides:
            raise UserError("it registers nothing; docs/plugins.md shows what it must hold")
        for one in provides:
            is_plain = isinstance(one.component, type) and not dataclasses.is_dataclass(
                one.component
            )
            if is_plain and one.registry.kind in _DATACLASSES:
                name = f"{one.registry.kind} '{one.name}' (line {one.line})"
                raise UserError(f"{name} is no dataclass: write @dataclass(frozen=True) above it")
    except (Exception, SystemExit) as error:
        sys.modules.pop(module, None)
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        trace = traceback.extract_tb(error.__traceback__)
        lines = [f" (line {one.lineno})" for one in trace if Path(one.filename).name == called]
        where = "".join(lines[-1:])
        raise UserError(f"{failure}{kind}{first_line(error)}{where}") from error
    return _loaded.setdefault(called, Plugin(called, source, sha256, is_installed, provides))


def refuse_code(name: str) -> None:
    """UsageError where the name of a network is a file of Python, or a function in one."""
    if file := re.match(r"(.+?\.py)(:|$)", name):
        raise UsageError(
            f"{name}: code comes from plug-ins: register the function in {file[1]}, add --plugin "
            f"{file[1]} and write the name that it has there (docs/networks.md)"
        )


def load_installed() -> None:
    """Load the plug-ins of installed distributions; a warning for each that cannot be loaded."""
    for entry in metadata.entry_points(group=GROUP):
        try:
            load(entry.module, is_installed=True)
        except UserError as error:
            warn(f"{error} (an installed distribution declares this plug-in)")


def loaded() -> tuple[Plugin, ...]:
    """The plug-ins that are loaded, in the order of their loading."""
    return tuple(_loaded.values())


def used(names: Mapping[str, str | None], components: Iterable[Any] = ()) -> list[Plugin]:
    """The loaded plug-ins that register one of ``names``, by kind as in {"dataset": "digits"}, or
    of ``components``.

    A component stands for its class too, and for the components that its fields hold, as an
    objective holds an attack.
    """
    objects = [part for component in components for part in _parts(component)]

    def takes_part(one: Registration) -> bool:
        name = names.get(one.registry.kind) or ""
        return one.name in (name, name.partition(":")[0]) or any(
            part is one.component for part in objects
        )

    return [plugin for plugin in _loaded.values() if any(map(takes_part, plugin.provides))]


def digests(plugins: Iterable[Plugin]) -> dict[str, dict[str, str]]:
    """{"plugins": {name: SHA-256}} for the records that must agree when work is continued; empty
    without plug-ins.
    """
    found = {plugin.name: plugin.sha256 for plugin in plugins}
    return {"plugins": found} if found else {}


def missing(kind: str, name: str, recorded: Iterable[Mapping[str, Any]] | None) -> str:
    """Which plug-in of a checkpoint's record provides ``name`` and is not loaded, as a sentence; ""
    if none.
    """
    for record in recorded or ():
        if f"{kind} '{name}'" in record["provides"]:
            place = f"PATH/{record['name']}" if is_file_name(record["name"]) else record["name"]
            plugin = f"the plug-in {record['name']} (sha256 {record['sha256'][:12]})"
            return f"{kind} '{name}' is from {plugin}, which is not loaded: add --plugin {place}"
    return ""


def changed(recorded: Mapping[str, str] | None) -> list[Plugin]:
    """The plug-ins that are loaded in another version than is ``recorded``, a SHA-256 by name."""
    before = recorded or {}
    return [one for one in loaded() if before.get(one.name, one.sha256) != one.sha256]


def blamed(error: BaseException, words: Collection[str]) -> str:
    """The plug-in, and the line in it, that raised an error or else registered what the ``words``
    of a command name, as "shapes.py, line 7"; "" if there is none.
    """
    provided = [(plugin, one) for plugin in loaded() for one in plugin.provides]
    modules = {one.module: plugin for plugin, one in provided}
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        if plugin := modules.get(frame.f_globals.get("__name__", "")):
            return f"{plugin.source}, line {line}"
    for plugin, one in provided:
        if one.name in words:
            return f"{plugin.source}, line {one.line} ({one.registry.kind} '{one.name}')"
    return ""


def is_file_name(name: str) -> bool:
    """Whether ``--plugin NAME`` means a file, not a module."""
    return name.endswith(".py") or os.sep in name


def _parts(component: Any) -> Iterator[Any]:
    """A component, its class, and the parts of what its fields hold."""
    yield component
    yield type(component)
    if dataclasses.is_dataclass(component) and not isinstance(component, type):
        for field in dataclasses.fields(component):
            yield from _parts(getattr(component, field.name))


_Found = tuple[str, str, str, Callable[[], object]]
"""A plug-in before its import: its name, the digest of its code, its module's name, and what
imports it.
"""


def _module(name: str) -> _Found:
    """A module by its dotted name; UsageError if there is none."""
    try:
        spec = importlib.util.find_spec(name)
    except Exception as error:  # also of the package around the module
        raise UsageError(f"--plugin: there is no module '{name}': {first_line(error)}") from error
    if spec is None or not spec.has_location:
        raise UsageError(f"--plugin: there is no module '{name}' on Python's path")
    file, is_alone = Path(str(spec.origin)), spec.submodule_search_locations is None
    files = [file] if is_alone and "." not in name else sorted(file.parent.rglob("*.py"))
    code: list[Any] = []
    for path in files:
        content = path.read_bytes()
        code += [f"{path.relative_to(file.parent).as_posix()} {len(content)}\n", content]
    return name, digest(code), name, lambda: importlib.import_module(name)


def _file(name: str) -> _Found:
    """A file, read once, so that its digest is that of the code that runs; UsageError if there is
    none.
    """
    path = Path(name)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"--plugin: {name} cannot be read: {error.strerror}") from error
    module = ModuleType(path.stem)
    module.__file__ = str(path.resolve())

    def run() -> None:
        sys.modules[module.__name__] = module  # where dataclasses and pickle look for it
        sys.path.append(str(path.resolve().parent))  # where spawned processes look for it
        exec(compile(content, path, "exec", dont_inherit=True), vars(module))

    return path.name, digest([content]), module.__name__, run
