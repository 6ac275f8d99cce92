"""One-step denoising by a diffusion model (Carlini et al., 2023): a UNet2DModel of diffusers, in a
folder.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from smoothadv.base.errors import UserError, first_line, optional_module, warn
from smoothadv.base.files import digest, file_digest

PREFIX = "diffusers:"
_KINDS = ("epsilon", "v_prediction", "sample")
_NEAR = 0.05


class OneStepDenoiser(nn.Module):
    """Maps x + noise, x in [0, 1] and noise of standard deviation sigma, [B, C, H, W], to an
    estimate of x in [0, 1].

    Carlini et al. (2023), algorithm 1. A diffusion model knows images 2 x - 1 in [-1, 1], at step t
    scaled by sqrt(a) and with noise of variance 1 - a, a = alpha_bar_t. So noise of sigma on [0, 1]
    is 2 sigma on [-1, 1] and

        x_t = sqrt(a) (2 (x + noise) - 1)  has the noise of step t where (1 - a) / a = (2 sigma)^2.

    ``alpha_bars`` [T] has alpha_bar_t of all steps. ``unet`` maps x_t and t to what ``prediction``
    names: the "epsilon" with x_t = sqrt(a) x_0 + sqrt(1 - a) epsilon, "v_prediction",
    sqrt(a) epsilon - sqrt(1 - a) x_0 (Salimans and Ho, 2022), or "sample", x_0. The estimate of x_0
    is clipped to [-1, 1]. No noise is added: that of the smoothed classifier takes the place of the
    diffusion's.
    """

    def __init__(
        self, unet: nn.Module, alpha_bars: torch.Tensor, sigma: float, prediction: str = "epsilon"
    ) -> None:
        super().__init__()
        self.unet, self.prediction = unet, prediction
        # The step whose noise is nearest to sigma.
        self.timestep = int((noise_of(alpha_bars) - sigma).abs().argmin())
        self.alpha_bar = float(alpha_bars[self.timestep])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        signal, noise = math.sqrt(self.alpha_bar), math.sqrt(1 - self.alpha_bar)
        noisy = signal * (2 * images - 1)
        output = self.unet(noisy, self.timestep)
        output = getattr(output, "sample", output)[
            :, : images.shape[1]
        ]  # a learned variance may follow
        if self.prediction == "epsilon":
            output = (noisy - noise * output) / signal
        elif self.prediction == "v_prediction":
            output = signal * noisy - noise * output
        return (output.clamp(-1, 1) + 1) / 2


def noise_of(alpha_bars: torch.Tensor) -> torch.Tensor:
    """The standard deviation, on images in [0, 1], of the noise at each step: sqrt((1 - a) / a) /
    2.
    """
    alpha_bars = alpha_bars.double()
    return ((1 - alpha_bars) / alpha_bars).sqrt() / 2


def load_diffusion(
    name: str, image_shape: tuple[int, int, int], sigma: float
) -> tuple[nn.Module, dict[str, Any]]:
    """The denoiser for noise of sigma in a folder that diffusers saved, diffusers:PATH, and what a
    log records of it.

    The folder is that of a pipeline, with unet/ and scheduler/ or with the files of both, or that
    of a UNet2DModel alone, of which the usual schedule (1,000 betas from 0.0001 to 0.02; epsilon)
    is assumed. UserError for others.
    """
    diffusers = optional_module(
        "diffusers",
        f"{PREFIX}PATH needs the package diffusers: pip install 'smoothadv[diffusers]'",
    )
    folder = Path(name.removeprefix(PREFIX)).expanduser()
    part = folder / "unet" if (folder / "unet").is_dir() else folder
    if not (part / "config.json").is_file():
        raise UserError(
            f"--denoiser {name}: {part} has no config.json, as a UNet2DModel saved by diffusers has"
        )
    scheduler = folder / "scheduler" if (folder / "scheduler").is_dir() else folder
    try:
        unet = diffusers.UNet2DModel.from_pretrained(
            part, local_files_only=True, use_safetensors=True, low_cpu_mem_usage=False
        )
        if (scheduler / "scheduler_config.json").is_file():
            schedule = diffusers.DDPMScheduler.from_pretrained(scheduler, local_files_only=True)
        else:
            warn(
                f"{folder} has no scheduler_config.json: 1,000 steps with betas from 0.0001 to "
                "0.02 are assumed"
            )
            schedule = diffusers.DDPMScheduler()
    except Exception as error:  # a damaged folder can raise nearly anything
        raise UserError(
            f"--denoiser {name} cannot be read by diffusers: {first_line(error)}"
        ) from error
    config, channels, kind = unet.config, image_shape[0], schedule.config.prediction_type
    if config.in_channels != channels or config.out_channels not in (channels, 2 * channels):
        raise UserError(
            f"--denoiser {name} takes images of {config.in_channels} channels and returns "
            f"{config.out_channels}; these have {channels}"
        )
    if (
        kind not in _KINDS
        or config.num_class_embeds is not None
        or config.class_embed_type is not None
    ):
        what = f"predicts {kind!r}" if kind not in _KINDS else "needs the class of an image"
        raise UserError(
            f"--denoiser {name} {what}: give an unconditional model that predicts "
            f"{', '.join(_KINDS)}"
        )
    denoiser = OneStepDenoiser(unet, schedule.alphas_cumprod, sigma, kind).eval()
    has = float(noise_of(schedule.alphas_cumprod)[denoiser.timestep])
    if abs(has - sigma) > _NEAR * sigma:
        warn(
            f"{folder} has no step with noise of {sigma:g}: the nearest, {denoiser.timestep}, has "
            f"{has:.3g}"
        )
    facts = {
        "sha256": _digest(part, scheduler),
        "arch": f"{PREFIX}UNet2DModel",
        "prediction": kind,
        "library": diffusers.__version__,
    }
    return denoiser, {**facts, "timestep": denoiser.timestep, "alpha_bar": denoiser.alpha_bar}


def _digest(*folders: Path) -> str:
    """A SHA-256, in hexadecimal, of the weights and configurations in folders."""
    files = [path for folder in dict.fromkeys(folders) for path in sorted(folder.glob("*"))]
    files = [path for path in files if path.suffix in (".json", ".safetensors")]
    return digest(f"{path.name} {file_digest(path)}\n" for path in files)
