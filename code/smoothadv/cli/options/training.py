"""Options of the training commands, and the request that they describe."""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from smoothadv.attacks import ATTACKS
from smoothadv.base.choices import INPUT_LAYER_NAMES
from smoothadv.base.registry import Registry
from smoothadv.base.settings import (
    Setting,
    non_negative_float,
    non_negative_int,
    number,
    options_of,
    positive_float,
    positive_int,
)
from smoothadv.cli.options.attack import (
    NO_GRADIENT,
    add_attack,
    compose_attack,
    given_attack_flags,
)
from smoothadv.cli.options.components import (
    add_components,
    add_options,
    compose_chosen,
    fields_given,
)
from smoothadv.cli.options.recipes import RELEASED, recipe_names, with_recipe
from smoothadv.cli.options.shared import check_dataset
from smoothadv.cli.runner import Parser
from smoothadv.objectives import OBJECTIVES, DataPolicy, Objective
from smoothadv.objectives.denoising import DENOISING
from smoothadv.training.evaluate import EvaluationSchedule
from smoothadv.training.execution import CONVOLUTION_DTYPES, Execution
from smoothadv.training.schedule import OPTIMIZERS, SHAPES
from smoothadv.training.spec import ScheduleChoices, TrainingRequest

_share = number(float, "a share from 0 to 1", lambda value: 0 <= value <= 1)
_RECIPES = {
    "--recipe NAME": (str, f"take options from a recipe: {', '.join(recipe_names())}, or a file"),
    "--released-behaviour": (
        None,
        "deviate from the paper as the released SmoothAdv code does, with --epsilon in 1/256 "
        "(docs/training.md)",
    ),
}
# The defaults are not set here, so that a recipe can replace them.
_SCHEDULE = {
    "--epochs N": (positive_int, "passes over the training images"),
    "--batch B": (positive_int, "images per update, each with all its noisy copies"),
    "--micro-batch B": (
        positive_int,
        "compute gradients of so many images at a time, to save memory; statistics of batch "
        "normalization are then those of the micro-batch (default: all images of an update)",
    ),
    "--split-updates": (
        None,
        "make m updates of each batch, on B/m images in m copies, as the released code does with "
        "--train-multi-noise",
    ),
    "--steps-per-epoch N": (positive_int, "updates per epoch (default: all)"),
    "--lr": (positive_float, "initial learning rate, or the highest of one-cycle"),
    "--lr-schedule": (
        SHAPES,
        "divide the learning rate in steps, or let it rise and fall once (default: step)",
    ),
    "--lr-step-size --lr_step_size N": (
        positive_int,
        "epochs between two steps of the learning rate",
    ),
    "--lr-factor --gamma F": (
        positive_float,
        "factor by which each step multiplies the learning rate (default: 0.1)",
    ),
    "--optimizer": (
        OPTIMIZERS,
        "stochastic gradient descent with momentum, or AdamW (default: sgd)",
    ),
    "--layer-decay D": (
        positive_float,
        "multiply the learning rate by D for each layer before the last one, in networks of timm, "
        "as 0.75 (default: 1)",
    ),
    "--momentum": (
        number(float, "a number from 0 to below 1", lambda value: 0 <= value < 1),
        "of sgd (default: 0.9)",
    ),
    "--weight-decay": (non_negative_float, "default: 1e-4"),
}
_DATA = {
    "--crop-padding P": (
        non_negative_int,
        "random crops after padding by P pixels, 0 for none (default: the dataset's)",
    ),
    "--horizontal-flip": (
        argparse.BooleanOptionalAction,
        "random mirror images (default: the dataset's)",
    ),
    "--pretrained-model CHECKPOINT": (
        Path,
        "start from these weights, with a new classification layer where the classes differ",
    ),
    "--pretrained": (
        None,
        "start from the weights, mean and standard deviation of the library whose network ARCH "
        "names, with a new classification layer where the number of classes differs",
    ),
    "--finetune-quantized": (
        None,
        "start from a --pretrained-model of integers, which quantize made, and train these: "
        "rounded in each pass, with the gradient of the identity",
    ),
    "--teacher CHECKPOINT": (
        Path,
        "the frozen classifier of the objectives distillation and cat-rs",
    ),
    "--teacher-draws N": (
        positive_int,
        "noisy copies of each training image on which the teacher of cat-rs votes first (default: "
        "10000)",
    ),
    "--choose-from-epoch E": (
        non_negative_int,
        "choose training images from this epoch on, counted from 0: leave out those of "
        "--drop-below, draw the others with replacement, by the weights of --resample-every "
        "(acr-weakness does so by itself)",
    ),
    "--drop-below P": (
        _share,
        "leave out images of which fewer than this share of 100 noisy copies is classified "
        "correctly",
    ),
    "--resample-every K": (
        non_negative_int,
        "every K epochs, weigh images by the radii certified by 16 noisy copies each; 0: equal "
        "weights",
    ),
    "--use-unlabelled FILE": (
        Path,
        "self-training: mix in batches of images with pseudo-labels, from a .npz file or a pickle "
        "with data and extrapolated_targets",
    ),
    "--unlabelled-weight ETA": (
        positive_float,
        "weight of the loss on the images of --use-unlabelled (paper: 0.1, 0.5, 1; default: 1)",
    ),
    "--input-layer": (
        INPUT_LAYER_NAMES,
        "first layer of the model (default: normalize, or that of --pretrained-model)",
    ),
}
_EXECUTION = {
    "--precision": (
        list(CONVOLUTION_DTYPES),
        "precision of convolutions; weights and losses stay float32 (default: fp32; convolutions "
        "then use TF32 on GPUs that have it, which is PyTorch's default)",
    ),
    "--compile": (None, "compile the network first: takes minutes, then runs faster"),
    "--cuda-graph": (
        argparse.BooleanOptionalAction,
        "launch all kernels of an update together, as a CUDA graph that was found to compute the "
        "same (default: on a GPU, without --compile and --sync-bn)",
    ),
    "--sync-bn": (
        None,
        "with several GPUs: statistics of batch normalization over all of them (default: on each "
        "GPU separately, as in the paper)",
    ),
    "--checkpoint-minutes MIN": (
        positive_float,
        "minutes between checkpoints within an epoch; there is one after each (default: 10)",
    ),
    "--evaluate-every K": (positive_int, "test after every K-th epoch and the last (default: 1)"),
    "--evaluate-images N": (
        positive_int,
        "number of evenly spaced test images to evaluate on (default: 1000)",
    ),
    "--tensorboard": (None, "write curves to OUTDIR/tensorboard"),
}


_OVERRIDDEN = "recipes (options on the command line override them)"
_BEHIND = (
    "the frozen classifier behind the denoiser, a checkpoint or a network by name, like "
    "timm:resnet18: stability needs it, with mse it is for the log only"
)
_OF_CLASSIFIERS = ("--pretrained ", "--finetune", "--teacher", "--choose", "--drop", "--resample")
_OF_ATTACKS = ("--warmup", "--warmup-from-first-epoch", "--base-attack")


def objectives_with(default: str) -> Registry[type[Objective]]:
    """The objectives of a command with this default: those of denoisers, or of classifiers."""
    return DENOISING if default in DENOISING else OBJECTIVES


def add_training(parser: Parser, objective: str, adapt: Callable[[Setting], Setting]) -> None:
    """The options of training, with this default ``objective``; ``adapt`` changes the settings of
    attacks.
    """
    recipes, group = (parser.add_argument_group(name) for name in (_OVERRIDDEN, "objective"))
    objectives, data = objectives_with(objective), _DATA
    names = f"one of {', '.join(objectives)} (default: {objective})"
    parser.set_defaults(default_objective=objective, released_behaviour=False)
    add_components(group, "--objective", objectives, names)
    if objectives is DENOISING:
        add_options(recipes, dict(list(_RECIPES.items())[:1]))
        add_options(group, {"--classifier CHECKPOINT": (Path, _BEHIND)})
        data = {
            flag: option
            for flag, option in _DATA.items()
            if not f"{flag} ".startswith(_OF_CLASSIFIERS)
        }
    else:
        add_options(recipes, _RECIPES)
        add_options(add_attack(parser, adapt), NO_GRADIENT)
    add_options(
        parser.add_argument_group("schedule (defaults: the paper's for the dataset)"), _SCHEDULE
    )
    add_options(parser.add_argument_group("data and start"), data)
    add_options(parser.add_argument_group("execution"), _EXECUTION)


def with_recipes(parser: Parser, options: argparse.Namespace) -> argparse.Namespace:
    """The options with those of the recipes added; --recipe overrides --released-behaviour, the
    command line both.
    """
    if options.lr_schedule == "one-cycle" and (options.lr_step_size or options.lr_factor):
        parser.error(
            "--lr-schedule one-cycle has no steps: leave out --lr-step-size and --lr-factor"
        )
    if options.optimizer == "adamw" and options.momentum is not None:
        parser.error("--momentum is of sgd, and --optimizer adamw has none: leave it out")
    if options.optimizer == "adamw" and options.lr is None:
        parser.error(
            "--optimizer adamw needs --lr, like 0.001: the rates of recipes and datasets are for "
            "sgd"
        )
    if options.recipe == RELEASED:
        parser.error(
            f"--recipe {RELEASED}: write --{RELEASED}, which also counts --epsilon in 1/256"
        )
    for name in [options.recipe] * (options.recipe is not None) + [
        RELEASED
    ] * options.released_behaviour:
        options = with_recipe(parser, options, name, _readable)
    return argparse.Namespace(
        **{**vars(options), "objective": options.objective or options.default_objective}
    )


def _readable(options: argparse.Namespace) -> set[str]:
    """The flags of the settings of the objective and, if it makes an attack, of the attack."""
    objective = objectives_with(options.default_objective)[
        options.objective or options.default_objective
    ]
    chosen: list[type] = [objective]
    if _makes_attack(objective) and options.attack:
        chosen.append(ATTACKS[options.attack])
    unread = (
        _OF_ATTACKS
        if _makes_attack(objective) and not (options.attack or _needs_attack(objective))
        else ()
    )
    return {setting.flag for component in chosen for setting in options_of(component)} - {*unread}


def _makes_attack(objective: type) -> bool:
    return any(field.name == "attack" for field in dataclasses.fields(objective))


def _needs_attack(objective: type) -> bool:
    return any(
        field.name == "attack" and field.default is dataclasses.MISSING
        for field in dataclasses.fields(objective)
    )


def request_of(
    parser: Parser, options: argparse.Namespace, command: Sequence[str]
) -> TrainingRequest:
    """The request that the options, with recipes added, describe; a usage error where they
    contradict each other.
    """
    check_dataset(options)
    objective = _objective(parser, options)
    _refuse_contradictions(parser, options, objective)
    of_kind = (
        {"teacher": options.classifier}
        if objective.DENOISES
        else {"policy": _policy(parser, options, objective)}
    )
    return TrainingRequest(
        classifier=options.arch,
        images=options.dataset,
        objective=objective,
        **of_kind,
        schedule=ScheduleChoices(
            learning_rate=options.lr,
            learning_rate_step=options.lr_step_size,
            learning_rate_factor=options.lr_factor,
            learning_rate_shape=options.lr_schedule,
            **fields_given(ScheduleChoices, options),
        ),
        execution=Execution(synchronized_norm=options.sync_bn, **fields_given(Execution, options)),
        tests=EvaluationSchedule(**fields_given(EvaluationSchedule, options, "evaluate_")),
        board=options.tensorboard,
        command=tuple(command),
        arguments=vars(options),
        **fields_given(TrainingRequest, options, without=("objective", "classifier")),
    )


def _policy(parser: Parser, options: argparse.Namespace, objective: Objective) -> DataPolicy | None:
    """The data policy on the command line, completed by the objective's own; None where neither is
    given.
    """
    flags = {
        "from_epoch": options.choose_from_epoch,
        "drop_below": options.drop_below,
        "resample_every": options.resample_every,
    }
    given = {name: value for name, value in flags.items() if value is not None}
    if not given:
        return None
    if objective.policy is not None:
        return dataclasses.replace(objective.policy, **given)
    if "from_epoch" not in given:
        parser.error(
            "--drop-below and --resample-every count from an epoch: add --choose-from-epoch E"
        )
    return DataPolicy(**given)


def _objective(parser: Parser, options: argparse.Namespace) -> Objective:
    """The objective that the options describe; a usage error where something is missing or
    contradictory.
    """
    if objectives_with(options.default_objective) is DENOISING:
        return compose_chosen(parser, DENOISING, options, "--objective")
    component = OBJECTIVES[options.objective]
    given: dict[str, Any] = {}
    if _makes_attack(component) and (options.attack is not None or _needs_attack(component)):
        if "--noise" not in options:
            parser.error(
                "--noise is required: the noise's standard deviation on images in [0, 1], like 0.25"
            )
        noise_sd = 0.0 if "--base-attack" in options else getattr(options, "--noise")
        given["attack"] = compose_attack(parser, options, noise_sd)
    elif flags := given_attack_flags(parser, options):
        parser.error(
            f"{flags[0]} is not read by --objective {options.objective}, which makes no attack"
            + (
                ": add --attack NAME"
                if _makes_attack(component)
                else ": leave it out, or take --objective smoothadv"
            )
        )
    elif _makes_attack(component) and (flags := [flag for flag in _OF_ATTACKS if flag in options]):
        parser.error(
            f"{flags[0]} is of an attack, and there is none: add --attack NAME, or leave it out"
        )
    return compose_chosen(
        parser, OBJECTIVES, options, "--objective", also=ATTACKS.values() if given else (), **given
    )


def _refuse_contradictions(
    parser: Parser, options: argparse.Namespace, objective: Objective
) -> None:
    if options.unlabelled_weight is not None and options.use_unlabelled is None:
        parser.error(
            "--unlabelled-weight weighs the images of --use-unlabelled: name their file, or leave "
            "it out"
        )
    if options.sync_bn and options.micro_batch is not None:
        parser.error(
            "--sync-bn computes statistics of whole batches, --micro-batch of parts: leave one of "
            "them out"
        )
    if options.sync_bn and options.cuda_graph:
        parser.error(
            "--sync-bn exchanges statistics in the midst of an update, where --cuda-graph cannot: "
            "leave one out"
        )
    if objective.noise_sd == 0 and objective.copies > 1:
        advice = "leave --num-noise-vec out" if "--num-noise-vec" in options else "give noise"
        parser.error(
            f"--noise 0 makes all {objective.copies} noisy copies of an image identical: {advice}"
        )
    if (
        "--init-norm-DDN" in options
        and "--init-norm-is-epsilon-DDN" in options
        and not options.released_behaviour
    ):
        parser.error(
            "--init-norm-DDN and --init-norm-is-epsilon-DDN contradict each other: leave one out"
        )
