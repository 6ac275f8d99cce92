"""What evaluations take as values of their settings: shards, targets, sigmas, procedures."""

from __future__ import annotations

import re

from smoothadv.base.cascades import STAGES
from smoothadv.base.errors import UsageError
from smoothadv.base.settings import (
    SettingError,
    non_negative_int,
    number,
    positive_int,
    positive_noise_level,
)
from smoothadv.evaluation.shards import Shard

fraction = number(float, "a number above 0 and below 1, like 0.999", lambda v: 0 < v < 1)


def shard(text: str) -> Shard:
    """Parses K/N with 0 <= K < N."""
    match = re.fullmatch("([0-9]{1,9})/([0-9]{1,9})", text)
    if not match or not int(match[1]) < int(match[2]):
        raise SettingError(
            f"'{text}' is no shard: write K/N, K from 0 to N-1, as in 0/8, 1/8, ... 7/8 for eight "
            "shards"
        )
    return Shard(int(match[1]), int(match[2]))


def sigma_or_stages(text: str) -> float | str:
    """Parses a positive noise level, or the word that stands for those of a cascade."""
    return text if text == STAGES else positive_noise_level(text)


def limit(text: str) -> int | None:
    """Parses a number of images; -1 stands for all."""
    return None if text == "-1" else positive_int(text)


def target(text: str) -> int | str:
    """Parses a class, or the rule that chooses one."""
    from smoothadv.attacks.smoothed_attack import EVERY, KNOWN_TARGETS, TARGET_RULES

    if text.isascii() and text.isdigit():
        return non_negative_int(text)
    if text not in KNOWN_TARGETS:
        raise SettingError(
            f"'{text}' is no target: write a class number, {', '.join(TARGET_RULES)} or {EVERY}"
        )
    return text


def procedure_name(method: str, kind: str) -> str:
    """The procedure that --method names, for a model of this kind: "cascade", "router" or "", a
    single classifier; UsageError where it is for another kind.
    """
    usual = ("exact", "sequential")
    names = {each: dict(zip(usual, (each, f"sequential-{each}"))) for each in ("cascade", "router")}
    own = names.pop(kind, {})
    for other, foreign in names.items():
        if method in foreign.values():
            hint = "" if kind else f": write {STAGES} in place of sigma"
            raise UsageError(f"--method {method} is for {other}s{hint}")
    if kind and method not in {*own, *own.values()}:
        raise UsageError(f"--method {method} is not for {kind}s: take one of {', '.join(usual)}")
    return own.get(method, method)
