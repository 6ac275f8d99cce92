"""How a command line is made of settings, read, and run: one clear line for each foreseeable error,
and the exit code that goes with it.
"""

import argparse
import io
import os
import re
import signal
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from smoothadv.base import plugins
from smoothadv.base.errors import (
    DoubtfulWarning,
    Terminated,
    UsageError,
    UserError,
    escape,
    first_line,
    is_out_of_memory,
)
from smoothadv.base.registry import Registry, did_you_mean
from smoothadv.base.settings import Setting, options_of
from smoothadv.records.logs import ARGUMENTS, CHECKPOINT_FILE, TRAINING_LOG
from smoothadv.version import __version__

Options = Mapping[str, Any]
"""What is on a command line: values by the main flag, or by the name of a positional argument."""
SUCCESS, FAILURE, USAGE, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143
# Options of the released code that are called otherwise here, or are not needed.
_RELEASED = {
    "--gpu": "set CUDA_VISIBLE_DEVICES",
    "--noise_sd": "write --noise",
    "--learning-rate": "write --lr",
    "--wd": "write --weight-decay",
    "--self-training-weight": "write --unlabelled-weight",
    "--no-grad-attack": "write --gradient stein",
    "--base-attack": "write --gradient base",
    **dict.fromkeys(
        ("--adv-training", "--train-multi-noise", "--visualize-examples", "--workers"),
        "leave it out",
    ),
    "--print-freq": "leave it out",
}


_WIDTH = 100


class Parser(argparse.ArgumentParser):
    """An argument parser that keeps examples as written, refuses abbreviations and raises a
    UsageError where the words are wrong.

    Made with the command as ``prog``: what follows "smoothadv", like "certify" or "analyze table".
    The settings of the ``kinds``, specifications, become its options.
    """

    def __init__(
        self,
        *,
        prog: str,
        description: str = "",
        epilog: str = "",
        kinds: Iterable[type] = (),
        **options: Any,
    ) -> None:
        called = invocation(prog)
        if called.startswith("smoothadv "):
            epilog = re.sub(r"python code/(\w+)\.py", r"smoothadv \1", epilog)
            epilog = re.sub(r"scripts/grids/([\w-]+)\.toml", r"\1", epilog)
        super().__init__(
            prog=called,
            description=textwrap.fill(" ".join(description.split()), _WIDTH),
            epilog=epilog,
            formatter_class=partial(
                argparse.RawDescriptionHelpFormatter, max_help_position=28, width=_WIDTH
            ),
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
            **options,
        )
        self.add_argument(
            "--version",
            action="version",
            version=f"smoothadv {__version__}",
            help="print the version",
        )
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")
        self.add_argument(
            "--plugin",
            action="append",
            metavar="FILE_OR_MODULE",
            help="make the components in it known, like your own dataset; can be given again "
            "(docs/plugins.md)",
        )
        add_settings(self, [one for kind in kinds for one in options_of(kind)])

    def format_help(self) -> str:
        """The usage in one line: the options are listed below it."""
        words = [
            str(action.metavar or action.dest.upper()) + " ..." * (action.nargs is not None)
            for action in self._actions
            if not action.option_strings
        ]
        self.usage = " ".join([self.prog, *words, "[options]"])
        return super().format_help()

    def parse_known_args(  # type: ignore[override]  # typeshed has overloads for namespaces
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """First refuses options that are not known: argparse would miss the arguments that a
        mistyped option takes away.
        """
        known = self._option_string_actions
        for word in args or ():
            if word == "--" or (self._subparsers and not word.startswith("-")):
                break  # the rest is for others
            flag = word.partition("=")[0]
            # To argparse, a word with a space is a value, whatever it starts with.
            if flag.startswith("--") and " " not in flag and flag not in known:
                # Compared without the dashes, which would make all flags similar.
                names = [option[2:] for option in known if option.startswith("--")]
                hint = did_you_mean(flag[2:], names, shown="--{}")
                if flag[2:] in [one.dest for one in self._actions if not one.option_strings]:
                    hint = f": {flag[2:].upper()} is written without a flag, in its place"
                elif flag == "--sigma" and "--noise" in known:
                    hint = " (did you mean --noise?)"
                elif flag in _RELEASED:
                    hint = f" of the released code: {_RELEASED[flag]} (docs/released.md)"
                hint = hint or "; --plugin FILE adds the options of a plug-in"
                self.error(f"unknown option {flag}{hint}")
        return super().parse_known_args(args, namespace)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)  # type: ignore[misc]  # not in typeshed
        except argparse.ArgumentError as error:  # of a subcommand, which has no other check
            hint = did_you_mean(str(value), map(str, action.choices or ()))
            raise argparse.ArgumentError(action, f"{error.message}{hint}") from None

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def add_settings(parser: argparse._ActionsContainer, settings: Iterable[Setting]) -> None:
    """Add an option for each setting, in the group that it names; components may share a flag, and
    what the parser has already stays.

    The option's destination is its main flag. What is not on the command line has no destination,
    so that it can be distinguished from what is given with its default.
    """
    by_flag: dict[str, list[Setting]] = {}
    for setting in settings:
        by_flag.setdefault(setting.flag, []).append(setting)
    known = {*parser._option_string_actions, *(action.dest for action in parser._actions)}
    for setting, *others in by_flag.values():
        if setting.flag in known:
            continue
        # Not the default of a switch, or of what is optional.
        defaults = {
            str(one.default)
            for one in (setting, *others)
            if one.default not in (MISSING, None, ()) and not isinstance(one.default, bool)
        }
        default = f" (default: {' or '.join(sorted(defaults))})" if defaults else ""
        _add_setting(group_of(parser, setting.group), setting, default)


def group_of(parser: argparse._ActionsContainer, title: str) -> Any:
    """The group of options with this title, a new one if there is none; "": the parser itself."""
    if not title:
        return parser
    known = [group for group in parser._action_groups if group.title == title]
    return known[0] if known else parser.add_argument_group(title)


def _add_setting(parser: argparse._ActionsContainer, setting: Setting, default: str) -> None:
    place: Any = {"dest": setting.flag} if setting.flag.startswith("-") else {}
    if setting.constants:
        choice = parser.add_mutually_exclusive_group()
        for value, meaning in setting.constants.items():
            text = meaning + " (the default)" * (value == setting.default)
            choice.add_argument(f"--{value}", action="store_const", const=value, help=text, **place)
        return
    how: dict[str, Any] = {"help": (setting.description + default).replace("%", "%%")}
    if setting.kind == (bool,):
        how["action"] = "store_false" if setting.default is True else "store_true"
        if setting.default is None:
            how["action"] = argparse.BooleanOptionalAction
    elif setting.choices is not None and not isinstance(setting.choices, Registry):
        how["choices"] = list(setting.choices)
    else:
        metavar = setting.metavar or setting.field.split("_")[-1].upper()
        how |= {"type": setting.parse, "metavar": metavar}
    if setting.many is list:
        how["action"] = "append"
    elif setting.many is not None:
        how["nargs"] = "*" if setting.default == () and not place else "+"
    if setting.many is tuple and setting.default == () and place:
        how["action"] = "extend"  # else a later option replaces an earlier one
    parser.add_argument(*setting.flags, **place, **how)


def given_settings(spec: type, options: Options) -> dict[str, Any]:
    """The settings of a spec, or of a component, that are on the command line, by field."""
    return {one.field: options[one.flag] for one in options_of(spec) if one.flag in options}


def compose(component: type, options: Options, name: str, **given: Any) -> Any:
    """Build ``component`` from the values ``given`` and the options that its other settings
    declare.

    A usage error where a required setting is missing or the component refuses the values.
    """
    values = {**given_settings(component, options), **given}
    for setting in options_of(component):
        if setting.default is MISSING and setting.field not in values:
            raise UsageError(f"{name} needs {setting.flag}: {setting.description}")
    try:
        return component(**values)
    except ValueError as error:
        raise UsageError(str(error)) from None


def refuse_foreign_settings(
    options: Options, registry: Registry[type[Any]], chooser: str, chosen: str
) -> None:
    """A usage error if an option was given that another component of ``registry`` reads, but not
    the one that ``chooser``, like --method, has ``chosen``.
    """
    readable = {one.flag for one in options_of(registry[chosen])}
    for name, component in registry.items():
        for setting in options_of(component):
            if setting.flag in options and setting.flag not in readable:
                raise UsageError(
                    f"{setting.flag} is not read by {chooser} {chosen}, but by {chooser} {name}: "
                    f"leave it out, or change {chooser}"
                )


def command_line_of(
    parser: argparse.ArgumentParser,
    options: Options,
    without: Collection[str],
    changes: Mapping[str, Any],
) -> list[str]:
    """The command line that gives ``options`` with ``changes``, except the destinations
    ``without``; positional arguments come first.
    """
    words, flags = [], []
    values = {**options, **changes}
    for action in parser._actions:
        value = values.get(action.dest)
        if action.dest in without or value is None:
            continue
        listed = [str(single) for single in (value if isinstance(value, list) else [value])]
        if not action.option_strings:
            words += listed
        elif isinstance(action, argparse._AppendAction) and action.nargs is None:
            flags += [word for single in listed for word in (action.option_strings[0], single)]
        elif action.nargs != 0 or value == action.const:
            flags += [action.option_strings[0], *(() if action.nargs == 0 else listed)]
    return [*words, *flags]


@contextmanager
def reading(source: str) -> Iterator[None]:
    """Within this context, bad input names ``source``, which is not the command line."""
    try:
        yield
    except UserError as error:
        kind = UsageError if isinstance(error, UsageError) else UserError
        raise kind(f"{source}: {error}") from None


def invocation(command: str) -> str:
    """How the user starts ``command``: with its script of the clone, if this process runs a script,
    else as ``smoothadv``.
    """
    name, space, subcommand = command.partition(" ")
    started = Path(sys.argv[0])
    is_script = started.suffix == ".py" and started.name != "__main__.py"
    return f"python code/{name}.py{space}{subcommand}" if is_script else f"smoothadv {command}"


def values_of(flag: str, words: Sequence[str]) -> list[str]:
    """The values of an option in the words of a command line, before there is a parser."""
    following = [value for word, value in zip(words, words[1:]) if word == flag]
    return following + [word.partition("=")[2] for word in words if word.startswith(f"{flag}=")]


def _refuse_inputs(options: Options) -> None:
    """UsageError if OUTFILE, OUTDIR or -o would replace a file that another option names."""
    lists = {
        name: value if isinstance(value, (list, tuple)) else [value]
        for name, value in options.items()
    }
    folders = lists.pop("outdir", ())
    written = [
        *(*lists.pop("outfile", ()), *lists.pop("-o", ())),
        *(
            folder / name
            for folder in folders
            for name in (CHECKPOINT_FILE, TRAINING_LOG, ARGUMENTS)
        ),
    ]
    for read in (one for values in lists.values() for one in values):
        if isinstance(read, (str, Path)) and os.path.isfile(read):
            for path in filter(os.path.exists, written):
                if os.path.samefile(path, read):
                    raise UsageError(
                        f"{path} is to be read, as {read}, and would be replaced: name another "
                        "output"
                    )


def run(
    command: str,
    make_parser: Callable[[], Parser],
    body: Callable[[Parser, Options, Sequence[str]], None],
    arguments: Sequence[str],
    interrupted: str = "",
    subcommands: Mapping[str, Callable[[Sequence[str]], int]] = MappingProxyType({}),
) -> int:
    """Parse ``arguments``, call ``body`` and turn what happens into an exit code; or run one of
    ``subcommands``, where its name comes first in the arguments, with those that follow.

    First loads the plug-ins, whose components may have options. ``body`` gets the parser, the
    options and the command line that repeats this run.

    0 on success, 2 on a usage error, 1 with one line on a UserError or a failing file, 130 on
    Ctrl-C and 143 on a SIGTERM that was obeyed; after these two ``interrupted`` tells the user how
    to continue. ``--debug`` adds the traceback. Any other exception is a fault of a plug-in that
    takes part, one line too, or else a defect, which propagates.
    """
    if arguments and arguments[0] in subcommands:
        return subcommands[arguments[0]](arguments[1:])
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A line printed to a file is there at once; what its encoding lacks, as ASCII does, is
        # escaped.
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    try:
        with _warnings_as_lines():
            plugins.load_installed()
            for name in values_of("--plugin", arguments):
                plugins.load(name)
            parser = make_parser()
            options = vars(parser.parse_args(arguments))
            _refuse_inputs(options)
            body(parser, options, ["smoothadv", *command.split(), *arguments])
        print(end="", flush=True)
        return SUCCESS
    except SystemExit as exit_request:  # argparse's way to end after --help
        return int(exit_request.code or SUCCESS)
    except UsageError as error:
        hint = "" if str(error).endswith(" --help)") else f" (see {invocation(command)} --help)"
        return _failed(f"{error}{hint}", arguments, USAGE)
    except UserError as error:
        return _failed(str(error), arguments)
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
    except Exception as error:
        if is_out_of_memory(error):
            return _failed(
                "out of memory: use a smaller --batch or --num-noise-vec "
                f"({str(error).split('. ')[0]})",
                arguments,
            )
        if not (place := plugins.blamed(error, arguments)):
            raise
        kind = type(error).__name__
        return _failed(f"plug-in {place}: {kind}: {first_line(error)}", arguments)


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Within this context, each DoubtfulWarning is one line on standard error, once, whatever
    warning filters Python has.
    """
    other, shown = warnings.showwarning, set[str]()

    def show(message: Warning | str, category: type[Warning], *place: Any, **options: Any) -> None:
        if not issubclass(category, DoubtfulWarning):
            other(message, category, *place, **options)
        elif str(message) not in shown:
            shown.add(str(message))
            print(f"warning: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always", DoubtfulWarning)
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


def _failed(message: str, arguments: Sequence[str], code: int = FAILURE) -> int:
    if "--debug" in arguments:
        traceback.print_exc()
    print(f"error: {escape(message)}", file=sys.stderr)
    return code
