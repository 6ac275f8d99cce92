"""One-step denoising by a diffusion model (Carlini et al., 2023): a file of OpenAI, or a folder of
the package diffusers.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from smoothadv.base.errors import UserError, first_line, optional_module, warn
from smoothadv.base.files import digest, file_digest
from smoothadv.base.settings import NEAREST, RELEASED
from smoothadv.diffusion.openai_unet import unet_of

_KINDS = ("epsilon", "v_prediction", "sample")
_NEAR = 0.05
_SCALE = 1000  # OpenAI's U-Nets know a schedule of T steps as 0 to 1,000


@dataclass(frozen=True)
class DiffusionModel:
    """A U-Net from x_t [B, C, H, W] and steps [B] to what ``prediction`` names, and alpha_bar_t [T]
    of all steps.
    """

    unet: nn.Module
    alpha_bars: torch.Tensor
    prediction: str = "epsilon"

    def step(self, sigma: float, timestep: str) -> int:
        """The step for noise of sigma on images in [0, 1]: the first from 1 on with at least that
        noise, "released"; the "nearest"; or the one whose number is given. UserError for none.
        """
        noise = noise_of(self.alpha_bars)
        if timestep == NEAREST:
            return int((noise - sigma).abs().argmin())
        enough = (noise[1:] >= sigma).nonzero()
        if timestep == RELEASED and len(enough):
            return 1 + int(enough[0])
        if timestep == RELEASED or int(timestep) >= len(noise):
            raise UserError(
                f"--timestep {timestep}: the model has steps up to {len(noise) - 1}, with noise up "
                f"to {float(noise[-1]):.4g} on images in [0, 1]"
            )
        return int(timestep)


class OneStepDenoiser(nn.Module):
    """Maps x + noise, x in [0, 1], [B, C, H, W], to an estimate of x in [0, 1].

    Carlini et al. (2023), algorithm 1. A diffusion model knows images 2 x - 1 in [-1, 1], at step t
    scaled by sqrt(a) and with noise of variance 1 - a, a = alpha_bar_t. So noise of sigma on [0, 1]
    is 2 sigma on [-1, 1] and

        x_t = sqrt(a) (2 (x + noise) - 1)  has the noise of step t where (1 - a) / a = (2 sigma)^2.

    The U-Net predicts the "epsilon" with x_t = sqrt(a) x_0 + sqrt(1 - a) epsilon, "v_prediction",
    sqrt(a) epsilon - sqrt(1 - a) x_0 (Salimans and Ho, 2022), or "sample", x_0. The estimate of x_0
    is clipped to [-1, 1]. No noise is added: that of the smoothed classifier takes the place of the
    diffusion's.
    """

    def __init__(self, model: DiffusionModel, step: int) -> None:
        super().__init__()
        self.unet, self.prediction = model.unet, model.prediction
        self.alpha_bar = float(model.alpha_bars[step])
        # Not whole where T is not 1,000: OpenAI's CIFAR-10 model has 4,000 steps.
        self.given_step = step * _SCALE / len(model.alpha_bars)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        signal, noise = math.sqrt(self.alpha_bar), math.sqrt(1 - self.alpha_bar)
        noisy = signal * (2 * images - 1)
        # diffusers would make a whole number of one float.
        steps = torch.full((len(images),), self.given_step, device=images.device)
        output = self.unet(noisy, steps)
        output = getattr(output, "sample", output)
        output = output[:, : images.shape[1]]  # a learned variance may follow
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
    name: str, image_shape: tuple[int, int, int], sigma: float, timestep: str = RELEASED
) -> tuple[nn.Module, dict[str, Any]]:
    """The denoiser for noise of sigma that is called openai:FILE or diffusers:FOLDER, in eval mode,
    and what a log records of it.

    ``timestep`` is that of ``DiffusionModel.step``. Where it is "released", the record has
    ``noise_sd``, the noise of the step, which the denoiser is to get in place of sigma. UserError
    where the model cannot be had, does not fit the images or has no such step.
    """
    kind, _, place = name.partition(":")
    try:
        if not place:
            raise UserError("it names no file: write openai:FILE.pt or diffusers:FOLDER")
        read = _of_openai if kind == "openai" else _of_diffusers
        model, (takes, returns), facts = read(Path(place).expanduser())
        if takes != image_shape[0] or returns not in (takes, 2 * takes):
            raise UserError(
                f"it takes images of {takes} channels and returns {returns}; these have "
                f"{image_shape[0]}"
            )
        step = model.step(sigma, timestep)
    except UserError as error:
        raise UserError(f"--denoiser {name}: {error}") from error
    noise = float(noise_of(model.alpha_bars)[step])
    if abs(noise - sigma) > _NEAR * sigma:
        warn(f"{name}: step {step} has noise of {noise:.3g}, not of {sigma:g}")
    denoiser = OneStepDenoiser(model, step).eval()
    facts |= {"prediction": model.prediction, "timestep": step, "alpha_bar": denoiser.alpha_bar}
    return denoiser, facts | ({"noise_sd": noise} if timestep == RELEASED else {})


_Read = tuple[DiffusionModel, tuple[int, int], dict[str, Any]]
"""A model, how many channels it takes and returns, and what a log records of it."""


def _of_openai(path: Path) -> _Read:
    """The model in a file of OpenAI's; UserError where it is none."""
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can raise nearly anything
        raise UserError(f"the file cannot be read: {first_line(error)[:120]}") from error
    if not isinstance(weights, dict) or not all(
        isinstance(name, str) and torch.is_tensor(value) and value.is_floating_point()
        for name, value in weights.items()
    ):
        raise UserError("the file is no state dict of floating-point tensors, as OpenAI's are")
    unet = unet_of(weights)
    channels = unet.shape.channels, unet.shape.out_channels
    facts = {"sha256": file_digest(path), "arch": "openai:UNet"}
    return DiffusionModel(unet, unet.family.alpha_bars), channels, facts


def _of_diffusers(folder: Path) -> _Read:
    """The UNet2DModel in a folder that diffusers saved.

    The folder is that of a pipeline, with unet/ and scheduler/ or with the files of both, or that
    of a UNet2DModel alone, of which the usual schedule (1,000 betas from 0.0001 to 0.02; epsilon)
    is assumed. UserError for others.
    """
    diffusers = optional_module(
        "diffusers", "it needs the package diffusers: pip install 'smoothadv[diffusers]'"
    )
    part = folder / "unet" if (folder / "unet").is_dir() else folder
    if not (part / "config.json").is_file():
        raise UserError(f"{part} has no config.json, as a UNet2DModel saved by diffusers has")
    scheduler = folder / "scheduler" if (folder / "scheduler").is_dir() else folder
    try:
        unet = diffusers.UNet2DModel.from_pretrained(
            part, local_files_only=True, use_safetensors=True, low_cpu_mem_usage=False
        )
        if (scheduler / "scheduler_config.json").is_file():
            schedule = diffusers.DDPMScheduler.from_pretrained(scheduler, local_files_only=True)
            written = diffusers.DDPMScheduler.load_config(scheduler, local_files_only=True)
        else:
            warn(
                f"{folder} has no scheduler_config.json: 1,000 steps with betas from 0.0001 to "
                "0.02 are assumed"
            )
            schedule = diffusers.DDPMScheduler()
            written = schedule.config
    except Exception as error:  # a damaged folder can raise nearly anything
        raise UserError(f"it cannot be read by diffusers: {first_line(error)}") from error
    config, kind = unet.config, schedule.config.prediction_type
    if config.num_class_embeds is not None or config.class_embed_type is not None:
        raise UserError("it needs the class of an image: give an unconditional model")
    if "beta_schedule" not in written:
        raise UserError(
            f"its scheduler, {written.get('_class_name')}, has no betas: give a model with those "
            "of DDPM"
        )
    if (steps := len(schedule.alphas_cumprod)) != _SCALE:
        warn(
            f"{folder} has {steps:,} steps and is given them on a scale of {_SCALE:,}, like "
            "OpenAI's models: one that diffusers trained on other numbers denoises badly"
        )
    if kind not in _KINDS:
        raise UserError(f"it predicts {kind!r}: give a model that predicts {', '.join(_KINDS)}")
    facts = {
        "sha256": _digest(part, scheduler),
        "arch": "diffusers:UNet2DModel",
        "library": diffusers.__version__,
    }
    channels = config.in_channels, config.out_channels
    return DiffusionModel(unet, schedule.alphas_cumprod, kind), channels, facts


def _digest(*folders: Path) -> str:
    """A SHA-256, in hexadecimal, of the weights and configurations in folders."""
    files = [path for folder in dict.fromkeys(folders) for path in sorted(folder.glob("*"))]
    files = [path for path in files if path.suffix in (".json", ".safetensors")]
    return digest(f"{path.name} {file_digest(path)}\n" for path in files)
