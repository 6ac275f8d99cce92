"""What strangers read of this clone: programs in the documentation run as they stand, hubconf.py is
as torch.hub reads it, and codemeta.json repeats other files.
"""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from smoothadv import SmoothedModule
from smoothadv.checkpoints import load_classifier
from smoothadv.version import __version__
from support.commands import CODE
from support.warm import FORGETTING

DOCS = CODE.parent / "docs"


def program(text: str) -> str:
    """All Python examples of a page, one after the other."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))


def run_program(warm, source: str, folder: Path):
    """Every warning is an error."""
    strict = f"import warnings\nwarnings.simplefilter('error')\n{source}"
    return warm.run([sys.executable, "-c", strict], folder)


PROGRAMS = {
    "extending": "SmoothedAttack(",
    "python": "smoothadv.falsify(",
    "model_to_certify": "smoothadv.certify(",
    "new_objective": "smoothadv.train(",
    "votes": "smoothadv.predict_votes(",
}


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_examples_of_pages_are_programs_that_run_in_one_folder(warm, times, tmp_path):
    """Again and again: each continues what it made, and nothing of another page."""
    for page, word in [*PROGRAMS.items()] * times:
        source = program((DOCS / f"{page}.md").read_text())
        assert source.count("import") > 3 and word in source
        done = run_program(warm, source, tmp_path)
        assert (done.returncode, done.stderr) == (0, ""), (page, done.stderr)


def test_program_of_the_readme_runs_on_the_model_of_the_quickstart(warm, checkpoints, tmp_path):
    place = tmp_path / "models/quickstart/smoothadv/checkpoint.pth.tar"
    place.parent.mkdir(parents=True)
    place.symlink_to(checkpoints["PGD"])
    done = run_program(warm, program((CODE.parent / "README.md").read_text()), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "radius" in done.stdout and len(done.stdout.splitlines()) == 7


PAGES = ["Dockerfile", "docs/install.md", "CONTRIBUTING.md"]


@pytest.mark.parametrize(
    "name", [*PAGES, ".github/workflows/tests.yml", ".github/workflows/release.yml"]
)
def test_files_that_a_setup_names_are_there(repository, name):
    text = (repository / name).read_text()
    is_workflow = name.endswith(".yml")
    jobs = (
        pytest.importorskip("yaml", reason="PyYAML is not installed").safe_load(text)["jobs"]
        if is_workflow
        else {}
    )
    assert all("uses" in job or {"runs-on", "steps"} <= job.keys() for job in jobs.values())
    named = re.findall(
        r"(?<![\w/.-])(?:\./)?((?:scripts|\.ci|\.github|code)/[\w./-]*\w|requirements\.\w+)", text
    )
    assert named and [one for one in named if not (repository / one).exists()] == []


def test_site_lists_every_page():
    listed = re.findall(r": ([\w/]+)\.md$", (DOCS.parent / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md")}
    assert pages <= set(listed)
    assert {"index", "tour"} <= set(listed) and len(listed) == len(set(listed))


def test_reference_has_the_names_that_pages_import():
    pages = "\n".join(
        (DOCS / f"{name}.md").read_text() for name in ("python", "extending", "plugins")
    )
    lists = re.findall(r"^ *from smoothadv\S* import (.+)$", pages, re.MULTILINE)
    names = {name.strip() for names in lists for name in names.split(",")}
    assert (
        len(names) > 20 and names - set(re.findall(r"\w+", (DOCS / "api.md").read_text())) == set()
    )


@pytest.mark.slow
def test_notebook_runs_from_top_to_bottom(warm, tmp_path):
    """Its code cells, as one program; where smoothadv can be imported, nothing is installed."""
    cells = json.loads((DOCS / "tour.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in cells), "outputs are not kept"
    done = run_program(warm, "\n".join(code), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "95%" in done.stdout and "flipped" in done.stdout
    assert "<html" in (tmp_path / "logs" / "tour_report" / "report.html").read_text()


def test_code_on_pages_fits_beside_the_contents():
    """The site shows 88 columns at a width of 1280 pixels; a path of a file may be longer."""
    for page in [CODE.parent / "README.md", *DOCS.rglob("*.md")]:
        blocks = re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
        lines = [line for block in blocks for line in block.splitlines()]
        assert [line for line in lines if len(line) > 88] == [], page


IMAGES = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def hub(repository, monkeypatch):
    """Loads an entry point of this clone."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def load(name: str, *arguments: object, **options: object) -> torch.nn.Module:
        return torch.hub.load(str(repository), name, *arguments, source="local", **options)

    return load


def test_entry_points_are_its_functions_and_have_help(repository, monkeypatch):
    """torch.hub lists whatever can be called and has no underscore before its name."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    names = runpy.run_path(str(repository / "hubconf.py"))
    listed = {name for name, one in names.items() if callable(one) and name[0] != "_"}
    assert listed == {"classifier", "network", "smoothed"}
    assert all(names[name].__doc__ for name in listed)


def test_classifier_and_its_smoothed_form_are_those_of_the_package(hub, checkpoints):
    path = str(checkpoints["PGD"])
    own = load_classifier(path, "digits")
    assert torch.equal(hub("classifier", path, "digits")(IMAGES), own(IMAGES))
    found = hub("smoothed", path, "digits", sigma=0.25, m=3)(IMAGES)
    assert torch.equal(found, SmoothedModule(own, 0.25, 3)(IMAGES))


def test_network_fits_its_dataset(hub):
    assert hub("network", "cifar_resnet20", "cifar10")(torch.rand(2, 3, 32, 32)).shape == (2, 10)


def test_clone_need_not_be_installed(warm, repository, checkpoints, tmp_path):
    """In a process that does not know the package otherwise."""
    program = (
        f"{FORGETTING}\n"
        "import torch\n"
        "model = torch.hub.load(sys.argv[1], 'classifier', sys.argv[2], 'digits', source='local')\n"
        "import smoothadv\n"
        "print(len(model(torch.rand(2, 1, 8, 8))), smoothadv.__file__)\n"
    )
    command = [sys.executable, "-c", program, str(repository), str(checkpoints["PGD"])]
    done = warm.run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2", str(repository / "code/smoothadv/__init__.py")]


def test_codemeta_repeats_what_other_files_say(repository):
    said = json.loads((repository / "codemeta.json").read_text())
    setup = (repository / "setup.py").read_text()
    assert said["version"] == __version__
    assert f'description="{said["description"]}"' in setup
    assert said["license"].endswith(re.search(r'license="(\w+)"', setup)[1])
    lines = (repository / "requirements.txt").read_text().splitlines()
    listed = [line.partition(";")[0].strip() for line in lines if line and line[0] != "#"]
    assert said["softwareRequirements"] == listed
    cited = (repository / "CITATION.cff").read_text()
    publications = said["referencePublication"]
    assert len(publications) == 2
    assert all(one["name"] in cited and one["url"] in cited for one in publications)
