"""Philox4x32-10 (Salmon et al., 2011): random bits that are a function of their address.

Every device computes the same integers, in whatever order and batches they are requested.
"""

import torch

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
ROUNDS = 10
Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Four independent uniform 32-bit words for each counter, as int64 tensors in 0..2^32-1.

    ``counter`` holds four int64 tensors in 0..2^32-1 of shapes that broadcast; ``key`` two such
    integers.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # An int64 product wraps around, but all of its 64 bits are right. The low halves keep the
        # high bits above them until the mask of the next round, or of the last line, removes those.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = ((p1 >> 32) ^ (c1 ^ k0)).bitwise_and_(_MASK), p1
        c2, c3 = ((p0 >> 32) ^ (c3 ^ k1)).bitwise_and_(_MASK), p0
        k0, k1 = (k0 + KEY_STEPS[0]) & _MASK, (k1 + KEY_STEPS[1]) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK
