"""Runs the kernels of the noise in Triton's interpreter, on the CPU, and prints what it finds as
JSON.

A process of its own: Triton reads TRITON_INTERPRET when it is imported.
"""

import itertools
import json
import math
import os
from unittest import mock

import torch
import triton
import triton.language as tl

from smoothadv.noise import (
    GaussianNoise,
    Noise,
    NoiseKey,
    RoundedGaussianNoise,
    Rows,
    kernels,
    streams,
)
from smoothadv.noise.philox import MULTIPLIERS, philox

MOST = 2**32 - 1
CPU = torch.device("cpu")
KINDS = (GaussianNoise, RoundedGaussianNoise)


@triton.jit
def words_kernel(out, given, SIZE: tl.constexpr):
    at = given + tl.arange(0, SIZE)
    c0, c1 = tl.load(at).to(tl.uint32), tl.load(at + SIZE).to(tl.uint32)
    c2, c3 = tl.load(at + 2 * SIZE).to(tl.uint32), tl.load(at + 3 * SIZE).to(tl.uint32)
    k0, k1 = tl.load(at + 4 * SIZE).to(tl.uint32), tl.load(at + 5 * SIZE).to(tl.uint32)
    w0, w1, w2, w3 = kernels.words_at(c0, c1, c2, c3, k0, k1)
    to = out + tl.arange(0, SIZE)
    tl.store(to, w0.to(tl.int64))
    tl.store(to + SIZE, w1.to(tl.int64))
    tl.store(to + 2 * SIZE, w2.to(tl.int64))
    tl.store(to + 3 * SIZE, w3.to(tl.int64))


@triton.jit
def parts_kernel(out, given, SIZE: tl.constexpr):
    word = tl.load(given + tl.arange(0, SIZE)).to(tl.uint32)
    cosine, sine = kernels._cosine_and_sine(word)
    to = out + tl.arange(0, SIZE)
    tl.store(to, kernels._radius(word, tl.full([1], 1.0, tl.float64)))
    tl.store(to + SIZE, cosine)
    tl.store(to + 2 * SIZE, sine)


def run(kernel, rows: int, given: torch.Tensor) -> torch.Tensor:
    """What a kernel above makes of its columns, of any number: [rows, columns]."""
    number = given.shape[-1]
    size = 1 << (number - 1).bit_length()
    found = torch.full(
        (rows, size), -1, dtype=torch.int64 if kernel is words_kernel else torch.float64
    )
    kernel[(1,)](found, torch.nn.functional.pad(given, (0, size - number)), SIZE=size)
    return found[:, :number]


def words() -> int:
    """How many of 9,096 addresses and keys have other words than ``philox`` gives: limits of all
    words, and random.
    """
    limits = torch.tensor(list(itertools.product([0, 1, 2**31, MOST], repeat=6))).T
    random = torch.randint(0, MOST + 1, (6, 5000), generator=torch.Generator().manual_seed(0))
    given = torch.cat([limits, random], dim=1)
    expected = torch.stack(philox(tuple(given[:4]), (given[4], given[5])))
    return int((run(words_kernel, 4, given) != expected).any(0).sum())


def extremes() -> float:
    """The largest error of root, cosine and sine at words around powers of two, where series are at
    their ends.
    """
    near = {
        value + step
        for power in range(33)
        for value in (2**power, 3 * 2**power)
        for step in range(-3, 4)
    }
    hard = torch.tensor(sorted(value for value in near if 0 <= value <= MOST))
    angle = hard.double() * (2 * math.pi * 2.0**-32)
    radius = (-2 * torch.log1p((hard.double() + 0.5) * 2.0**-32 - 1)).sqrt()
    return float(
        (run(parts_kernel, 3, hard) - torch.stack([radius, angle.cos(), angle.sin()])).abs().max()
    )


def batch_of(noise: Noise, shape: tuple[int, ...], shares: int) -> list[Rows]:
    """Shares of one to three draws, of images of 8 bits, divided as GPUs do, at the limits of
    example, purpose and draw, and between.
    """
    generator = torch.Generator().manual_seed(shares)
    limits = itertools.cycle(
        itertools.product([0, MOST], [0, MOST, 7], [MOST - 2, 0, 2**31 - 1, 10**6])
    )
    rows = []
    for share, (example, purpose, first) in zip(range(shares), limits):
        image = torch.randint(0, 256, shape, generator=generator) * torch.tensor(1 / 255)
        rows.append(Rows(noise.stream(example, "cpu", purpose), image, first, 1 + share % 3))
    return rows


def filled(chosen, batch: list[Rows], out: torch.Tensor) -> torch.Tensor:
    """``out``, filled by the kernels, or, where ``chosen`` is None, by torch alone."""
    with mock.patch.object(streams, "kernels_on", lambda device: chosen):
        batch[0].stream.noise.fill(out, batch)
    return out


def exact(noise: Noise, batch: list[Rows], shape: tuple[int, ...]) -> torch.Tensor:
    """Gaussian noise of the rows by Box and Muller in float64, from the words."""
    size, found = math.prod(shape), []
    for rows in batch:
        address = rows.count, rows.stream.example, rows.first, rows.stream.purpose
        for _, drawn in noise.words(CPU, -(-size // 4), *address):
            w = [each.double() for each in drawn]
            radii = [(-2 * ((each + 0.5) * 2.0**-32).log()).sqrt() * noise.sigma for each in w[::2]]
            angles = [each * (2 * math.pi * 2.0**-32) for each in w[1::2]]
            pairs = [f(a) * r for a, r in zip(angles, radii) for f in (torch.cos, torch.sin)]
            found.append(torch.cat(pairs, dim=1)[:, :size])
    return torch.cat(found).view(-1, *shape)


def empty(rows: int, shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> torch.Tensor:
    """A tensor of sevens in one of the layouts that callers use; the rows of the last lie 2^31
    elements apart.
    """
    if layout == "far apart":
        step = 2**31 + 8
        whole = torch.empty(
            step * (rows - 1) + math.prod(shape), dtype=dtype
        )  # most of it is never touched
        return whole.as_strided((rows, *shape), (step, *torch.empty(shape).stride()))
    out = torch.full((rows, *shape), 7.0, dtype=dtype)
    return out.contiguous(memory_format=torch.channels_last) if layout == "channels last" else out


CASES = [
    ((3, 5, 7), 41, "channels last"),
    ((1, 1, 1), 1, "channels last"),
    ((3, 9, 2), 2, "contiguous"),
    ((2, 3, 3), 17, "channels last"),
    ((11,), 5, "contiguous"),
    ((1, 2, 3), 2, "far apart"),
]


def batches(kind: type[Noise], cases: list[tuple]) -> list[dict]:
    """Each case in each type: launches, addresses, how many differ from the definition; errors of
    float32, in sigma: the kernel's, then those of torch alone.
    """
    results = []
    for (shape, shares, layout), sigma in zip(cases, itertools.cycle([0.12, 0.25, 0.7])):
        noise = kind(sigma, 3, key=NoiseKey("weights", "images", sigma, 3))
        batch = batch_of(noise, shape, shares)
        count, padding = sum(rows.count for rows in batch), 0 if layout == "far apart" else 3
        if kind is GaussianNoise:
            black = [
                Rows(rows.stream, torch.zeros(shape), rows.first, rows.count) for rows in batch
            ]
            alone = filled(kernels, black, torch.empty(count, *shape))
            images = torch.cat([rows.image.expand(rows.count, *shape) for rows in batch])
            expected = images + alone
            by_torch = filled(None, black, torch.empty(count, *shape))
            errors = [
                (each - exact(noise, batch, shape)).abs() / sigma for each in (alone, by_torch)
            ]
        else:
            expected, errors = filled(None, batch, torch.empty(count, *shape)), []
        # The type changes only how a sum is rounded: the others are tried where most is drawn.
        for dtype in (torch.float32, torch.float16, torch.bfloat16)[: 3 if shares > 40 else 1]:
            with mock.patch.object(kernels, "launch", wraps=kernels.launch) as launch:
                found = filled(kernels, batch, empty(count + padding, shape, dtype, layout))
            right = [expected.to(dtype)]
            if (
                dtype == torch.bfloat16
            ):  # the interpreter cuts digits off, where a GPU rounds (cvt.rn)
                right.append(
                    (expected.contiguous().view(torch.int32) >> 16 << 16).view(torch.float32)
                )
            wrong = min(int((found[:count] != each).sum()) for each in right)
            results.append(
                {
                    "case": f"{kind.__name__} {shape} {shares} {layout} {dtype}",
                    "wrong": wrong + int((found[count:] != found[:1]).sum()),
                    "launches": launch.call_count,
                    "addresses": count * math.prod(shape),
                    "errors": [float(each.max()) for each in errors],
                }
            )
    return results


def interpreter_stores() -> bool:
    """That of Triton 3.0 does not, with NumPy 2."""
    return int(run(words_kernel, 4, torch.zeros(6, 8, dtype=torch.int64)).min()) >= 0


def main() -> None:
    if not interpreter_stores():
        return
    found: dict = {"words": words(), "extremes": extremes()}
    with mock.patch.object(kernels, "_MULTIPLIER_0", tl.constexpr(MULTIPLIERS[0] ^ 2)):
        found["words of a wrong multiplier"] = words()
    with mock.patch.object(kernels, "_BLOCK", 128):  # several programs, some of them across rows
        found["small blocks"] = [
            each for kind in KINDS for each in batches(kind, [((3, 5, 3), 5, "channels last")])
        ]
    kernels._BLOCK = 2**14  # the interpreter takes long for each program
    found["batches"] = [each for kind in KINDS for each in batches(kind, CASES)]
    print(json.dumps(found))


if __name__ == "__main__":
    assert os.environ["TRITON_INTERPRET"] == "1"
    main()
