"""cite: the entries of what made logs of every kind, a key for every component, and entries that are
those of CITATION.cff.
"""

import re
from collections import Counter
from fnmatch import fnmatchcase

import pytest
from torch import nn

import smoothadv.cli.list  # which imports what registers components
from smoothadv import noise
from smoothadv.architectures.libraries import LIBRARIES, LibraryNetwork
from smoothadv.attacks.estimators import ESTIMATORS
from smoothadv.base.registry import REGISTRATIONS
from smoothadv.base.settings import settings_record
from smoothadv.cite.command import CREDITS, keys_of
from smoothadv.models.name import MEANS
from smoothadv.records.logs import manifest_path
from support.analyzed_folder import COHEN, ORACLE, certification
from support.commands import CODE, call, refused, succeed
from support.diffusion import small_unet
from support.staged import write_stages

BIB = (CODE / "smoothadv/cite/references.bib").read_text()
ENTRIES = dict(re.findall(r"(?ms)^@\w+\{(\w+),\n(.*?)^\}", BIB))
ALSO_OF = {
    "objective of denoisers": "objective",
    "architecture": "network",
    "kind of diffusion model": "denoiser",
}
UNCITED = "analysis command engine format function list tracker".split()
UNCITED += ["input layer", "function of networks of integers"]


def own_components() -> list[tuple[str, str]]:
    """What this package registers or makes known otherwise, by the kind and name that records
    have.
    """
    found = [
        ("noise", "GaussianNoise"),
        ("noise", "RoundedGaussianNoise"),
        *(("network", f"mean of {one}") for one in MEANS),
    ]
    for make, _ in ESTIMATORS.values():
        record = settings_record(make(0.25))
        found.append(("gradient", record if isinstance(record, str) else record["name"]))
    for one in REGISTRATIONS:
        kind = ALSO_OF.get(one.registry.kind, one.registry.kind)
        if one.module.startswith("smoothadv.") and kind not in UNCITED:
            is_class = kind in ("objective", "attack")
            found.append((kind, one.component.__name__ if is_class else one.name))
    return found


def is_credited(kind: str, name: str) -> bool:
    """Whether a component, or what its name begins, as openai does that of openai:FILE, is in the
    table.
    """
    return any(
        fnmatchcase(one, pattern) for pattern in CREDITS[kind] for one in (name, f"{name}:FILE")
    )


def test_every_component_has_a_key_or_says_that_there_is_none():
    found = own_components()
    assert {kind for kind, _ in found} <= CREDITS.keys() and len(found) > 70
    assert {one for one in noise.__all__ if one.endswith("Noise")} <= {
        "Noise",
        *dict(map(reversed, found)),
    }
    assert [one for one in found if not is_credited(*one)] == []
    assert not is_credited("objective", "Mine") and keys_of("objective", "Mine") == ["?"]


def test_entries_are_complete_and_those_of_the_citation_file(repository):
    yaml = pytest.importorskip("yaml")
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
    assert Counter(cited) == Counter(stated)


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
    small = ("--device", "cpu", "--N", 200, "--max", 2)
    behind = ("--denoiser", f"openai:{small_unet(folder)}", "--local-noise", 0.1)
    attack = ("--num-steps", 2, "--num-noise-vec", 2, "--attack")
    for name, model, sigma, *options in [
        ("exact", pgd, 0.25),
        ("sequential", pgd, 0.25, "--method", "sequential"),
        ("cascade", cascade, "stages"),
        ("router", router, "stages"),
        ("ensemble", f"{pgd}+{checkpoints['DDN']}", 0.25),
        ("integers", integers, 0.25, "--sound"),
        ("denoised", pgd, 0.25, *behind),
    ]:
        succeed("certify", "digits", model, sigma, folder / f"{name}.tsv", *small, *options)
    for command, log, *options in [
        ("predict", "predicted.tsv", *small, *attack, "DDN", "--epsilon", 0.5),
        ("attack", "attacked", *small, *attack, "PGD", "--epsilon", 0.5),
        ("attack", "falsified", *small, *attack, "PGD", "--against", folder / "exact.tsv"),
    ]:
        succeed(command, "digits", pgd, 0.25, folder / log, *options)
    given = "digits digits_resnet8 OUT --noise 0.25 --objective macer --recipe smoke --device cpu"
    given = given.replace("OUT", str(folder / "trained"))
    succeed("train", *given.split(), "--epochs", 1, "--num-noise-vec", 2)
    certification(str(folder / COHEN.format("0.25")), ORACLE)
    return folder


SEQUENTIAL = "horvath2022boosting chen2022input voracek2024treatment lan1983discrete"
PGD = "salman2019provably madry2018towards"
EACH = {
    "exact.tsv": PGD,
    "sequential.tsv": f"{PGD} {SEQUENTIAL}",
    "cascade.tsv": f"{PGD} jeong2023multiscale",
    "router.tsv": f"{PGD} sun2026dual ?",
    "predicted.tsv": f"{PGD} rony2019decoupling",
    "attacked": PGD,
    "falsified": PGD,
    "cohen": "krizhevsky2009learning ?",
    "ensemble.tsv": f"{PGD} rony2019decoupling horvath2022boosting",
    "integers.tsv": "jin2022getting voracek2023sound jacob2018quantization lin2021integer",
    "denoised.tsv": f"{PGD} carlini2023certified nichol2021improved dhariwal2021diffusion "
    "zhang2023diffsmooth",
    "trained": "zhai2020macer",
}


@pytest.mark.parametrize("name", EACH)
def test_keys_of_logs_of_each_kind(name, logs, capsys):
    outcome = call(capsys, "cite", logs / name, "--keys")
    assert outcome.code == 0 and re.fullmatch(r"\\cite\{[\w,]+\}\n", outcome.out)
    *expected, last = EACH[name].split()
    if last != "?":
        expected.append(last)
        assert outcome.err == ""
    else:
        unknown = {"cohen": "certification procedure of", "router.tsv": "training not recorded of"}
        assert outcome.err.count("\n") == 1 and unknown[name] in outcome.err
    data = ["alpaydin1998optical", "pedregosa2011scikit"] * (name != "cohen")
    found = Counter(re.findall(r"\w+", outcome.out)[1:])
    assert found == Counter([*expected, *data, "cohen2019certified", "he2016deep", "smoothadv"])


def test_each_entry_is_printed_once_with_its_reasons(logs, workplace, capsys):
    printed = call(capsys, "cite", logs)
    assert call(capsys, "cite", logs, "-o", "made.bib").out == ""
    assert (workplace / "made.bib").read_text() == printed.out
    keys = re.findall(r"^@\w+\{(\w+),", printed.out, re.MULTILINE)
    assert call(capsys, "cite", logs, "--keys").out == f"\\cite{{{','.join(keys)}}}\n"
    for entry in printed.out.split("\n\n"):
        comments, text = entry[: entry.index("@")], entry[entry.index("@") :].strip()
        assert text in BIB and re.fullmatch(r"(% why: .+ of /.+\n)+", comments)
    assert f"% why: objective Macer of {logs}/trained/log.txt\n@inproceedings{{zhai" in printed.out
    assert f"% why: certification procedure exact of {logs}/" in printed.out


def test_what_is_no_log_or_in_doubt_is_refused_in_one_line(logs, workplace, capsys):
    (workplace / "notes.txt").write_text("nothing\n")
    for place in ("notes.txt", "nowhere", "."):
        assert refused(call(capsys, "cite", logs / "exact.tsv", place), place, "is no log of")
    (workplace / "log.tsv").write_bytes((logs / "exact.tsv").read_bytes())
    manifest_path(workplace / "log.tsv").write_text("{")
    assert refused(call(capsys, "cite", "log.tsv", "-o", "new.bib"), "log.tsv", "manifest")
    assert not (workplace / "new.bib").exists()
