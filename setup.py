"""Installs the package under code/ and the console command `smoothadv`.

SMOOTHADV_WHEEL=statistics makes the light distribution smoothadv-statistics of the same files: the
package smoothadv.statistics and the modules that it needs, on NumPy and SciPy alone.
"""

import ast
import os
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
OPTIONAL = {
    "tensorboard": ["tensorboard>=2.15"],
    "wandb": ["wandb>=0.18"],
    "mlflow": ["mlflow-skinny>=3.1"],
    "hub": ["huggingface_hub>=0.30", "safetensors>=0.4"],
    "attacks": [
        *["foolbox>=3.3", "torchattacks>=3.3", "adversarial-robustness-toolbox>=1.17"],
        "pyautoattack>=0.2",
    ],
    "slurm": ["submitit>=1.5"],
    "ray": ["ray>=2.40"],
    "onnx": ["onnx>=1.16", "onnxruntime>=1.17"],
    "timm": ["timm>=1.0"],
    "transformers": ["transformers>=4.45"],
    "diffusers": ["diffusers>=0.30"],
    "datasets": ["datasets>=2.20"],
}


def module_of(name: str) -> Path | None:
    """The file of a module of the package; None if there is none of this name."""
    place = HERE / "code" / name.replace(".", "/")
    files = place / "__init__.py", place.with_suffix(".py")
    return next((file for file in files if file.is_file()), None)


def needed_by_statistics() -> list[str]:
    """The modules of smoothadv.statistics and those that they need when they are imported."""
    folder = HERE / "code/smoothadv/statistics"
    waiting = {f"smoothadv.statistics.{file.stem}" for file in folder.glob("*.py")}
    found = set[str]()
    while waiting:
        name = waiting.pop().removesuffix(".__init__")
        waiting |= {name.rpartition(".")[0]} - {""} - found
        found.add(name)
        for node in ast.parse(module_of(name).read_text()).body:
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("smoothadv"):
                named = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
                waiting |= {one for one in named if module_of(one)} - found
    return sorted(found)


class BuildPart(build_py):
    """Takes of the packages only the modules that smoothadv.statistics needs."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """As setuptools does, without the other modules."""
        wanted = {str(module_of(name)) for name in needed_by_statistics()}
        found = super().find_package_modules(package, package_dir)
        return [one for one in found if str(Path(one[2]).resolve()) in wanted]


class BuildWithGrids(build_py):
    """Puts scripts/grids into the package, where an installation without a clone finds them by
    name.
    """

    def run(self) -> None:
        """As setuptools does, then the grids, but for an editable installation, which has the
        clone.
        """
        super().run()
        if not self.editable_mode:
            shutil.copytree(
                HERE / "scripts/grids", Path(self.build_lib, "smoothadv/grids"), dirs_exist_ok=True
            )


def requirements() -> list[str]:
    """The run-time dependencies: requirements.txt is their only list."""
    return [
        line
        for line in (HERE / "requirements.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]


def version() -> str:
    """The version, which code/smoothadv/version.py alone states."""
    for line in (HERE / "code" / "smoothadv" / "version.py").read_text().splitlines():
        if line.startswith("__version__"):
            return line.split('"')[1]
    raise RuntimeError("code/smoothadv/version.py states no __version__")


ABOUT = {
    "version": version(),
    "long_description_content_type": "text/markdown",
    "license": "MIT",
    "author": "smoothadv contributors",
    "python_requires": ">=3.10",
    "package_dir": {"": "code"},
}
WHOLE = {
    "name": "smoothadv",
    "description": "Adversarially trained smoothed classifiers with provable l2 robustness",
    "long_description": (HERE / "README.md").read_text(),
    "keywords": "randomized smoothing, certified robustness, adversarial training, adversarial "
    "examples, PyTorch",
    "packages": find_packages("code"),
    "package_data": {
        "smoothadv": ["py.typed", "recipes/*.txt", "datasets/*.txt"],
        "smoothadv.analysis": ["*.jinja"],
    },
    "install_requires": requirements(),
    "extras_require": {
        **OPTIONAL,
        "test": [
            *["pytest>=7.4", "pytest-timeout>=2.2", "pytest-xdist>=3.7", "hypothesis>=6.90"],
            *["pytest-random-order>=1.2", "timm>=1.0.10"],
            *["mypy>=1.18,<2.5", "ruff>=0.15,<0.18", "pyyaml>=6.0"],
            *(requirement for requirements in OPTIONAL.values() for requirement in requirements),
        ],
    },
    "cmdclass": {"build_py": BuildWithGrids},
    "entry_points": {"console_scripts": ["smoothadv=smoothadv.cli:main"]},
}
STATISTICS = {
    "name": "smoothadv-statistics",
    "description": "Certificates of randomized classifiers from their votes",
    "keywords": "randomized smoothing, certified robustness, Clopper-Pearson",
    "packages": sorted(
        {name for name in needed_by_statistics() if module_of(name).name == "__init__.py"}
    ),
    "package_data": {"smoothadv": ["py.typed"]},
    "install_requires": [one for one in requirements() if one.startswith(("numpy", "scipy"))],
    "cmdclass": {"build_py": BuildPart},
    # A build of the whole package must not be taken for one of its part.
    "options": {"build": {"build_base": "build/statistics"}},
}


def chosen() -> dict[str, object]:
    """What the environment variable SMOOTHADV_WHEEL names: the whole package, or its statistics,
    whose description is the page of docs and the guarantee.
    """
    if (name := os.environ.get("SMOOTHADV_WHEEL", "")) not in ("", "statistics"):
        raise SystemExit(f"SMOOTHADV_WHEEL is '{name}': the only part is 'statistics'")
    if not name:
        return WHOLE
    pages = [(HERE / f"docs/{page}.md").read_text() for page in ("votes", "guarantee")]
    return {**STATISTICS, "long_description": "\n".join(pages)}


setup(
    **ABOUT,
    **chosen(),
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
