"""What the tests of shards share: small runs by each method, and comparing the logs that they
leave.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from smoothadv.noise import NoiseKey
from support.commands import header, timeless

EXAMPLES = ["--max", 20]
METHODS = {
    "exact": ["certify", "--N", 100],
    "adaptive": ["certify", "--method", "adaptive", "--N", 500, "--radii", 0, 0.25],
    "predict": [
        "predict",
        "--N",
        50,
        "--attack",
        "PGD",
        "--epsilon",
        0.5,
        "--num-steps",
        2,
        "--num-noise-vec",
        2,
    ],
}


def manifest_of(log: Path) -> dict:
    return json.loads(log.with_name(f"{log.name}.manifest.json").read_text())


def settings_of(log: Path) -> dict:
    return manifest_of(log)["settings"]


def key_of_log(log: Path) -> NoiseKey:
    """The key of the draws behind a log, from what its manifest records."""
    settings = settings_of(log)
    return NoiseKey(
        *(settings[name] for name in ("classifier_sha256", "dataset_fingerprint", "sigma", "seed"))
    )


def assert_same(log: Path, expected: Path) -> None:
    """All but the times is equal: columns, rows, their order, and what the manifest says of their
    numbers.
    """
    assert header(log) == header(expected) and timeless(log) == timeless(expected)
    assert settings_of(log) == settings_of(expected)


class OneWorker:
    """What a process under torchrun sees that was started alone."""

    rank, size, local_rank, restarted = 0, 1, 0, False

    def for_log(self, name: str) -> OneWorker:
        return self

    def claims(self, count: int) -> Iterator[int]:
        return iter(range(count))

    def report(self, examples: int) -> int:
        return examples

    def agree(self, name: str, value: int) -> int:
        return value

    def wait_for_all(self, step: str) -> None:
        pass
