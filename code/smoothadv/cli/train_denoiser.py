"""train_denoiser: a denoiser that makes a classifier without noise in its training one that can be
smoothed.
"""

from functools import partial

from smoothadv.cli.options.training import training_parser
from smoothadv.cli.train import train_command

_EXAMPLES = """examples:
  python code/train_denoiser.py digits digits_dncnn models/denoiser --noise 0.25
  python code/train_denoiser.py cifar10 dncnn models/cifar10/denoiser_0.25 --noise 0.25
  python code/train_denoiser.py cifar10 dncnn models/cifar10/stability_0.25 --noise 0.25 \\
      --objective stability \\
      --classifier models/cifar10/clean/checkpoint.pth.tar --optimizer adamw --lr 1e-4 \\
      --pretrained-model models/cifar10/denoiser_0.25/checkpoint.pth.tar
docs/denoised.md says how it is used.
"""
_DESCRIPTION = (
    "Train a denoiser (Salman et al., 2020): behind it, a classifier trained without noise is "
    "certified."
)

make_parser = partial(training_parser, "train_denoiser", _DESCRIPTION, _EXAMPLES)
main = partial(train_command, "train_denoiser", make_parser)
