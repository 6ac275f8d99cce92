"""How every command runs: one clear line for each foreseeable error, and the exit code that goes
with it.
"""

import argparse
import contextlib
import io
import itertools
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from smoothadv.base import plugins
from smoothadv.base.errors import (
    DoubtfulWarning,
    Terminated,
    UsageError,
    UserError,
    escape,
    visible,
)
from smoothadv.base.registry import PLUGIN_HINT, did_you_mean
from smoothadv.records.logs import ARGUMENTS, CHECKPOINT, FALSIFICATION_LOG, TRAINING_LOG, files_of
from smoothadv.version import __version__

COMPLETING = "_ARGCOMPLETE"
"""The environment variable that is set where a shell wants to know which words can follow."""
_READ = """checkpoint classifier denoiser against dataset logs shards grids recipe plugin
pretrained_model teacher use_unlabelled""".split()
"""The options that name files to read, also as KIND:FILE, FILE:FUNCTION, GROUP=FILE or FILE+FILE.
"""
_WRITTEN: dict[str, Callable[[Path], Iterable[Path]]] = {
    "output": lambda path: [path],
    "outfile": files_of,
    "outdir": lambda folder: [
        *(folder / name for name in (CHECKPOINT, TRAINING_LOG, ARGUMENTS, FALSIFICATION_LOG)),
        *folder.glob("epsilon_*"),
    ],
}
SUCCESS, FAILURE, USAGE, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps texts as written, and gives most options one line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=100)


class Parser(argparse.ArgumentParser):
    """An argument parser that keeps help text as written, refuses abbreviations and answers errors
    in one line.

    Made with the command as ``prog``: what follows "smoothadv", like "certify" or "analyze table".
    """

    def __init__(self, *, prog: str, epilog: str = "", **options: Any) -> None:
        invocation = _invocation(prog)
        if invocation.startswith("smoothadv "):
            epilog = re.sub(r"python code/(\w+)\.py", r"smoothadv \1", epilog)
            epilog = re.sub(r"scripts/grids/([\w-]+)\.toml", r"\1", epilog)
        super().__init__(
            prog=invocation,
            epilog=epilog,
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
            **options,
        )
        self.add_argument(
            "--version",
            action="version",
            version=f"smoothadv {__version__}",
            help="print the version",
        )
        self.add_argument(
            "--debug",
            action="store_true",
            default=argparse.SUPPRESS,
            help="show the traceback of an error",
        )
        self.add_argument(
            "--plugin",
            action="append",
            default=argparse.SUPPRESS,
            metavar="FILE_OR_MODULE",
            help="make the components in it known, like your own dataset; can be given again "
            "(docs/plugins.md)",
        )

        self._source = ""

    def format_usage(self) -> str:
        """One line: the options are listed below it."""
        words = [
            str(action.metavar or action.dest.upper()) + " ..." * (action.nargs is not None)
            for action in self._actions
            if not action.option_strings
        ]
        return f"usage: {' '.join([self.prog, *words, '[options]'])}\n"

    def format_help(self) -> str:
        self.usage = self.format_usage().removeprefix("usage: ").rstrip().replace("%", "%%")
        return super().format_help()

    @contextmanager
    def reading(self, source: str) -> Iterator[None]:
        """Within this context, a usage error names ``source``, which is not the command line, as
        its place.
        """
        around, self._source = self._source, f"{self._source}{source}: "
        try:
            yield
        except UsageError as error:
            self.error(str(error))
        finally:
            self._source = around

    def parse_known_args(  # type: ignore[override]  # typeshed has overloads for namespaces
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        words = sys.argv[1:] if args is None else list(args)
        self._refuse_unknown_options(words)
        return super().parse_known_args(words, namespace)

    def _refuse_unknown_options(self, words: Sequence[str]) -> None:
        """A usage error for an option that this parser does not know.

        argparse would first miss the arguments that a mistyped option takes away.
        """
        for word in words:
            flag = word.partition("=")[0]
            is_subcommand = self._subparsers and not word.startswith("-")
            if word == "--" or is_subcommand:  # the rest is for others
                return
            # To argparse, a word with a space is a value, whatever it starts with.
            is_flag = flag.startswith("--") and " " not in flag
            if flag == "alpha" or (is_flag and flag not in self._option_string_actions):
                self._refuse_released_options(words)
            if is_flag and flag not in self._option_string_actions:
                # Compared without the dashes, which would make all flags similar.
                known = [
                    option[2:] for option in self._option_string_actions if option.startswith("--")
                ]
                hint = (
                    did_you_mean(flag[2:], known, shown="--{}")
                    or "; --plugin FILE adds the options of a plug-in"
                )
                self.error(f"unknown option {flag}{hint}")

    def _refuse_released_options(self, words: Sequence[str]) -> None:
        """A usage error that translates options of the released code, if there are any."""
        from smoothadv.cli.released_options import translated

        if command := translated(self.prog, list(words)):
            self.error(
                f"options of the released code: here, the command is {command} , as "
                "docs/released.md explains"
            )

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)  # type: ignore[misc]  # not in typeshed
        except UserError as error:  # argparse expects other exceptions of a type
            raise argparse.ArgumentError(action, str(error)) from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            hint = did_you_mean(str(value), known)
            end = PLUGIN_HINT if action.dest == "analysis" else ""
            raise argparse.ArgumentError(
                action, f"unknown choice '{value}'{hint}; known: {', '.join(known)}{end}"
            )

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"error: {escape(f'{self._source}{message} (see {self.prog} --help)')}\n")


def _invocation(command: str) -> str:
    """How the user starts ``command``: with a script of the clone, if this process runs one, else
    as ``smoothadv``.
    """
    name, space, subcommand = command.partition(" ")
    is_script = Path(sys.argv[0]).name == f"{name}.py"
    return f"python code/{name}.py{space}{subcommand}" if is_script else f"smoothadv {command}"


def _open_closed_streams() -> None:
    """Let the null device stand for the standard streams that the process was started without, as
    by ``>&-``.

    Else the next file that is opened, like a log, would take the place of one and get what
    libraries print.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))


def complete(parser: argparse.ArgumentParser, start: int) -> None:
    """Tell the shell which words can follow, by a ``parser`` of what follows the first
    ``start``, and exit.

    argcomplete finds the command line, and where to answer, in environment variables.
    """
    import argcomplete

    os.environ[COMPLETING] = str(start)
    argcomplete.autocomplete(parser, always_complete_options=False)


def _named_plugins(words: Sequence[str]) -> list[str]:
    """The values of --plugin; none if one has no value, which the command's own parser will say."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--plugin", action="append", default=[])
    try:
        return parser.parse_known_args(words)[0].plugin
    except argparse.ArgumentError:
        return []


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value] * (value is not None)


def _refuse_inputs(options: Mapping[str, Any]) -> None:
    """UsageError if OUTFILE, OUTDIR or -o would make a file that an option in ``_READ`` names."""
    options = {name.lstrip("-").replace("-", "_"): value for name, value in options.items()}
    written = [
        one
        for name, files in _WRITTEN.items()
        for path in _listed(options.get(name))
        for one in files(path)
    ]
    for name in _READ:
        for text in map(str, _listed(options.get(name))):
            read = text.partition(":")[2] if name == "dataset" else text
            for path, part in itertools.product(written, {read, *re.split("[+:=]", read)}):
                if os.path.exists(path) and os.path.exists(part) and os.path.samefile(path, part):
                    raise UsageError(
                        f"{path} is to be read, as {text}, and would be replaced: name another "
                        "output"
                    )


Body = Callable[[Parser, argparse.Namespace, Sequence[str]], None]
"""Carries out a command, given its parser, its options and the command line that repeats this run.
"""


def run(
    command: str,
    make_parser: Callable[[], Parser],
    body: Body,
    arguments: Sequence[str],
    interrupted: str = "",
) -> int:
    """Parse ``arguments``, call ``body`` and turn what happens into an exit code.

    First loads the plug-ins, whose components may have options.

    0 on success, 2 on a usage error, 1 with one line on a UserError or a failing file, 130 on
    Ctrl-C and 143 on a SIGTERM that was obeyed; after these two ``interrupted`` tells the user how
    to continue. ``--debug`` adds the traceback. Any other exception is a defect and propagates.
    """
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A line printed to a file is there at once; what its encoding lacks, as ASCII does, is
        # escaped.
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    try:
        with _warnings_as_lines():
            plugins.load_installed()
            for name in _named_plugins(arguments):
                plugins.load(name)
        parser = make_parser()
        if COMPLETING in os.environ:
            complete(parser, 1 + len(command.split()))
        options = parser.parse_args(arguments)
        _refuse_inputs(vars(options))
        visible_output: Any = _VisibleOutput(sys.stdout)
        with _warnings_as_lines(), contextlib.redirect_stdout(visible_output):
            body(parser, options, ["smoothadv", *command.split(), *arguments])
        sys.stdout.flush()
        return SUCCESS
    except SystemExit as exit_request:  # argparse's way to end after --help or a usage error
        return int(exit_request.code or SUCCESS)
    except UsageError as error:
        _failed(f"{error} (see {_invocation(command)} --help)", arguments)
        return USAGE
    except UserError as error:
        return _failed(str(error), arguments)
    except (MemoryError, RuntimeError) as error:
        # torch.OutOfMemoryError or an error of the host's allocator, known by its text: torch is
        # not imported here.
        signs, what = (
            ("out of memory", "can't allocate memory", "ALLOCATION_FAILED"),
            str(error).split(". ")[0],
        )
        if not isinstance(error, MemoryError) and not any(sign in str(error) for sign in signs):
            raise
        return _failed(
            f"out of memory: use a smaller --batch or --num-noise-vec ({what})", arguments
        )
    except BrokenPipeError:
        # The reader of the output has closed it, as in `... | head`: that is no error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SUCCESS
    except OSError as error:
        return _failed(f"{error.filename or 'input/output'}: {error.strerror or error}", arguments)
    except KeyboardInterrupt:
        print(f"\ninterrupted{': ' + interrupted if interrupted else ''}", file=sys.stderr)
        return INTERRUPTED
    except Terminated:
        print(f"stopped by SIGTERM{': ' + interrupted if interrupted else ''}", file=sys.stderr)
        return TERMINATED


class _VisibleOutput:
    """``stream``, but what files and names hold is printed with escapes in place of what would
    steer a terminal.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        self._stream.write(visible(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Within this context, each DoubtfulWarning is one line on standard error, whatever warning
    filters Python has.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("always", DoubtfulWarning)
        other = warnings.showwarning

        def show(
            message: Warning | str, category: type[Warning], *place: Any, **options: Any
        ) -> None:
            if issubclass(category, DoubtfulWarning):
                print(f"warning: {escape(str(message))}", file=sys.stderr)
            else:
                other(
                    visible(str(message)), category, *place, **options
                )  # a library may repeat a name

        warnings.showwarning = show
        yield


@contextmanager
def terminable() -> Iterator[None]:
    """Within this context, SIGTERM raises Terminated, so that a run can save its work before it
    stops.
    """

    def terminate(number: int, frame: object) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _failed(message: str, arguments: Sequence[str]) -> int:
    if "--debug" in arguments:
        for line in traceback.format_exc().splitlines():
            print(escape(line), file=sys.stderr)
    print(f"error: {escape(message)}", file=sys.stderr)
    return FAILURE
