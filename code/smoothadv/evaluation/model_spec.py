"""What an evaluation says of its model: one classifier, or the stages of a cascade or a router."""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from smoothadv.base import plugins
from smoothadv.base.errors import UsageError
from smoothadv.base.members import (
    STAGES,
    Stage,
    read_stages,
    stage_of,
    stages_of,
)
from smoothadv.base.settings import (
    INPUT_LAYER_NAMES,
    a_threshold,
    positive_noise_level,
    setting,
)
from smoothadv.datasets.spec import RunSpec
from smoothadv.statistics.cascade import DEFAULT_THRESHOLD

Spec = TypeVar("Spec", bound="ModelSpec")


def sigma_or_stages(text: str) -> float | str:
    """Parses a positive noise level, or the word that stands for those of a cascade."""
    return text if text == STAGES else positive_noise_level(text)


@dataclass(frozen=True, kw_only=True)
class ModelSpec(RunSpec):
    """The settings that say what is smoothed.

    ``model`` is a checkpoint, an ensemble, a network by name, a module that maps images
    [B, C, H, W] in [0, 1] to logits [B, K], or a file of stages.
    """

    model: Any = setting(
        parse=Path,
        kind=object,
        flag="checkpoint",
        metavar="CHECKPOINT",
        keyword=False,
        help="checkpoint.pth.tar, hf-hub:OWNER/NAME[@REVISION], an ensemble A.pth.tar+B.pth.tar or "
        "TOML file, or a network by name like timm:NAME, onnx:FILE, FILE.py:FUNCTION "
        "(docs/networks.md)",
    )
    sigma: Any = setting(
        None,
        parse=sigma_or_stages,
        flag="sigma",
        records="sigma",
        unit="on images in [0, 1]",
        help=f"standard deviation of the smoothing noise; {STAGES} where CHECKPOINT is a TOML file "
        "of a cascade or a router (docs/cascades.md)",
    )
    stages: tuple[Stage, ...] | None = setting(
        None,
        kind=object,
        flag="",
        help="(model, sigma) of each stage of a cascade, in place of model and sigma",
    )
    router: Stage | None = setting(
        None,
        kind=object,
        flag="",
        help="(model, sigma) of a router, which says for each image which of the stages decides",
    )
    threshold: float | None = setting(
        None,
        parse=a_threshold,
        metavar="P0",
        records="threshold",
        help="a stage of a cascade before the last one decides if a class has more than this "
        f"probability there (default: that of its file, or {DEFAULT_THRESHOLD})",
    )
    arch: str | None = setting(
        None,
        parse=str,
        metavar="NAME",
        records="arch_given",
        help="architecture of a checkpoint that does not record it, such as a state_dict alone: "
        "a name, or FILE.py:FUNCTION",
    )
    weights: str | None = setting(
        None,
        parse=str,
        metavar="KEY",
        records="weights_given",
        help="which weights of a checkpoint that holds several, like state_dict_ema or ema.shadow",
    )
    input_layer: str | None = setting(
        None,
        choices=INPUT_LAYER_NAMES,
        records="input_layer",
        help="first layer of a model whose checkpoint does not record it",
    )
    pretrained: bool = setting(
        True,
        flag="--no-pretrained",
        help="a network by name has its own weights (the default), else random ones",
    )
    denoiser: str | None = setting(
        None,
        parse=str,
        metavar="CHECKPOINT",
        help="denoiser before the model: a checkpoint of train_denoiser, or diffusers:PATH",
    )
    _OF_ONE_STAGE: ClassVar[dict[str, Any]] = {}

    def __post_init__(self) -> None:
        if isinstance(self.model, (str, os.PathLike)):
            self._set(model=Path(self.model))
        super().__post_init__()
        self._read_stages()
        for given in ("arch", "weights"):
            if getattr(self, given) and not isinstance(self.model, Path):
                raise UsageError(f"--{given} is for checkpoints: leave it out for a module")
        if self.arch and plugins.names_function(self.arch) and self.arch not in plugins.FUNCTIONS:
            self._set(arch=plugins.load(self.arch).name)

    def _read_stages(self) -> None:
        """Set the stages, their router or threshold, and as sigma the largest one, where the model
        has stages.
        """
        if self.stages is not None:
            router = None if self.router is None else stage_of(self.router, "router")
            self._set(stages=stages_of(self.stages), router=router)
        elif isinstance(self.sigma, str):
            stages, router, threshold = read_stages(Path(self.model))
            self._set(stages=stages, router=router, threshold=self.threshold or threshold)
        if self.threshold is not None and self.kind != "cascade":
            raise UsageError("--threshold is for cascades: leave it out")
        if self.stages is None:
            if self.router is not None:
                raise UsageError("router: found one without stages: give stages, too")
            return
        if self.denoiser is not None:
            raise UsageError(f"--denoiser is for one sigma: leave it out for a {self.kind}")
        self._set(sigma=max(stage.sigma for stage in self.classifiers))
        if self.router is None and self.threshold is None:
            self._set(threshold=DEFAULT_THRESHOLD)

    @property
    def kind(self) -> str:
        """What the model is: a "cascade", a "router", or "": a single classifier."""
        if self.stages is None:
            return ""
        return "cascade" if self.router is None else "router"

    @property
    def classifiers(self) -> tuple[Stage, ...]:
        """The stages, and then the router; one of a single classifier."""
        stages = self.stages or (Stage(self.model, self.sigma),)
        return stages if self.router is None else (*stages, self.router)

    @property
    def most_voters(self) -> int:
        """How many of the classifiers vote about an image, at most: a router chooses one stage."""
        return len(self.classifiers) if self.router is None else 2

    def of_stage(self: Spec, stage: Stage) -> Spec:
        """The spec of one of the classifiers; this one if there is no other."""
        if self.stages is None:
            return self
        alone = {**self._OF_ONE_STAGE, "model": stage.model, "sigma": stage.sigma}
        return dataclasses.replace(self, stages=None, router=None, threshold=None, **alone)

    def missing_plugin(self) -> str:
        if not isinstance(self.model, Path):
            return ""
        from smoothadv.checkpoints import missing_dataset_plugin  # imports torch

        reason = missing_dataset_plugin(self.model, self.dataset)
        return f"checkpoint {self.model}: {reason}" if reason else ""
