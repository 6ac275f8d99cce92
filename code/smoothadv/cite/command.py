"""cite: the BibTeX entries of what made logs, each below the components that it is for.

Logs, their manifests and the records of trainings are read, but no checkpoint. No torch.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from smoothadv.analysis.facts import facts_of
from smoothadv.base.errors import UserError, escape, warn
from smoothadv.base.files import refuse_to_replace, write_text
from smoothadv.base.settings import Checked, output_file, setting
from smoothadv.cli.runner import Options, Parser, given_settings, run
from smoothadv.records.logs import flat, training_record
from smoothadv.records.readers import kind_of_log

_EXAMPLES = """examples:
  python code/cite.py logs/pgd_0.25.tsv
  python code/cite.py logs models/pgd_0.25 -o made_with.bib
  python code/cite.py logs/pgd_0.25.tsv --keys
"""
_COHEN, _UNKNOWN = "cohen2019certified", "?"
_SEQUENTIAL = f"{_COHEN} horvath2022boosting chen2022input voracek2024treatment lan1983discrete"
# By kind and name, as records have it or as a pattern: keys of references.bib, in the order of the
# output. "" is nothing to cite; "?", or no entry, is what no record tells. Plug-ins add their own.
CREDITS: dict[str, dict[str, str]] = {
    "method": {"randomized smoothing": _COHEN},
    "certification procedure": {
        **dict.fromkeys(("exact", "two-sided", "cascade", "router"), _COHEN),
        **dict.fromkeys(("adaptive", "sequential"), _SEQUENTIAL),
        **dict.fromkeys(("sequential-cascade", "sequential-router"), _SEQUENTIAL),
        "top-k": f"{_COHEN} jia2020certified",
        "conformal": f"{_COHEN} zargarbashi2025one",
    },
    "conformal scores": {"*": "zargarbashi2025robust"},
    "stages": {"cascade": "jeong2023multiscale", "router": "sun2026dual"},
    "noise": {
        "GaussianNoise": "",  # that of randomized smoothing
        "RoundedGaussianNoise": "jin2022getting voracek2023sound",
    },
    "objective": {
        "Gaussian": _COHEN,
        "SmoothAdv": "salman2019provably",
        "Stability": "li2019certified jeong2020consistency",
        "Macer": "zhai2020macer",
        "Consistency": "jeong2020consistency",
        "SmoothMix": "jeong2021smoothmix",
        "CatRS": "jeong2023confidence",
        "FTCADIS": "jang2024confidence",
        "AcrWeakness": "sun2025average",
        "Distillation": "vaishnavi2022accelerating",
        **dict.fromkeys(("MeanSquaredError", "DenoisedStability"), "salman2020denoised"),
    },
    "training": {},
    "data policy": {"DataPolicy": "sun2025average"},
    "starting weights": {"*": f"hendrycks2019using {_UNKNOWN}"},
    "pseudo-labelled images": {"*": "carmon2019unlabeled"},
    "teacher": {},
    "low-rank adaptation": {"*": "hu2022lora"},
    "attack": {"PGD": "madry2018towards", "DDN": "rony2019decoupling"},
    "gradient": {
        **dict.fromkeys(("plug_in", "Stein"), "salman2019provably"),
        "expected_loss": _COHEN,
    },
    "denoiser": {
        "*dncnn*": "salman2020denoised zhang2017beyond",
        "openai:*": "carlini2023certified nichol2021improved dhariwal2021diffusion",
        "diffusers:*": f"carlini2023certified ho2020denoising vonplaten2022diffusers {_UNKNOWN}",
    },
    "local noise": {"*": "zhang2023diffsmooth"},
    "network": {
        "integer": "jacob2018quantization lin2021integer",
        "timm": "wightman2019timm",
        "torchvision": "torchvision2016",
        "hf": "wolf2020transformers",
        "onnx": "bai2019onnx",
        "module": "",  # a user's own
        "mean of *": "horvath2022boosting",
        "wide_resnet*": "zagoruyko2016wide",
        **dict.fromkeys(("resnet[0-9]*", "*_resnet[0-9]*", "*/resnet-*"), "he2016deep"),
        "lenet": "lecun1998gradient",
        "*dncnn*": "zhang2017beyond",
        **dict.fromkeys(("beit_*", "*/beit-*"), "bao2022beit"),
        **dict.fromkeys(("vit_*", "*/vit-*"), "dosovitskiy2021image"),
    },
    "dataset": {
        **dict.fromkeys(("cifar10", "cifar100"), "krizhevsky2009learning"),
        "cifar10.1*": "recht2018cifar krizhevsky2009learning",
        "cifar10-c*": "hendrycks2019benchmarking krizhevsky2009learning",
        "mnist": "lecun1998gradient",
        "fashion-mnist": "xiao2017fashion",
        "svhn": "netzer2011reading",
        "digits": "alpaydin1998optical pedregosa2011scikit",
        "imagenet": "russakovsky2015imagenet",
        "imagenet32": "chrabaszcz2017downsampled russakovsky2015imagenet",
        "tiny-imagenet": "le2015tiny russakovsky2015imagenet",
        "hf-dataset*": f"lhoest2021datasets {_UNKNOWN}",
        **dict.fromkeys(("imagefolder*", "npz*"), _UNKNOWN),
    },
    "software": {"smoothadv": "smoothadv"},
}
# The kinds of components, by where a record has them, in the form of ``flat``.
_PLACES = {
    "smoothing": "method",
    "software": "software",
    "stages": "stages",
    "noise": "noise",
    "method": "certification procedure",
    "at_least": "conformal scores",
    "local_noise": "local noise",
    r"training\.\d+": "training",
    r"(.*\.)?dataset": "dataset",
    r"(.*\.)?(denoiser|behind)(\.\d+)?\.arch": "denoiser",
    r"(training\.(\d+\.)?)?arch": "network",
    r"(.*\.)?objective\.name": "objective",
    r"(.*\.)?data_policy\.name": "data policy",
    r"(.*\.)?pretrained_sha256": "starting weights",
    r"(.*\.)?pseudo_labelled_fingerprint": "pseudo-labelled images",
    r"(.*\.)?teacher_sha256": "teacher",
    r"(.*\.)?lora": "low-rank adaptation",
    r"(.*\.)?attack\.name": "attack",
    r"(.*\.)?attack\.estimator(\.name)?": "gradient",
}
_BETWEEN_NETWORKS = re.compile(r" > |\+|:| \(|\)")


@dataclass(frozen=True, kw_only=True)
class CiteSpec(Checked):
    """Print the entries of what made ``logs``, or write them to ``output``."""

    logs: tuple[str, ...] = setting(
        parse=str,
        flag="logs",
        metavar="LOG",
        help="log of certify, predict, attack, sets or train, also a released one; or a folder of "
        "logs",
    )
    keys: bool = setting(False, help=r"print \cite{...} with the keys, in place of the entries")
    output: Path | None = setting(
        None, parse=output_file, flag="-o --output", metavar="FILE", help="write to FILE"
    )


def keys_of(kind: str, name: str) -> list[str]:
    """The keys for a component; "?" is among them where there is more than is known."""
    known = (keys for pattern, keys in CREDITS[kind].items() if fnmatchcase(name, pattern))
    return next(known, _UNKNOWN).split()


def components(path: Path) -> list[tuple[str, str]]:
    """What made a log, by kind and name, "unknown" where nothing tells the name; UserError where
    its manifest cannot be read.
    """
    kind = kind_of_log(path)
    facts = facts_of("prediction" if kind == "prediction" else "certification", path, {})
    trained = {"training": training_record(path.parent)["recipe"]}
    record = trained if kind == "training" else facts.settings
    if not any(record.values()):
        record = {
            "dataset": facts.get("dataset"),
            "arch": facts.get("arch"),
            "objective": {"name": facts.get("objective")},
            "attack": {"name": facts.get("attack")},
        }
    listed = {
        name: {str(place): one or "not recorded" for place, one in enumerate(value)}
        for name, value in record.items()
        if isinstance(value, list)
    }
    record = {
        "smoothing": "randomized smoothing",
        "stages": "sigmas" in record and ("cascade" if "threshold" in record else "router"),
        "software": "smoothadv",
        **record,
        **listed,
    }
    found = [
        (of, one)
        for place, value in flat(record).items()
        for pattern, of in _PLACES.items()
        if value and re.fullmatch(pattern, place)
        for one in (_BETWEEN_NETWORKS.split(str(value)) if of == "network" else [str(value)])
        if one
    ]
    needed = ["objective", "network", "dataset"]
    needed += ["certification procedure"] * (kind == "certification")
    return [*found, *((of, "unknown") for of in needed if of not in dict(found))]


def reasons(places: Iterable[str]) -> dict[str, list[str]]:
    """Why to cite what, by key, for the logs that files and folders are; UserError where a file
    cannot be read, or there is none. Warns of logs in folders that cannot be read.
    """
    made: dict[tuple[str, str], Path] = {}
    for name in places:
        place = Path(name)
        if not name or not place.exists():
            raise UserError(f"'{name}' is no file and no folder: name logs")
        files = sorted(place.rglob("*")) if place.is_dir() else [place]
        logs = [path for path in files if kind_of_log(path)]
        if not logs:
            raise UserError(
                f"{place} is no log of certify, predict, attack, sets or train, nor holds one"
            )
        for path in logs:
            try:
                made |= {one: made.get(one, path) for one in components(path)}
            except UserError as error:
                if place.is_file():
                    raise
                warn(f"{error}; it is left out")
    found: dict[str, list[str]] = {}
    for (kind, name), path in sorted(made.items(), key=lambda one: [*CREDITS].index(one[0][0])):
        for key in keys_of(kind, name):
            # BibTeX takes each @ for the start of an entry.
            why = f"{kind} {escape(name, 40)} of {escape(str(path))}".replace("@", " at ")
            found.setdefault(key, []).append(why)
    return found


def _cite(parser: Parser, options: Options, command: Sequence[str]) -> None:
    spec = CiteSpec(**given_settings(CiteSpec, options))
    found = reasons(spec.logs)
    if unknown := found.pop(_UNKNOWN, []):
        warn(f"nothing tells what to cite for: {', '.join(unknown)}")
    entries = Path(__file__).with_name("references.bib").read_text(encoding="utf-8").split("\n\n")
    by_key = {entry.partition("{")[2].partition(",")[0]: entry.strip() for entry in entries}
    parts = [
        "".join(f"% why: {one}\n" for one in why) + by_key.get(key, f"% {key}") + "\n"
        for key, why in found.items()
    ]
    text = rf"\cite{{{','.join(found)}}}" + "\n" if spec.keys else "\n".join(parts)
    if spec.output is None:
        print(text, end="")
    else:
        refuse_to_replace(spec.output, "output of cite", b"% why: ", rb"\cite{")
        write_text(spec.output, text)


make_parser = partial(
    Parser,
    prog="cite",
    kinds=[CiteSpec],
    epilog=_EXAMPLES,
    description="Print the BibTeX entries of what made logs: certification procedure, training "
    "objective, attack, network, data, ..., each below comments that say why it is there.",
)
main = partial(run, "cite", make_parser, _cite)
