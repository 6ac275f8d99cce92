"""What tests read of logs and their manifests, and comparing two logs."""

from __future__ import annotations

import json
from pathlib import Path

from smoothadv.noise import NoiseKey
from support.commands import header, timeless


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
