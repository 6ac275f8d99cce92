"""Which words the shell is offered after a part of a command line."""

import os
import sys

import pytest

from smoothadv.cli import COMMANDS
from smoothadv.statistics import PROCEDURES
from support.commands import CODE, run_process


def offered(folder, line: str) -> list[str]:
    """As argcomplete's function for bash asks when a person types ``line`` and the tabulator
    key.
    """
    asks = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_SUPPRESS_SPACE": "1"}
    asks |= {
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE_STDOUT_FILENAME": str(folder / "answer"),
    }
    path = os.pathsep.join(filter(None, [str(CODE), os.environ.get("PYTHONPATH")]))
    done = run_process([sys.executable, "-m", "smoothadv"], folder, PYTHONPATH=path, **asks)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return sorted((folder / "answer").read_text().split())


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("smoothadv ", sorted(COMMANDS)),
        ("smoothadv qu", ["quantize"]),
        ("smoothadv certify --me", ["--method"]),
        ("smoothadv certify digits x.pth.tar 0.25 log.tsv --method ", sorted(PROCEDURES)),
        ("smoothadv certify merge --o", ["--overwrite"]),
        ("smoothadv analyze plot_", ["plot_empirical", "plot_envelope", "plot_training"]),
        ("smoothadv sweep run digits-smoke --engine s", ["slurm"]),
        ("smoothadv sweep plan gr", ["grid.toml"]),
    ],
)
def test_words_that_can_come_next_are_offered(tmp_path, line, expected):
    (tmp_path / "grid.toml").touch()
    assert offered(tmp_path, line) == expected
