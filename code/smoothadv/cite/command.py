"""cite: the BibTeX entries of what made logs, each with the components that it is for.

Logs, their manifests and the records of trainings are read, no checkpoint. No torch.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from smoothadv.analysis.facts import facts_of
from smoothadv.base.errors import UserError, escape, warn
from smoothadv.base.files import read_json, write_text
from smoothadv.base.registry import Registry
from smoothadv.base.settings import Checked, output_file, setting
from smoothadv.cli.runner import Options, Parser, given_settings, run
from smoothadv.records.logs import ARGUMENTS
from smoothadv.records.readers import kind_of_log

_EXAMPLES = """examples:
  python code/cite.py logs/pgd_0.25.tsv
  python code/cite.py logs models/pgd_0.25 -o made_with.bib
  python code/cite.py logs/pgd_0.25.tsv --keys
"""
CITATIONS: Registry[str] = Registry("citation")
"""BibTeX entries of components of plug-ins, by kind and recorded name, like "objective MyLoss"."""
_COHEN, _MORE = "cohen2019certified", "?"
_SEQUENTIAL = f"{_COHEN} horvath2022boosting chen2022input voracek2024treatment lan1983discrete"
CREDITS: dict[str, dict[str, str]] = {
    "method": {"randomized smoothing": _COHEN},
    "certification procedure": {
        **dict.fromkeys(("exact", "two-sided", "cascade", "router"), _COHEN),
        **dict.fromkeys(("adaptive", "sequential"), _SEQUENTIAL),
        **dict.fromkeys(("sequential-cascade", "sequential-router"), _SEQUENTIAL),
        "top-k": f"{_COHEN} jia2020certified",
    },
    "stages": {"cascade": "jeong2023multiscale", "router": "sun2026dual"},
    "ensemble": {"*": "horvath2022boosting"},
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
    "data policy": {"DataPolicy": "sun2025average"},
    "training": {},
    "starting weights": {"*": f"hendrycks2019using {_MORE}"},
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
        "diffusers:*": f"carlini2023certified ho2020denoising vonplaten2022diffusers {_MORE}",
    },
    "local noise": {"*": "zhang2023diffsmooth"},
    "library": {
        "integer": "jacob2018quantization lin2021integer",
        "timm": "wightman2019timm",
        "torchvision": "torchvision2016",
        "hf": "wolf2020transformers",
        "onnx": f"bai2019onnx {_MORE}",
    },
    "architecture": {
        "wide_resnet*": "zagoruyko2016wide",
        **dict.fromkeys(("resnet[-0-9]*", "*_resnet[0-9]*"), "he2016deep"),
        "lenet": "lecun1998gradient",
        "*dncnn*": "zhang2017beyond",
        "beit[_-]*": "bao2022beit",
        "vit[_-]*": "dosovitskiy2021image",
    },
    "dataset": {
        **dict.fromkeys(("cifar10", "cifar100"), "krizhevsky2009learning"),
        **dict.fromkeys(("cifar10.1", "cifar10.1-v4"), "recht2018cifar krizhevsky2009learning"),
        "cifar10-c": "hendrycks2019benchmarking krizhevsky2009learning",
        "mnist": "lecun1998gradient",
        "fashion-mnist": "xiao2017fashion",
        "svhn": "netzer2011reading",
        "digits": "alpaydin1998optical pedregosa2011scikit",
        "imagenet": "russakovsky2015imagenet",
        "imagenet32": "chrabaszcz2017downsampled russakovsky2015imagenet",
        "tiny-imagenet": "le2015tiny russakovsky2015imagenet",
        "hf-dataset": f"lhoest2021datasets {_MORE}",
        **dict.fromkeys(("imagefolder", "npz"), _MORE),
    },
    "software": {"smoothadv": "smoothadv"},
}
"""By kind and name, as records have it or as a pattern: keys of ``references.bib``, in the order of
the output. "" is nothing to cite; "?", and what is not here, is what no record tells.
"""
_PLACES = {
    "*.denoiser.arch": "denoiser",
    "*.behind.arch": "denoiser",
    "*.arch": "architecture",
    "*.dataset": "dataset",
    "*.objective.name": "objective",
    "*.data_policy.name": "data policy",
    "*.pretrained_sha256": "starting weights",
    "*.pseudo_labelled_fingerprint": "pseudo-labelled images",
    "*.teacher_sha256": "teacher",
    "*.lora": "low-rank adaptation",
    "*.attack.name": "attack",
    "*.attack.estimator": "gradient",
    "*.attack.estimator.name": "gradient",
    ".noise": "noise",
    ".method": "certification procedure",
    ".local_noise": "local noise",
    ".checkpoint_sha256*.logits": "ensemble",
    ".checkpoint_sha256*.probabilities": "ensemble",
}
"""Which kind of component stands where in a record, the first that fits."""
_BETWEEN_MODELS = re.compile(r" > |\+| \(mean of \w+\)")
_OF_ANY_NETWORK = "onnx", "module"
"""Libraries that do not name the architecture."""
_KEY = re.compile(r"^@\w+\{([^,\s]+)", re.MULTILINE)
_DIGEST = 64


@dataclass(frozen=True, kw_only=True)
class CiteSpec(Checked):
    """What ``cite`` is asked for: entries of what made ``logs``."""

    logs: tuple[str, ...] = setting(
        parse=str,
        flag="logs",
        metavar="LOG",
        help="log of certify, predict, attack or train, also a released one; or a folder of logs",
    )
    keys: bool = setting(False, help=r"print \cite{...} with the keys, in place of the entries")
    output: Path | None = setting(
        None, parse=output_file, flag="-o --output", metavar="FILE", help="write to FILE"
    )


def bibliography() -> dict[str, str]:
    """The BibTeX entries of this package and of plug-ins, by key."""
    own = Path(__file__).with_name("references.bib").read_text(encoding="utf-8")
    entries = re.split(r"^(?=@)", "\n".join([own, *CITATIONS.values()]), flags=re.MULTILINE)
    return {key: entry.strip() for entry in entries for key in _KEY.findall(entry)}


def keys_of(kind: str, name: str) -> list[str]:
    """The keys for a component; "?" is among them where there is more than is known."""
    if f"{kind} {name}" in CITATIONS:
        return _KEY.findall(CITATIONS[f"{kind} {name}"])
    known = (keys for pattern, keys in CREDITS[kind].items() if fnmatchcase(name, pattern))
    return next(known, _MORE).split()


def components(path: Path) -> Iterator[tuple[str, str]]:
    """What made a log: kinds in ``CREDITS`` and names, "" where nothing tells them; UserError where
    its manifest cannot be read.
    """
    kind = kind_of_log(path)
    facts = facts_of("prediction" if kind == "prediction" else "certification", path, {})
    record = _training_beside(path) if kind == "training" else facts.settings
    if not record:  # its path may tell something
        record = {name: facts.get(name) for name in ("dataset", "arch")}
        record |= {name: {"name": facts.get(name)} for name in ("objective", "attack")}
    yield "method", "randomized smoothing"
    if "sigmas" in record:
        yield "stages", "cascade" if "threshold" in record else "router"
    expected = {"objective": "training", "architecture": "architecture", "dataset": "dataset"}
    if kind == "certification":
        expected["certification procedure"] = "certification procedure"
    for place, value in _leaves(record):
        of = next((of for pattern, of in _PLACES.items() if fnmatchcase(place, pattern)), "")
        if of and value not in (None, False):
            expected.pop(of, None)
            yield from _named(of, str(value))
        elif place == ".training":  # of a member, or a stage, whose training is not recorded
            yield "training", ""
    yield from ((unknown, "") for unknown in expected.values())
    yield "software", "smoothadv"


def _training_beside(path: Path) -> dict[str, Any]:
    """What the record beside a training's log says of it; nothing where there is none."""
    try:
        return {"training": read_json(path.with_name(ARGUMENTS))["recipe"]}
    except (OSError, LookupError, TypeError, ValueError):
        return {}


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """The values in a record that hold no others, each after its place, like ".attack.name"."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _leaves(each, f"{place}.{name}")
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(each, place)
    else:
        yield place, value


def _named(kind: str, value: str) -> Iterator[tuple[str, str]]:
    """The components of a kind that a value in a record names."""
    if kind == "dataset":
        yield kind, value.partition(":")[0]
    elif kind != "architecture":
        yield kind, value[:12] if len(value) == _DIGEST else value
    else:
        for name in filter(None, _BETWEEN_MODELS.split(value)):
            library, colon, network = name.rpartition(":")
            if colon:
                yield "library", library
            if library not in _OF_ANY_NETWORK:
                yield kind, Path(network).name.lower()


def cite(spec: CiteSpec) -> str:
    """The entries, or their keys, of what made the logs of a spec; warns of what no record tells.

    UserError where a log cannot be read, or there is none.
    """
    made: dict[tuple[str, str], list[Path]] = {}
    for path in (path for named in spec.logs for path in _logs(Path(named))):
        for component in dict.fromkeys(components(path)):
            made.setdefault(component, []).append(path)
    reasons: dict[str, list[str]] = {}
    for kind in CREDITS:
        for (of, name), paths in made.items():
            for key in keys_of(of, name) if of == kind else ():
                others = f" and {len(paths) - 1:,} more" if paths[1:] else ""
                words = f"{kind} {name}".strip()
                reasons.setdefault(key, []).append(f"{words} of {escape(str(paths[0]))}{others}")
    if unknown := reasons.pop(_MORE, []):
        warn(f"no record tells what else to cite for: {', '.join(unknown)}")
    if spec.keys:
        return rf"\cite{{{','.join(reasons)}}}" + "\n"
    known = bibliography()
    parts = (
        "".join(f"% why: {reason}\n" for reason in why) + f"{known[key]}\n"
        for key, why in reasons.items()
    )
    return "\n".join(parts)


def _logs(place: Path) -> list[Path]:
    """The logs that an argument names; UserError where there is none."""
    files = sorted(place.rglob("*")) if place.is_dir() else [place]
    logs = [path for path in files if kind_of_log(path)]
    if not logs:
        raise UserError(f"{place} is no log of certify, predict, attack or train, nor holds one")
    return logs


_make_parser = partial(
    Parser,
    prog="cite",
    kinds=[CiteSpec],
    epilog=_EXAMPLES,
    description="Print the BibTeX entries of what made logs: certification procedure, training "
    "objective, attack, network, data, ..., each below a comment that says why it is there.",
)


def _cite(parser: Parser, options: Options, command: Sequence[str]) -> None:
    spec = CiteSpec(**given_settings(CiteSpec, options))
    text = cite(spec)
    if spec.output is None:
        print(text, end="")
    else:
        write_text(spec.output, text)


main = partial(run, "cite", _make_parser, _cite)
