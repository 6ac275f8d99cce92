"""The key of the noise that made a log, from what its manifest records."""

from pathlib import Path

from smoothadv.noise import NoiseKey
from support.sharding import manifest_of


def settings_of(log: Path) -> dict:
    return manifest_of(log)["settings"]


def key_of_log(log: Path) -> NoiseKey:
    """The key of the draws behind a log."""
    settings = settings_of(log)
    return NoiseKey(*(settings[name] for name in ("classifier_sha256", "dataset_fingerprint", "sigma", "seed")))
