"""Makes a checkpoint of integers of a trained one, and compares the votes of both."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from smoothadv.base.errors import UserError
from smoothadv.base.files import refuse_to_replace, reserved
from smoothadv.base.progress import Progress
from smoothadv.base.provenance import provenance
from smoothadv.datasets import ImageDataset, get_dataset
from smoothadv.integer.conversion import convert, read_network
from smoothadv.integer.network import IntegerNetwork
from smoothadv.integer.spec import QuantizeSpec
from smoothadv.models.checkpoint import (
    INTEGER,
    save_checkpoint,
)
from smoothadv.models.load import BaseClassifier, load_checkpoint
from smoothadv.noise import Purpose, RoundedGaussianNoise
from smoothadv.statistics.bounds import certified_radius
from smoothadv.voting.classifier import VotingClassifier, optimized_for_inference

_PASS = 64  # images at a time
_KEPT = ("epoch", "dataset", "noise_sd", "recipe", "plugins")
_ALPHA = 0.001


@dataclass(frozen=True)
class Comparison:
    """How the integers vote beside the float network, on ``images`` training images without a part
    in calibration.

    ``agreement`` is the share of equal votes; ``certified`` has the certified accuracies at some
    radii: (radius, of the float network, of the integers), from ``draws`` draws at alpha = 0.001,
    the most frequent class selected.
    """

    images: int
    draws: int
    agreement: float
    certified: list[tuple[float, float, float]]


def quantize(spec: QuantizeSpec) -> tuple[IntegerNetwork, Comparison]:
    """Write the checkpoint; UserError where files do not fit or the network has no integer form."""
    refuse_to_replace(spec.outfile, "checkpoint", b"pk")
    images = get_dataset(spec.dataset, "train", spec.data_dir)
    if len(images) < 2:
        raise UserError(
            f"{spec.dataset} has one training image: some decide the ranges, others compare the "
            "votes"
        )
    base = load_checkpoint(spec.checkpoint, images, input_layer=spec.input_layer)
    if any("behind" in content for content in base.contents):
        raise UserError(
            f"{spec.checkpoint} was trained behind a denoiser, which a network of integers cannot "
            "have: take another checkpoint"
        )
    is_ensemble = len(base.contents) > 1
    if is_ensemble or INTEGER in base.contents[0]:
        kind = "an ensemble: quantize its members" if is_ensemble else "of integers already"
        raise UserError(f"{spec.checkpoint} is {kind}")
    noise = RoundedGaussianNoise(spec.sigma, spec.seed)
    shape = images.description.image_shape
    float_network = read_network(base.module, shape)
    chosen = _spaced(len(images), spec.calibration)
    rest = np.setdiff1d(np.arange(len(images)), chosen)
    parts = [chosen[start : start + _PASS] for start in range(0, len(chosen), _PASS)]
    batches = (
        torch.cat([_noisy(images, int(index), noise, 1, Purpose.CALIBRATION) for index in part])
        for part in Progress(parts, "calibrating", delay=2)
    )
    with reserved(spec.outfile, spec.overwrite):
        network = convert(float_network, batches, shape, noise.clip, spec.weight_bits)
        voter = optimized_for_inference(base.module, torch.device("cpu"))
        held_out = rest[_spaced(len(rest), spec.held_out)]
        comparison = _compare((voter, network), images, held_out, noise, spec.draws)
        _save(spec, base, images, network, comparison)
    return network, comparison


def _spaced(available: int, wanted: int) -> np.ndarray:
    """At most ``wanted`` indices below ``available``, evenly spaced; half of them at most."""
    count = max(1, min(wanted, available // 2))
    return np.arange(count) * available // count


def _noisy(
    images: ImageDataset, index: int, noise: RoundedGaussianNoise, draws: int, purpose: Purpose
) -> torch.Tensor:
    """Noisy copies [draws, C, H, W] of an image; UserError where it is not of 8 bits."""
    name = f"integers are for 8-bit images: example {index} of {images.description.name}"
    return noise.stream(index, "cpu", purpose).noisy(draws, images[index][0], name)


@torch.inference_mode()
def _compare(
    networks: tuple[VotingClassifier, IntegerNetwork],
    images: ImageDataset,
    indices: Iterable[int],
    noise: RoundedGaussianNoise,
    draws: int,
) -> Comparison:
    equal, radii = 0, []
    chosen = [int(index) for index in indices]
    for index in Progress(chosen, "comparing votes", delay=2):
        noisy, label = _noisy(images, index, noise, draws, Purpose.EVALUATION), images[index][1]
        votes = [
            torch.cat([network(part).argmax(1) for part in noisy.split(_PASS)])
            for network in networks
        ]
        equal += int((votes[0] == votes[1]).sum())
        radii.append([_radius(each, int(label), noise.sigma) for each in votes])
    both = np.array(radii)
    certified = [
        (radius, *(both >= radius).mean(0).tolist())
        for radius in (noise.sigma * share for share in (0, 0.5, 1, 1.5))
    ]
    return Comparison(len(chosen), draws, equal / (draws * len(chosen)), certified)


def _radius(votes: torch.Tensor, label: int, sigma: float) -> float:
    """The certified radius of the most frequent class; -1 for an abstention or a wrong class."""
    counts = votes.bincount()
    top = int(counts.argmax())
    radius = certified_radius(int(counts[top]), len(votes), sigma, _ALPHA)
    return -1.0 if radius is None or top != label else radius


def _save(
    spec: QuantizeSpec,
    source: BaseClassifier,
    images: ImageDataset,
    network: IntegerNetwork,
    comparison: Comparison,
) -> None:
    description, before = images.description, source.contents[0]
    fields = network.state_fields()
    made = {
        "from_sha256": source.settings["checkpoint_sha256"],
        "dataset_fingerprint": images.fingerprint(),
        "sigma": spec.sigma,
        "calibration": spec.calibration,
        "seed": spec.seed,
        "weight_bits": spec.weight_bits,
        "agreement": comparison.agreement,
        **provenance(spec.command),
    }
    content = {
        **{name: before[name] for name in _KEPT if name in before},
        "arch": f"{INTEGER}:{source.settings['arch']}",
        "input_layer": source.settings["input_layer"],
        "classes": list(description.class_names),
        "image_shape": list(description.image_shape),
        **fields,
        INTEGER: {**fields[INTEGER], "made": made},
    }
    save_checkpoint(spec.outfile, content)
