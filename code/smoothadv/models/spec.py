"""What a run on images says: which images, which machine, which seed, what to do with earlier
output; and which model, one classifier or the stages of a cascade or a router.
"""

import contextlib
import os
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from smoothadv.base.cpus import MOST_THREADS, suitable_threads, usable_cpus
from smoothadv.base.errors import UsageError, UserError
from smoothadv.base.registry import diffusion_model
from smoothadv.base.settings import (
    EXISTING,
    FILTERS,
    INPUT_LAYER_NAMES,
    NEAREST,
    RELEASED,
    Checked,
    SettingError,
    a_threshold,
    any_seed,
    non_negative_int,
    number,
    one_of,
    positive_noise_level,
    refuse_any,
    setting,
)
from smoothadv.datasets import DATASETS, DatasetDescription, describe_dataset, source_of
from smoothadv.datasets.preparation import split_location
from smoothadv.models.name import (
    CHECKPOINT,
    LIBRARY,
    MODULE,
    STAGES,
    Stage,
    parse_model,
    read_stages,
    stage_of,
    stages_of,
)
from smoothadv.records.logs import training_record
from smoothadv.statistics.cascade import DEFAULT_THRESHOLD

Spec = TypeVar("Spec", bound="ModelSpec")


def device(text: str) -> Any:
    """Parses a torch.device that can be used; only who names one waits for torch."""
    from smoothadv.base.devices import usable_device

    return usable_device(text)


def _known_datasets() -> str:
    names = [
        f"{name}:{one.location}" if one.takes_location else name for name, one in DATASETS.items()
    ]
    return f"one of {', '.join(names)}"


@dataclass(frozen=True, kw_only=True)
class RunSpec(Checked):
    """The settings that all runs share; ``dataset`` is a name, or the images themselves."""

    dataset: Any = setting(flag="dataset", keyword=False, help=_known_datasets)
    data_dir: str | None = setting(
        None,
        parse=str,
        metavar="DIR",
        group="running",
        help="folder of the dataset's files (default: data; for imagenet IMAGENET_DIR)",
    )
    device: Any = setting(
        None,
        parse=device,
        group="running",
        help="torch device like cpu or cuda:1 (default: cuda if there is one)",
    )
    threads: int | None = setting(
        None,
        parse=number(int, "a whole number from 1 to 1,024", lambda v: 1 <= v <= MOST_THREADS),
        metavar="N",
        group="running",
        keyword=False,
        help="threads of PyTorch on the CPU (default: OMP_NUM_THREADS, else what suits the images)",
    )
    seed: int = setting(
        0, parse=any_seed, group="running", records="seed", help="seed of all randomness"
    )
    existing: str = setting(
        "resume",
        parse=one_of(EXISTING),
        group="running",
        constants={
            "resume": "continue the output of an earlier run of the same command",
            "overwrite": "replace the output of an earlier run",
        },
        help='"resume" continues earlier output, "overwrite" replaces it, "refuse" raises',
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.dataset, str):
            try:
                source_of(self.dataset)
            except UserError as error:
                reason = self.missing_plugin() or error
                raise UsageError(f"argument DATASET: {reason}") from error

    def _set(self, **values: Any) -> None:
        """Complete the spec, which is frozen, while it is made."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def missing_plugin(self) -> str:
        """Which plug-in knows the dataset, as a sentence, where a checkpoint tells; else ""."""
        return ""


@cache
def say_what_is_certified(dataset: str) -> None:
    """Once for each dataset of resized images, however many commands of a sweep or processes of
    torchrun are about it.
    """
    source, location = source_of(dataset)
    is_resized = source.takes_preparation and split_location(location)[1] is not None
    if is_resized and os.environ.get("RANK", "0") == "0":
        print(
            f"{dataset}: noise, perturbations and radii are those of the resized images",
            file=sys.stderr,
        )


def use_threads(run: Any, resumed: Path | None = None) -> None:
    """Let PyTorch use the ``threads`` of a run, else OMP_NUM_THREADS, else those of the training
    in the folder ``resumed``: its bits depend on them; else those that suit the images.
    """
    import torch

    threads, most = run.threads, torch.get_num_threads()
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        threads = min(most, usable_cpus())
        # What cannot be read is for the command itself to complain about.
        with contextlib.suppress(UserError, OSError, LookupError, TypeError, ValueError):
            if run.dataset is not None:  # that of a log, which verify reads later
                shape = describe_dataset(run.dataset, run.data_dir).image_shape
                threads = suitable_threads(shape, most)
            if resumed is not None:
                threads = min(int(training_record(resumed)["runs"][-1]["torch_threads"]), most)
    torch.set_num_threads(threads or most)


def timestep(text: str) -> str:
    """Parses "released", "nearest" or the number of a step."""
    if text in (RELEASED, NEAREST):
        return text
    try:
        return str(non_negative_int(text))
    except SettingError:
        raise SettingError(
            f"'{text}' is not {RELEASED}, {NEAREST} or the number of a step"
        ) from None


_side = number(int, "a number of pixels from 1 to 4,096", lambda v: 1 <= v <= 4096)
_copies = number(int, "a number of noises from 1 to 1,000", lambda v: 1 <= v <= 1000)


def side_and_filter(text: str) -> str:
    """Parses SIDE or SIDE:FILTER; returns the latter."""
    side, _, name = text.partition(":")
    return f"{_side(side)}:{one_of(FILTERS)(name or FILTERS[0])}"


def local_noise(text: str) -> str:
    """Parses SD or SD:M; returns the latter."""
    noise_sd, _, count = text.partition(":")
    return f"{positive_noise_level(noise_sd):g}:{_copies(count or '5')}"


def sigma_or_stages(text: str) -> float | str:
    """Parses a positive noise level, or the word that stands for those of a cascade."""
    return text if text == STAGES else positive_noise_level(text)


@dataclass(frozen=True, kw_only=True)
class DenoisedSpec(RunSpec):
    """The settings that say what stands before a classifier."""

    denoiser: str | None = setting(
        None,
        parse=str,
        metavar="CHECKPOINT",
        help="denoiser before the model: a checkpoint of train_denoiser, or a diffusion model, "
        "openai:FILE.pt or diffusers:FOLDER",
    )
    timestep: str | None = setting(
        None,
        parse=timestep,
        metavar="STEP",
        records="timestep",
        help=f"step of a diffusion model as the denoiser: {RELEASED} (default), the first with at "
        f"least the noise sigma, whose noise is then drawn; {NEAREST}; or a number",
    )
    resize: str | None = setting(
        None,
        parse=side_and_filter,
        metavar="SIDE[:FILTER]",
        records="resize",
        help="resize images before the model, behind the denoiser, to SIDE x SIDE; FILTER is "
        f"{', '.join(FILTERS)} (default: {FILTERS[0]}), with antialiasing and not clipped",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if diffusion_model(self.denoiser) is not None:
            self._set(timestep=self.timestep or RELEASED)
        elif self.timestep is not None:
            raise UsageError(
                "--timestep is for a diffusion model, --denoiser openai:FILE or diffusers:FOLDER"
            )

    @property
    def dataset_name(self) -> str | None:
        """The name of the dataset; None for images that the caller handed over."""
        return self.dataset if isinstance(self.dataset, str) else None

    def seen(self, images: DatasetDescription) -> DatasetDescription:
        """The images as the classifier sees them, resized."""
        if self.resize is None:
            return images
        side = int(self.resize.partition(":")[0])
        return replace(images, image_shape=(images.image_shape[0], side, side))


@dataclass(frozen=True, kw_only=True)
class ModelSpec(DenoisedSpec):
    """The settings that say what is smoothed.

    ``model`` is a checkpoint, an ensemble, a network by name, a module that maps images
    [B, C, H, W] in [0, 1] to logits [B, K], or a file of stages.
    """

    model: Any = setting(
        flag="checkpoint",
        metavar="CHECKPOINT",
        keyword=False,
        help="checkpoint.pth.tar, hf-hub:OWNER/NAME[@REVISION], an ensemble A.pth.tar+B.pth.tar or "
        "TOML file, or a network by name like timm:NAME, onnx:FILE (docs/networks.md)",
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
    stages: Any = setting(
        None,
        flag="",
        help="(model, sigma) of each stage of a cascade, in place of model and sigma",
    )
    router: Any = setting(
        None,
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
        help="architecture of a checkpoint that does not record it, such as a state_dict alone",
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
        help="give a network by name, like timm:resnet18, random weights in place of its own",
    )
    local_noise: str | None = setting(
        None,
        parse=local_noise,
        metavar="SD[:M]",
        records="local_noise",
        help="average the model's probabilities over M (default: 5) fixed noises of this standard "
        "deviation, behind the denoiser (DiffSmooth)",
    )
    _OF_ONE_STAGE: ClassVar[dict[str, Any]] = {}

    def __post_init__(self) -> None:
        if self.model is not None:
            self._set(model=parse_model(self.model))
        super().__post_init__()
        self._read_stages()
        for name in [stage.model for stage in self.classifiers]:
            for given in ("arch", "weights", "input_layer"):
                fits = name.kind == CHECKPOINT or (given == "input_layer" and name.kind == LIBRARY)
                if getattr(self, given) is not None and not fits:
                    who, flag = "a module" if name.kind == MODULE else name, given.replace("_", "-")
                    raise UsageError(f"--{flag} is for checkpoints: leave it out for {who}")
            if not self.pretrained and name.kind != LIBRARY:
                raise UsageError(
                    "--no-pretrained is for networks by name, like timm:resnet18: leave it out"
                )

    def _read_stages(self) -> None:
        """Set the stages, their router or threshold, and as sigma the largest one, where the model
        has stages.
        """
        if self.stages is not None:
            router = None if self.router is None else stage_of(self.router, "router")
            self._set(stages=stages_of(self.stages), router=router)
        elif isinstance(self.sigma, str):
            stages, router, threshold = read_stages(self.model.source)
            self._set(stages=stages, router=router, threshold=self.threshold or threshold)
        faults = {
            "--threshold is for cascades: leave it out": (
                self.threshold is not None and self.kind != "cascade"
            ),
            "router: found one without stages: give stages, too": (
                self.router is not None and self.stages is None
            ),
            f"--denoiser is for one sigma: leave it out for a {self.kind}": (
                self.denoiser is not None and self.kind
            ),
        }
        refuse_any(faults, UsageError)
        if self.kind:
            self._set(sigma=max(stage.sigma for stage in self.classifiers))
        if self.kind == "cascade" and self.threshold is None:
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
        return replace(self, stages=None, router=None, threshold=None, **alone)

    @property
    def description(self) -> DatasetDescription:
        """The description of the images, which may be all that is known of them."""
        if isinstance(self.dataset, str):
            return describe_dataset(self.dataset, self.data_dir)
        return getattr(self.dataset, "description", self.dataset)

    def missing_plugin(self) -> str:
        if self.model is None or self.model.kind != CHECKPOINT:
            return ""
        from smoothadv.models.checkpoint import missing_dataset_plugin  # imports torch

        return missing_dataset_plugin(self.model.source, self.dataset)
