"""The Python face of the package: certify, predict, attack, falsify and train, as functions.

Each takes a ``model``: the path of a checkpoint, a network by name like "timm:resnet18", or a
``torch.nn.Module`` that maps images [B, C, H, W], float32 in [0, 1], to logits [B, K], or to an
object or dict with ``logits``; normalization belongs inside it. And ``images``: the name of a
dataset; a tensor or NumPy array [N, C, H, W] with ``labels`` [N], which certify and predict can do
without; a torch Dataset of (image, label) pairs; or a DataLoader, whose images are kept in memory.
What the arguments mean is what the options of the commands mean.

All functions that evaluate return the rows of a log as a DataFrame, sorted by ``idx``. Given a
path, they write that log as the commands do, row by row and with a manifest: the same call again
continues it after any interruption, and ``smoothadv analyze`` reads it. Bad input raises
``errors.UserError`` with one line; what is allowed but probably a mistake causes an
``errors.DoubtfulWarning``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from smoothadv.architectures.denoisers import resized
from smoothadv.architectures.libraries import library_network
from smoothadv.architectures.logits import frozen, logits_in, logits_of, probe
from smoothadv.base.devices import allows_tf32
from smoothadv.base.distributed import is_launched
from smoothadv.base.errors import UserError
from smoothadv.base.progress import progress_hidden
from smoothadv.base.settings import Checked, checked, setting, settings_of, takes, up_to_a_million
from smoothadv.datasets import DatasetDescription, ImageDataset, describe_dataset
from smoothadv.datasets.given import GivenImages, described, first_image, items_of
from smoothadv.evaluation import certify as certifying
from smoothadv.evaluation import falsify as falsifying
from smoothadv.evaluation import predict as predicting
from smoothadv.evaluation.falsify import Verdict
from smoothadv.evaluation.specs import (
    AttackSpec,
    CertifySpec,
    FalsifySpec,
    PredictSpec,
    Spec,
)
from smoothadv.models.checkpoint import read_members
from smoothadv.models.name import (
    CHECKPOINT,
    LIBRARY,
    MODULE,
    STAGES,
    ModelName,
    parse_model,
    stages_of,
)
from smoothadv.models.spec import side_and_filter
from smoothadv.objectives import Objective
from smoothadv.training.setup import Trained
from smoothadv.training.setup import train as train_as_specified
from smoothadv.training.spec import ScheduleSpec, TrainSpec

if TYPE_CHECKING:
    import pandas as pd

Model = str | os.PathLike[str] | torch.nn.Module


@dataclass(frozen=True, kw_only=True)
class ArraySpec(Checked):
    """What a call says of images that are no named dataset."""

    name: str = setting(
        "images", parse=str, flag="", help="what a log calls images that are no named dataset"
    )
    num_classes: int | None = setting(
        None,
        parse=up_to_a_million,
        flag="",
        help="number of classes, where neither the module nor the checkpoint tells it",
    )


_COMPILER = "torch._inductor.config"  # it takes a second to load


@contextmanager
def torch_settings_kept() -> Iterator[None]:
    """Within this context or function, tensors are float32 on the CPU by default, without autocast,
    and gradients are possible, and settings of this process's PyTorch may change; afterwards they
    are as before.
    """
    cudnn, deterministic = torch.backends.cudnn, torch.get_deterministic_debug_mode()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    cudnn_settings, threads = (cudnn.benchmark, cudnn.deterministic), torch.get_num_threads()
    tf32 = allows_tf32()
    chosen = getattr(sys.modules.get(_COMPILER), "deterministic", False)
    dtype, is_elsewhere = torch.get_default_dtype(), torch.get_default_device().type != "cpu"
    torch.set_default_dtype(torch.float32)
    try:
        with (
            torch.inference_mode(False),
            torch.device("cpu") if is_elsewhere else nullcontext(),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
        ):
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_deterministic_debug_mode(deterministic)
        if hasattr(compiler := sys.modules.get(_COMPILER), "deterministic"):
            compiler.deterministic = chosen  # type: ignore[union-attr]
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        cudnn.benchmark, cudnn.deterministic = cudnn_settings
        if allows_tf32() != tf32:
            cudnn.allow_tf32 = tf32
        torch.set_num_threads(threads)


@takes(CertifySpec, ArraySpec)
@torch_settings_kept()
def certify(
    model: Model | None = None, images: Any = None, labels: Any = None, **keywords: Any
) -> pd.DataFrame:
    """Certify images with the smoothed classifier (Cohen et al., 2019): a class and an l2 radius
    each, or -1 and 0.

        rows = smoothadv.certify(model, images, labels, sigma=0.25, n=10_000, log="logs/mine.tsv")

    ``log`` is the file to write or to continue (None: no file). A cascade has ``stages`` in place
    of ``model`` and ``sigma``:

        rows = smoothadv.certify(images=images, labels=labels, stages=[(first, 1.0), (second, 0.5)])

    Returns columns idx, label, predict, correct (int64), radius (float64), successes, trials and
    those of the method; of an array without labels, which no log can be of, no label and no
    correct. UserError on bad input, NonFiniteError where a logit is NaN or infinite.
    """
    spec = spec_of_call(CertifySpec, "certify", model, images, labels, keywords)
    log, _ = certifying.certify(spec)
    return _without_labels(images, labels, log.table)


@takes(PredictSpec, ArraySpec)
@torch_settings_kept()
def predict(
    model: Model | None = None, images: Any = None, labels: Any = None, **keywords: Any
) -> pd.DataFrame:
    """The smoothed classifier's classes (-1: it abstains), after an ``attack`` on the images, where
    one is given. Each is right but for ``alpha`` (PREDICT of Cohen et al., 2019).

        attack = PGD(0.5, 20)
        rows = smoothadv.predict(
            model, images, labels, sigma=0.25, attack=attack, num_noise_vec=128
        )

    ``attack`` is any of ``smoothadv.attacks.ATTACKS``. ``log`` is the file to write or to continue
    (None: no file).

    Returns columns idx, label, predict, correct (int64) and what else the log has; without labels
    as ``certify``. UserError on bad input, NonFiniteError where a logit is NaN or infinite.
    """
    spec = spec_of_call(PredictSpec, "predict", model, images, labels, keywords)
    return _without_labels(images, labels, predicting.predict(spec).table)


@takes(AttackSpec, ArraySpec)
@torch_settings_kept()
def attack(model: Model, images: Any, labels: Any = None, **keywords: Any) -> pd.DataFrame:
    """Attack images with each of ``epsilons`` (l2, on images in [0, 1]; by default that of
    ``attack``), then predict them.

        attack, epsilons = PGD(0.5, 20), [0.25, 0.5, 1.0]
        rows = smoothadv.attack(
            model, images, labels, sigma=0.25, attack=attack, epsilons=epsilons
        )
        rows.groupby("epsilon").correct.mean()  # empirical robust accuracy

    ``outdir`` is where a log for each epsilon is written or continued, with the adversarial images
    beside it (``readers.read_examples``); None: no files.

    Returns the rows of all logs, one epsilon after the other, with columns idx, label, predict,
    correct, attack_norm, epsilon and what else the logs have. UserError on bad input,
    NonFiniteError where a logit is NaN or infinite.
    """
    import pandas as pd

    if keywords.get("epsilons", ()) is None:
        del keywords["epsilons"]
    spec = spec_of_call(AttackSpec, "attack", model, images, labels, keywords)
    return pd.concat([log.table for log in predicting.attack(spec)], ignore_index=True)


@takes(FalsifySpec, ArraySpec)
@torch_settings_kept()
def falsify(model: Model, images: Any, labels: Any = None, **keywords: Any) -> Verdict:
    """Attack each image of the certification log ``against`` within ``fraction`` of its certified
    radius.

    Returns the verdict: which certificates fell, how many of them are credible, and whether they
    refute the log, which happens to a true one with probability at most ``false_alarm``. UserError
    on bad input and where the log is about another model, other images or another sigma.
    """
    spec = spec_of_call(FalsifySpec, "falsify", model, images, labels, keywords)
    log, certificates = falsifying.falsify(spec)
    named = None if spec.outdir is None else log.path
    return falsifying.verdict(spec, certificates, log.table, named)


@takes(TrainSpec, ScheduleSpec)
@torch_settings_kept()
def train(
    model: str | torch.nn.Module,
    images: Any,
    labels: Any = None,
    *,
    objective: Objective,
    outdir: str | os.PathLike[str],
    test: Any = None,
    test_labels: Any = None,
    num_classes: int | None = None,
    existing: str = "resume",
    quiet: bool = False,
    schedule: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Trained:
    """Train a classifier for an objective, with checkpoints and a log in the folder ``outdir``.

        objective = SmoothAdv(attack=PGD(0.5, 4), noise_sd=0.25, num_noise_vec=2)
        smoothadv.train(model, images, labels, objective=objective, outdir="models/mine", epochs=20)

    ``model`` is the name of an architecture, or a module, which is trained in place. ``images`` as
    above, for training; ``test`` and ``test_labels`` likewise (None: the test split of a named
    dataset, else the training images). Of arrays, ``num_classes`` is what the module says where it
    is None. ``existing`` says what to do with a run that is there: "resume", "overwrite" or
    "refuse". ``quiet`` prints no lines and no progress. ``schedule`` may hold the keywords of the
    schedule (epochs, batch, learning_rate, ...).

    Returns the model and the history of its training. UserError on bad input, NonFiniteError where
    the loss or the weights stop being finite.
    """
    checked("objective", objective, None, Objective)
    known = ScheduleSpec.__dataclass_fields__
    chosen = {**checked("schedule", {} if schedule is None else schedule, None, Mapping)}
    if unknown := [name for name in chosen if name not in known]:
        raise UserError(f"schedule: found {unknown[0]!r}, expected {', '.join(known)}")
    single = {name: settings.pop(name) for name in known if name in settings}
    if twice := [name for name in single if name in chosen]:
        raise UserError(f"{twice[0]}: found it in schedule too: leave one of them out")
    spec = TrainSpec(
        dataset=_training_images(
            model, images, labels, test, test_labels, num_classes, settings.get("resize")
        ),
        model=model,
        outdir=outdir,  # type: ignore[arg-type]  # the specification checks it
        objective=objective,
        schedule=ScheduleSpec(**chosen, **single),
        existing=existing,
        command=called_from("train"),
        **settings,
    )
    to_logits: AbstractContextManager[Any] = nullcontext()
    if isinstance(model, torch.nn.Module):
        if isinstance(spec.dataset, str):
            description = describe_dataset(spec.dataset, spec.data_dir)
        else:
            description = spec.dataset[0].description
        to_logits = _trained_on_logits(model, spec.seen(description))
    with to_logits, progress_hidden(checked("quiet", quiet, None)):
        return train_as_specified(spec, (lambda line: None) if quiet else print)


def _training_images(
    model: str | torch.nn.Module,
    images: Any,
    labels: Any,
    test: Any,
    test_labels: Any,
    num_classes: int | None,
    resize: Any,
) -> str | tuple[ImageDataset, ImageDataset]:
    """The name of a dataset, or the images to train and to test on; UserError where they cannot
    be had.
    """
    if not isinstance(model, (str, torch.nn.Module)):
        raise UserError(
            f"the model is a {type(model).__name__}: give a torch.nn.Module or name an architecture"
        )
    if isinstance(images, str):
        if not (labels is None and test is None and test_labels is None):
            raise UserError(
                f"the dataset '{images}' has labels and test images of its own: leave them out"
            )
        return images
    if test is None and test_labels is not None:
        raise UserError(
            "test_labels without test: give the images that they are of, or leave them out"
        )
    name = _seeing(ModelName(model, "architecture" if isinstance(model, str) else MODULE), resize)
    training = dataset_of(name, images, labels, num_classes, "images")
    if isinstance(model, str) and isinstance(training, GivenImages):
        training = training.with_constants()  # for the input layer
    if test is None:
        return training, training
    return training, dataset_of(name, test, test_labels, num_classes, "images")


def spec_of_call(
    kind: type[Spec],
    function: str,
    model: Model | None,
    images: Any,
    labels: Any,
    keywords: Mapping[str, Any],
) -> Spec:
    """The spec that the arguments of ``function`` describe; UserError where they are wrong."""
    if keywords.get("log", keywords.get("outdir")) is None and is_launched():
        raise UserError(
            "under torchrun the processes share a log: name the file or folder to write"
        )
    names = {one.field for one in settings_of(ArraySpec)}
    arrays = ArraySpec(**{name: keywords[name] for name in names & keywords.keys()})
    fields = {name: value for name, value in keywords.items() if name not in names}
    if fields.get("sigma") is None and fields.get("stages") is None:
        raise TypeError(f"{function}() missing a required argument: 'sigma'")
    source: Any = model
    if fields.get("stages") is not None:
        if model is not None or fields.get("sigma") not in (None, STAGES):
            raise UserError("stages: found a model or a sigma beside them: leave one of them out")
        fields |= {"sigma": STAGES, "stages": stages_of(fields["stages"])}
        source = fields["stages"][0].model
    name = parse_model(source)
    if name.kind == MODULE and not isinstance(name.source, torch.nn.Module):
        raise UserError(
            f"the model is a {name}: give a torch.nn.Module or the path of a checkpoint"
        )
    dataset = images
    if not isinstance(images, str):
        reading = {
            one: checked(one, fields[one], str)
            for one in ("arch", "weights")
            if fields.get(one) is not None
        }
        is_open = kind in (CertifySpec, PredictSpec) and fields.get("log") is None
        own = fields.get("settings")
        is_aware = isinstance(own, Mapping) and own.get("label_aware", False)
        needs_labels = not is_open or fields.get("attack") is not None or is_aware
        seeing = _seeing(name, fields.get("resize"))
        dataset = dataset_of(
            seeing, images, labels, arrays.num_classes, arrays.name, reading, needs_labels
        )
    elif labels is not None:
        raise UserError(f"the dataset '{images}' has labels of its own: leave labels out")
    fields |= {"model": None if model is None else name, "command": called_from(function)}
    return kind(dataset=dataset, **fields)


def _without_labels(images: Any, labels: Any, rows: pd.DataFrame) -> pd.DataFrame:
    """The rows, without what the labels of an array say where it has none."""
    is_array = isinstance(images, (torch.Tensor, np.ndarray))
    return rows.drop(columns=["label", "correct"]) if is_array and labels is None else rows


def called_from(function: str) -> tuple[str, ...]:
    """What a manifest records as the command: the function, and the words that started this
    process.
    """
    return (f"smoothadv.{function}", *sys.argv)


def _seeing(model: ModelName, resize: Any) -> ModelName:
    """A model as images are given to it: a module that resizes them first."""
    if resize is None or not isinstance(model.source, torch.nn.Module):
        return model
    return ModelName(resized(model.source, checked("resize", resize, side_and_filter)), MODULE)


def dataset_of(
    model: ModelName,
    images: Any,
    labels: Any,
    num_classes: int | None,
    name: str,
    reading: Mapping[str, str] = MappingProxyType({}),
    needs_labels: bool = True,
) -> ImageDataset:
    """What the caller handed over, as a dataset with the classes of the model, whose checkpoint is
    read with the arguments ``reading``; UserError where it cannot be one.
    """
    if num_classes is not None:
        num_classes = checked("num_classes", num_classes, up_to_a_million)
    if hasattr(images, "fingerprint") and hasattr(images, "description"):
        return images
    items = items_of(images, labels, needs_labels)
    return described(
        items, _class_names(model, first_image(items, name), num_classes, reading), name
    )


def _class_names(
    model: ModelName,
    image: torch.Tensor,
    num_classes: int | None,
    reading: Mapping[str, str],
) -> tuple[str, ...]:
    """The names of a model's classes, or their numbers, for an image [C, H, W]; UserError where
    nothing tells how many there are.
    """
    network = model.source
    if model.kind == CHECKPOINT:
        for content in read_members(model.source, **reading).contents:
            if content.get("classes"):
                return tuple(map(str, content["classes"]))
    elif model.kind == LIBRARY:
        found = library_network(str(model), pretrained=False)
        if found.usual_names:
            return found.usual_names
        network = found.module
    if num_classes is None and isinstance(network, torch.nn.Module):
        with frozen(network):
            num_classes = probe(network, image)[1]
    if num_classes is None:
        raise UserError(f"nothing tells how many classes {model} has: give num_classes")
    return tuple(map(str, range(num_classes)))


@contextmanager
def _trained_on_logits(network: torch.nn.Module, description: DatasetDescription) -> Iterator[None]:
    """Within this context, a network that returns an object or a mapping with ``logits`` returns
    the logits.

    Its ``state_dict`` stays as it is. UserError where it does not fit the images or has nothing to
    train.
    """
    if not any(one.requires_grad and not one.is_inference() for one in network.parameters()):
        raise UserError(
            f"{type(network).__name__} has no parameters that require gradients, or was made in "
            "inference mode: there is nothing to train"
        )
    with frozen(network):
        is_plain = logits_of(network, description) is network
    with (
        nullcontext()
        if is_plain
        else network.register_forward_hook(lambda module, images, output: logits_in(output))
    ):
        yield
