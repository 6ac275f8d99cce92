"""What the functions of the Python face share: their arguments, and the parts of a request that
these become.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

import torch

from smoothadv.attacks import GradientAttack
from smoothadv.base.devices import usable_device
from smoothadv.base.distributed import is_launched
from smoothadv.base.errors import UserError
from smoothadv.base.settings import checked, checked_list, perturbation_size, up_to_a_million
from smoothadv.checkpoints import read_members
from smoothadv.datasets import ImageDataset
from smoothadv.datasets.given import described, first_image, items_of
from smoothadv.evaluation.classifiers import count_classes
from smoothadv.evaluation.named_networks import class_names_of, is_named
from smoothadv.evaluation.specs import AttackPlan

Model = str | os.PathLike[str] | torch.nn.Module
FilePath = str | os.PathLike[str]


class CommonOptions(TypedDict, total=False):
    """Keyword arguments that certify, predict, attack and falsify share; all may be left out."""

    seed: int
    """Of all noise (0)."""
    skip: int
    """Take every skip-th image (1)."""
    maximum: int | None
    """Take at most so many images (None: all)."""
    split: str
    """Of a named dataset: "train" or "test" ("test")."""
    data_dir: FilePath | None
    """Where the files of a named dataset lie."""
    name: str
    """What a log calls images that are no named dataset ("images")."""
    input_layer: str | None
    """ "normalize" or "center", where a checkpoint does not record it."""
    pretrained: bool
    """A network by name has its own weights, else random ones (True)."""
    denoiser: FilePath | None
    """The denoiser before the model: a checkpoint of train_denoiser, or "diffusers:PATH" (None:
    none).
    """
    num_classes: int | None
    """Where neither the module nor the checkpoint tells it."""
    batch: int | None
    """Noisy images per forward pass (None: that of the log to be continued, else what suits the
    device).
    """
    precision: str
    """Of weights and activations: "fp32", "bf16" or "fp16" ("fp32")."""
    compile: bool
    """Compile the classifier first (False)."""
    device: str | torch.device | None
    """Where to compute (None: the first GPU, else the CPU)."""
    existing: str
    """"resume" continues a log that is there, "overwrite" replaces it, "refuse" raises ("resume").
    """


def common_fields(
    function: str, model: Model, images: Any, labels: Any, further: CommonOptions, **fixed: Any
) -> dict[str, Any]:
    """Model, images and ``further`` arguments of ``function``, and ``fixed``, as fields of an
    ``EvaluationRequest``.
    """
    unknown = sorted(further.keys() - CommonOptions.__annotations__.keys())
    if unknown:
        raise TypeError(f"{function}() got an unexpected keyword argument '{unknown[0]}'")
    fields: dict[str, Any] = {**further, **fixed}
    name, num_classes = fields.pop("name", "images"), fields.pop("num_classes", None)
    if not isinstance(model, (str, os.PathLike, torch.nn.Module)):
        raise UserError(
            f"the model is a {type(model).__name__}: give a torch.nn.Module or the path of a "
            "checkpoint"
        )
    name = checked("name", name, str)
    source = model if isinstance(model, torch.nn.Module) else Path(model)
    if isinstance(images, str):
        if labels is not None:
            raise UserError(f"the dataset '{images}' has labels of its own: leave labels out")
        fields["images"] = images
    else:
        fields["images"] = dataset_of(source, images, labels, num_classes, name)
    if fields.get("device") is not None:
        fields["device"] = usable_device(fields["device"])
    return {**fields, "classifier": source, "command": called_from(function)}


def called_from(function: str) -> tuple[str, ...]:
    """What a manifest records as the command: the function, and the words that started this
    process.
    """
    return (f"smoothadv.{function}", *sys.argv)


def attack_plan(
    attack: GradientAttack,
    num_noise_vec: int,
    base_attack: bool,
    attack_batch: int | None,
    usual: int,
    **further: Any,
) -> AttackPlan:
    """An attack of a request, with ``further`` fields of it; UserError if it is none or cannot be
    carried out.
    """
    checked("attack", attack, None, GradientAttack)
    if checked("base_attack", base_attack, None):
        if checked("num_noise_vec", num_noise_vec, up_to_a_million) not in (1, usual):
            raise UserError(
                f"num_noise_vec: found {num_noise_vec!r}, and a base_attack has no noise: leave it "
                "out"
            )
        num_noise_vec = 1
    plan = AttackPlan(
        attack=attack,
        num_noise_vec=num_noise_vec,
        is_on_base=base_attack,
        batch=attack_batch,
        **further,
    )
    try:
        plan.smoothed(sigma=1.0, seed=0)
    except ValueError as error:
        raise UserError(str(error)) from error
    return plan


def refuse_without_attack(**given: Any) -> None:
    """UserError where an argument of an attack is ``given``, but for the values that it has
    anyway.
    """
    usual = {"num_noise_vec": 1, "restarts": 1, "base_attack": False}
    for name, value in given.items():
        if value is not usual.get(name):
            raise UserError(
                f"{name}: found {value!r}, and there is no attack: give one, like attack=PGD(0.5, "
                "20)"
            )


def path_of(name: str, value: Any) -> Path:
    """A path that a caller handed over as ``name``; UserError where it is none, or names
    nothing.
    """
    path = checked(name, value, Path)
    if not path.name:
        raise UserError(f"{name}: found {str(value)!r}, expected the name of a file or folder")
    return path


def attack_sizes(epsilons: Sequence[float] | None, attack: GradientAttack) -> tuple[float, ...]:
    """The l2 norms of an ``AttackRequest``; UserError unless they are one or several different
    numbers >= 0.
    """
    sizes = checked_list(
        "epsilons", (attack.epsilon,) if epsilons is None else epsilons, perturbation_size
    )
    if not sizes or len(set(sizes)) < len(sizes):
        raise UserError(
            f"epsilons: found {epsilons!r}, expected a list of one l2 norm or several different "
            "ones"
        )
    return sizes


def dataset_of(
    model: str | Path | torch.nn.Module,
    images: Any,
    labels: Any,
    num_classes: int | None,
    name: str,
) -> ImageDataset:
    """What the caller handed over, as a dataset with the classes of the model; UserError where it
    cannot be one.
    """
    num_classes = (
        None if num_classes is None else checked("num_classes", num_classes, up_to_a_million)
    )
    if hasattr(images, "fingerprint") and hasattr(images, "description"):
        return images
    items = items_of(images, labels)
    return described(items, _class_names(model, first_image(items, name), num_classes), name)


def _class_names(
    model: str | Path | torch.nn.Module, image: torch.Tensor, num_classes: int | None
) -> Sequence[str]:
    if isinstance(model, Path) and is_named(model):
        if names := class_names_of(str(model), image):
            return names
    elif isinstance(model, Path):
        recorded = [
            content["classes"] for content in read_members(model).contents if content.get("classes")
        ]
        if recorded:
            return [str(name) for name in recorded[0]]
    if num_classes is None:
        if not isinstance(model, torch.nn.Module):
            raise UserError(f"nothing tells how many classes {model} has: give num_classes")
        num_classes = count_classes(model, image)
    return [str(number) for number in range(num_classes)]


@contextmanager
def torch_settings_kept() -> Iterator[None]:
    """Within this context or function, settings of this process's PyTorch may change; afterwards
    they are as before.
    """
    cudnn, deterministic = torch.backends.cudnn, torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    of_cudnn, threads = (cudnn.benchmark, cudnn.deterministic), torch.get_num_threads()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=only_warns)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        cudnn.benchmark, cudnn.deterministic = of_cudnn
        torch.set_num_threads(threads)


def output_path(name: str, path: FilePath | None) -> Path | None:
    """The file or folder to write; None where the rows stay in memory."""
    if path is not None:
        return path_of(name, path)
    if is_launched():
        raise UserError(
            "under torchrun the processes share a log: name the file or folder to write"
        )
    return None
