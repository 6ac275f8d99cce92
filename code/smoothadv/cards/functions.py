"""``smoothadv.card`` and ``smoothadv.board``."""

from typing import Any

from smoothadv.analysis.functions import paths
from smoothadv.base.errors import UserError
from smoothadv.base.settings import takes
from smoothadv.cards.board import BoardSpec
from smoothadv.cards.card import CardSpec


@takes(CardSpec)
def card(*logs: Any, **keywords: Any) -> list[dict[str, Any]]:
    """A card per certification log for the board: facts, values with intervals, and what was
    verified.

    ``logs`` are files, folders (searched throughout) or globs, as strings or paths.

    Returns the cards, as ``json.dump`` takes them. UserError where a row of a log does not hold.
    """
    return [content for _, content in CardSpec(logs=paths(logs), **keywords).made()]


@takes(BoardSpec)
def board(*cards: Any, **keywords: Any) -> Any:
    """Rankings of cards with the same dataset, images, alpha and kind of certificate.

    ``cards`` are files of cards, folders of them or globs, as strings or paths.

    Returns a DataFrame with a row per card. UserError where there are no cards.
    """
    try:
        files = paths(cards)
    except UserError:
        raise UserError("cards: give files, as analyze card -o FILE writes them") from None
    return BoardSpec(cards=files, **keywords).table().frame()
