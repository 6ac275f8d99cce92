"""The rules of the house that ruff cannot check: who may import whom, sizes, names, what an
installation requires.
"""

import ast
import functools
import graphlib
import pkgutil
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path

import pytest

from support.commands import CODE, run_process
from support.warm import FORGETTING


def modules(code: Path) -> dict[str, str]:
    """The source of every module below ``code``, by dotted name; the scripts directly in it by
    their bare name.
    """
    found = {}
    for path in sorted(code.rglob("*.py")):
        parts = path.relative_to(code).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


@functools.cache  # tests change one module at a time
def imported_names(source: str, module: str) -> set[str]:
    """The dotted names that a module's source imports, wherever it does so: in functions and for
    types alone, too.

    ``from a import b`` gives "a.b", whether b is a module or not; see ``graph``.
    """
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [] if not node.level else module.split(".")[: -node.level]
            names |= {
                ".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names
            }
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("import_module", "__import__")
        ):
            names |= {
                argument.value for argument in node.args if isinstance(argument, ast.Constant)
            }
    return names


def graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """For each module, what it imports: modules among ``sources`` by their full name, others by
    their first part.
    """
    return {
        module: {_resolved(name, sources) for name in imported_names(source, module)} - {module}
        for module, source in sources.items()
    }


def _resolved(name: str, sources: dict[str, str]) -> str:
    prefix = name
    while prefix:
        if prefix in sources:
            return prefix
        prefix = prefix.rpartition(".")[0]
    return name.partition(".")[0]


def part(module: str) -> str:
    """The part of the house that a module belongs to: "attacks" for smoothadv.attacks.pgd; "" for
    the package itself.

    A script directly in code/ is "scripts".
    """
    first, *rest = module.split(".")
    if first != "smoothadv":
        return "scripts"
    return rest[0] if rest else ""


def forbidden_imports(sources: dict[str, str]) -> list[str]:
    """Imports between parts that ``ALLOWED`` does not list; a part may import itself and a missing
    one nothing else.
    """
    edges = graph(sources)
    return [
        f"{module} imports {target}"
        for module, targets in edges.items()
        for target in sorted(targets)
        if target in edges and part(target) not in {part(module), *ALLOWED.get(part(module), set())}
    ]


def reaches(edges: dict[str, set[str]], start: str) -> set[str]:
    """Everything that importing ``start`` imports, at any distance."""
    seen: set[str] = set()
    left = [start]
    while left:
        new = edges.get(left.pop(), set()) - seen
        seen |= new
        left += new
    return seen


def cycle(sources: dict[str, str]) -> list[str]:
    """The modules of one import cycle, [] if there is none."""
    try:
        graphlib.TopologicalSorter(graph(sources)).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


REPOSITORY = CODE.parent
SOURCES = modules(CODE)
ANNEXES = {path.parent.name for path in CODE.glob("smoothadv/*/plugin.py")}
# Each room and those whose names it may use: arrows point down.
BASE = {"version", "base"}
BUILDING = {"architectures", "attacks", "datasets", "models", "noise", "voting"}
ALLOWED = {
    "version": set(),
    "base": {"version"},
    "records": BASE | {"statistics"},
    "statistics": BASE,
    "noise": BASE | {"statistics"},
    "datasets": BASE | {"noise"},
    "architectures": BASE | {"datasets"},
    "attacks": BASE | {"architectures", "noise"},
    "models": BASE | {"architectures", "datasets", "noise", "records", "statistics"},
    "checkpoints": {"models"},
    "objectives": BASE | {"attacks", "noise", "statistics"},
    "voting": BASE | {"architectures", "noise", "statistics"},
    "core": BASE | {"architectures", "noise", "statistics", "voting"},
    "smoothed_module": BASE | {"architectures", "attacks", "noise"},
    "analysis": BASE | {"records", "statistics"},
    "training": BASE | BUILDING | {"objectives", "records", "statistics"},
    "evaluation": BASE | BUILDING | {"analysis", "records", "statistics"},
    "api": BASE | BUILDING | {"evaluation", "objectives", "records", "training"},
}
ALLOWED["cli"] = set(ALLOWED)
ALLOWED |= dict.fromkeys(ANNEXES, set(ALLOWED))
ALLOWED |= {
    "": BASE | {"analysis", "api", "core", "smoothed_module", "statistics"},
    "scripts": {"cli"},
    "__main__": {"cli"},
}
WITH_TORCH = {"base.devices", "base.distributed"}
WITHOUT_TORCH = {
    *("version", "base", "records", "statistics", "analysis"),
    *("evaluation.shards", "models.name"),
    *("sweep.grid", "sweep.jobs", "sweep.stages", "sweep.engines"),
    *("sets.coverage", "sets.scores", "sets.table"),
    *("cli.options.recipes", "cli.runner"),
}
# Their functions may import torch, but importing them does not: names, requests and help texts do
# not wait for it.
LOADED_WITHOUT_TORCH = {
    "smoothadv",
    "smoothadv.cli",
    "smoothadv.cli.analyze",
    "smoothadv.cli.certify",
    "smoothadv.cli.evaluation",
    "smoothadv.cards.push",
    "smoothadv.sweep.command",
    "smoothadv.datasets",
    "smoothadv.evaluation.specs",
}
TORCH = {"torch", "torchvision"}


def torch_users(sources: dict[str, str]) -> list[str]:
    """Modules that must do without torch but import it, themselves or through others."""
    edges = graph(sources)
    return [
        module for module in sources if is_without_torch(module) and reaches(edges, module) & TORCH
    ]


def is_without_torch(module: str) -> bool:
    """Whether a module, or the part that it is in, must do without torch."""
    name = module.removeprefix("smoothadv.")
    return bool({name, name.rpartition(".")[0], part(module)} & WITHOUT_TORCH) and (
        name not in WITH_TORCH
    )


def objectives_named_by_training(sources: dict[str, str]) -> set[str]:
    imported = [names for module, names in graph(sources).items() if part(module) == "training"]
    return {name for name in set().union(*imported) if name.startswith("smoothadv.objectives.")}


def with_line(module: str, line: str) -> dict[str, str]:
    """The sources with one more line in a module."""
    return {**SOURCES, module: f"{SOURCES[module]}\n{line}\n"}


def test_every_part_of_the_house_has_rules():
    assert {part(module) for module in SOURCES} <= ALLOWED.keys()


def test_imports_follow_the_picture():
    assert forbidden_imports(SOURCES) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("smoothadv.statistics.bounds", "from smoothadv.core import Smooth"),
        ("smoothadv.base.settings", "import smoothadv.records.logs"),
        ("smoothadv.statistics.exact", "from smoothadv.noise import GaussianNoise"),
        ("smoothadv.analysis.tables", "def late():\n    from smoothadv import checkpoints"),
        (
            "smoothadv.attacks.pgd",
            "if TYPE_CHECKING:\n    from smoothadv.objectives import BatchLoss",
        ),
        ("smoothadv.attacks.ddn", "from ..training import train"),
        ("smoothadv.datasets.sources.digits", "from smoothadv.cli import options"),
        (
            "smoothadv.objectives.gaussian",
            "import importlib\nimportlib.import_module('smoothadv.training')",
        ),
        ("smoothadv.core", "import certify"),
        ("smoothadv.cli.analyze", "from smoothadv.cards.card import CardSpec"),
        ("smoothadv.sweep.command", "from smoothadv.integer import spec"),
        ("train", "from smoothadv import training"),
    ],
)
def test_forbidden_import_is_noticed(module, line):
    (violation,) = forbidden_imports(with_line(module, line))
    assert violation.startswith(f"{module} imports ")


def test_no_other_part_names_an_annex():
    """Not in a text either, by which it could be imported."""
    assert {"cards", "cite", "diffusion", "integer", "sets", "sweep"} == ANNEXES
    core = {name: source for name, source in SOURCES.items() if part(name) not in ANNEXES}
    pattern = rf"smoothadv[./]({'|'.join(ANNEXES)})\b"
    assert {name for name, source in core.items() if re.search(pattern, source)} == set()
    assert re.search(pattern, 'importlib.import_module("smoothadv.integer.network")')


def test_imports_have_no_cycles():
    assert cycle(SOURCES) == []


@pytest.mark.parametrize(
    "sources",
    [
        with_line("smoothadv.attacks.geometry", "from smoothadv.attacks.pgd import PGD"),
        with_line("smoothadv.base.errors", "def late():\n    from smoothadv.training import setup"),
        {"a": "import b", "b": "import c", "c": "import a"},
    ],
    ids=["within a part", "through many", "of three"],
)
def test_cycle_is_noticed(sources):
    assert len(cycle(sources)) >= 3, "the first module is named again at the end"


def test_statistics_and_analysis_do_without_torch():
    assert torch_users(SOURCES) == []
    edges = graph(SOURCES)
    needed = [reaches(edges, module) for module in SOURCES if part(module) == "statistics"]
    others = set().union(*needed) - SOURCES.keys() - sys.stdlib_module_names - {"tomli"}
    assert others == {"numpy", "scipy", "mpmath"}, "statistics need no other library"
    base = {module for module in set().union(*needed) & SOURCES.keys() if part(module) == "base"}
    pure = {"smoothadv.base.errors", "smoothadv.base.registry", "smoothadv.base.settings"}
    assert base <= {"smoothadv.base", *pure}, "statistics read and write no file, and show no bar"


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("smoothadv.statistics.bounds", "import torch.nn.functional as F"),
        ("smoothadv.records.logs", "def late():\n    from torch import Tensor"),
        ("smoothadv.statistics.exact", "from smoothadv.noise import GaussianNoise"),
        ("smoothadv.base.registry", "import torchvision"),
    ],
)
def test_torch_is_noticed(module, line):
    assert module in torch_users(with_line(module, line))


def test_importing_statistics_and_analysis_does_not_import_torch(tmp_path):
    """As above, but for whatever the libraries do on their own."""
    names = [*filter(is_without_torch, SOURCES), *LOADED_WITHOUT_TORCH]
    program = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    done = run_process([sys.executable, "-c", program], tmp_path, PYTHONPATH=str(CODE))
    assert (done.returncode, done.stderr) == (0, "")


def test_training_names_no_objective():
    assert objectives_named_by_training(SOURCES) == set()
    sources = [source for module, source in SOURCES.items() if part(module) == "training"]
    assert len(sources) > 5 and not any("OBJECTIVES" in source for source in sources), (
        "nor looks one up"
    )
    line = "from smoothadv.objectives.gaussian import Gaussian"
    assert objectives_named_by_training(with_line("smoothadv.training.run", line)), (
        "the check would notice it"
    )


def loads(source: str) -> list[str]:
    """The calls of torch.load."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [ast.unparse(node) for node in found if ast.unparse(node.func) == "torch.load"]


def test_checkpoints_are_read_as_plain_weights():
    """Others may run code when they are read."""
    found = [
        call for source in SOURCES.values() if "torch.load" in source for call in loads(source)
    ]
    assert found and [call for call in found if "weights_only=True" not in call] == []


def dead_links(page: Path) -> list[str]:
    """Relative targets of a Markdown page's links and pictures that are not there."""
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    return [
        target for target in targets if "://" not in target and not (page.parent / target).exists()
    ]


def test_pages_link_to_what_is_there(tmp_path):
    pages = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]
    assert {page.name: links for page in pages if (links := dead_links(page))} == {}
    assert len(pages) >= 4
    (tmp_path / "page.md").write_text(
        "![plot](gone.png) [other](page.md#part) [web](https://example.org)"
    )
    assert dead_links(tmp_path / "page.md") == ["gone.png"]


def test_files_are_short():
    files = [*CODE.rglob("*.py"), *(REPOSITORY / "tests").rglob("*.py")]
    sizes = {path: len(path.read_text().splitlines()) for path in files}
    assert {path: size for path, size in sizes.items() if size > 600} == {}
    assert {
        path: size for path, size in sizes.items() if path.parent == CODE and size > 10
    } == {}, "scripts only start"


def test_code_hides_no_other_module():
    """Running code/X.py puts code/ first on the path: a file there would be imported in a module's
    place; and `code`, were it a package, in that of the standard library's.
    """
    own = {path.stem if path.suffix == ".py" else path.name for path in CODE.iterdir()}
    installed = pkgutil.iter_modules(path for path in sys.path if path.endswith("-packages"))
    others = sys.stdlib_module_names | {module.name for module in installed}
    assert {"torch", "numpy", "code"} <= others
    assert (own - {"smoothadv"}) & others == set() and "__init__" not in own


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> metadata.Distribution:
    """An installation of the wheel that this clone makes."""
    reason = "older versions need the package wheel to build one"
    pytest.importorskip("setuptools", "70.1", reason=reason)
    clone, installed = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("installed")
    for path in filter(Path.is_file, REPOSITORY.iterdir()):
        shutil.copy(path, clone)
    own = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(CODE, clone / "code", ignore=own)
    shutil.copytree(REPOSITORY / "scripts/grids", clone / "scripts/grids")
    program = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    done = run_process([sys.executable, "-c", program], clone)
    assert done.returncode == 0, done.stderr
    shutil.unpack_archive(clone / done.stdout.splitlines()[-1], installed, "zip")
    (distribution,) = metadata.distributions(path=[str(installed)])
    return distribution


def test_installation_requires_what_requirements_lists(built):
    """requirements.txt is the only list; the extras add to it."""
    lines = (REPOSITORY / "requirements.txt").read_text().splitlines()
    listed = [line for line in lines if line and line[0] != "#"]
    always = [line for line in built.requires or [] if "extra ==" not in line]
    spelled = [sorted(line.replace(" ", "") for line in lines) for lines in (always, listed)]
    assert spelled[0] == spelled[1]


def test_requirements_list_what_the_code_imports(built):
    """Directly, and not by the grace of another requirement; what is optional, as an extra."""
    not_required = {"tomllib", "_typeshed"}  # from Python 3.11 on; known to type checkers only
    imported = set().union(*graph(SOURCES).values()) - SOURCES.keys() - sys.stdlib_module_names
    distributions = {
        "sklearn": "scikit-learn",
        "PIL": "pillow",
        "typing_extensions": "typing-extensions",
        # which requires it where there can be a GPU; without it torch draws the noise
        "triton": "torch",
    }
    listed = set(
        re.findall(r"^[\w-]+", (REPOSITORY / "requirements.txt").read_text().lower(), re.MULTILINE)
    )
    optional = {
        "submitit",
        "ray",
        "onnx",
        "onnxruntime",
        "timm",
        "transformers",
        "datasets",
        "diffusers",
        "huggingface_hub",
        "safetensors",
        "wandb",
        "mlflow",
    }
    assert optional <= {re.match(r"\w+", line)[0] for line in built.requires or []}
    assert {"slurm", "ray", "onnx"} <= {*built.metadata.get_all("Provides-Extra")}
    assert {distributions.get(name, name) for name in imported - not_required} - listed <= optional


def test_installation_has_the_console_command_every_module_and_the_data(built):
    """PEP 561: without py.typed, type checkers ignore the annotations of an installed package."""
    (command,) = built.entry_points.select(group="console_scripts")
    assert (command.name, command.value) == ("smoothadv", "smoothadv.cli:main")
    assert f'__version__ = "{built.version}"\n' in SOURCES["smoothadv.version"]
    packed = {str(path) for path in built.files if path.parts[0] == "smoothadv"}
    files = [path for path in (CODE / "smoothadv").rglob("*") if "__pycache__" not in path.parts]
    names = {path.relative_to(CODE).as_posix() for path in files if path.is_file()}
    grids = {f"smoothadv/grids/{path.name}" for path in (REPOSITORY / "scripts/grids").iterdir()}
    assert packed == names | grids
    assert {"smoothadv/py.typed", "smoothadv/grids/digits-smoke.toml"} <= packed
    folders = {path.parent for path in files if path.suffix == ".py"}
    assert all((folder / "__init__.py").is_file() for folder in folders), "packages alone are found"


VOTES = """
import importlib.abc
import sys


class OnlyNumPyAndSciPy(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        known = {"numpy", "scipy", "smoothadv", *sys.stdlib_module_names}
        if name.partition(".")[0] not in known and not name.startswith("_"):
            raise ModuleNotFoundError(name, name=name)


if sys.argv[1:]:
    sys.meta_path.insert(0, OnlyNumPyAndSciPy())
import smoothadv
from smoothadv.statistics import PROCEDURES, Smoothing

for name, procedure in PROCEDURES.items():
    if "cascade" in name or "router" in name:
        continue
    further = {"radii": (0.0, 0.25)} if procedure.on_grid else {}
    further |= {"top_k": 1} if name == "top-k" else {}
    made = procedure(Smoothing(0.25, 100, 500, 0.001), **further)
    found = smoothadv.certify_votes(lambda count: [count // 20, count - count // 20], made)
    print(name, found.prediction, found.radius, found.successes, found.trials)
print(smoothadv.predict_votes(lambda count: [0, count], 100, 0.001))
"""


def test_votes_are_certified_on_numpy_and_scipy_alone(tmp_path, monkeypatch, capsys):
    """No other library can be imported there; with all of them the certificates are the same."""
    places = {"PYTHONPATH": str(CODE), "HOME": str(tmp_path)}
    light = run_process([sys.executable, "-c", VOTES, "alone"], tmp_path, **places)
    assert light.returncode == 0, light.stderr
    monkeypatch.setattr(sys, "argv", ["-c"])
    exec(VOTES, {})
    assert light.stdout == capsys.readouterr().out and len(light.stdout.splitlines()) == 6
    assert "exact 1 0.3" in light.stdout and light.stdout.endswith("[1]\n")


ALONE = f"""
{FORGETTING}
sys.path.insert(0, sys.argv[1])
import torch

import smoothadv
from smoothadv.cli import main

content = dict(arch="integer:digits_resnet8", input_layer="none", integer=dict(), recipe=dict())
content |= dict(epoch=1, state_dict=dict(mean=torch.zeros(1)))
torch.save(content, "integers.pth.tar")
tuned = "--noise 0.25 --pretrained-model integers.pth.tar --finetune-quantized --device cpu"
lines = [
    "--help",
    "list",
    "analyze --help",
    "sweep plan digits-smoke",
    "certify digits integers.pth.tar 0.25 log.tsv --device cpu",
    "train digits digits_resnet8 out " + tuned,
]
print([main(line.split()) for line in lines], hasattr(smoothadv, "card"))
"""


def test_without_annexes_only_what_they_add_is_missing(warm, tmp_path):
    package = tmp_path / "smoothadv"
    package.mkdir()
    for path in (CODE / "smoothadv").iterdir():
        if path.name not in ANNEXES:
            (package / path.name).symlink_to(path)
    done = warm.run([sys.executable, "-c", ALONE, str(tmp_path)], tmp_path)
    assert done.returncode == 0, done.stderr
    *printed, ended = done.stdout.splitlines()
    assert ended == "[0, 0, 0, 2, 1, 1] False"
    listed = {line.split()[0] for line in printed if line}
    assert {"certify", "attacks", "table"} <= listed
    assert not {"cite", "push", "quantize", "sets", "sweep", "card", "board", "grids"} & listed
    unknown, *others = re.findall("^error: (.*)", done.stderr, re.MULTILINE)
    assert unknown.startswith("unknown command 'sweep'; known: train, ")
    assert len(others) == 2 and all(
        one.startswith("checkpoint integers.pth.tar is of integers, and this") for one in others
    )
