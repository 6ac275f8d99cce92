"""Compares denoised smoothing with classifiers trained under noise, on digits, and writes
docs/results/denoised.md and .png.

    python benchmarks/denoised_comparison.py

One classifier per seed is trained without noise. It is certified at sigma as it is, behind a
denoiser of mean squared error, behind one of stability that starts from the former, and behind a
diffusion model in one step; beside it are Gaussian augmentation and SmoothAdv. It needs the package
diffusers.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import comparing
import numpy as np
import torch
from comparing import Job, cell, row
from matplotlib.figure import Figure
from torch.nn import functional as F

from smoothadv.datasets import describe_dataset, get_dataset
from smoothadv.diffusion.one_step import load_diffusion
from smoothadv.models.load import load_denoiser
from smoothadv.records.readers import read_certification_log

SIGMA, RADII = 0.25, (0.0, 0.25, 0.5, 0.75)
WAYS = {
    "clean": "classifier without noise",
    "mse": "+ denoiser, mean squared error",
    "stability": "+ denoiser, stability",
    "diffusion": "+ diffusion model, one step",
    "gaussian": "Gaussian augmentation",
    "smoothadv": "SmoothAdv",
}


@dataclass(frozen=True)
class Denoised(Job):
    """A denoiser to train; certified is the classifier that it needs, behind it."""

    @property
    def certified(self) -> str:
        return self.needs[0].checkpoint


class Diffusion(Denoised):
    """A small UNet2DModel of diffusers, which predicts the noise at random steps of DDPM (Ho et
    al., 2020).
    """

    def make(self) -> None:
        train_diffusion(self.model, int(self.training[-1]))


def jobs_of(seed: int, folder: Path, draws: int) -> dict[str, Job]:
    """The job of each way, and of a seed."""
    found: dict[str, Job] = {}

    def add(
        way: str,
        words: str,
        *more: str,
        kind: type[Job] = Job,
        needs: tuple[Job, ...] = (),
    ) -> None:
        name = f"{way}_n_{draws}_seed_{seed}"
        how = ("--N", str(draws))
        arch = "digits_resnet8" if kind is Job else "digits_dncnn"
        if kind is not Job:
            made = f"{folder}/models/{name}"
            denoiser = f"diffusers:{made}" if kind is Diffusion else f"{made}/checkpoint.pth.tar"
            how += ("--timestep", "nearest") if kind is Diffusion else ()
            how += ("--denoiser", denoiser)
        training = (*words.split(), *more, "--seed", str(seed))
        found[way] = kind(folder, name, SIGMA, training, how, "digits", arch, needs)

    add("clean", "train --noise 0 --epochs 30 --lr-step-size 10")
    add("gaussian", f"train --noise {SIGMA} --epochs 30 --lr-step-size 10")
    attack = "--attack PGD --epsilon 0.5 --num-steps 4 --num-noise-vec 2"
    add("smoothadv", f"train_pgd --noise {SIGMA} {attack} --epochs 30 --lr-step-size 12")
    clean = found["clean"]
    words = f"train_denoiser --noise {SIGMA}"
    behind = ("--classifier", clean.checkpoint)
    options = "--recipe denoiser --epochs 60 --lr-step-size 20"
    add("mse", f"{words} {options}", *behind, kind=Denoised, needs=(clean,))
    mse = found["mse"]
    options = "--objective stability --optimizer adamw --lr 0.0003 --epochs 30 --lr-step-size 15"
    behind += ("--pretrained-model", mse.checkpoint)
    add("stability", f"{words} {options}", *behind, kind=Denoised, needs=(clean, mse))
    add("diffusion", "", kind=Diffusion, needs=(clean,))
    return found


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
    resampled = comparing.resampled(images)
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
        cells = [cell(100.0 * (found >= radius).mean(0), resampled, 1) for radius in RADII]
        gain = 100 * ((found >= 0.25).mean(0) - (radii["clean"] >= 0.25).mean(0))
        cells.append("" if way == "clean" else cell(gain, resampled, 1, "+"))
        lines.append(row([WAYS[way], *cells]))
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
    for way, job in jobs.items():
        if isinstance(job, Denoised):
            load = load_denoiser
            more = (description,)
            if way == "diffusion":
                load = load_diffusion
                more = (description.image_shape, SIGMA, "nearest")
            network = load(job.certifying[-1], *more)[0]
            name = WAYS[way][2:].replace(", ", "\n").replace("denoiser", "denoised")
            rows.append((name, network(noisy), job))
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
    parser = comparing.parser_of(__doc__, "denoised_comparison", "results/denoised.md")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(comparing.SEEDS))
    parser.add_argument("--draws", type=int, default=comparing.DRAWS, help="n of the certificates")
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=list(WAYS), help="all unless asked otherwise"
    )
    options = parser.parse_args()
    folder = options.folder.resolve()
    by_seed = [jobs_of(seed, folder, options.draws) for seed in options.seeds]
    jobs = {way: [each[way] for each in by_seed] for way in options.ways}
    comparing.run_all(sum(jobs.values(), []), options.processes, "training and certifying")
    text = table(comparing.stacked_radii(jobs), options.draws)
    text += "\n\n![images, noisy and denoised, with their certificates](denoised.png)"
    comparing.write_between(options.page, text, "denoised comparison")
    picture = draw({way: group[0] for way, group in jobs.items()})
    picture.savefig(options.page.parent / "denoised.png", dpi=120)
    print(text)


if __name__ == "__main__":
    main()
