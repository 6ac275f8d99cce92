"""Trains a small diffusion model on digits and writes it as OpenAI's improved-diffusion does.

    python scripts/train_diffusion.py models/digits_diffusion.pt

It takes a few minutes on one core; docs/denoised.md shows what it is for. The loss is that of Ho et
al. (2020): the squared error of the noise at random steps.
"""

import argparse
from pathlib import Path

import torch
from torch.nn import functional as F
from tqdm import trange

from smoothadv.base.files import write_atomically
from smoothadv.datasets import get_dataset
from smoothadv.diffusion.openai_unet import OpenAIUNet, Shape

SHAPE = Shape(
    channels=1,
    out_channels=1,
    width=32,
    widths=(32, 64),
    blocks=1,
    attention=(False, True),
    has_scale=True,
    resamples_in_blocks=False,
)


def train(seed: int, updates: int, batch: int = 64, rate: float = 0.002) -> OpenAIUNet:
    """The model after so many updates, with weights averaged as OpenAI's files have them."""
    torch.manual_seed(seed)
    images = get_dataset("digits", "train")
    pixels = 2 * torch.stack([images[index][0] for index in range(len(images))]) - 1
    unet = OpenAIUNet(SHAPE)
    alpha_bars = unet.family.alpha_bars.float()
    optimizer = torch.optim.AdamW(unet.parameters(), rate)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, updates)
    average = torch.optim.swa_utils.AveragedModel(
        unet, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)
    )
    for _ in trange(updates, desc="training"):
        clean = pixels[torch.randint(len(pixels), (batch,))]
        noise, steps = torch.randn_like(clean), torch.randint(len(alpha_bars), (batch,))
        a = alpha_bars[steps, None, None, None]
        noisy = a.sqrt() * clean + (1 - a).sqrt() * noise
        loss = F.mse_loss(unet(noisy, steps * (1000 / len(alpha_bars))), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rates.step()
        average.update_parameters(unet)
    return average.module


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="where to write the weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=3000)
    options = parser.parse_args()
    weights = train(options.seed, options.updates).state_dict()
    write_atomically(options.file, lambda file: torch.save(weights, file))


if __name__ == "__main__":
    main()
