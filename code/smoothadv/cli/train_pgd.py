"""train_pgd: a base classifier with SmoothAdv."""

from functools import partial

from smoothadv.cli.options.training import training_parser
from smoothadv.cli.train import train_command

_EXAMPLES = """examples:
  python code/train_pgd.py digits digits_resnet8 models/digits_smoothadv --noise 0.25 \\
      --attack PGD --epsilon 0.5 --num-steps 4 --num-noise-vec 2
  python code/train_pgd.py cifar10 cifar_resnet110 models/cifar10/pgd_0.25 --noise 0.25 \\
      --attack PGD --epsilon 255/255 --num-steps 10 --num-noise-vec 8 --warmup 10
  python code/train_pgd.py imagenet resnet50 models/imagenet/ddn_0.50 --noise 0.5 \\
      --attack DDN --epsilon 255/255 --num-steps 2 --num-noise-vec 1 --warmup 10
  python code/train_pgd.py cifar10 cifar_resnet110 models/cifar10/vanilla_noise --noise 0.25 \\
      --base-attack \\
      --attack PGD --epsilon 0.5 --num-steps 2
  torchrun --nproc-per-node 4 code/train_pgd.py cifar10 cifar_resnet110 models/cifar10/fast \\
      --noise 0.5 \\
      --attack PGD --epsilon 1 --num-steps 2 --recipe fast --precision bf16
"""
_DESCRIPTION = (
    "Train a classifier with SmoothAdv (Salman et al., 2019): attack the smoothed classifier, "
    "train on the attacked noisy images."
)

make_parser = partial(training_parser, "train_pgd", _DESCRIPTION, _EXAMPLES)
main = partial(train_command, "train_pgd", make_parser)
