"""Makes options of settings, and specs and components of the options on a command line."""

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING
from typing import Any

from smoothadv.base.registry import Registry
from smoothadv.base.settings import Setting, options_of
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


def add_settings(parser: argparse._ActionsContainer, settings: Iterable[Setting]) -> None:
    """Add an option for each setting, in the group that it names; components may share a flag, and
    what the parser has already stays.

    The option's destination is its main flag. An option that is not on the command line has no
    attribute there, so that it can be distinguished from one that is given with its default.
    """
    by_flag: dict[str, list[Setting]] = {}
    for setting in settings:
        by_flag.setdefault(setting.flag, []).append(setting)
    known = {*parser._option_string_actions, *(action.dest for action in parser._actions)}
    for setting, *others in by_flag.values():
        if setting.flag in known:
            continue
        defaults = {str(one.default) for one in (setting, *others) if _is_said(one.default)}
        default = f" (default: {' or '.join(sorted(defaults))})" if defaults else ""
        _add_setting(group_of(parser, setting.group), setting, default)


def group_of(parser: argparse._ActionsContainer, title: str) -> Any:
    """The group of options with this title, a new one if there is none; "": the parser itself."""
    if not title:
        return parser
    known = [group for group in parser._action_groups if group.title == title]
    return known[0] if known else parser.add_argument_group(title)


def _is_said(default: Any) -> bool:
    """Whether a help text names the default; not that of a switch, or of what is optional."""
    return default not in (MISSING, None, ()) and not isinstance(default, bool)


def _add_setting(parser: argparse._ActionsContainer, setting: Setting, default: str) -> None:
    if setting.constants:
        choice = parser.add_mutually_exclusive_group()
        for value, meaning in setting.constants.items():
            text = meaning + " (the default)" * (value == setting.default)
            choice.add_argument(
                f"--{value}",
                dest=setting.flag,
                action="store_const",
                const=value,
                default=argparse.SUPPRESS,
                help=text,
            )
        return
    text = (setting.description + default).replace("%", "%%")
    place: dict[str, Any] = {"dest": setting.flag} if setting.flag.startswith("-") else {}
    action = parser.add_argument(
        *setting.flags, default=argparse.SUPPRESS, help=text, **place, **_reading(setting)
    )
    if isinstance(setting.choices, Registry):  # argcomplete offers the names in place of files
        names = setting.choices
        action.completer = lambda **_: names  # type: ignore[attr-defined]


def _reading(setting: Setting) -> dict[str, Any]:
    """How argparse reads an option: arguments of ``add_argument``."""
    if setting.parse is None:
        if setting.default is None:
            return {"action": argparse.BooleanOptionalAction}
        return {"action": "store_false" if setting.default is True else "store_true"}
    nargs: dict[str, Any] = {}
    if setting.many:
        nargs = {"nargs": "+" if setting.many is True else setting.many}
    if setting.choices is not None and not isinstance(setting.choices, Registry):
        return {"choices": list(setting.choices), **nargs}
    metavar = setting.metavar or setting.field.split("_")[-1].upper()
    return {"type": setting.parse, "metavar": metavar, **nargs}


def given_settings(spec: type, options: argparse.Namespace) -> dict[str, Any]:
    """The settings of a spec, or of a component, that are on the command line, by field."""
    return {
        setting.field: getattr(options, setting.flag)
        for setting in options_of(spec)
        if setting.flag in options
    }


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
        [adapt(setting) for component in registry.values() for setting in options_of(component)],
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
    name = getattr(options, chooser.removeprefix("--"))
    refuse_foreign_settings(parser, options, registry, chooser, name, also)
    return compose(parser, registry[name], options, f"{chooser} {name}", **given)


def compose(
    parser: Parser, component: type, options: argparse.Namespace, name: str, **given: Any
) -> Any:
    """Build ``component`` from the values ``given`` and the options that its other settings
    declare.

    A usage error where a required setting is missing or the component refuses the values.
    """
    values = {**given_settings(component, options), **given}
    for setting in options_of(component):
        if setting.required and setting.field not in values:
            parser.error(f"{name} needs {setting.flag}: {setting.description}")
    try:
        return component(**values)
    except ValueError as error:
        parser.error(str(error))


def refuse_foreign_settings(
    parser: Parser,
    options: argparse.Namespace,
    registry: Registry,
    chooser: str,
    chosen: str,
    also: Iterable[type] = (),
) -> None:
    """A usage error if an option was given that another component of ``registry`` reads, but not
    the one that ``chooser``, like --method, has ``chosen``, and none of ``also``.
    """
    components = (registry[chosen], *also)
    readable = {one.flag for component in components for one in options_of(component)}
    for name, component in registry.items():
        for setting in options_of(component):
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
