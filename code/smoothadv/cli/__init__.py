"""Commands, one per entry point; ``smoothadv NAME ...`` and ``python code/NAME.py ...`` are the
same code.
"""

import os
import sys
from pathlib import Path

from smoothadv.base import registry
from smoothadv.base.errors import escape
from smoothadv.base.registry import Addition, did_you_mean
from smoothadv.version import __version__

_CORE = {
    "train": "train a classifier under Gaussian noise (the baseline)",
    "train_pgd": "train a classifier with SmoothAdv",
    "train_denoiser": "train a denoiser to put before a classifier: denoised smoothing",
    "certify": "certify a smoothed classifier on test images: a log of radii",
    "predict": "predict with a smoothed classifier, on clean or attacked images",
    "attack": "attack a smoothed classifier on test images, or try to falsify its certificates",
    "analyze": "turn logs into summaries, tables and plots",
    "list": "list the datasets, architectures, objectives, attacks and procedures by name",
}
registry.load_annexes()
COMMANDS = {
    **{name: Addition(f"smoothadv.cli.{name}:main", about) for name, about in _CORE.items()},
    **registry.COMMANDS,
}


def usage() -> str:
    """The help text of the console command."""
    lines = [f"  {name:14s} {command.about}" for name, command in COMMANDS.items()]
    end = (
        "`smoothadv COMMAND --help` lists a command's options, `smoothadv --version` prints the "
        "version."
    )
    return "\n".join(["usage: smoothadv COMMAND ...\n\ncommands:", *lines, f"\n{end}"])


def main(arguments: list[str] | None = None, script: str = "") -> int:
    """The console command ``smoothadv NAME ...``; ``script`` is the path of a code/NAME.py, which
    says the name.
    """
    if arguments is None:
        arguments = sys.argv[1:]
        if script:
            arguments = [Path(script).stem, *arguments]
    if arguments[:1] in (["-h"], ["--help"]):
        print(usage())
        return 0
    if arguments[:1] == ["--version"]:
        print(f"smoothadv {__version__}")
        return 0
    if not arguments or arguments[0] not in COMMANDS:
        found = "no command given"
        if arguments:
            found = (
                f"unknown command '{escape(arguments[0])}'{did_you_mean(arguments[0], COMMANDS)}"
            )
        print(f"error: {found}; known: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
            # Threads of PyTorch that wait for others sleep soon, as libgomp has them do where it
            # has more threads than CPUs: they would keep CPUs from other programs.
            os.environ["GOMP_SPINCOUNT"] = "1000"
        # Imported only now: `smoothadv --help` must not wait for torch.
        return COMMANDS[arguments[0]](arguments[1:])
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("smoothadv"):
            raise
        print(
            f"error: the Python in {sys.executable} has no package {error.name}: in a clone, `bash "
            "scripts/quickstart.sh` installs all of them, and `source .venv/bin/activate` makes "
            "them available in a shell",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:  # while the libraries load, which takes seconds
        print("\ninterrupted", file=sys.stderr)
        return 130
