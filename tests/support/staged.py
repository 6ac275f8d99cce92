"""Files of stages, and the votes of a stage, counted in an obvious way."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from smoothadv.checkpoints import load_classifier
from smoothadv.datasets import get_dataset
from smoothadv.noise import GaussianNoise, NoiseKey
from support.commands import settings_of

StageFile = tuple[object, float]
N, N0 = 300, 60
NUMBERS = ["--N", N, "--N0", N0, "--skip", 24, "--device", "cpu"]
"""Of the shared logs of stages."""


def write_stages(
    path: Path,
    stages: Sequence[StageFile],
    threshold: float | None = None,
    router: StageFile | None = None,
) -> Path:
    text = "" if threshold is None else f"threshold = {threshold}\n"
    heads = ["[[stage]]"] * len(stages)
    if router is not None:
        heads, stages = ["[router]", *heads], [router, *stages]
    for head, (checkpoint, sigma) in zip(heads, stages):
        text += f"{head}\ncheckpoint = {json.dumps(str(checkpoint))}\nsigma = {sigma}\n"
    path.write_text(text)
    return path


def slow_votes(
    log: Path, place: int, stage: StageFile, index: int, selection: int, draws: int
) -> torch.Tensor:
    """The votes [K] of so many draws, after those of the selection, of a stage from 1 on."""
    settings, (checkpoint, sigma) = settings_of(log), stage
    classifier = f"{settings['classifier_sha256']} {place}"
    key = NoiseKey(classifier, settings["dataset_fingerprint"], sigma, settings["seed"])
    image = get_dataset("digits", "test")[index][0]
    stream = GaussianNoise(sigma, 0, key=key).stream(index, "cpu")
    stream.reserve(selection)
    with torch.inference_mode():
        classes = load_classifier(checkpoint, "digits")(stream.noisy(draws, image)).argmax(1)
    return classes.bincount(minlength=10)
