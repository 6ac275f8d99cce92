"""Puts the package of this clone, and what tests share, on the path; keeps torch from fighting over
the cores.
"""

import functools
import gc
import os
import runpy
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import settings

# Before torch is loaded: parallel test processes of many threads each are ten times slower than of
# one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # for the tests that take several
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "code"))
# With SMOOTHADV_TEST_SEED=1, every model that a test trains is another one.
runpy.run_path(str(ROOT / "tests/support/reseeded/sitecustomize.py"))

# With SMOOTHADV_TEST_DEVICE=standin, what runs in this process computes there by default.
if DEVICE := os.environ.get("SMOOTHADV_TEST_DEVICE"):
    from support import stand_in

    stand_in.become_the_default(DEVICE)

# The same examples in each run, on machines of any speed.
settings.register_profile(
    "repeatable", deadline=None, derandomize=True, database=None, max_examples=80
)
settings.load_profile("repeatable")


def pytest_collection_finish() -> None:
    """What is there before the first test stays until the end: to look for garbage in it, each time
    that Python looks for some, takes a twentieth of the suite.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


@pytest.fixture(autouse=True)
def settings_of_torch() -> Iterator[None]:
    """What holds for the whole process: kernels compiled by PyTorch 2.4 take subnormal numbers for
    zero from then on, and commands choose a number of threads and deterministic kernels.
    """
    yield
    if torch := sys.modules.get("torch"):
        torch.set_deterministic_debug_mode("default")
        torch.backends.cudnn.deterministic = False
        torch.set_flush_denormal(False)
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(autouse=True)
def no_plugins() -> Iterator[None]:
    """No plug-in that a test loads is there in those after it, nor its folder on Python's path."""
    from support.commands import forget_plugins  # which keeps the environment as it is from here on

    path = sys.path[:]
    yield
    forget_plugins()
    sys.path[:] = path


@pytest.fixture(scope="session", autouse=True)
def quick_disk() -> Iterator[None]:
    """Waiting until the disk has a file shows no test anything; those of what is waited for replace
    it themselves.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_plugins() -> Iterator[None]:
    """Every command asks all installed distributions for plug-ins and versions, which are the same
    as long as Python's path is.
    """
    asked, asked_version = metadata.entry_points, metadata.version

    @functools.cache
    def found(path: tuple[str, ...], **wanted: str) -> metadata.EntryPoints:
        return asked(**wanted)

    @functools.cache
    def version(path: tuple[str, ...], name: str) -> str:
        return asked_version(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            metadata,
            "entry_points",
            lambda **wanted: found(tuple(map(os.path.abspath, sys.path)), **wanted),
        )
        patch.setattr(metadata, "version", lambda name: version(tuple(sys.path), name))
        yield


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def repository() -> Path:
    """The folder of this clone."""
    return ROOT


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Tables that the tests build, and the processes that they start, are never cached among this
    user's.
    """
    from smoothadv.base.files import kept_rows
    from smoothadv.statistics.error_spending import rows_of
    from support.commands import ENVIRONMENT

    rows_of.set(kept_rows)
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SMOOTHADV_CACHE", str(folder))
        patch.setitem(ENVIRONMENT, "SMOOTHADV_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Classifiers of digits, trained under noise of 0.25: the same on every machine, by the recipe
    that made each.
    """
    from support.classifiers import restore
    from support.recipes import RECIPES

    folder = tmp_path_factory.mktemp("trained")
    return {name: restore(name, folder / name) for name in RECIPES}


@pytest.fixture(scope="session")
def checkpoint(checkpoints: dict[str, Path]) -> Path:
    """The one of them that was trained without attacks."""
    return checkpoints["gaussian"]


@pytest.fixture(scope="session")
def integers(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same one as a network of integers, made by ``quantize`` with few images."""
    from support.commands import succeed
    from support.integers import SHORT

    path = tmp_path_factory.mktemp("integers") / "integers.pth.tar"
    succeed("quantize", "digits", checkpoint, 0.25, path, *SHORT)
    return path


@pytest.fixture(scope="session")
def warm(own_cache: Path) -> Iterator[object]:
    """A ``support.warm.WarmProcesses``, of all tests."""
    from support.warm import WarmProcesses

    processes = WarmProcesses()
    yield processes
    processes.close()
