"""Compares denoised smoothing with classifiers trained under noise, on digits, and writes
docs/results/denoised.md and .png.

    python benchmarks/denoised_comparison.py

One classifier per seed is trained without noise. It is certified at sigma as it is, behind a
denoiser of mean squared error, behind one of stability that starts from the former, and behind a
diffusion model in one step; beside it are Gaussian augmentation and SmoothAdv. The script runs the
commands that a user would type, several at a time, and continues where it was interrupted. It needs
the package diffusers.
"""

from __future__ import annotations

import argparse
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import digits_comparison as digits
import numpy as np
import torch
from matplotlib.figure import Figure
from torch.nn import functional as F

from smoothadv.architectures.diffusion import load_diffusion
from smoothadv.datasets import describe_dataset, get_dataset
from smoothadv.models.load import load_denoiser
from smoothadv.records.readers import read_certification_log

SIGMA, RADII, DRAWS = 0.25, (0.0, 0.25, 0.5, 0.75), 10_000
WAYS = {
    "clean": "classifier without noise",
    "mse": "+ denoiser, mean squared error",
    "stability": "+ denoiser, stability",
    "diffusion": "+ diffusion model, one step",
    "gaussian": "Gaussian augmentation",
    "smoothadv": "SmoothAdv",
}
_DENOISED = ("mse", "stability", "diffusion")
_OPTIONS = {
    **dict.fromkeys(("clean", "gaussian"), "--epochs 30 --lr-step-size 10"),
    "mse": "--recipe denoiser --epochs 60 --lr-step-size 20",
    "stability": "--objective stability --optimizer adamw --lr 0.0003 --epochs 30 --lr-step-size "
    "15",
    "smoothadv": "--attack PGD --epsilon 0.5 --num-steps 4 --num-noise-vec 2 --epochs 30 "
    "--lr-step-size 12",
}


@dataclass(frozen=True)
class Job:
    """One way and one seed: a log, and the models that it needs."""

    way: str
    seed: int
    folder: Path
    draws: int = DRAWS

    @property
    def log(self) -> Path:
        return self.folder / "logs" / f"{self.way}_n_{self.draws}_seed_{self.seed}.tsv"

    def model(self, way: str) -> Path:
        return self.folder / "models" / f"{way}_seed_{self.seed}"

    def checkpoint(self, way: str) -> str:
        return str(self.model(way) / "checkpoint.pth.tar")

    @property
    def denoiser(self) -> str:
        return (
            f"diffusers:{self.model(self.way)}"
            if self.way == "diffusion"
            else self.checkpoint(self.way)
        )

    def train(self, way: str) -> None:
        """Make a model, and those that it starts from, unless it is there."""
        model, noise = self.model(way), "0" if way == "clean" else str(SIGMA)
        if (model / "done").exists():
            return
        if way == "diffusion":
            train_diffusion(model, self.seed)
        else:
            command = {
                "mse": "train_denoiser",
                "stability": "train_denoiser",
                "smoothadv": "train_pgd",
            }.get(way, "train")
            arch = "digits_dncnn" if way in _DENOISED else "digits_resnet8"
            words = [
                "digits",
                arch,
                str(model),
                "--noise",
                noise,
                "--seed",
                str(self.seed),
                *_OPTIONS[way].split(),
            ]
            if way in _DENOISED:
                words += ["--classifier", self.checkpoint("clean")]
            if way == "stability":
                self.train("mse")
                words += ["--pretrained-model", self.checkpoint("mse")]
            digits.call(command, *words, "--resume")
        (model / "done").touch()

    def run(self) -> None:
        """Train what is missing and certify all test images, unless the log is complete."""
        if self.log.exists() and len(read_certification_log(self.log)) == len(
            get_dataset("digits", "test")
        ):
            return
        classifier = "clean" if self.way in _DENOISED else self.way
        for way in (classifier, self.way):
            self.train(way)
        words = [
            "digits",
            self.checkpoint(classifier),
            str(SIGMA),
            str(self.log),
            "--N",
            str(self.draws),
        ]
        digits.call(
            "certify", *words, *(["--denoiser", self.denoiser] if self.way in _DENOISED else [])
        )


def train_diffusion(folder: Path, seed: int, updates: int = 3000) -> None:
    """Train a small UNet2DModel to predict the noise at random steps of DDPM (Ho et al., 2020),
    with diffusers.
    """
    from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    images = get_dataset("digits", "train")
    pixels = 2 * torch.stack([images[index][0] for index in range(len(images))]) - 1
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    sizes = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}
    unet = UNet2DModel(sample_size=8, in_channels=1, out_channels=1, **blocks, **sizes)
    schedule, optimizer = DDPMScheduler(), torch.optim.AdamW(unet.parameters(), 0.002)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.002, updates)
    for _ in range(updates):
        clean = pixels[torch.randint(len(pixels), (64,))]
        noise, steps = torch.randn_like(clean), torch.randint(len(schedule.betas), (64,))
        loss = F.mse_loss(unet(schedule.add_noise(clean, noise, steps), steps).sample, noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rates.step()
    shutil.rmtree(folder, ignore_errors=True)
    DDPMPipeline(unet.eval(), schedule).save_pretrained(folder)


def table(radii: dict[str, np.ndarray], draws: int) -> str:
    """Certified accuracies, and their differences from the classifier alone; ``radii`` are [seeds,
    images].
    """
    seeds, images = radii["clean"].shape
    resampled = np.random.default_rng(0).integers(images, size=(digits.RESAMPLES, images))
    lines = [
        f"sigma = {SIGMA}, {images} test images, n = {draws:,}, {seeds} seed{'s' * (seeds > 1)}, "
        "in percent:",
        "",
        "| base classifier | "
        + " | ".join(f"{radius:.2f}" for radius in RADII)
        + " | against the classifier alone at 0.25 |",
        "|---|" + "---:|" * (len(RADII) + 1),
    ]
    for way, found in radii.items():
        cells = [digits.cell((found >= radius).mean(0), resampled, 100, 1) for radius in RADII]
        gain = 100 * ((found >= 0.25).mean(0) - (radii["clean"] >= 0.25).mean(0))
        low, high = digits.interval(gain, resampled)
        cells.append("" if way == "clean" else f"{gain.mean():+.1f} [{low:+.1f}, {high:+.1f}]")
        lines.append("| " + " | ".join([WAYS[way], *cells]) + " |")
    return "\n".join(lines)


@torch.inference_mode()
def draw(jobs: dict[str, Job], columns: int = 9) -> Figure:
    """Test images, noisy and denoised; below each the class that is certified there, and its
    radius.
    """
    test, description = get_dataset("digits", "test"), describe_dataset("digits")
    images = torch.stack([test[index][0] for index in range(columns)])
    noisy = images + SIGMA * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    rows = [("image", images, None), (f"noise {SIGMA}", noisy, jobs["clean"])]
    for way in (way for way in _DENOISED if way in jobs):
        network = (
            load_diffusion(jobs[way].denoiser, description.image_shape, SIGMA)
            if way == "diffusion"
            else load_denoiser(jobs[way].denoiser, description)
        )[0]
        rows.append(
            (
                WAYS[way][2:].replace(", ", "\n").replace("denoiser", "denoised"),
                network(noisy),
                jobs[way],
            )
        )
    figure = Figure(figsize=(1.1 * columns + 1.3, 1.45 * len(rows)), layout="constrained")
    for line, (title, pixels, job) in zip(figure.subplots(len(rows), columns), rows):
        line[0].set_ylabel(title, rotation=0, ha="right", va="center", fontsize=9)
        log = None if job is None else read_certification_log(job.log).set_index("idx")
        for index, axes in enumerate(line):
            axes.imshow(pixels[index, 0], cmap="gray", vmin=0, vmax=1)
            axes.set(xticks=[], yticks=[])
            label = test[index][1]
            if log is None:
                axes.set_xlabel(f"class {label}", fontsize=8)
                continue
            found, radius = int(log.predict[index]), float(log.radius[index])
            text = "abstains" if found < 0 else f"{found} within {np.floor(100 * radius) / 100:.2f}"
            axes.set_xlabel(text, fontsize=8, color="black" if found == label else "C3")
    return figure


def main() -> None:
    """Train, certify, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, default=Path("logs/denoised_comparison"), help="for models and logs"
    )
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, help="jobs at a time, one thread each"
    )
    parser.add_argument(
        "--page", type=Path, default=digits.CODE.parent / "docs/results/denoised.md"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--draws", type=int, default=DRAWS, help="n of the certificates")
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=list(WAYS), help="all unless asked otherwise"
    )
    options = parser.parse_args()
    folder = options.folder.resolve()
    jobs = {
        way: [Job(way, seed, folder, options.draws) for seed in options.seeds]
        for way in options.ways
    }
    # By stages, so that no two jobs make the same model.
    for stage in (("clean", "gaussian", "smoothadv"), ("mse", "diffusion"), ("stability",)):
        some = [job for way in stage for job in jobs.get(way, [])]
        digits.run_all(some, options.processes, ", ".join(stage))
    radii = {
        way: np.stack([digits.certified_radii(job) for job in group]) for way, group in jobs.items()
    }
    text = (
        table(radii, options.draws)
        + "\n\n![images, noisy and denoised, with their certificates](denoised.png)"
    )
    digits.write_between(options.page, text, "denoised comparison")
    draw({way: group[0] for way, group in jobs.items()}).savefig(
        options.page.parent / "denoised.png", dpi=120
    )
    print(text)


if __name__ == "__main__":
    main()
