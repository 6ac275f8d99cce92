"""The stand-alone verifier of logs, as tests call it."""

import functools
import importlib.util
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from smoothadv.records.logs import manifest_path
from support.commands import rows

SCRIPT = Path(__file__).parents[2] / "scripts" / "verify_log.py"


Tampering = Callable[[list[dict[str, str]], dict[str, Any]], None]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """scripts/verify_log.py as a module. It remembers boundaries, and what it says of a row: two
    hundred logs share them.
    """
    spec = importlib.util.spec_from_file_location("verify_log", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    begun = functools.cache(lambda *given, boundaries=module.boundaries: ([], boundaries(*given)))

    def boundaries(t: int, looks: list[int], allowances: list[int]) -> Iterator[int]:
        found, further = begun(t, tuple(looks), tuple(allowances))
        for k in range(len(looks)):
            found.extend(itertools.islice(further, k == len(found)))
            yield found[k]

    module.boundaries = boundaries
    module.noise_distance = functools.cache(module.noise_distance)
    for name in ("Procedure", "CascadeProcedure", "RouterProcedure"):
        remember(module, name)
    return module


def remember(module: ModuleType, name: str) -> None:
    """Let a class of the script be made once of equal settings and runs, and judge equal rows
    once.
    """
    kind = getattr(module, name)
    judged = functools.cache(lambda procedure, row, fault=kind.fault: fault(procedure, dict(row)))
    made = functools.cache(lambda *texts: kind(*map(json.loads, texts)))
    kind.fault = lambda procedure, row: judged(procedure, tuple(row.items()))
    setattr(
        module,
        name,
        lambda *content: made(*map(json.dumps, content)) if len(content) == 2 else kind(*content),
    )


def verdict(script: ModuleType, log: Path, capsys: pytest.CaptureFixture) -> tuple[bool, str]:
    """Whether it accepts a log, and what it says."""
    capsys.readouterr()
    try:
        return script.verify(log), capsys.readouterr().out
    except (KeyError, ValueError, TypeError) as error:
        return False, f"cannot be verified: {error}"


def tampered(log: Path, target: Path, tampering: Tampering) -> Path:
    """A copy of a log, with its manifest, of which the tampering has changed rows or manifest."""
    table, manifest = rows(log), json.loads(manifest_path(log).read_text())
    tampering(table, manifest)
    target.write_text(
        "\n".join("\t".join(row) for row in [table[0], *(row.values() for row in table)]) + "\n"
    )
    manifest_path(target).write_text(json.dumps(manifest))
    return target
