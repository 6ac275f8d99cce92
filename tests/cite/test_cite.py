"""cite: the entries of what made logs of every kind, a key for every component, and entries that
are those of CITATION.cff.
"""

import re
from pathlib import Path

import pytest
from torch import nn

from smoothadv import noise
from smoothadv.architectures.libraries import LIBRARIES, LibraryNetwork
from smoothadv.attacks.estimators import ESTIMATORS
from smoothadv.base.registry import REGISTRATIONS
from smoothadv.base.settings import settings_record
from smoothadv.cite.command import CREDITS, keys_of
from smoothadv.models.name import MEANS
from smoothadv.records.logs import manifest_path
from support.analyzed_folder import COHEN, ORACLE, certification
from support.analyzed_folder import log as small_log
from support.commands import CODE, call, refused, succeed
from support.diffusion import small_unet
from support.staged import write_stages

BIB = (CODE / "smoothadv/cite/references.bib").read_text()
ENTRIES = dict(re.findall(r"(?ms)^@\w+\{(\w+),\n(.*?)^\}", BIB))
# What records call the kind of each registry; "" is cited by nobody.
KINDS = {
    **{kind: kind for kind in ("objective", "attack", "certification procedure", "dataset")},
    **{"objective of denoisers": "objective", "architecture": "network", "denoiser": "denoiser"},
    **{"kind of diffusion model": "denoiser", "input layer": "", "tracker": "", "engine": ""},
    **{kind: "" for kind in ("analysis", "command", "format", "function", "list")},
    "function of networks of integers": "",
}


def own_components() -> list[tuple[str, str]]:
    """What this package registers, or makes known otherwise, by the kind and name in records."""
    own = [one for one in REGISTRATIONS if one.module.startswith("smoothadv.")]
    made = [settings_record(make(0.25)) for make, _ in ESTIMATORS.values()]
    names = {"attack": "{0.__name__}", "objective": "{0.__name__}", "denoiser": "{1}:FILE"}
    return [
        *(("noise", one) for one in noise.__all__ if one.endswith("GaussianNoise")),
        *(("network", f"mean of {one}") for one in MEANS),
        *(("gradient", one["name"] if isinstance(one, dict) else one) for one in made),
        *(
            (kind, names.get(kind, "{1}").format(one.component, one.name))
            for one in own
            if (kind := KINDS[one.registry.kind])
        ),
    ]


def test_every_component_has_a_key_or_says_that_there_is_none():
    succeed("list")  # which imports what registers components
    found = own_components()
    assert {"network", "noise", "objective"} < dict(found).keys() and len(found) > 70
    # Whose images these hold is not known.
    users = [("dataset", "imagefolder"), ("dataset", "npz")]
    assert [one for one in found if keys_of(*one) == ["?"]] == users
    assert keys_of("objective", "Mine") == ["?"]


def test_entries_are_complete_and_those_of_the_citation_file(repository):
    yaml = pytest.importorskip("yaml", reason="PyYAML, of the extra test, is not installed")
    used = {key for names in CREDITS.values() for keys in names.values() for key in keys.split()}
    assert used - {"?"} == ENTRIES.keys() and len(ENTRIES) == BIB.count("\n@")
    fields = {
        key: dict(re.findall(r"(?m)^  (\w+) = \{(.*)\},?$", one)) for key, one in ENTRIES.items()
    }
    assert [key for key, one in fields.items() if one["year"] not in key] == ["smoothadv"]
    software = yaml.safe_load((repository / "CITATION.cff").read_text())
    assert software["title"] == fields.pop("smoothadv")["title"]
    stated = [
        (re.sub("[{}]", "", one["title"]), int(one["year"]), one["author"].count(" and ") + 1)
        for one in fields.values()
    ]
    cited = [(one["title"], one["year"], len(one["authors"])) for one in software["references"]]
    assert sorted(cited) == sorted(stated)


@LIBRARIES.register("routing")
def _routing(location: str, pretrained: bool, images: object) -> LibraryNetwork:
    return LibraryNetwork(nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), "1")


@pytest.fixture(scope="module")
def logs(checkpoints, integers, tmp_path_factory):
    """A folder with a log of each kind."""
    folder, pgd = tmp_path_factory.mktemp("logs"), checkpoints["PGD"]
    stages = [(pgd, 0.25), (checkpoints["gaussian"], 0.12)]
    cascade = write_stages(folder / "cascade.toml", stages, 0.7)
    router = write_stages(folder / "router.toml", stages, router=("routing:of-tests", 0.25))
    behind = ("--denoiser", f"openai:{small_unet(folder)}", "--local-noise", 0.1)
    attack = ("--num-steps", 2, "--num-noise-vec", 2, "--attack")
    for command, model, sigma, log, *options in [
        ("certify", pgd, 0.25, "exact.tsv"),
        ("certify", pgd, 0.25, "sequential.tsv", "--method", "sequential"),
        ("certify", cascade, "stages", "cascade.tsv"),
        ("certify", router, "stages", "router.tsv"),
        ("certify", f"{pgd}+{checkpoints['DDN']}", 0.25, "ensemble.tsv"),
        ("certify", integers, 0.25, "integers.tsv", "--sound"),
        ("certify", pgd, 0.25, "denoised.tsv", *behind),
        ("predict", pgd, 0.25, "predicted.tsv", *attack, "DDN", "--epsilon", 0.5),
        ("attack", pgd, 0.25, "attacked", *attack, "PGD", "--epsilon", 0.5),
        ("attack", pgd, 0.25, "falsified", *attack, "PGD", "--against", folder / "exact.tsv"),
        ("sets", pgd, 0.25, "sets@0.tsv", "--radii", 0),
        ("sets", pgd, 0.25, "counted.tsv", "--radii", 0, "--N", 5),
    ]:
        few = ["--max", 12] if command == "sets" else ["--N", 200, "--max", 2]
        options += ["--device", "cpu", *few]
        succeed(command, "digits", model, sigma, folder / log, *options)
    given = (
        "--noise 0.25 --objective macer --num-noise-vec 2 --epochs 1 --recipe smoke --device cpu"
    )
    succeed("train", "digits", "digits_resnet8", folder / "trained", *given.split())
    certification(str(folder / COHEN.format("0.25")), ORACLE)
    return folder


SEQUENTIAL = "horvath2022boosting chen2022input voracek2024treatment lan1983discrete"
PGD = "salman2019provably madry2018towards"
EACH = {
    "exact.tsv": PGD,
    "sequential.tsv": f"{PGD} {SEQUENTIAL}",
    "cascade.tsv": f"{PGD} jeong2023multiscale",
    "router.tsv": f"{PGD} sun2026dual",
    "predicted.tsv": f"{PGD} rony2019decoupling",
    "attacked": PGD,
    "sets@0.tsv": f"{PGD} zargarbashi2025one",
    "counted.tsv": f"{PGD} zargarbashi2025one zargarbashi2025robust",
    "falsified": PGD,
    "cohen": "krizhevsky2009learning",
    "ensemble.tsv": f"{PGD} rony2019decoupling horvath2022boosting",
    "integers.tsv": "jin2022getting voracek2023sound jacob2018quantization lin2021integer",
    "denoised.tsv": f"{PGD} carlini2023certified nichol2021improved dhariwal2021diffusion "
    "zhang2023diffsmooth",
    "trained": "zhai2020macer",
}


UNKNOWN = {"cohen": "certification procedure unknown of", "router.tsv": "training not recorded of"}


@pytest.mark.parametrize("name", EACH)
def test_keys_of_logs_of_each_kind(name, logs, capsys):
    outcome = call(capsys, "cite", logs / name, "--keys")
    data = "" if name == "cohen" else "alpaydin1998optical pedregosa2011scikit"
    expected = f"{EACH[name]} {data} cohen2019certified he2016deep smoothadv".split()
    assert outcome.code == 0 and re.fullmatch(r"\\cite\{[\w,]+\}\n", outcome.out)
    assert sorted(re.findall(r"\w+", outcome.out)[1:]) == sorted(expected)
    assert UNKNOWN.get(name, "") in outcome.err and outcome.err.count("\n") == (name in UNKNOWN)


def test_each_entry_is_printed_once_with_its_reasons(logs, workplace, capsys, monkeypatch):
    printed = call(capsys, "cite", logs)
    for _ in range(2):
        assert call(capsys, "cite", logs, "-o", "made.bib").out == ""
    Path("mine.bib").write_text("@misc{mine}")
    assert refused(
        call(capsys, "cite", logs / "trained", "-o", "mine.bib"), "mine.bib holds no output of cite"
    )
    for missing in ("made", ""):
        assert refused(call(capsys, "cite", missing), f"'{missing}' is no file and no folder")
    assert (workplace / "made.bib").read_text() == printed.out
    keys = re.findall(r"^@\w+\{(\w+),", printed.out, re.MULTILINE)
    assert call(capsys, "cite", logs, "--keys").out == f"\\cite{{{','.join(keys)}}}\n"
    for entry in printed.out.split("\n\n"):
        comments, text = entry[: entry.index("@")], entry[entry.index("@") :].strip()
        assert text in BIB and re.fullmatch(r"(% why: .+ of /.+\n)+", comments)
    assert f"% why: objective Macer of {logs}/trained/log.txt\n@inproceedings{{zhai" in printed.out
    assert f"% why: certification procedure exact of {logs}/" in printed.out
    monkeypatch.setitem(CREDITS["objective"], "Macer", "of_a_plugin")
    printed = call(capsys, "cite", logs / "trained").out
    assert f"% why: objective Macer of {logs}/trained/log.txt\n% of_a_plugin\n\n" in printed


def test_faulty_manifest_in_a_folder_stops_no_other_log(workplace, capsys):
    good = small_log("some/a.tsv", [0.5])
    manifest_path(small_log("some/b.tsv", [0.5])).write_text("{")
    assert refused(call(capsys, "cite", "some/b.tsv"), "some/b.tsv is left in doubt")
    outcome, alone = call(capsys, "cite", "some"), call(capsys, "cite", good)
    assert (outcome.code, outcome.out) == (0, alone.out) and "@" in alone.out
    assert "warning: some/b.tsv is left in doubt" in outcome.err
