"""The plug-in, the commands and the grid of docs/plugins.md."""

import re
import shlex

from support.commands import CODE

PAGE = (CODE.parent / "docs" / "plugins.md").read_text()


def block(language: str, start: str = "") -> str:
    """The first block of code in a language that begins with ``start``."""
    return re.search(
        rf"^```{language}\n({re.escape(start)}.*?)^```$", PAGE, re.DOTALL | re.MULTILINE
    )[1]


SHAPES = block("python")
GRID = block("toml", "about")
COMMANDS = [shlex.split(line) for line in block("", "smoothadv").replace("\\\n", " ").splitlines()]


def words(command: str) -> list[str]:
    """What follows ``smoothadv COMMAND`` in the page's first line with that command."""
    return next(line[2:] for line in COMMANDS if line[:2] == ["smoothadv", command])
