"""Plug-ins: a user's own files and modules that register datasets, architectures, attacks, objectives and the like.

A command loads those that ``--plugin FILE_OR_MODULE`` names, and those that installed distributions declare as entry
points of the group ``smoothadv.plugins``. In Python, ``load`` does the same. Records name the plug-ins that took part,
each with a digest of its source code. No torch, unless a plug-in imports it.
"""

import dataclasses
import hashlib
import importlib
import importlib.util
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any

from smoothadv.errors import UsageError, UserError, warn
from smoothadv.files import read_regular
from smoothadv.registry import REGISTRATIONS, Registration, Registry

GROUP = "smoothadv.plugins"
"""The entry-point group in which a distribution names its plug-in modules."""
FUNCTIONS: Registry[Callable[..., Any]] = Registry("architecture")
"""The functions that plug-ins called FILE.py:FUNCTION are, by these names, in which FILE is without folders."""
_FUNCTION = re.compile(r"(.+\.py):([^\W\d]\w*)")
# File by module name, as JSON: processes that this one spawns import from there what they unpickle.
_FILES = "SMOOTHADV_PLUGIN_FILES"
# Python imports the modules of plug-in files as submodules of this one, and so loads this one first.
__path__: list[str] = []


@dataclass(frozen=True)
class Plugin:
    """A plug-in that is loaded.

    ``name`` is that of the file, like "mine.py", or of the module; ``source`` is the path of the file as given, or the
    module. ``sha256`` is that of the file; for a module in a package, of all Python files of the package.
    ``is_installed`` if an entry point names it. ``provides`` has what it registered, ``modules`` what it imported.
    """

    name: str
    source: str
    sha256: str
    is_installed: bool
    provides: tuple[Registration, ...]
    modules: frozenset[str]

    @property
    def record(self) -> dict[str, Any]:
        """What a checkpoint says of it."""
        provides = [f"{one.registry.kind} '{one.name}'" for one in self.provides]
        return {"name": self.name, "sha256": self.sha256, "provides": provides}


_loaded: dict[str, Plugin] = {}  # by module name
_entry_points: list[str] = []


def load(name: str | Path, is_installed: bool = False) -> Plugin:
    """Import a plug-in, a file or a module by its dotted name, and so register what it defines.

    FILE.py:FUNCTION is a plug-in, too, which registers this function as the architecture of this name.

    A plug-in that is loaded already is not imported again unless its code has changed. UsageError if there is no such
    file or module; UserError, and nothing stays registered, if it raises an exception, registers nothing or takes a
    name that is taken.
    """
    spec, source, display = _found(str(name))
    sha256 = _digest(spec, display)
    if known := _loaded.get(spec.name):
        if known.sha256 == sha256:
            return known
        unload(known)
    if twin := next((plugin for plugin in _loaded.values() if plugin.name == display), None):
        raise UserError(f"plug-ins {twin.source} and {source} have the same name, by which records know them")
    _loaded[spec.name] = Plugin(display, source, sha256, is_installed, *_imported(spec, display))
    _share_files()
    return _loaded[spec.name]


def load_installed() -> None:
    """Load the plug-ins of installed distributions, once per process; a warning for each that cannot be loaded."""
    for entry in metadata.entry_points(group=GROUP):
        if entry.module not in _entry_points:
            _entry_points.append(entry.module)
            try:
                load(entry.module, is_installed=True)
            except UserError as error:
                warn(f"{error} (an installed distribution declares this plug-in)")


def loaded() -> tuple[Plugin, ...]:
    """The plug-ins that are loaded, in the order of their loading."""
    return tuple(_loaded.values())


def unload(plugin: Plugin) -> None:
    """Forget a plug-in and what it registered."""
    module = next(module for module, other in _loaded.items() if other is plugin)
    _withdraw(plugin.provides, plugin.modules)
    del _loaded[module]
    _share_files()


def used(names: Mapping[str, str | None], components: Iterable[Any] = ()) -> list[Plugin]:
    """The loaded plug-ins that register one of ``names``, by kind as in {"dataset": "digits"}, or of ``components``.

    A component stands for its class too, and for the components that its fields hold, as an objective holds an attack.
    """
    objects = [part for component in components for part in _parts(component)]

    def takes_part(one: Registration) -> bool:
        name = names.get(one.registry.kind) or ""
        return one.name in (name, name.partition(":")[0]) or any(part is one.component for part in objects)

    return [plugin for plugin in _loaded.values() if any(map(takes_part, plugin.provides))]


def digests(plugins: Iterable[Plugin]) -> dict[str, dict[str, str]]:
    """{"plugins": {name: SHA-256}} for the records that must agree when work is continued; empty without plug-ins."""
    found = {plugin.name: plugin.sha256 for plugin in plugins}
    return {"plugins": found} if found else {}


def words() -> list[str]:
    """The options that load the same plug-ins again; installed ones need none."""
    return [word for plugin in _loaded.values() if not plugin.is_installed for word in ("--plugin", plugin.source)]


def missing(kind: str, name: str, recorded: Any) -> str:
    """Which plug-in of a checkpoint's record provides ``name`` and is not loaded, as a sentence; "" if none."""
    for record in _providers(kind, name, recorded):
        place = f"PATH/{record['name']}" if is_file_name(record["name"]) else record["name"]
        plugin = f"the plug-in {record['name']} (sha256 {record['sha256'][:12]})"
        return f"{kind} '{name}' is from {plugin}, which is not loaded: add --plugin {place}"
    return ""


def changed(recorded: Any) -> list[Plugin]:
    """The plug-ins that are loaded in another version than the settings of a log record."""
    before = recorded if isinstance(recorded, dict) else {}
    return [plugin for plugin in loaded() if before.get(plugin.name, plugin.sha256) != plugin.sha256]


def changed_provider(kind: str, name: str, recorded: Any) -> list[Plugin]:
    """The plug-ins that provide ``name`` in another version than a checkpoint records."""
    return changed({one["name"]: one["sha256"] for one in _providers(kind, name, recorded)})


def is_file_name(name: str) -> bool:
    """Whether ``--plugin NAME`` means a file, not a module."""
    return name.endswith(".py") or "/" in name or os.sep in name or os.path.isfile(name) or names_function(name)


def names_function(name: str) -> bool:
    """Whether ``name`` is FILE.py:FUNCTION."""
    return _FUNCTION.fullmatch(name) is not None


def _providers(kind: str, name: str, recorded: Any) -> Iterator[dict[str, Any]]:
    """The well-formed entries of a checkpoint's record of plug-ins, which may hold anything, that provide ``name``."""
    for entry in recorded if isinstance(recorded, list) else []:
        match entry:
            case {"name": str(), "sha256": str(), "provides": [*provides]} if f"{kind} '{name}'" in provides:
                yield entry


def _parts(component: Any) -> Iterator[Any]:
    """A component, its class, and the parts of what its fields hold."""
    yield component
    yield type(component)
    if dataclasses.is_dataclass(component) and not isinstance(component, type):
        for field in dataclasses.fields(component):
            yield from _parts(getattr(component, field.name))


class _FileLoader(SourceFileLoader):
    """Reads a plug-in's file once, so that its digest is that of the code that runs; leaves no compiled file."""

    def __init__(self, module: str, path: str) -> None:
        super().__init__(module, path)
        self.content = read_regular(Path(path))

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self.content, self.path)


class _Finder(MetaPathFinder):
    """Finds the modules of plug-in files in processes that were spawned, where nothing has loaded them."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        file = json.loads(os.environ.get(_FILES, "{}")).get(fullname)
        return None if file is None else _file_spec(fullname, file)


sys.meta_path.append(_Finder())


def _share_files() -> None:
    files = {module: sys.modules[module].__file__ for module in _loaded if module.startswith(f"{__name__}.")}
    os.environ[_FILES] = json.dumps(files)


def _file_spec(module: str, path: str) -> ModuleSpec:
    spec = importlib.util.spec_from_file_location(module, path, loader=_FileLoader(module, path))
    assert spec is not None, "it has a loader"
    return spec


def _found(name: str) -> tuple[ModuleSpec, str, str]:
    """Where the module of a plug-in is, what ``--plugin`` names it by, and its name; UsageError if there is none."""
    if not is_file_name(name):
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            spec = None
        except Exception as error:  # of the package around the module
            raise _failure(name, error) from error
        if spec is None:
            hint = f"; for the file write {name}.py" if os.path.isfile(f"{name}.py") else ""
            raise UsageError(f"--plugin: there is no module '{name}' on Python's path{hint}")
        return spec, name, name
    named = _FUNCTION.fullmatch(name)
    path, function = Path(named[1] if named else name).resolve(), f":{named[2]}" if named else ""
    if os.path.isdir(path):  # unlike Path's, no OSError for a name that is too long
        raise UsageError(f"--plugin: {name} is a folder: name a file in it, or a module")
    stem = re.sub(r"\W", "_", path.stem)
    module = f"{__name__}.{stem}_{hashlib.sha256(os.fsencode(str(path) + function)).hexdigest()[:8]}"
    try:
        return _file_spec(module, str(path)), name, f"{path.name}{function}"
    except OSError as error:
        raise UsageError(f"{'' if named else '--plugin: '}{name} cannot be read: {error.strerror}") from error


def _digest(spec: ModuleSpec, name: str) -> str:
    """The SHA-256 of a plug-in's file; of a module in a package, of all Python files of the package."""
    if isinstance(spec.loader, _FileLoader):
        return hashlib.sha256(spec.loader.content).hexdigest()
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not folders:
        if not spec.has_location or spec.origin is None:
            raise UsageError(f"--plugin: {name} is a part of Python")
        if "." not in name:
            return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
        folders = [Path(spec.origin).parent]
    digest = hashlib.sha256()
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            content = file.read_bytes()
            digest.update(f"{file.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _imported(spec: ModuleSpec, name: str) -> tuple[tuple[Registration, ...], frozenset[str]]:
    """Import a plug-in; returns what it registered, and its modules."""
    before, package, registered = set(sys.modules), spec.name.partition(".")[0], len(REGISTRATIONS)
    try:
        if isinstance(spec.loader, _FileLoader):
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # where dataclasses and pickle look for it
            spec.loader.exec_module(module)
            if names_function(name):
                function = getattr(module, name.rpartition(":")[2], None)
                if not callable(function):
                    raise UserError(f"plug-in {name} cannot be loaded: the file defines no such function")
                FUNCTIONS.register(name)(function)
        else:
            importlib.import_module(spec.name)
        if not any(map(_is_foreign, REGISTRATIONS[registered:])):
            reason = ": it was imported before" if spec.name in before else ""
            raise UserError(f"plug-in {name} registers nothing{reason}; docs/plugins.md shows what it must hold")
    except BaseException as error:
        _withdraw(filter(_is_foreign, REGISTRATIONS[registered:]), _of_package(package, before))
        if isinstance(error, (Exception, SystemExit)):
            raise _failure(name, error) from error
        raise
    return tuple(filter(_is_foreign, REGISTRATIONS[registered:])), _of_package(package, before)


def _is_foreign(one: Registration) -> bool:
    """Whether a plug-in registered it, not a part of this package that the plug-in was the first to import."""
    package = __name__.partition(".")[0]
    return one.registry is FUNCTIONS or one.module.startswith(f"{__name__}.") or one.module.partition(".")[0] != package


def _of_package(package: str, before: set[str]) -> frozenset[str]:
    """The modules of a package that were imported since; of this package, those of plug-in files."""
    prefix = f"{__name__}." if package == __name__.partition(".")[0] else f"{package}."
    return frozenset(name for name in sys.modules.keys() - before if f"{name}.".startswith(prefix))


def _withdraw(registrations: Iterable[Registration], modules: Iterable[str]) -> None:
    """Undo the import of a plug-in, so that it can be imported again."""
    for one in registrations:
        one.registry.remove(one.name)
    for name in modules:
        del sys.modules[name]


def _failure(name: str, error: BaseException) -> UserError:
    """What went wrong while a plug-in was imported, in one line."""
    if isinstance(error, UserError) and str(error).startswith(f"plug-in {name} "):
        return error
    file, trace = name.partition(":")[0], traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in trace if Path(frame.filename).name == file]
    line = error.lineno if isinstance(error, SyntaxError) else frames[-1].lineno if frames else None
    text = next(iter(str(error.msg if isinstance(error, SyntaxError) else error).splitlines()), "")
    where = f", line {line}" if line is not None else ""
    return UserError(f"plug-in {name}{where}: {type(error).__name__}: {text}")
