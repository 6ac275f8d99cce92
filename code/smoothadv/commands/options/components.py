"""Components on the command line: their names, their settings as options, their making and their description."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterable
from typing import Any

from smoothadv.commands.runner import Parser
from smoothadv.errors import UserError
from smoothadv.registry import Registry
from smoothadv.settings import Setting, settings_of


def name_in(registry: Registry) -> Callable[[str], str]:
    """An argparse type: a name that ``registry`` knows."""
    return name_that(registry.require)


def name_that(check: Callable[[str], object]) -> Callable[[str], str]:
    """An argparse type: a name that ``check`` does not answer with a UserError."""

    def parse(text: str) -> str:
        try:
            check(text)
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return parse


def add_settings(parser: argparse._ActionsContainer, settings: Iterable[Setting]) -> None:
    """One option per setting; components may share a flag. The option's destination is its flag, and an absent
    option leaves no trace there, so that what was given can be told from defaults.
    """
    for setting in {setting.flag: setting for setting in settings}.values():
        default = (
            f" (default: {setting.default})" if setting.default not in (None, False) and not setting.required else ""
        )
        kind: dict[str, Any] = {"action": "store_true"}
        if setting.parse is not None:
            kind = {"type": setting.parse, "metavar": setting.field.split("_")[-1].upper()}
        if setting.many:
            kind["nargs"] = "+"
        parser.add_argument(
            setting.flag,
            dest=setting.flag,
            default=argparse.SUPPRESS,
            help=setting.help.replace("%", "%%") + default,
            **kind,
        )


def compose(parser: Parser, component: type, options: argparse.Namespace, name: str, **given: Any) -> Any:
    """Build ``component`` from the options that its settings declare and the values ``given``.

    A usage error where a required setting is missing or the component refuses the values.
    """
    values = dict(given)
    for setting in settings_of(component):
        if setting.flag in options:
            values[setting.field] = getattr(options, setting.flag)
        elif setting.required:
            parser.error(f"{name} needs {setting.flag}: {setting.help}")
    try:
        return component(**values)
    except ValueError as error:
        parser.error(str(error))


def refuse_foreign_settings(
    parser: Parser, options: argparse.Namespace, declared: Iterable[type], chosen: Iterable[type], names: str
) -> None:
    """A usage error if an option was given that only components other than the ``chosen`` ones read."""
    readable = {setting.flag for component in chosen for setting in settings_of(component)}
    for component in declared:
        for setting in settings_of(component):
            if setting.flag in options and setting.flag not in readable:
                parser.error(f"{setting.flag} is not read by {names}: leave it out")


def describe(component: Any) -> str:
    """A component and its settings as a person would read them, without those left at None or False."""

    def text(record: Any) -> str:
        if not isinstance(record, dict):
            return str(record)
        said = [
            f"{field}={text(value)}"
            for field, value in record.items()
            if field != "name" and value is not None and value is not False
        ]
        return f"{record['name']}({', '.join(said)})"

    return text(settings_record(component))


def settings_record(component: Any) -> dict[str, Any]:
    """A component's class and field values as plain JSON values, nested components included."""
    if dataclasses.is_dataclass(component):
        fields = {
            field.name: settings_record(getattr(component, field.name)) for field in dataclasses.fields(component)
        }
        return {"name": type(component).__name__, **fields}
    return component.__name__ if callable(component) else component


def warn(message: str) -> None:
    """Tell the user, on standard error, what is allowed but probably not meant."""
    print(f"warning: {message}", file=sys.stderr)


def retyped(parser: Parser, options: argparse.Namespace, without: Iterable[str]) -> list[str]:
    """The command line that gives ``options``, but for the destinations ``without``: positional words come first.

    Options at their default are left out.
    """
    words, flags = [], []
    for action in parser._actions:
        value = getattr(options, action.dest, action.default)
        if action.dest in without or value in (None, argparse.SUPPRESS):
            continue
        if not action.option_strings:
            words.append(str(value))
        elif value != action.default:
            values = value if isinstance(value, list) else [value]
            flags += [action.option_strings[0], *(() if action.nargs == 0 else map(str, values))]
    return [*words, *flags]
