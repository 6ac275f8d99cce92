"""certify --fast: what it chooses from measured rates, and that a log keeps the choice."""

import json
from pathlib import Path

import pytest
import torch

from smoothadv.architectures.integers import is_of_integers
from smoothadv.base.errors import UserError
from smoothadv.checkpoints import load_classifier
from smoothadv.evaluation import fastest as module
from smoothadv.evaluation.specs import CertifySpec, VerifySpec
from smoothadv.evaluation.verify import verify
from smoothadv.records.logs import manifest_path
from support.commands import call, refused, rows, succeed

DRAWS = 10**6


@pytest.fixture
def rates(monkeypatch):
    """Makes the measured rates those of a dict by precision; compiled forms get another one, or an
    error.
    """
    asked: list[list[str]] = []

    def set_rates(compiled: float | UserError = 0.0, **known: float) -> list[list[str]]:
        def found(forms, images):
            asked.append([*forms])
            if "plain" in forms and isinstance(compiled, UserError):
                raise compiled
            if "plain" in forms:
                return {name: 1.0 if name == "plain" else compiled for name in forms}
            return {name: known[name] for name in forms}

        monkeypatch.setattr(module, "_rates", found)
        return asked

    return set_rates


@pytest.fixture(scope="module")
def classifier(checkpoint):
    return load_classifier(checkpoint, "digits")


def choose(classifier, draws=DRAWS):
    spec = CertifySpec(dataset="digits", model=Path("a"), sigma=0.25, fast=True)
    return module.fastest(spec, classifier, torch.rand(1, 8, 8), torch.device("cpu"), draws)


@pytest.mark.parametrize(
    ("known", "compiled", "draws", "chosen"),
    [
        ({"fp32": 1e5, "bf16": 2e5}, 9.0, DRAWS, ("bf16", False)),
        ({"fp32": 1e5, "bf16": 1.2e5}, 9.0, DRAWS, ("fp32", False)),
        ({"fp32": 1e5, "bf16": 1e4}, 9.0, DRAWS, ("fp32", False)),
        ({"fp32": 1e3, "bf16": 1e2}, 1.5, DRAWS, ("fp32", True)),
        ({"fp32": 1e3, "bf16": 1e2}, 0.9, DRAWS, ("fp32", False)),
        ({"fp32": 1e3, "bf16": 1.6e3}, 1.5, DRAWS, ("bf16", True)),
        ({"fp32": 1e3, "bf16": 1.7e3}, 1.5, DRAWS, ("bf16", False)),
    ],
)
def test_fastest_form_is_chosen(classifier, rates, capsys, known, compiled, draws, chosen):
    """A lower precision from 1.25 times fp32's rate on, and compiling from ten minutes of work on,
    if it is faster.
    """
    rates(compiled, **known)
    found = choose(classifier, draws)
    assert (found["precision"], found["compile"]) == chosen
    said = capsys.readouterr().err
    assert f"--fast: {chosen[0]}" in said and (", compiled" in said) == chosen[1]
    assert ("certificates are of the classifier in bf16" in said) == (chosen[0] == "bf16")


def test_machine_without_compiler_goes_on(classifier, rates):
    rates(UserError("no compiler"), fp32=1e3, bf16=1e2)
    with pytest.warns(match="--fast goes on without compiling: no compiler"):
        assert choose(classifier) == {"precision": "fp32", "compile": False}


def test_gpus_have_fp16_too(classifier):
    assert module._precisions(classifier, torch.device("cpu")) == ["fp32", "bf16"]
    assert module._precisions(classifier, torch.device("cuda")) == ["fp32", "bf16", "fp16"]


def test_rates_are_measured_of_every_form(classifier):
    forms = {
        name: module._form(classifier, torch.rand(1, 8, 8), torch.device("cpu"), name)
        for name in ("fp32", "bf16")
    }
    found = module._rates(forms, torch.rand(3, 1, 8, 8))
    assert found.keys() == forms.keys() and min(found.values()) > 0


def test_log_keeps_the_choice(checkpoint, rates, workplace, capsys):
    """The rows are those of the same options given; a continued log measures nothing; verify
    repeats it.
    """
    number = ("--N", 100, "--device", "cpu")
    asked = rates(fp32=1e5, bf16=2e5)
    certify = ("certify", "digits", checkpoint, 0.25)
    succeed(*certify, "a.tsv", "--fast", "--max", 4, *number)
    succeed(*certify, "b.tsv", "--precision", "bf16", "--max", 6, *number)
    settings = json.loads(manifest_path(Path("a.tsv")).read_text())["settings"]
    assert (settings["precision"], settings["compiled"]) == ("bf16", False)
    rates(fp32=2e5, bf16=1e5)
    succeed(*certify, "a.tsv", "--fast", "--max", 6, *number)
    assert asked == [["fp32", "bf16"]], "the log says what was chosen"
    assert [row | {"time": ""} for row in rows(Path("a.tsv"))] == [
        row | {"time": ""} for row in rows(Path("b.tsv"))
    ]
    found = verify(VerifySpec(log=Path("a.tsv"), rows=6, device="cpu"))
    assert (found.repeated, found.differences) == (6, {})
    assert refused(call(capsys, *certify, "a.tsv", *number), "precision was 'bf16', now 'fp32'")


def test_network_of_integers_stays_what_it_is(integers, rates):
    network = load_classifier(integers, "digits")
    assert is_of_integers(network)
    asked = rates(fp32=1e5)
    assert choose(network) == {"precision": "fp32", "compile": False}
    assert asked == [["fp32"]]
    assert module._precisions(network, torch.device("cuda")) == ["fp32"]
