"""The Python face of the package: certify, predict, attack, falsify and train, as functions.

Each takes a ``model``: the path of a checkpoint, a network by name like "timm:resnet18", or a
``torch.nn.Module`` that maps images [B, C, H, W], float32 in [0, 1], to logits [B, K], or to an
object or dict with ``logits``; normalization belongs inside it. And ``images``: the name of a
dataset; a tensor or NumPy array [N, C, H, W] with ``labels`` [N]; a torch Dataset of (image, label)
pairs; or a DataLoader, whose images are kept in memory. What the arguments mean is what the options
of the commands mean.

All functions that evaluate return the rows of a log as a DataFrame, sorted by ``idx``. Given a
path, they write that log as the commands do, row by row and with a manifest: the same call again
continues it after any interruption, and ``smoothadv analyze`` reads it. Bad input raises
``errors.UserError`` with one line; what is probably not meant is a ``errors.DoubtfulWarning``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from smoothadv.api import arguments
from smoothadv.api.arguments import CommonOptions, FilePath, Model, torch_settings_kept
from smoothadv.attacks import GradientAttack
from smoothadv.base.devices import usable_device
from smoothadv.base.errors import UserError
from smoothadv.base.progress import progress_hidden
from smoothadv.base.settings import checked
from smoothadv.datasets import ImageDataset, describe_dataset
from smoothadv.datasets.given import GivenImages
from smoothadv.evaluation import attack as attacking
from smoothadv.evaluation import certify as certifying
from smoothadv.evaluation import falsify as falsifying
from smoothadv.evaluation import predict as predicting
from smoothadv.evaluation import specs as requests
from smoothadv.evaluation.classifiers import trained_on_logits
from smoothadv.objectives import Objective
from smoothadv.records.readers import read_certification_log, read_prediction_log
from smoothadv.training.job import Trained
from smoothadv.training.job import train as train_as_requested
from smoothadv.training.spec import ScheduleChoices, TrainingRequest

if TYPE_CHECKING:
    import pandas as pd
    from typing_extensions import Unpack


@torch_settings_kept()
def certify(
    model: Model,
    images: Any,
    labels: Any = None,
    *,
    sigma: float,
    n0: int = 100,
    n: int | None = None,
    alpha: float = 0.001,
    method: str = "exact",
    settings: Mapping[str, Any] | None = None,
    sound: bool = False,
    log: FilePath | None = None,
    **options: Unpack[CommonOptions],
) -> pd.DataFrame:
    """Certify images with the smoothed classifier (Cohen et al., 2019): a class and an l2 radius
    each, or -1 and 0.

        rows = smoothadv.certify(model, images, labels, sigma=0.25, n=10_000, log="logs/mine.tsv")

    ``sigma`` > 0 is the standard deviation of the noise on images in [0, 1]; ``n0`` draws select
    the class and ``n`` (None: 100,000, or the default of the ``method``) estimate its probability;
    ``alpha`` is the probability of a false statement per image. ``method`` is a certification
    procedure ("exact", "adaptive", ...) with its own ``settings`` by field. ``sound`` draws noise
    in whole grey levels, for images of 8 bits: the certificates then hold for the executed
    arithmetic (docs/guarantee.md).

    ``log`` is the file to write or to continue (None: no file). ``options``: see ``CommonOptions``.

    Returns columns idx, label, predict, correct (int64), radius (float64), successes, trials and
    those of the method. UserError on bad input, NonFiniteError where a logit is NaN or infinite.
    """
    fields = arguments.common_fields(
        "certify", model, images, labels, options, sigma=sigma, alpha=alpha, draws=n
    )
    given = {} if settings is None else settings
    outfile = arguments.output_path("log", log)
    request = requests.CertifyRequest(
        **fields, outfile=outfile, n0=n0, method=method, procedure_settings=given, sound=sound
    )
    written, _ = certifying.certify(request)
    return written.table(read_certification_log)


@torch_settings_kept()
def predict(
    model: Model,
    images: Any,
    labels: Any = None,
    *,
    sigma: float,
    n: int | None = None,
    alpha: float = 0.001,
    top_k: int = 1,
    attack: GradientAttack | None = None,
    num_noise_vec: int = 1,
    base_attack: bool = False,
    restarts: int = 1,
    target: int | str | None = None,
    attack_batch: int | None = None,
    log: FilePath | None = None,
    **options: Unpack[CommonOptions],
) -> pd.DataFrame:
    """The smoothed classifier's classes (-1: it abstains), from ``n`` draws each (None: 100,000),
    each right but for ``alpha`` (PREDICT of Cohen et al., 2019); after an ``attack`` on the images,
    where one is given.

        attack = PGD(0.5, 20)
        rows = smoothadv.predict(
            model, images, labels, sigma=0.25, n=10_000, attack=attack, num_noise_vec=64
        )

    The attack averages over ``num_noise_vec`` draws of noise, or, with ``base_attack``, attacks the
    base classifier; ``restarts`` and ``target`` as in ``attacks.SmoothedAttack``; ``attack_batch``
    bounds its noisy images per pass. Without an attack they are refused. With ``top_k`` above 1, a
    prediction is the set of the k most probable classes, in columns class_1 to class_k, and
    ``predict`` is the label if it is one of them. ``log`` is the file to write or to continue
    (None: no file). ``options``: see ``CommonOptions``.

    Returns columns idx, label, predict, correct (int64) and, of attacked images, attack_norm,
    epsilon (float64) and what else the log has. UserError on bad input, NonFiniteError where a
    logit is NaN or infinite.
    """
    fields = arguments.common_fields(
        "predict", model, images, labels, options, sigma=sigma, alpha=alpha, draws=n
    )
    further: dict[str, Any] = {"restarts": restarts, "target": target, "attack_batch": attack_batch}
    plan = None
    if attack is None:
        arguments.refuse_without_attack(
            num_noise_vec=num_noise_vec, base_attack=base_attack, **further
        )
    else:
        plan = arguments.attack_plan(attack, num_noise_vec, base_attack, usual=1, **further)
    outfile = arguments.output_path("log", log)
    request = requests.PredictRequest(**fields, outfile=outfile, attack=plan, top_k=top_k)
    return predicting.predict(request).table(read_prediction_log)


@torch_settings_kept()
def attack(
    model: Model,
    images: Any,
    labels: Any = None,
    *,
    sigma: float,
    attack: GradientAttack,
    epsilons: Sequence[float] | None = None,
    num_noise_vec: int = 64,
    base_attack: bool = False,
    restarts: int = 1,
    target: int | str | None = None,
    attack_batch: int | None = None,
    n: int | None = None,
    alpha: float = 0.001,
    folder: FilePath | None = None,
    **options: Unpack[CommonOptions],
) -> pd.DataFrame:
    """Attack images with each of ``epsilons`` (l2, on images in [0, 1]; None: that of ``attack``),
    then predict them.

        attack, epsilons = PGD(0.5, 20), [0.25, 0.5, 1.0]
        rows = smoothadv.attack(
            model, images, labels, sigma=0.25, attack=attack, epsilons=epsilons
        )
        rows.groupby("epsilon").correct.mean()  # empirical robust accuracy

    ``attack`` and what follows it as in ``predict``. ``folder`` is where a log for each epsilon is
    written or continued, with the adversarial images beside it (``readers.read_examples``); None:
    no files. ``options``: see ``CommonOptions``.

    Returns the rows of all logs, one epsilon after the other, with columns idx, label, predict,
    correct, attack_norm, epsilon and what else the logs have. UserError on bad input,
    NonFiniteError where a logit is NaN or infinite.
    """
    import pandas as pd

    fields = arguments.common_fields(
        "attack", model, images, labels, options, sigma=sigma, alpha=alpha, draws=n
    )
    plan = arguments.attack_plan(
        attack,
        num_noise_vec,
        base_attack,
        usual=64,
        restarts=restarts,
        target=target,
        attack_batch=attack_batch,
    )
    sizes = arguments.attack_sizes(epsilons, attack)
    outdir = arguments.output_path("folder", folder)
    request = requests.AttackRequest(**fields, outdir=outdir, attack=plan, epsilons=sizes)
    logs = attacking.attack(request)
    return pd.concat([log.table(read_prediction_log) for log in logs], ignore_index=True)


@torch_settings_kept()
def falsify(
    model: Model,
    images: Any,
    labels: Any = None,
    *,
    against: FilePath,
    sigma: float,
    attack: GradientAttack,
    fraction: float = requests.DEFAULT_FRACTION,
    false_alarm: float = requests.DEFAULT_FALSE_ALARM,
    num_noise_vec: int = 64,
    restarts: int = 1,
    attack_batch: int | None = None,
    n: int | None = None,
    alpha: float = 0.001,
    folder: FilePath | None = None,
    **options: Unpack[CommonOptions],
) -> falsifying.Verdict:
    """Attack each image of the certification log ``against`` within ``fraction`` of its certified
    radius.

    The other arguments as in ``attack``. Returns the verdict: which certificates fell, how many of
    them are credible, and whether they refute the log, which happens to a true one with probability
    at most ``false_alarm``. UserError on bad input and where the log is about another model, other
    images or another sigma.
    """
    fields = arguments.common_fields(
        "falsify", model, images, labels, options, sigma=sigma, alpha=alpha, draws=n
    )
    plan = arguments.attack_plan(
        attack, num_noise_vec, False, usual=64, restarts=restarts, attack_batch=attack_batch
    )
    request = requests.FalsifyRequest(
        **fields,
        outdir=arguments.output_path("folder", folder),
        attack=plan,
        against=arguments.path_of("against", against),
        fraction=fraction,
        false_alarm=false_alarm,
    )
    log, certificates = falsifying.falsify(request)
    table = log.table(read_prediction_log)
    named = against if folder is None else None
    return falsifying.verdict(request, certificates, table, named)


@torch_settings_kept()
def train(
    model: str | torch.nn.Module,
    images: Any,
    labels: Any = None,
    *,
    objective: Objective,
    outdir: FilePath,
    test: Any = None,
    test_labels: Any = None,
    num_classes: int | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    existing: str = "resume",
    quiet: bool = False,
    data_dir: str | Path | None = None,
    schedule: Mapping[str, Any] | None = None,
    **options: Any,
) -> Trained:
    """Train a classifier for an objective, with checkpoints and a log in the folder ``outdir``.

        objective = SmoothAdv(attack=PGD(0.5, 4), noise_sd=0.25, num_noise_vec=2)
        how = dict(objective=objective, outdir="models/mine", schedule={"epochs": 20})
        smoothadv.train(model, images, labels, **how)

    ``model`` is the name of an architecture, or a module, which is trained in place. ``images`` as
    above, for training; ``test`` and ``test_labels`` likewise (None: the test split of a named
    dataset, else the training images). Of arrays, ``num_classes`` is what the module says where it
    is None.

    ``schedule`` holds fields of ``training.request.ScheduleChoices`` (epochs, batch, learning_rate,
    ...), and ``options`` further fields of ``training.request.TrainingRequest`` (execution,
    crop_padding, ...). ``existing`` says what to do with a run that is there: "resume", "overwrite"
    or "refuse". ``quiet`` prints no lines and no progress.

    Returns the model and the history of its training. UserError on bad input, NonFiniteError where
    the loss or the weights stop being finite.
    """
    if not isinstance(objective, Objective):
        raise UserError(
            f"the objective is a {type(objective).__name__}: give one, like Gaussian(noise_sd=0.25)"
        )
    known = TrainingRequest.__dataclass_fields__.keys() - {"classifier", "command", "arguments"}
    foreign = sorted(options.keys() - known)
    if foreign:
        hint = (
            f": give schedule={{'{foreign[0]}': ...}}"
            if foreign[0] in ScheduleChoices.__dataclass_fields__
            else ""
        )
        raise TypeError(f"train() got an unexpected keyword argument '{foreign[0]}'{hint}")
    chosen = checked("schedule", {} if schedule is None else schedule, None, Mapping)
    unknown = sorted(chosen.keys() - ScheduleChoices.__dataclass_fields__.keys(), key=str)
    if unknown:
        raise UserError(
            f"schedule: found {unknown[0]!r}, expected "
            f"{', '.join(ScheduleChoices.__dataclass_fields__)}"
        )
    if test is None and test_labels is not None:
        raise UserError(
            "test_labels without test: give the images that they are of, or leave them out"
        )
    if not isinstance(model, (str, torch.nn.Module)):
        raise UserError(
            f"the model is a {type(model).__name__}: give a torch.nn.Module or name an architecture"
        )
    sources: str | tuple[ImageDataset, ImageDataset]
    if isinstance(images, str):
        if not (labels is None and test is None and test_labels is None):
            raise UserError(
                f"the dataset '{images}' has labels and test images of its own: leave them out"
            )
        sources, description = images, describe_dataset(images, data_dir)
    else:
        training = arguments.dataset_of(model, images, labels, num_classes, "images")
        if isinstance(model, str) and isinstance(training, GivenImages):
            training = training.with_constants()  # for the input layer
        tested = (
            training
            if test is None
            else arguments.dataset_of(model, test, test_labels, num_classes, "images")
        )
        sources, description = (training, tested), training.description
    request = TrainingRequest(
        classifier=model,
        images=sources,
        outdir=arguments.path_of("outdir", outdir),
        objective=objective,
        schedule=ScheduleChoices(**chosen),
        seed=seed,
        device=None if device is None else usable_device(device),
        existing=existing,
        data_dir=data_dir,
        command=arguments.called_from("train"),
        **options,
    )
    to_logits = (
        trained_on_logits(model, description)
        if isinstance(model, torch.nn.Module)
        else nullcontext()
    )
    with to_logits, progress_hidden(checked("quiet", quiet, None)):
        return train_as_requested(request, (lambda line: None) if quiet else print)
