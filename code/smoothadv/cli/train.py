"""train: a base classifier under Gaussian noise, or with any other registered objective."""

import shlex
from collections.abc import Callable, Sequence
from functools import partial

from smoothadv.base import plugins
from smoothadv.base.distributed import ended
from smoothadv.base.settings import RELEASED
from smoothadv.cli.options.training import training_of, training_parser
from smoothadv.cli.runner import Options, Parser, invocation, run
from smoothadv.models.name import STAGES
from smoothadv.models.spec import use_threads
from smoothadv.records.logs import CHECKPOINT_FILE
from smoothadv.training.setup import train
from smoothadv.training.spec import TrainSpec

_EXAMPLES = """examples:
  python code/train.py digits digits_resnet8 models/digits_gaussian --noise 0.25
  python code/train.py imagenet resnet50 models/imagenet/gaussian_0.50 --noise 0.5 \\
      --data-dir /datasets/imagenet
  python code/train.py cifar10 cifar_resnet110 models/cifar10/consistency_0.50 --noise 0.5 \\
      --objective consistency
  python code/train.py digits digits_resnet8 models/taught --noise 0.25 \\
      --objective distillation --teacher models/digits_gaussian/checkpoint.pth.tar
  python code/train.py imagefolder:my_images timm:resnet18 models/tuned --noise 0.25 --pretrained \\
      --recipe finetune-noise
"""
_DESCRIPTION = (
    "Train a classifier on Gaussian-augmented images (Cohen et al., 2019), or for another "
    "--objective."
)


_OF_ROUTER = (
    "a router: name it and the stages in ROUTER.toml, as docs/cascades.md shows, then certify with"
)


def train_command(
    name: str, make_parser: Callable[[Sequence[str]], Parser], arguments: Sequence[str]
) -> int:
    """Run a training command with these ``arguments``; returns the exit code."""
    hint = "with --resume the same command continues from the last checkpoint"
    return ended(run(name, partial(make_parser, arguments), _train, arguments, interrupted=hint))


def _train(parser: Parser, options: Options, command: Sequence[str]) -> None:
    with training_of(parser, options, command) as spec:
        use_threads(spec, spec.outdir if spec.existing == "resume" else None)
        if train(spec).is_first:
            what = "certify it with" if spec.route is None else _OF_ROUTER
            print(f"saved {spec.outdir / CHECKPOINT_FILE}; {what}:\n  {_certify_command(spec)}")


def _certify_command(spec: TrainSpec) -> str:
    """The command line that certifies the trained model with the sigma of its training."""
    sigma, made = str(spec.objective.noise_sd or 0.25), str(spec.outdir / CHECKPOINT_FILE)
    words = invocation("certify").split()
    classifier, before = made, {"denoiser": spec.denoiser, "resize": spec.resize}
    if spec.timestep != RELEASED:
        before["timestep"] = spec.timestep
    if spec.objective.DENOISES:
        classifier, before = str(spec.teacher or "CLASSIFIER"), {"denoiser": made}
    if spec.route is not None:
        classifier, sigma = "ROUTER.toml", STAGES
    log = f"logs/{spec.outdir.resolve().name}_sigma_{sigma}.tsv"
    words += [spec.dataset_name, classifier, sigma, log]
    for name, value in before.items():
        words += [] if value is None else [f"--{name}", value]
    if spec.data_dir:
        words += ["--data-dir", str(spec.data_dir)]
    for plugin in plugins.loaded():
        words += [] if plugin.is_installed else ["--plugin", plugin.source]
    return shlex.join(words)


make_parser = partial(training_parser, "train", _DESCRIPTION, _EXAMPLES)
main = partial(train_command, "train", make_parser)
