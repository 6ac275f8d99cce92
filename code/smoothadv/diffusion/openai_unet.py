"""The U-Nets of OpenAI's improved-diffusion and guided-diffusion, read from their files: what
Carlini et al. (2023) and their successors put before a classifier.

Nichol and Dhariwal (2021), Dhariwal and Nichol (2021). A file is a state dict, whose shapes tell
the architecture. The noise schedule and the number of attention heads are not in it: three
families of files have them by their structure (``Family``).
"""

import math
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from smoothadv.base.errors import UserError, first_line

_GROUPS, _EPSILON = 32, 1e-5
_LONGEST_PERIOD = 10_000
_NO_UNET = "it is no U-Net of OpenAI's improved-diffusion or guided-diffusion"
_OTHER = "a weight has another number of dimensions"


@dataclass(frozen=True)
class Family:
    """What the files of a family share and do not say.

    ``heads`` is the number of attention heads, or None: 64 channels a head. The schedule is
    "cosine" (Nichol and Dhariwal, eq. 17) or "linear" (betas from 0.0001 to 0.02), of ``steps``.
    """

    heads: int | None
    schedule: str
    steps: int

    @property
    def alpha_bars(self) -> torch.Tensor:
        """alpha_bar_t [steps], float64: the product of 1 - beta up to step t."""
        if self.schedule == "linear":
            return (1 - torch.linspace(1e-4, 0.02, self.steps, dtype=torch.float64)).cumprod(0)
        at = (torch.arange(self.steps + 1, dtype=torch.float64) / self.steps + 0.008) / 1.008
        signal = (at * math.pi / 2).cos() ** 2
        return (1 - (1 - signal[1:] / signal[:-1]).clamp(max=0.999)).cumprod(0)


IMPROVED = Family(4, "cosine", 4000)
"""improved-diffusion: cifar10_uncond_50M_500K.pt, cifar10_uncond_vlb_50M_500K.pt,
imagenet64_uncond_100M_1500K.pt."""
GUIDED = Family(None, "linear", 1000)
"""guided-diffusion: 256x256_diffusion_uncond.pt and LSUN's."""
WITHOUT_SCALE = Family(1, "linear", 1000)
"""improved-diffusion's LSUN files, whose embedding of the step is added."""


@dataclass(frozen=True)
class Shape:
    """The architecture of a file.

    The step is embedded in ``width`` numbers. Each resolution, from fine to coarse, has a number of
    channels in ``widths``, and ``blocks`` residual blocks, with attention where ``attention`` says
    so. ``has_scale``: the step scales and shifts the normalized features, else it is added.
    ``resamples_in_blocks``: residual blocks halve and double the resolution, else convolutions do.
    """

    channels: int
    out_channels: int
    width: int
    widths: tuple[int, ...]
    blocks: int
    attention: tuple[bool, ...]
    has_scale: bool
    resamples_in_blocks: bool

    @property
    def family(self) -> Family:
        if not self.has_scale:
            return WITHOUT_SCALE
        return GUIDED if self.resamples_in_blocks else IMPROVED


class _Float32(nn.Module):
    """Keeps its weights in float32 in every precision, as OpenAI's code does."""

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        return super()._apply(lambda tensor: tensor.to(fn(tensor).device), recurse)


class GroupNorm(_Float32, nn.GroupNorm):
    """Normalizes in float32; the result has the dtype of its input."""

    def __init__(self, channels: int) -> None:
        super().__init__(_GROUPS, channels, _EPSILON)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return super().forward(features.float()).to(features.dtype)


class Linear(_Float32, nn.Linear):
    """Of the embedding of the step, which stays in float32 under autocast, too."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        with torch.autocast(features.device.type, enabled=False):
            return super().forward(features.float())


def embedded_step(step: torch.Tensor, width: int) -> torch.Tensor:
    """Cosines and sines [B, width] of steps [B], float32, at frequencies from 1 to 1 / 10,000."""
    half = width // 2
    frequencies = torch.exp(
        -math.log(_LONGEST_PERIOD)
        * torch.arange(half, device=step.device, dtype=torch.float32)
        / half
    )
    angles = step.float()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1)


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut; the step's embedding comes between them.

    ``resampling`` is 0.5 or 2 for a block that halves the resolution by averaging, or doubles it by
    repetition, on both paths; else 1.
    """

    def __init__(
        self, before: int, after: int, embedding: int, has_scale: bool, resampling: float = 1
    ) -> None:
        super().__init__()
        self.has_scale, self.resampling = has_scale, resampling
        self.in_layers = nn.Sequential(
            GroupNorm(before), nn.SiLU(), nn.Conv2d(before, after, 3, padding=1)
        )
        self.emb_layers = nn.Sequential(nn.SiLU(), Linear(embedding, after * (1 + has_scale)))
        self.out_layers = nn.Sequential(
            GroupNorm(after), nn.SiLU(), nn.Identity(), nn.Conv2d(after, after, 3, padding=1)
        )
        self.skip_connection = nn.Identity() if before == after else nn.Conv2d(before, after, 1)

    def forward(self, features: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        hidden = self.in_layers[:2](features)
        hidden = self.in_layers[2](self._resampled(hidden))
        of_step = self.emb_layers(embedding)[:, :, None, None].to(hidden.dtype)
        if self.has_scale:
            scale, shift = of_step.chunk(2, dim=1)
            hidden = self.out_layers[1:](self.out_layers[0](hidden) * (1 + scale) + shift)
        else:
            hidden = self.out_layers(hidden + of_step)
        return self.skip_connection(self._resampled(features)) + hidden

    def _resampled(self, features: torch.Tensor) -> torch.Tensor:
        if self.resampling == 1:
            return features
        if self.resampling < 1:
            return F.avg_pool2d(features, 2)
        return F.interpolate(features, scale_factor=2.0, mode="nearest")


class Attention(nn.Module):
    """Attention among all positions, beside a shortcut. ``qkv`` is ordered by heads: [heads, 3, C /
    heads] channels.
    """

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = GroupNorm(channels)
        self.qkv = nn.Conv1d(channels, 3 * channels, 1)
        self.proj_out = nn.Conv1d(channels, channels, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        flat = features.flatten(2)  # [B, C, positions]
        parts = self.qkv(self.norm(flat)).unflatten(1, (self.heads, 3, -1)).transpose(3, 4)
        query, key, value = parts.unbind(2)  # [B, heads, positions, C / heads]
        found = F.scaled_dot_product_attention(query, key, value)
        return features + self.proj_out(found.transpose(2, 3).flatten(1, 2)).view_as(features)


def _halving(channels: int) -> nn.Module:
    return nn.Sequential(OrderedDict(op=nn.Conv2d(channels, channels, 3, stride=2, padding=1)))


def _doubling(channels: int) -> nn.Module:
    convolution = nn.Conv2d(channels, channels, 3, padding=1)
    return nn.Sequential(OrderedDict(up=nn.Upsample(scale_factor=2.0), conv=convolution))


class Stage(nn.ModuleList):
    """Blocks that follow each other; residual ones are given the embedding of the step."""

    def forward(self, features: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        for block in self:
            is_residual = isinstance(block, ResidualBlock)
            features = block(features, embedding) if is_residual else block(features)
        return features


class OpenAIUNet(nn.Module):
    """Maps images x_t [B, C, H, W] of a diffusion, and its steps [B] on a scale of 1,000, to C or
    2C channels: the noise, and what a learned variance is made of.

    The names of weights are those of OpenAI's files.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, self.family = shape, shape.family
        embedding = 4 * shape.width
        self.time_embed = nn.Sequential(
            Linear(shape.width, embedding), nn.SiLU(), Linear(embedding, embedding)
        )

        def residual(before: int, after: int, resampling: float = 1) -> nn.Module:
            return ResidualBlock(before, after, embedding, shape.has_scale, resampling)

        def attention(channels: int) -> nn.Module:
            return Attention(channels, self.family.heads or channels // 64)

        def level_of(before: int, after: int, attends: bool) -> list[nn.Module]:
            return [residual(before, after), *([attention(after)] if attends else [])]

        levels = [*zip(shape.widths, shape.attention)]
        channels = shape.widths[0]
        stages: list[Stage] = [Stage([nn.Conv2d(shape.channels, channels, 3, padding=1)])]
        kept = [channels]  # the channels of each stage, which come back as shortcuts
        for number, (width, attends) in enumerate(levels):
            for _ in range(shape.blocks):
                stages.append(Stage(level_of(channels, width, attends)))
                channels = width
                kept.append(channels)
            if number < len(levels) - 1:
                halving = (
                    residual(width, width, 0.5) if shape.resamples_in_blocks else _halving(width)
                )
                stages.append(Stage([halving]))
                kept.append(channels)
        self.input_blocks = nn.ModuleList(stages)
        self.middle_block = Stage(
            [residual(channels, channels), attention(channels), residual(channels, channels)]
        )
        stages = []
        for number, (width, attends) in reversed([*enumerate(levels)]):
            for block in range(shape.blocks + 1):
                blocks = level_of(channels + kept.pop(), width, attends)
                channels = width
                if number and block == shape.blocks:
                    doubling = (
                        residual(width, width, 2) if shape.resamples_in_blocks else _doubling(width)
                    )
                    blocks.append(doubling)
                stages.append(Stage(blocks))
        self.output_blocks = nn.ModuleList(stages)
        self.out = nn.Sequential(
            GroupNorm(channels), nn.SiLU(), nn.Conv2d(channels, shape.out_channels, 3, padding=1)
        )

    def forward(self, images: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        embedding = self.time_embed(embedded_step(steps, self.shape.width))
        features, kept = images, []
        for stage in self.input_blocks:
            features = stage(features, embedding)
            kept.append(features)
        features = self.middle_block(features, embedding)
        for stage in self.output_blocks:
            features = stage(torch.cat([features, kept.pop()], dim=1), embedding)
        return self.out(features)


def shape_of(weights: Mapping[str, torch.Tensor]) -> Shape:
    """The architecture whose state dict this is; UserError if it is none of these."""
    if "label_emb.weight" in weights:
        raise UserError("it needs the class of an image: give an unconditional model")
    # A block that halves has the names of any other. One that doubles is the second of its stage.
    doublings = {
        re.sub(r"\.[1-9]\d*\.(conv|in_layers\.2)\.weight$", "", name): name.endswith("conv.weight")
        for name in weights
        if re.fullmatch(r"output_blocks\.\d+\.[1-9]\d*\.(conv|in_layers\.2)\.weight", name)
    }
    stages = {name.split(".")[1] for name in weights if name.startswith("output_blocks.")}
    levels, per_level = len(doublings) + 1, len(stages) // (len(doublings) + 1)
    firsts = [f"input_blocks.{1 + level * per_level}" for level in range(levels)]
    try:
        widths = tuple(len(weights[f"{first}.0.out_layers.3.weight"]) for first in firsts)
        return Shape(
            channels=weights["input_blocks.0.0.weight"].shape[1],
            out_channels=len(weights["out.2.weight"]),
            width=weights["time_embed.0.weight"].shape[1],
            widths=widths,
            blocks=per_level - 1,
            attention=tuple(f"{first}.1.qkv.weight" in weights for first in firsts),
            has_scale=len(weights[f"{firsts[0]}.0.emb_layers.1.weight"]) == 2 * widths[0],
            resamples_in_blocks=not any(doublings.values()),
        )
    except (KeyError, IndexError, TypeError) as error:
        fault = f"it lacks {error.args[0]}" if isinstance(error, KeyError) else _OTHER
        raise UserError(f"{_NO_UNET}: {fault}") from error


def unet_of(weights: Mapping[str, torch.Tensor]) -> OpenAIUNet:
    """The U-Net in a state dict, in eval mode; UserError where it is none, or not whole."""
    shape = shape_of(weights)
    try:
        with torch.device("meta"):
            unet = OpenAIUNet(shape)
    except (ValueError, ArithmeticError, RuntimeError) as error:
        raise UserError(f"{_NO_UNET}: {first_line(error)}") from error
    expected = {name: tensor.shape for name, tensor in unet.state_dict().items()}
    for name in [*expected, *weights]:
        if name not in weights:
            raise UserError(f"{_NO_UNET}: it lacks {name}")
        found, wanted = weights[name].shape, expected.get(name)
        if found != wanted:
            raise UserError(
                f"{name} has the shape {list(found)}, which does not fit the rest of the "
                f"file: expected {'no such weight' if wanted is None else list(wanted)}"
            )
    unet.load_state_dict({name: one.float() for name, one in weights.items()}, assign=True)
    return unet.eval()
