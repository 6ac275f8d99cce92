"""Write into scripts/verify_log.py what a certification log may hold, as the package knows it:

    python scripts/write_schema.py

That script imports nothing of the package. It has the names of settings and columns from here, and
the rules for rows, word for word; a test compares them.
"""

import inspect
import re
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "code"))

from smoothadv.records import rows  # noqa: E402
from smoothadv.records.logs import METHODS, NEEDED, OF_OTHERS, SETTINGS  # noqa: E402
from smoothadv.statistics import Smoothing  # noqa: E402

SCRIPT = ROOT / "scripts" / "verify_log.py"
BEGIN, END = "# Here begins what scripts/write_schema.py writes.\n", "# Here ends it.\n"
RULES = (rows.row_checks, rows.grid_checks, rows.stage_checks, rows.router_checks, rows.if_then)


def constant(name: str, words: Iterable[str]) -> str:
    """A text that has these words."""
    lines = textwrap.wrap(" ".join(words), 90)
    return f'{name} = """\n' + "\n".join(lines) + '\n"""'


def block() -> str:
    """What lies between BEGIN and END."""
    methods = []
    for name, kind in METHODS.items():
        sigmas = {"sigmas": (1.0, 1.0, 1.0)} if "sigmas" in kind.recorded_names() else {}
        procedure = kind(Smoothing(1.0, 1, 100, 0.01), **sigmas)
        # The columns with a number, and label_aware, depend on further settings.
        columns = [column for column in procedure.columns if not re.search("[0-9]", column)]
        own = " ".join(kind.recorded_names()), " ".join(columns)
        methods.append(f'    "{name}": (\n        "{own[0]}",\n        "{own[1]}",\n    ),')
    return "\n".join(
        [
            constant("SETTINGS", sorted({*SETTINGS}.difference(OF_OTHERS))),
            constant("NEEDED", NEEDED),
            "METHODS = {  # the settings and the columns of each procedure that not all have",
            *methods,
            "}\n\n",
            "\n\n".join(inspect.getsource(rule) for rule in RULES) + "\n",
        ]
    )


def written(text: str) -> str:
    """The script's text with this block."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}{block()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    SCRIPT.write_text(written(SCRIPT.read_text()))
