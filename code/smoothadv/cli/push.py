"""push: a checkpoint goes to the Hugging Face hub, where hf-hub:OWNER/NAME names it."""

from collections.abc import Sequence
from functools import partial

from smoothadv.cli.runner import Options, Parser, given_settings, run
from smoothadv.evaluation.push import PushSpec, push

_EXAMPLES = """examples:
  python code/push.py models/pgd_0.25/checkpoint.pth.tar me/pgd-0.25 --to files
  python code/push.py models/pgd_0.25/checkpoint.pth.tar me/pgd-0.25 --card cards/pgd_0.25.json
  python code/certify.py cifar10 hf-hub:me/pgd-0.25 0.25 logs/pgd_0.25.tsv --skip 20
With --to nothing is uploaded. It needs pip install 'smoothadv[hub]', and a token: hf auth login.
"""


make_parser = partial(
    Parser,
    prog="push",
    kinds=[PushSpec],
    epilog=_EXAMPLES,
    description="Put a checkpoint on the Hugging Face hub: weights as safetensors, what is needed "
    "to use them, and a model card. Certify it there as hf-hub:OWNER/NAME@REVISION.",
)


def _push(parser: Parser, options: Options, command: Sequence[str]) -> None:
    for line in push(PushSpec(**given_settings(PushSpec, options))):
        print(line)


main = partial(run, "push", make_parser, _push)
