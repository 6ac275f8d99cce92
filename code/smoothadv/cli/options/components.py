"""Tables of options; components on the command line: their names, their settings as options, and
how these are read.
"""

import argparse
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING
from typing import Any

from smoothadv.base.registry import Registry
from smoothadv.base.settings import Setting, settings_of
from smoothadv.cli.runner import Parser


def add_options(parser: argparse._ActionsContainer, table: Mapping[str, tuple[Any, ...]]) -> None:
    """Add the options of a table, {"--flag METAVAR": (kind, help text, default)}; the default may
    be left out: None.

    A kind is an argparse type, the choices, an argparse action, or None for a switch. There may be
    several flags; a positional argument has its name in their place. METAVAR... takes one value or
    more, [METAVAR...] any number.
    """
    for words, (kind, text, *default) in table.items():
        flags = [word for word in words.split() if word.startswith("-")] or words.split()[:1]
        metavar = " ".join(words.split()[len(flags) :])
        details: dict[str, Any] = {"type": kind, "metavar": metavar.strip("[.]") or None}
        if metavar.endswith(("...", "...]")):
            details["nargs"] = "*" if metavar.endswith("]") else "+"
        if kind is None:
            details = {"action": "store_true"}
        elif isinstance(kind, type) and issubclass(kind, argparse.Action):
            details = {"action": kind}
        elif not callable(kind):
            details = {"choices": kind}
        action = parser.add_argument(
            *flags, help=text, **details, **dict(zip(["default"], default))
        )
        if isinstance(
            names := getattr(kind, "__self__", None), Registry
        ):  # argcomplete offers them in place of files
            action.completer = lambda names=names, **_: names  # type: ignore[attr-defined]


def fields_given(
    request: type, options: argparse.Namespace, prefix: str = "", without: Iterable[str] = ()
) -> dict[str, Any]:
    """The options called as ``prefix`` and a field of the dataclass ``request``, by field; the
    class has defaults.

    Left out are the fields ``without``, and options that are None.
    """
    names = [field.name for field in dataclasses.fields(request) if field.name not in without]
    values = {name: getattr(options, prefix + name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def add_settings(parser: argparse._ActionsContainer, settings: Iterable[Setting]) -> None:
    """Add an option for each setting; components may share a flag.

    The option's destination is its flag. An option that is not on the command line has no attribute
    there, so that it can be distinguished from one that is given with its default.
    """
    by_flag: dict[str, list[Setting]] = {}
    for setting in settings:
        by_flag.setdefault(setting.flag, []).append(setting)
    for setting, *others in by_flag.values():
        defaults = {
            one.default: None
            for one in (setting, *others)
            if one.default not in (None, False, MISSING)
        }
        default = (
            f" (default: {' or '.join(map(str, sorted(defaults, key=str)))})" if defaults else ""
        )
        kind: dict[str, Any] = {"action": "store_true"}
        if setting.parse is not None:
            kind = {"type": setting.parse, "metavar": setting.field.split("_")[-1].upper()}
        if setting.many:
            kind["nargs"] = "+"
        text = setting.help.replace("%", "%%") + default
        parser.add_argument(
            setting.flag, dest=setting.flag, default=argparse.SUPPRESS, help=text, **kind
        )


def add_components(
    parser: argparse._ActionsContainer,
    flag: str,
    registry: Registry[type[Any]],
    text: str,
    default: str | None = None,
    adapt: Callable[[Setting], Setting] = lambda setting: setting,
) -> None:
    """``flag`` NAME, which chooses a component, and the settings of all of ``registry``, each
    changed by ``adapt``.
    """
    add_options(parser, {f"{flag} NAME": (registry.require, text, default)})
    add_settings(
        parser,
        [adapt(setting) for component in registry.values() for setting in settings_of(component)],
    )


def compose_chosen(
    parser: Parser,
    registry: Registry[type[Any]],
    options: argparse.Namespace,
    chooser: str,
    also: Iterable[type] = (),
    **given: Any,
) -> Any:
    """``compose`` what the option ``chooser``, like --attack, names; refuses foreign settings."""
    refuse_foreign_settings(parser, options, registry, chooser, also)
    name = getattr(options, chooser.removeprefix("--"))
    return compose(parser, registry[name], options, f"{chooser} {name}", **given)


def compose(
    parser: Parser, component: type, options: argparse.Namespace, name: str, **given: Any
) -> Any:
    """Build ``component`` from the values ``given`` and the options that its other settings
    declare.

    A usage error where a required setting is missing or the component refuses the values.
    """
    try:
        return component(
            **given, **given_settings(parser, component, options, name, without=tuple(given))
        )
    except ValueError as error:
        parser.error(str(error))


def given_settings(
    parser: Parser,
    component: type,
    options: argparse.Namespace,
    name: str,
    without: Iterable[str] = (),
) -> dict[str, Any]:
    """The settings of ``component`` on the command line, by field, but ``without``; a usage error
    if one is lacking.
    """
    values = {}
    for setting in settings_of(component):
        if setting.field in without:
            continue
        if setting.flag in options:
            values[setting.field] = getattr(options, setting.flag)
        elif setting.required:
            parser.error(f"{name} needs {setting.flag}: {setting.help}")
    return values


def refuse_foreign_settings(
    parser: Parser,
    options: argparse.Namespace,
    registry: Registry,
    chooser: str,
    also: Iterable[type] = (),
) -> None:
    """A usage error if an option was given that another component of ``registry`` reads, but not
    the chosen one.

    The option ``chooser``, like --method, chose it; the components ``also`` are in use as well.
    """
    chosen = getattr(options, chooser.removeprefix("--"))
    readable = {
        setting.flag
        for component in (registry[chosen], *also)
        for setting in settings_of(component)
    }
    for name, component in registry.items():
        for setting in settings_of(component):
            if setting.flag in options and setting.flag not in readable:
                other = f"{setting.flag} is not read by {chooser} {chosen}, but by {chooser} {name}"
                parser.error(f"{other}: leave it out, or change {chooser}")


def command_line_of(
    parser: Parser, options: argparse.Namespace, without: Iterable[str], changes: Mapping[str, Any]
) -> list[str]:
    """The command line that gives ``options`` with ``changes``, except the destinations
    ``without``.

    Positional arguments come first; options with their default value are left out.
    """
    words, flags = [], []
    values = {**vars(options), **changes}
    for action in parser._actions:
        value = values.get(action.dest, action.default)
        if action.dest in without or value in (None, argparse.SUPPRESS):
            continue
        if not action.option_strings:
            words.append(str(value))
        elif value != action.default:
            listed = [str(single) for single in (value if isinstance(value, list) else [value])]
            if isinstance(action, argparse._AppendAction):
                flags += [word for single in listed for word in (action.option_strings[0], single)]
            else:
                flags += [action.option_strings[0], *(() if action.nargs == 0 else listed)]
    return [*words, *flags]
