"""Images whose labels are the stages that certify them best: with them, a router is trained
(``statistics.router``), also by soft labels and with weights (dual randomized smoothing; Sun et
al., 2026).
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional as F

from smoothadv.base.errors import UserError, counted, escape, warn
from smoothadv.datasets import ImageDataset
from smoothadv.datasets.relabelled import RelabelledImages
from smoothadv.models.name import sigma_names
from smoothadv.records.logs import read_manifest_file
from smoothadv.records.readers import read_certification_log

HELD_OUT = 10
"""Every tenth image is held out, to test the router."""


def routed(
    images: ImageDataset, logs: Sequence[Path]
) -> tuple[ImageDataset, ImageDataset, torch.Tensor]:
    """The images to train a router, those held out to test it, and the radii float64 [N, K] of the
    former, from a certification log of each of K stages on ``images``, in the order of the stages.

    Of each image that a stage certifies, the label is the stage with the largest radius, the first
    one of several; other images say nothing about stages. The radius of a stage that abstains or is
    wrong is 0. UserError where a log is of other images or of one noise level among several, or
    where too few images are left.
    """
    import pandas as pd  # help texts do not wait for it

    if len(logs) < 2:
        raise UserError(
            f"--route: found {counted(len(logs), 'log')}, expected one per stage, two or more"
        )
    if len({path.resolve() for path in logs}) < len(logs):
        raise UserError("--route: found one log twice, expected one per stage")
    tables, sigmas = [], []
    for path in logs:
        settings = read_manifest_file(path)["settings"]
        if settings.get("dataset_fingerprint") != images.fingerprint():
            raise UserError(
                f"--route: {path} is of other images than the training images of "
                f"'{escape(images.description.name)}': certify those, with --split train"
            )
        if "sigmas" in settings or "sigma" not in settings:
            raise UserError(f"--route: {path} is of no single classifier with noise of one sigma")
        table = read_certification_log(path)
        tables.append(table.radius.where(table.correct == 1, -1.0).set_axis(table.idx))
        sigmas.append(settings["sigma"])
    found = pd.concat(tables, axis=1, join="inner")  # of the images that are in all logs
    if len(found) < (most := max(map(len, tables))):
        warn(f"--route: only the {len(found):,} images that all logs have are used, of {most:,}")
    found = found[(found >= 0).any(axis=1)]
    indices, radii = torch.tensor(found.index.to_numpy()), torch.tensor(found.to_numpy())
    labels = radii.argmax(1)
    if len(labels) < 2 * HELD_OUT:
        raise UserError(
            f"--route: {counted(len(labels), 'image')} certified in any of the logs, too few to "
            "train a router"
        )
    is_held_out, names = torch.arange(len(labels)) % HELD_OUT == 0, sigma_names(sigmas)
    training, test = (
        RelabelledImages(images, names, labels[part], indices[part])
        for part in (~is_held_out, is_held_out)
    )
    return training, test, radii[~is_held_out].clamp(min=0)


def shares_of_stages(radii: torch.Tensor, is_soft: bool, is_balanced: bool) -> torch.Tensor:
    """What a router learns of each image, float32 [N, K], from the radii float64 [N, K] of its
    stages: shares of the stages, which sum up to the weight of the image.

    Shares are exp(radius) divided by their sum if they are soft, else 1 for the first stage with
    the largest radius. The weight is 1, or if it is balanced, N / the number of images with the
    same first stage of the largest radius.
    """
    best = radii.argmax(1)
    counts = best.bincount(minlength=radii.shape[1])
    shares = radii.softmax(1) if is_soft else F.one_hot(best, radii.shape[1]).double()
    if is_balanced:
        shares = shares * (len(best) / counts[best]).unsqueeze(1)
    return shares.float()
