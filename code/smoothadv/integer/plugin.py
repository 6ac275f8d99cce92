"""Registers the command ``quantize`` and what others ask of networks of integers."""

from smoothadv.base.registry import COMMANDS, INTEGERS, Addition

COMMANDS.register("quantize")(
    Addition(
        "smoothadv.integer.command:main",
        "make a network of integers of a trained one, the same on all machines",
    )
)
INTEGERS.register("read")(Addition("smoothadv.integer.network:IntegerNetwork.read"))
INTEGERS.register("trained")(Addition("smoothadv.integer.training:trained_integers"))
