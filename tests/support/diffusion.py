"""A small diffusion model of OpenAI's form."""

from pathlib import Path

import torch
from torch import nn

from smoothadv.diffusion.openai_unet import OpenAIUNet, Shape


def small_unet(folder: Path) -> Path:
    """A file of an untrained model whose prediction of the noise is small: it changes little."""
    torch.manual_seed(0)
    network = OpenAIUNet(Shape(1, 2, 32, (32, 32), 1, (False, True), True, False))
    for weight in network.out[2].parameters():
        nn.init.normal_(weight, 0, 0.02)
    torch.save(network.state_dict(), folder / "unet.pt")
    return folder / "unet.pt"
