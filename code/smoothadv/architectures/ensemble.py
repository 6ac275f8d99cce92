"""An ensemble of classifiers as one classifier, which may vote without asking all its members, as
those of Horvath et al. (ICLR 2022); here, the vote is always that of all.
"""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import nn

_MOST_CHUNKS, _ROWS = 8, 16


class Ensemble(nn.Module):
    """The mean of ``members``, which map images [B, C, H, W] to logits [B, K]; returns logits [B,
    K].

    ``mean`` "logits" takes the mean of their logits, "probabilities" the logarithm of that of their
    softmax outputs.
    """

    def __init__(self, members: Sequence[nn.Module], mean: str) -> None:
        super().__init__()
        self.members, self.mean = nn.ModuleList(members), mean

    def extra_repr(self) -> str:
        return f"mean of {self.mean}"

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        outputs = [_single(member(images.clone())) for member in self.members]
        if self.mean == "logits":
            return reduce(torch.add, outputs) / len(outputs)  # in the order of the members
        return torch.stack(outputs).log_softmax(2).logsumexp(0) - torch.tensor(len(outputs)).log()

    @torch.inference_mode()
    def summed_probabilities(self, images: torch.Tensor, consensus: bool) -> torch.Tensor:
        """The sum of the members' softmax outputs, float32 [B, K], added in the order of the
        members.

        With ``consensus`` a row contains only as many members as decide its largest entry: that
        entry is the largest of the whole sum, too. Let one class lead by d in the sum over j of M
        members as computed. Computed probabilities lie in [0, 1], so its entry never decreases, and
        that of a rival grows at most by 1 and a rounding with each of the M - j members left. No
        sum exceeds M (1 + 2^-24)^M; so the roundings of these sums, of d and of the threshold
        differ by less than M^2 2^-22 in all, and d > M - j + M^2 2^-22 decides the row.

        All passes of a member have one shape, whichever rows are left: the batch for the M // 2 + 1
        members that every row needs, about an eighth of it, padded, for the others.
        """
        most, chunk = len(self.members), torch.empty_like(images[: _chunk_size(len(images))])
        rows = torch.arange(len(images), device=images.device)
        total = torch.zeros((), device=images.device)
        for asked, member in enumerate(self.members, start=1):
            if asked <= most // 2 + 1:
                total = total + _probabilities(member(images.clone()))
            else:
                added = [_of_chunk(member, images[some], chunk) for some in rows.split(len(chunk))]
                total = total.index_put((rows,), total[rows] + torch.cat(added))
            left = most - asked
            if (
                consensus and 0 < left < asked and total.shape[1] > 1
            ):  # with more members left, no lead suffices
                leaders = total[rows].topk(2).values
                rows = rows[~(leaders[:, 0] - leaders[:, 1] > left + most**2 * 2**-22)]
                if not len(rows):
                    break
        return total


def _of_chunk(member: nn.Module, images: torch.Tensor, chunk: torch.Tensor) -> torch.Tensor:
    """The probabilities of some images, in a pass of the shape of ``chunk``."""
    chunk[: len(images)] = images
    chunk[len(images) :] = images[0]
    return _probabilities(member(chunk))[: len(images)]


def _probabilities(logits: torch.Tensor) -> torch.Tensor:
    """The softmax of logits [B, K], float32; rows that are not finite become NaN."""
    finite = logits.isfinite().all(1, keepdim=True)
    return _single(logits).softmax(1).clamp(max=1).where(finite, torch.nan)


def _chunk_size(batch: int) -> int:
    """The rows of a pass: a multiple of 16, since kernels may round the rows beyond the last 16
    differently.
    """
    return min(batch, -(-batch // (_MOST_CHUNKS * _ROWS)) * _ROWS)


def _single(logits: torch.Tensor) -> torch.Tensor:
    """Logits in float32, or in float64 if they are: sums of a lower precision would be coarse."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
