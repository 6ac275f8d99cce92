"""train: a base classifier under Gaussian noise, or with any other registered objective."""

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from smoothadv.architectures import ARCHITECTURES, LIBRARIES, chosen_architecture
from smoothadv.architectures.denoisers import DENOISERS
from smoothadv.base import plugins
from smoothadv.base.distributed import ended
from smoothadv.base.settings import output_folder
from smoothadv.cli.options.attack import in_256ths, unchanged
from smoothadv.cli.options.components import add_options
from smoothadv.cli.options.shared import add_dataset, add_running, use_threads
from smoothadv.cli.options.training import (
    add_training,
    objectives_with,
    request_of,
    with_recipes,
)
from smoothadv.cli.runner import Parser, run
from smoothadv.objectives import Objective
from smoothadv.objectives.denoising import DENOISING
from smoothadv.records.logs import ARGUMENTS, CHECKPOINT
from smoothadv.training.job import train

_EXAMPLES = """examples:
  python code/train.py digits digits_resnet8 models/digits_gaussian --noise 0.25
  python code/train.py cifar10 cifar_resnet110 models/cifar10/gaussian_0.25 --noise 0.25
  python code/train.py imagenet resnet50 models/imagenet/gaussian_0.50 --noise 0.5 \\
      --data-dir /datasets/imagenet
  python code/train.py cifar10 cifar_resnet110 models/cifar10/consistency_0.50 --noise 0.5 \\
      --objective consistency
  python code/train.py digits digits_resnet8 models/taught --noise 0.25 \\
      --objective distillation --teacher \\
      models/digits_gaussian/checkpoint.pth.tar
  python code/train.py imagefolder:my_images cifar_resnet20 models/mine --noise 0.25 --epochs 30
  python code/train.py imagefolder:my_images timm:resnet18 models/tuned --noise 0.25 --pretrained \\
      --recipe finetune-noise
"""


def make_parser(arguments: Sequence[str]) -> Parser:
    """The parser of the command ``train``; --released-behaviour in ``arguments`` changes the unit
    of --epsilon.
    """
    description = (
        "Train a classifier on Gaussian-augmented images (Cohen et al., 2019), or for another "
        "--objective."
    )
    return training_parser("train", description, _EXAMPLES, "gaussian", arguments)


def training_parser(
    name: str, description: str, examples: str, objective: str, arguments: Sequence[str]
) -> Parser:
    """The parser of train, train_pgd or train_denoiser, which differ in their default objective."""
    parser = Parser(prog=name, description=description, epilog=examples)
    add_dataset(parser)
    libraries = ", ".join(f"{kind}:NAME" for kind in LIBRARIES if kind != "onnx")
    text = (
        f"one of {', '.join(ARCHITECTURES)}; of a library: {libraries}; or FILE.py:FUNCTION "
        "(docs/networks.md)"
    )
    arch = chosen_architecture, text
    if objectives_with(objective) is DENOISING:
        arch = DENOISERS.require, f"one of {', '.join(DENOISERS)}"
    outdir = output_folder, "folder for the checkpoint, the log and the arguments"
    add_options(parser, {"arch ARCH": arch, "outdir OUTDIR": outdir})
    add_training(parser, objective, in_256ths if "--released-behaviour" in arguments else unchanged)
    add_running(parser)
    return parser


def train_command(
    name: str, make_parser: Callable[[Sequence[str]], Parser], arguments: Sequence[str]
) -> int:
    """Run a training command with these ``arguments``; returns the exit code."""
    hint = "with --resume the same command continues from the last checkpoint"
    return ended(run(name, lambda: make_parser(arguments), _train, arguments, interrupted=hint))


def _train(parser: Parser, options: argparse.Namespace, command: Sequence[str]) -> None:
    options = with_recipes(parser, options)
    request = request_of(parser, options, command)
    use_threads(options, options.outdir / ARGUMENTS if options.existing == "resume" else None)
    trained = train(request)
    if trained.is_first:
        command_line = _certify_command(options, request.objective)
        print(f"saved {options.outdir / CHECKPOINT}; certify it with:\n  {command_line}")


def _certify_command(options: argparse.Namespace, objective: Objective) -> str:
    """The command line that certifies the trained model with the sigma of its training."""
    sigma = str(objective.noise_sd or 0.25)
    is_clone = Path(sys.argv[0]).suffix == ".py"
    words = ["python", "code/certify.py"] if is_clone else ["smoothadv", "certify"]
    made = str(options.outdir / CHECKPOINT)
    words += [
        options.dataset,
        str(options.classifier or "CLASSIFIER") if objective.DENOISES else made,
        sigma,
    ]
    words.append(f"logs/{options.outdir.resolve().name}_sigma_{sigma}.tsv")
    words += ["--denoiser", made] if objective.DENOISES else []
    words += ["--data-dir", options.data_dir] if options.data_dir else []
    return shlex.join([*words, *plugins.words()])


main = partial(train_command, "train", make_parser)
