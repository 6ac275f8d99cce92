"""The key of the noise that made a log, from what its manifest records."""

import json
from pathlib import Path

from smoothadv.noise import NoiseKey
from smoothadv.records import manifest_path


def key_of_log(log: Path) -> NoiseKey:
    """The key of the draws behind a log."""
    settings = json.loads(manifest_path(log).read_text())["settings"]
    return NoiseKey(*(settings[name] for name in ("classifier_sha256", "dataset_fingerprint", "sigma", "seed")))
