"""Specifications of evaluations: what options and keywords have in common, and what both refuse."""

import inspect
import re

import pytest

import smoothadv
from smoothadv.attacks.pgd import PGD
from smoothadv.base.errors import UsageError, UserError
from smoothadv.base.settings import options_of, settings_of
from smoothadv.evaluation.shards import Shard
from smoothadv.evaluation.specs import (
    AttackSpec,
    CertifySpec,
    FalsifySpec,
    PredictSpec,
    a_shard,
)
from smoothadv.models.name import STAGES, stages_of

KINDS = {
    "certify": CertifySpec,
    "predict": PredictSpec,
    "attack": AttackSpec,
    "falsify": FalsifySpec,
}
USUAL = {"model": "checkpoint.pth.tar", "dataset": "digits", "sigma": 0.25}


@pytest.mark.parametrize("text", ["0/1", "0/8", "7/8", "999999998/999999999"])
def test_a_shard_is_written_as_its_number_and_how_many_there_are(text):
    index, count = map(int, text.split("/"))
    assert a_shard(text) == Shard(index, count) and str(a_shard(text)) == text


@pytest.mark.parametrize(
    "text",
    "|1|/|1/|/2|2/2|8/4|0/0|-1/4|1/-4|1.0/4|1/4/2| 1/4|1/4\n|a/b|1:4|0/9999999999".split("|"),
)
def test_anything_else_is_no_shard(text):
    with pytest.raises(UserError, match="is no shard: write K/N, K from 0 to N-1"):
        a_shard(text)


@pytest.mark.parametrize("function", KINDS)
def test_every_keyword_is_documented_and_in_the_signature(function):
    call, spec = getattr(smoothadv, function), KINDS[function]
    keywords = [one.field for one in settings_of(spec) if one.keyword]
    assert len(keywords) > 15 and {*keywords} <= inspect.signature(call).parameters.keys()
    listed = re.findall(r"^- ``(\w+)(?:=False)?``: ", call.__doc__, re.MULTILINE)
    assert {*keywords} <= {*listed}


@pytest.mark.parametrize("kind", KINDS.values())
def test_every_option_has_a_meaning_and_one_flag_of_its_own(kind):
    options = options_of(kind)
    flags = [flag for one in options for flag in one.flags]
    assert len(flags) == len({*flags}) and all(one.description for one in options)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (CertifySpec, {"dataset": "digit"}, "did you mean 'digits'"),
        (CertifySpec, {"settings": {"radius": 1}}, "settings of method 'exact': found 'radius'"),
        (CertifySpec, {"method": "adaptive", "alpha": 1e-10}, "alpha must be at least 1e-09 for"),
        *(
            (CertifySpec, {"fast": True, **chosen}, "it is not for --precision or --compile")
            for chosen in ({"compile": True}, {"precision": "bf16"})
        ),
        (
            CertifySpec,
            {
                "fast": True,
                "model": None,
                "sigma": STAGES,
                "stages": stages_of([("a", 2), ("b", 1)]),
            },
            "--fast chooses for one classifier: it is not for a cascade or a router",
        ),
        (PredictSpec, {"restarts": 2}, "restarts: found 2, and there is no attack"),
        (PredictSpec, {"attack": len}, "attack: found .*, expected an object like"),
        (
            PredictSpec,
            {"attack": PGD(0.5, 1), "base_attack": True, "num_noise_vec": 2},
            "--num-noise-vec is not read by an attack on the base classifier",
        ),
        (
            AttackSpec,
            {"attack": PGD(0.5, 1), "epsilons": [0.5, 0.25, 0.5]},
            "names a size twice",
        ),
        *(
            (AttackSpec, {"attack": PGD(0.5, 1), **both}, "is not read with --skip, --max or other")
            for both in (
                {"only": [1], "skip": 2},
                {"only": [1], "limit": 2},
                {"only": [1], "image_set": "1-2"},
                {"image_set": "1-2", "skip": 2},
                {"image_set": [1, 2], "limit": 2},
            )
        ),
    ],
)
def test_contradictions_are_refused_once_for_both_faces(kind, fields, message):
    with pytest.raises(UserError, match=message) as error:
        kind(**{**USUAL, **fields})
    assert isinstance(error.value, UsageError) or "found" in message


def test_defaults_depend_on_the_kind_of_run():
    attack = {"attack": PGD(0.5, 1)}
    assert (CertifySpec(**USUAL, method="adaptive").n, CertifySpec(**USUAL).n) == (125_000, 100_000)
    assert PredictSpec(**USUAL, **attack).num_noise_vec == 1
    assert AttackSpec(**USUAL, **attack).num_noise_vec == 64
    assert AttackSpec(**USUAL, **attack, base_attack=True).num_noise_vec == 1
    assert AttackSpec(**USUAL, **attack).epsilons == (0.5,)
    assert PredictSpec(**USUAL).num_noise_vec is None
