"""Makes options of settings, and specs and components of the options on a command line."""

import argparse
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING
from typing import Any

from smoothadv.base.errors import UsageError
from smoothadv.base.registry import Registry
from smoothadv.base.settings import Setting, options_of

Options = Mapping[str, Any]
"""What is on a command line: values by the main flag, or by the name of a positional argument."""


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
    if setting.parse is None:
        how["action"] = "store_false" if setting.default is True else "store_true"
        if setting.default is None:
            how["action"] = argparse.BooleanOptionalAction
    elif setting.choices is not None and not isinstance(setting.choices, Registry):
        how["choices"] = list(setting.choices)
    else:
        metavar = setting.metavar or setting.field.split("_")[-1].upper()
        how |= {"type": setting.parse, "metavar": metavar}
    if setting.many in ("append", "extend"):
        how["action"] = setting.many
    if setting.many and setting.many != "append":
        how["nargs"] = "*" if setting.many == "*" else "+"
    action = parser.add_argument(*setting.flags, **place, **how)
    if isinstance(setting.choices, Registry):  # argcomplete offers the names in place of files
        names = setting.choices
        action.completer = lambda **_: names  # type: ignore[attr-defined]


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
        elif isinstance(action, argparse._AppendAction):
            flags += [word for single in listed for word in (action.option_strings[0], single)]
        elif action.nargs != 0 or value == action.const:
            flags += [action.option_strings[0], *(() if action.nargs == 0 else listed)]
    return [*words, *flags]
