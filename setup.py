"""Installs the package under code/ and the console command `smoothadv`."""

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


setup(
    name="smoothadv",
    version=version(),
    description="Adversarially trained smoothed classifiers with provable l2 robustness",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="MIT",
    author="smoothadv contributors",
    keywords="randomized smoothing, certified robustness, adversarial training, adversarial "
    "examples, PyTorch",
    python_requires=">=3.10",
    package_dir={"": "code"},
    packages=find_packages("code"),
    package_data={
        "smoothadv": ["py.typed", "recipes/*.txt", "datasets/sources/*.txt"],
        "smoothadv.analysis": ["*.jinja"],
        "smoothadv.cards": ["*.jinja"],
        "smoothadv.cite": ["*.bib"],
    },
    install_requires=requirements(),
    extras_require={
        **OPTIONAL,
        "test": [
            *["pytest>=7.4", "pytest-timeout>=2.2", "pytest-xdist>=3.7", "hypothesis>=6.90"],
            *["pytest-random-order>=1.2", "timm>=1.0.10"],
            *["mypy>=1.18,<2.5", "ruff>=0.15,<0.18", "pyyaml>=6.0"],
            *(requirement for requirements in OPTIONAL.values() for requirement in requirements),
        ],
    },
    cmdclass={"build_py": BuildWithGrids},
    entry_points={"console_scripts": ["smoothadv=smoothadv.cli:main"]},
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
