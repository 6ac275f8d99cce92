"""One description of a run: options, keywords, checks, documentation and the manifest's record."""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import pytest

from smoothadv.analysis import ANALYSES
from smoothadv.base.errors import UserError
from smoothadv.base.settings import (
    Checked,
    identity,
    options_of,
    output_file,
    positive_float,
    positive_int,
    setting,
    takes,
)
from smoothadv.cli.runner import Parser, add_settings, given_settings
from smoothadv.objectives import OBJECTIVES
from smoothadv.statistics import PROCEDURES
from support.refusals import refusal


@dataclass(frozen=True, kw_only=True)
class ShoutSpec(Checked):
    """What the tests below describe."""

    text: str = setting(parse=str, flag="text", help="what to shout")
    volume: float = setting(
        1.0,
        parse=positive_float,
        flag="--volume --loudness",
        metavar="V",
        group="sound",
        unit="decibels",
        records="level",
        help="how loud",
    )
    times: int | None = setting(None, parse=positive_int, records="times", help="how often")
    places: tuple[str, ...] = setting((), help="where")
    echo: bool = setting(False, help="repeat it")
    clear: bool = setting(True, flag="--no-clear", help="mumble")
    polite: bool | None = setting(None, help="bow first")
    language: str = setting("en", choices=("en", "fr"), records="language", help="the language")
    existing: str = setting(
        "resume",
        choices=("resume", "anew"),
        constants={"resume": "go on", "anew": "begin"},
        help="what to do with an earlier log",
    )
    log: Path | None = setting(None, parse=output_file, flag="", help="log to write")
    shouter: dict[str, str] | None = setting(None, keyword=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.echo and self.volume < 1:
            raise UserError("--echo needs a --volume of at least 1")


def test_none_is_taken_where_the_type_says_so():
    @dataclass(frozen=True)
    class Whisper(Checked):
        times: Optional[int] = setting(1, parse=positive_int, help="how often")  # noqa: UP045
        volume: float = setting(1.0, parse=positive_float, help="how loud")

    assert Whisper(times=None).times is None
    refusal(Whisper, volume=None, names="volume: found None")


def read(*words: str) -> ShoutSpec:
    parser = Parser(prog="shout")
    add_settings(parser, options_of(ShoutSpec))
    return ShoutSpec(**given_settings(ShoutSpec, vars(parser.parse_args(words))))


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ((), {}),
        (("--loudness", "2"), {"volume": 2.0}),
        (("--times", "3", "--places", "here", "there"), {"times": 3, "places": ("here", "there")}),
        (("--echo", "--no-clear", "--no-polite"), {"echo": True, "clear": False, "polite": False}),
        (("--polite", "--language", "fr", "--anew"), {"polite": True, "language": "fr"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_options_and_keywords_make_the_same_spec(words, fields):
    existing = {"existing": "anew"} if "--anew" in words else {}
    assert read("hello", *words) == ShoutSpec(text="hello", **fields, **existing)


def test_help_has_groups_units_defaults_and_metavars(capsys):
    with pytest.raises(SystemExit):
        read("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "sound: --volume V, --loudness V how loud (decibels) (default: 1.0)" in text
    assert "--times TIMES how often" in text and "--resume go on (the default)" in text
    assert "log to write" not in text


def test_a_function_takes_the_keywords_and_documents_them():
    @takes(ShoutSpec)
    def shout(place, **keywords):
        """Shout."""
        return place, keywords

    assert shout("here", text="a", log="log") == ("here", {"text": "a", "log": "log"})
    parameters = inspect.signature(shout).parameters
    assert [*parameters][:3] == ["place", "text", "volume"] and "shouter" not in parameters
    assert parameters["volume"].default == 1.0
    assert "- ``volume``: how loud (decibels)" in shout.__doc__
    assert "- ``clear=False``: mumble" in shout.__doc__ and "- ``echo``: repeat" in shout.__doc__
    for wrong in ({}, {"text": "a", "tone": 1}, {"text": "a", "shouter": 1}):
        with pytest.raises(TypeError, match=r"^shout\(\) "):
            shout("here", **wrong)


@pytest.mark.parametrize(
    ("given", "hint"),
    [("loudness", "volume"), ("volum", "volume"), ("anew", "existing"), ("place", "places")],
)
def test_another_name_of_a_keyword_is_answered_by_the_keyword(given, hint):
    @takes(ShoutSpec)
    def shout(**keywords):
        return keywords

    with pytest.raises(TypeError, match=f"keyword argument '{given}': do you mean {hint}=\\?$"):
        shout(text="a", **{given: 1})
    with pytest.raises(TypeError, match="keyword argument 'zzz'$"):
        shout(text="a", zzz=1)


def test_an_error_names_keywords_in_place_of_flags():
    @takes(ShoutSpec)
    def shout(**keywords):
        ShoutSpec(**keywords)
        raise UserError("--anew or --no-clear: leave --loudness out, a--volume, --other")

    words = "echo=True needs a volume of at least 1"
    assert refusal(shout, text="a", echo=True, volume=0.5) == words
    words = 'existing="anew" or clear=False: leave volume out, a--volume, --other'
    assert refusal(shout, text="a") == words


def test_identity_has_what_decides_the_numbers_and_is_given():
    assert identity(ShoutSpec(text="a", volume=2)) == {"level": 2.0, "language": "en"}
    assert identity(ShoutSpec(text="b", times=3))["times"] == 3


def test_whatever_has_checks_of_its_own_has_those_of_its_settings_too():
    kinds = [Checked]
    for kind in kinds:  # which grows
        kinds += kind.__subclasses__()
        if own := vars(kind).get("__post_init__"):
            assert kind is Checked or "super" in own.__code__.co_names, kind
    known = (ANALYSES, OBJECTIVES, PROCEDURES)
    assert {ShoutSpec}.union(*map(dict.values, known)).issubset(kinds)
