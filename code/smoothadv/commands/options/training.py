"""Options of the training commands, and the request that they describe."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smoothadv.attacks import ATTACKS
from smoothadv.commands.options.attack import compose_attack, given_attack_flags
from smoothadv.commands.options.components import add_settings, compose, name_in, refuse_foreign_settings
from smoothadv.commands.options.recipes import RELEASED, recipe_names, with_recipe
from smoothadv.commands.options.shared import add_input_layer
from smoothadv.commands.runner import Parser
from smoothadv.objectives import OBJECTIVES, Objective
from smoothadv.settings import non_negative_float, non_negative_int, positive_float, positive_int, settings_of
from smoothadv.training import EvaluationSchedule, Execution
from smoothadv.training.execution import CONVOLUTION_DTYPES
from smoothadv.training.request import ScheduleChoices, TrainingRequest
from smoothadv.training.schedule import SHAPES


def add_recipe(parser: Parser) -> None:
    """--recipe and --released-behaviour."""
    group = parser.add_argument_group("recipes (options on the command line override them)")
    group.add_argument(
        "--recipe", metavar="NAME", help=f"take options from a recipe: {', '.join(recipe_names())}, or a file"
    )
    group.add_argument(
        "--released-behaviour",
        action="store_true",
        help="deviate from the paper as the released SmoothAdv code does, with --epsilon in 1/256 (docs/training.md)",
    )


def add_objective(parser: Parser, default: str) -> None:
    """--objective and the settings of all objectives."""
    group = parser.add_argument_group("objective")
    group.add_argument(
        "--objective",
        type=name_in(OBJECTIVES),
        metavar="NAME",
        help=f"one of {', '.join(OBJECTIVES)} (default: {default})",
    )
    parser.set_defaults(default_objective=default)
    add_settings(group, [setting for name in OBJECTIVES for setting in settings_of(OBJECTIVES[name])])


def add_schedule(parser: Parser) -> None:
    """Epochs, batches, learning rate; the defaults are not set here, so that a recipe can replace them."""
    group = parser.add_argument_group("schedule (defaults: the paper's for the dataset)")
    group.add_argument("--epochs", type=positive_int, metavar="N", help="passes over the training images")
    group.add_argument(
        "--batch", type=positive_int, metavar="B", help="images per update, each with all its noisy copies"
    )
    group.add_argument(
        "--micro-batch",
        type=positive_int,
        metavar="B",
        help="compute gradients of so many images at a time, to save memory; statistics of batch normalization are "
        "then those of the micro-batch (default: all images of an update)",
    )
    group.add_argument(
        "--split-updates",
        action="store_true",
        help="make m updates of each batch, on B/m images in m copies, as the released code does with "
        "--train-multi-noise",
    )
    group.add_argument("--steps-per-epoch", type=positive_int, metavar="N", help="updates per epoch (default: all)")
    group.add_argument("--lr", type=positive_float, help="initial learning rate, or the highest of one-cycle")
    group.add_argument(
        "--lr-schedule",
        choices=SHAPES,
        help="divide the learning rate in steps, or let it rise and fall once (default: step)",
    )
    group.add_argument(
        "--lr-step-size",
        "--lr_step_size",
        type=positive_int,
        metavar="N",
        help="epochs between two steps of the learning rate",
    )
    group.add_argument(
        "--lr-factor",
        "--gamma",
        type=positive_float,
        metavar="F",
        help="factor by which each step multiplies the learning rate (default: 0.1)",
    )
    group.add_argument("--momentum", type=non_negative_float, help="default: 0.9")
    group.add_argument("--weight-decay", type=non_negative_float, help="default: 1e-4")


def add_data(parser: Parser) -> None:
    """Augmentation, initial weights and pseudo-labelled images."""
    group = parser.add_argument_group("data and start")
    group.add_argument(
        "--crop-padding",
        type=non_negative_int,
        metavar="P",
        help="random crops after padding by P pixels, 0 for none (default: the dataset's)",
    )
    group.add_argument(
        "--horizontal-flip",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="random mirror images (default: the dataset's)",
    )
    group.add_argument(
        "--pretrained-model",
        type=Path,
        metavar="CHECKPOINT",
        help="start from these weights, with a new classification layer where the classes differ",
    )
    group.add_argument(
        "--use-unlabelled",
        type=Path,
        metavar="FILE",
        help="self-training: mix in batches of images with pseudo-labels, from a .npz file or a pickle with data and "
        "extrapolated_targets",
    )
    group.add_argument(
        "--unlabelled-weight",
        type=positive_float,
        metavar="ETA",
        help="weight of the loss on the images of --use-unlabelled (paper: 0.1, 0.5, 1; default: 1)",
    )
    add_input_layer(group, None, "first layer of the model (default: normalize, or that of --pretrained-model)")


def add_execution(parser: Parser) -> None:
    """Precision and speed, checkpoints, and evaluation during training."""
    group = parser.add_argument_group("execution")
    group.add_argument(
        "--precision",
        choices=list(CONVOLUTION_DTYPES),
        help="precision of convolutions; weights and losses stay float32 (default: fp32; convolutions then use TF32 on "
        "GPUs that have it, which is PyTorch's default)",
    )
    group.add_argument(
        "--compile", action="store_true", help="compile the network first: takes minutes, then runs faster"
    )
    group.add_argument(
        "--sync-bn",
        action="store_true",
        help="with several GPUs: statistics of batch normalization over all of them (default: on each GPU separately, "
        "as in the paper)",
    )
    group.add_argument(
        "--checkpoint-minutes",
        type=positive_float,
        metavar="MIN",
        help="minutes between checkpoints within an epoch; there is one after each (default: 10)",
    )
    group.add_argument(
        "--evaluate-every", type=positive_int, metavar="K", help="test after every K-th epoch and the last (default: 1)"
    )
    group.add_argument(
        "--evaluate-images",
        type=positive_int,
        metavar="N",
        help="number of evenly spaced test images to evaluate on (default: 1000)",
    )
    group.add_argument("--tensorboard", action="store_true", help="write curves to OUTDIR/tensorboard")


def with_recipes(parser: Parser, options: argparse.Namespace) -> argparse.Namespace:
    """The options with those of the recipes added; --recipe overrides --released-behaviour, the command line both."""
    if options.lr_schedule == "one-cycle" and (options.lr_step_size or options.lr_factor):
        parser.error("--lr-schedule one-cycle has no steps: leave out --lr-step-size and --lr-factor")
    if options.recipe == RELEASED:
        parser.error(f"--recipe {RELEASED}: write --{RELEASED}, which also counts --epsilon in 1/256")
    for name in [options.recipe] * (options.recipe is not None) + [RELEASED] * options.released_behaviour:
        options = with_recipe(parser, options, name, _readable)
    return argparse.Namespace(**{**vars(options), "objective": options.objective or options.default_objective})


def _readable(options: argparse.Namespace) -> set[str]:
    """The flags of the settings of the objective and, if it makes an attack, of the attack."""
    objective = OBJECTIVES[options.objective or options.default_objective]
    chosen: list[type] = [objective]
    if _makes_attack(objective) and options.attack:
        chosen.append(ATTACKS[options.attack])
    return {setting.flag for component in chosen for setting in settings_of(component)}


def _makes_attack(objective: type) -> bool:
    return any(field.name == "attack" for field in dataclasses.fields(objective))


def request_of(parser: Parser, options: argparse.Namespace, command: Sequence[str]) -> TrainingRequest:
    """The request that the options, with recipes added, describe; a usage error where they contradict each other."""
    objective = _objective(parser, options)
    _refuse_contradictions(parser, options)
    return TrainingRequest(
        classifier=options.arch,
        images=options.dataset,
        outdir=options.outdir,
        objective=objective,
        schedule=ScheduleChoices(
            epochs=options.epochs,
            batch=options.batch,
            learning_rate=options.lr,
            learning_rate_step=options.lr_step_size,
            learning_rate_factor=options.lr_factor,
            learning_rate_shape=options.lr_schedule,
            momentum=options.momentum,
            weight_decay=options.weight_decay,
            micro_batch=options.micro_batch,
            steps_per_epoch=options.steps_per_epoch,
            split_updates=options.split_updates,
        ),
        execution=Execution(
            compile=options.compile,
            synchronized_norm=options.sync_bn,
            **_given(precision=options.precision, checkpoint_minutes=options.checkpoint_minutes),
        ),
        tests=EvaluationSchedule(**_given(every=options.evaluate_every, images=options.evaluate_images)),
        seed=options.seed,
        device=options.device,
        data_dir=options.data_dir,
        input_layer=options.input_layer,
        crop_padding=options.crop_padding,
        horizontal_flip=options.horizontal_flip,
        pretrained_model=options.pretrained_model,
        use_unlabelled=options.use_unlabelled,
        unlabelled_weight=options.unlabelled_weight or 1.0,
        existing=options.existing,
        board=options.tensorboard,
        command=tuple(command),
        arguments=vars(options),
    )


def _objective(parser: Parser, options: argparse.Namespace) -> Objective:
    """The objective that the options describe; a usage error where something is missing or contradictory."""
    component = OBJECTIVES[options.objective]
    everything = [OBJECTIVES[name] for name in OBJECTIVES]
    given: dict[str, Any] = {}
    if _makes_attack(component):
        if "--noise" not in options:
            parser.error("--noise is required: the noise's standard deviation on images in [0, 1], like 0.25")
        noise_sd = 0.0 if "--base-attack" in options else getattr(options, "--noise")
        given["attack"] = compose_attack(parser, options, noise_sd)
        chosen = [component, *(ATTACKS[name] for name in ATTACKS)]
    else:
        chosen = [component]
        if given_attack_flags(options):
            parser.error(
                f"{given_attack_flags(options)[0]} is not read by --objective {options.objective}, which makes no "
                "attack: leave it out, or use train_pgd"
            )
    refuse_foreign_settings(parser, options, everything, chosen, f"--objective {options.objective}")
    return compose(parser, component, options, f"--objective {options.objective}", **given)


def _refuse_contradictions(parser: Parser, options: argparse.Namespace) -> None:
    """A usage error where options contradict each other."""
    if options.unlabelled_weight is not None and options.use_unlabelled is None:
        parser.error("--unlabelled-weight weighs the images of --use-unlabelled: name their file, or leave it out")
    if options.sync_bn and options.micro_batch is not None:
        parser.error("--sync-bn computes statistics of whole batches, --micro-batch of parts: leave one of them out")
    if getattr(options, "--noise", None) == 0 and getattr(options, "--num-noise-vec", 1) > 1:
        parser.error("--noise 0 makes all --num-noise-vec copies of an image identical: leave --num-noise-vec out")
    if "--init-norm-DDN" in options and "--init-norm-is-epsilon-DDN" in options and not options.released_behaviour:
        parser.error("--init-norm-DDN and --init-norm-is-epsilon-DDN contradict each other: leave one out")


def _given(**values: Any) -> dict[str, Any]:
    """The values that are not None; for the others, the called class has a default."""
    return {name: value for name, value in values.items() if value is not None}
