"""hubconf.py, as torch.hub reads it in a clone; and codemeta.json, which repeats other files."""

import json
import re
import runpy
import sys

import pytest
import torch

from smoothadv import SmoothedModule
from smoothadv.checkpoints import load_classifier
from smoothadv.version import __version__
from support.commands import run_process

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


def test_clone_need_not_be_installed(repository, checkpoints, tmp_path):
    """In a process that does not know the package otherwise."""
    program = (
        "import sys, torch\n"
        "sys.path = [one for one in sys.path if not one.rstrip('/').endswith('code')]\n"
        "model = torch.hub.load(sys.argv[1], 'classifier', sys.argv[2], 'digits', source='local')\n"
        "import smoothadv\n"
        "print(len(model(torch.rand(2, 1, 8, 8))), smoothadv.__file__)\n"
    )
    command = [sys.executable, "-c", program, str(repository), str(checkpoints["PGD"])]
    done = run_process(command, tmp_path)
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
