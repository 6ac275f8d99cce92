"""Who imports whom, read from source text: what the import rules are checked on."""

import ast
import functools
import graphlib
from pathlib import Path


def modules(code: Path) -> dict[str, str]:
    """The source of every module below ``code``, by dotted name; the scripts directly in it by
    their bare name.
    """
    found = {}
    for path in sorted(code.rglob("*.py")):
        parts = path.relative_to(code).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


@functools.cache  # tests change one module at a time
def imported_names(source: str, module: str) -> set[str]:
    """The dotted names that a module's source imports, wherever it does so: in functions and for
    types alone, too.

    ``from a import b`` gives "a.b", whether b is a module or not; see ``graph``.
    """
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [] if not node.level else module.split(".")[: -node.level]
            names |= {
                ".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names
            }
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
            names |= {
                argument.value for argument in node.args if isinstance(argument, ast.Constant)
            }
    return names


def _called(node: ast.Call) -> str | None:
    """The last name of what is called: ``importlib.import_module`` is "import_module"."""
    return getattr(node.func, "attr", getattr(node.func, "id", None))


def graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """For each module, what it imports: modules among ``sources`` by their full name, others by
    their first part.
    """
    return {
        module: {_resolved(name, sources) for name in imported_names(source, module)} - {module}
        for module, source in sources.items()
    }


def _resolved(name: str, sources: dict[str, str]) -> str:
    prefix = name
    while prefix:
        if prefix in sources:
            return prefix
        prefix = prefix.rpartition(".")[0]
    return name.partition(".")[0]


def part(module: str) -> str:
    """The part of the house that a module belongs to: "attacks" for smoothadv.attacks.pgd; "" for
    the package itself.

    A script directly in code/ is "scripts".
    """
    first, *rest = module.split(".")
    if first != "smoothadv":
        return "scripts"
    return rest[0] if rest else ""


def forbidden_imports(edges: dict[str, set[str]], allowed: dict[str, set[str]]) -> list[str]:
    """Imports between parts that ``allowed`` does not list; a part may import itself and a missing
    one nothing else.
    """
    return [
        f"{module} imports {target}"
        for module, targets in edges.items()
        for target in sorted(targets)
        if target in edges and part(target) not in {part(module), *allowed.get(part(module), set())}
    ]


def reaches(edges: dict[str, set[str]], start: str) -> set[str]:
    """Everything that importing ``start`` imports, at any distance."""
    seen: set[str] = set()
    left = [start]
    while left:
        new = edges.get(left.pop(), set()) - seen
        seen |= new
        left += new
    return seen


def cycle(edges: dict[str, set[str]]) -> list[str]:
    """The modules of one import cycle, [] if there is none."""
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []
