"""A cascade and a router of the same two classifiers, and a log of each."""

from pathlib import Path

import pytest
import torch

from smoothadv.architectures.libraries import LIBRARIES, LibraryNetwork
from support.commands import succeed
from support.staged import NUMBERS, write_stages


class Brightness(torch.nn.Module):
    """Two classes of images: bright ones and dark ones."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        score = 40 * (images.flatten(1).mean(1, keepdim=True) - 0.31)
        return torch.cat([score, -score], dim=1)


@LIBRARIES.register("bright")
def _bright(location: str, pretrained: bool, images: object) -> LibraryNetwork:
    return LibraryNetwork(Brightness(), "1")


@pytest.fixture(scope="session")
def stages(checkpoints) -> list[tuple[Path, float]]:
    return [(checkpoints["PGD"], 0.25), (checkpoints["gaussian"], 0.12)]


@pytest.fixture(scope="session")
def files(stages, tmp_path_factory) -> dict[str, Path]:
    """By what they are; the router sends bright digits to the first stage."""
    folder = tmp_path_factory.mktemp("stages")
    router = "bright:of-tests", 0.2
    return {
        "cascade": write_stages(folder / "cascade.toml", stages, 0.7),
        "router": write_stages(folder / "router.toml", stages, router=router),
    }


@pytest.fixture(scope="session")
def logs(files) -> dict[str, Path]:
    """Certificates of 30 digits by each."""
    logs = {kind: path.with_suffix(".tsv") for kind, path in files.items()}
    for kind, log in logs.items():
        succeed("certify", "digits", files[kind], "stages", log, *NUMBERS)
    return logs


@pytest.fixture
def cascade(files) -> Path:
    return files["cascade"]


@pytest.fixture
def router(files) -> Path:
    return files["router"]


@pytest.fixture
def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    """Twelve images [12, 1, 2, 2] of which the first pixel says the class, 0 or 1; and these."""
    grey = torch.linspace(0.1, 0.9, 12)
    images = torch.full((12, 1, 2, 2), 0.5)
    images[:, 0, 0, 0] = grey
    return images, (grey > 0.5).long()
