"""Which training images an epoch has, and how often: hard ones left out, others drawn more often
(acr-weakness).
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import ndtri

from smoothadv.base.errors import UserError
from smoothadv.base.settings import (
    Checked,
    non_negative_int,
    positive_int,
    setting,
    share_of_one,
)
from smoothadv.statistics.bounds import lower_confidence_bound

_ALPHA = 0.1
_LEAST_SHARE = 0.75
_GROUP = "data and start"


@dataclass(frozen=True)
class DataPolicy(Checked):
    """Each image once in an epoch before ``from_epoch``, counted from 0; from then on draws with
    replacement.

    Images of which fewer than a share ``drop_below`` of ``drop_draws`` noisy copies are classified
    correctly before that epoch are left out for good. Every ``resample_every`` epochs (0: never)
    the others get weights from ``resample_draws`` copies: the normal quantile of the lower
    confidence bound on the probability of their label, which is a certified radius divided by
    sigma; a share of votes below .75 counts as .75. The rule is that of the released code of
    acr-weakness (eth-sri), which votes on augmented images: here, votes are on the images
    themselves.
    """

    from_epoch: int = setting(
        parse=non_negative_int,
        flag="--choose-from-epoch",
        metavar="E",
        group=_GROUP,
        help="choose training images from this epoch on, counted from 0: leave out those of "
        "--drop-below, draw the others with replacement, by the weights of --resample-every "
        "(acr-weakness does so by itself)",
    )
    drop_below: float = setting(
        0.0,
        parse=share_of_one,
        metavar="P",
        group=_GROUP,
        help="leave out images of which fewer than this share of 100 noisy copies is classified "
        "correctly",
    )
    resample_every: int = setting(
        0,
        parse=non_negative_int,
        metavar="K",
        group=_GROUP,
        help="every K epochs, weigh images by the radii certified by 16 noisy copies each; 0: "
        "equal weights",
    )
    drop_draws: int = setting(100, parse=positive_int)
    resample_draws: int = setting(16, parse=positive_int)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights(np.zeros(1, int)).min() <= 0:
            raise ValueError(f"{self} has too few resample_draws: 16 are usual")

    def drops_before(self, epoch: int) -> bool:
        """Whether images are left out for good before this epoch."""
        return epoch == self.from_epoch and self.drop_below > 0

    def weighs_before(self, epoch: int) -> bool:
        """Whether images get new weights before this epoch."""
        return (
            0 < self.resample_every
            and epoch >= self.from_epoch
            and not ((epoch - self.from_epoch) % self.resample_every)
        )

    def kept(self, votes: np.ndarray) -> np.ndarray:
        """The weights float64 [N], 1 or 0, by how many of ``drop_draws`` votes int64 [N] were for
        the label.

        UserError where no image is left.
        """
        kept = (votes / self.drop_draws >= self.drop_below).astype(np.float64)
        if not kept.any():
            raise UserError(
                f"--drop-below {self.drop_below:g} leaves none of {len(votes)} training images: "
                f"the best is classified correctly in {votes.max() / self.drop_draws:.0%} of its "
                "noisy copies; take a smaller share"
            )
        return kept

    def weights(self, votes: np.ndarray) -> np.ndarray:
        """The weights float64 [N], above 0, by how many of ``resample_draws`` votes int64 [N] were
        for the label.
        """
        least = math.ceil(_LEAST_SHARE * self.resample_draws)
        bounds = [
            lower_confidence_bound(count, self.resample_draws, _ALPHA)
            for count in range(self.resample_draws + 1)
        ]
        return ndtri(np.array(bounds))[np.maximum(votes, least)]

    @staticmethod
    def order(weights: np.ndarray, generator: torch.Generator) -> torch.Tensor:
        """As many indices int64 [N] as there are weights [N], drawn independently with
        probabilities in proportion.
        """
        ends = np.cumsum(weights)
        drawn = (
            torch.rand(len(weights), dtype=torch.float64, generator=generator).numpy() * ends[-1]
        )
        # The last image with a weight takes what rounding puts beyond the end.
        return torch.from_numpy(
            np.searchsorted(ends, drawn, side="right").clip(max=np.flatnonzero(weights)[-1])
        )
