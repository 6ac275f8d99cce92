"""Registers cards, their board, and the command ``push``."""

from smoothadv.base.registry import ANALYSES, COMMANDS, FUNCTIONS, Addition

COMMANDS.register("push")(
    Addition(
        "smoothadv.cards.push:main", "put a checkpoint on the Hugging Face hub, with a model card"
    )
)
ANALYSES.register("card")(Addition("smoothadv.cards.card:CardSpec"))
ANALYSES.register("board")(Addition("smoothadv.cards.board:BoardSpec"))
FUNCTIONS.register("card")(Addition("smoothadv.cards.card:card"))
FUNCTIONS.register("board")(Addition("smoothadv.cards.board:board"))
