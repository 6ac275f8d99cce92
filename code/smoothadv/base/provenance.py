"""What made a file: command, versions, plug-ins and commit, for its manifest; without passwords. No
torch.
"""

import contextlib
import functools
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from smoothadv.base import plugins
from smoothadv.version import __version__

_PACKAGE = Path(__file__).parents[1]
_SECRET_NAME = (
    "[a-z0-9_-]*(?:token|passw(?:or)?d|secret|credentials?"
    "|(?:api|access|private|auth)[_-]?key|signature)"
)
_SECRET = re.compile(
    rf"((?:^|[?&;\s-]){_SECRET_NAME}=)[^&]+"  # --token=..., and in addresses
    r"|(?<=://)[^/\s@]+(?=@)"  # user:password@
    r"|\b(?-i:hf_|gh[opsur]_|github_pat_|glpat-|sk-|xox[a-z]-|AKIA|eyJ)[\w.-]{16,}",
    re.IGNORECASE,
)
_SECRET_OPTION = re.compile(f"--?{_SECRET_NAME}", re.IGNORECASE)
_PACKAGES = ("torch", "torchvision", "numpy", "scipy", "statsmodels", "pandas")


def provenance(command: Sequence[str] | None = None) -> dict[str, Any]:
    """The command (None: that of this process), versions, plug-ins and commit that make a file, for
    its manifest.
    """
    packages = dict[str, str | None].fromkeys(_PACKAGES)
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": without_secrets(sys.argv if command is None else command),
        "smoothadv": __version__,
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "plugins": [
            {"name": one.name, "source": one.source, "sha256": one.sha256}
            for one in plugins.loaded()
        ],
    }


def without_secrets(command: Sequence[object]) -> list[str]:
    """The words of a command, with ``***`` for what looks like a password, a token or a key:
    records are shared.
    """
    words = [_SECRET.sub(r"\1***", str(word)) for word in command]
    return [
        "***" if _SECRET_OPTION.fullmatch(before) else word
        for before, word in zip(["", *words], words)
    ]


@functools.cache  # of the code that this process has loaded
def _git_commit() -> str | None:
    """The commit of the clone this package runs from; "-dirty" if files differ or are new; None
    outside one.
    """
    git, found = ["git", "--no-optional-locks", "-C", str(_PACKAGE)], list[str]()
    for words in ("ls-files __init__.py", "rev-parse HEAD", "status --porcelain -- ."):
        command = [*git, *words.split()]
        try:
            ran = subprocess.run(command, check=True, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            return None
        found.append(ran.stdout.strip())
    is_part, commit, changes = found
    # An installed package may lie in another project's repository, whose commit is not that of this
    # package.
    return f"{commit}{'-dirty' * bool(changes)}" if is_part else None
