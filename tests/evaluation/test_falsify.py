"""The verdict on certificates: what is a claim, what flips one, and how many flips refute a log."""

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from smoothadv.attacks.pgd import PGD
from smoothadv.evaluation.falsify import (
    CertificatePolls,
    Certificates,
    read_certificates,
    verdict,
)
from smoothadv.evaluation.log import Example
from smoothadv.evaluation.specs import FalsifySpec
from support.refusals import refusal

ALPHA, IMAGES = 0.001, 5000
SPEC = FalsifySpec(
    model=Path("checkpoint.pth.tar"),
    dataset="digits",
    sigma=0.25,
    alpha=ALPHA,
    against=Path("log.tsv"),
    outdir=Path("out"),
    attack=PGD(0.0, 1),
)


@pytest.mark.parametrize(
    ("printed", "least"),
    [
        ((0.1234, 0.5), (0.12335, 0.49995)),
        ((0.12345, 0.5), (0.12345, 0.5)),
    ],
)
def test_radii_that_were_rounded_are_attacked_as_if_they_were_rounded_up(workplace, printed, least):
    """A radius of 0 is no claim, and an image at the distance of the radius itself does not
    count.
    """
    rows = [f"{idx}\t1\t1\t{radius}\t1\t0:00:01\n" for idx, radius in enumerate((*printed, 0.0))]
    Path("log.tsv").write_text("idx\tlabel\tpredict\tradius\tcorrect\ttime\n" + "".join(rows))
    certificates = read_certificates(SPEC)
    radii = [claim.radius for claim in certificates.claims.values()]
    assert radii == pytest.approx(least, rel=1e-12)
    polls = CertificatePolls(None, None, certificates=certificates)
    example = Example(0, torch.zeros(1, 8, 8), 1)
    for answer, norm, flipped in [
        (2, np.nextafter(radii[0], 0), 1),
        (2, radii[0], 0),
        (1, 0.0, 0),
        (-1, 0.0, 0),
    ]:
        assert polls.judged(example, answer, norm)["flipped"] == flipped


CLAIM = SimpleNamespace(label=0, predict=1, radius=0.1)
RECORD = (
    "dataset split dataset_fingerprint checkpoint_sha256 module_sha256 denoiser input_layer sigma "
    "precision"
).split()


@pytest.mark.parametrize(
    ("images", "classes", "changed"),
    [(4, 2, None), (5, 1, None), *((5, 2, name) for name in RECORD)],
)
def test_certificates_of_anything_else_are_not_attacked(images, classes, changed):
    recorded = {name: f"one {name}" for name in RECORD}
    certificates = Certificates(SPEC.against, [4], {4: CLAIM}, ALPHA, recorded)

    def check(images: int, classes: int, **settings: object) -> None:
        dataset = mock.MagicMock(
            __len__=lambda dataset: images, description=mock.Mock(num_classes=classes)
        )
        certificates.check_evaluation(mock.Mock(dataset=dataset, settings={**recorded, **settings}))

    check(5, 2)
    words = "it has image 4 and class 1" if changed is None else f"something else: {changed} was"
    assert words in refusal(check, images, classes, **({changed: "another"} if changed else {}))


def test_one_flip_more_than_is_credible_accuses_a_log():
    """Of 5,000 images ten flip at 0.002 in the mean; the most that more than one log in 1,000
    exceeds is no proof.
    """
    credible = int(stats.binom.isf(0.001, IMAGES, ALPHA + SPEC.alpha))
    assert (
        stats.binom.sf(credible, IMAGES, 0.002)
        <= 0.001
        < stats.binom.sf(credible - 1, IMAGES, 0.002)
    )
    for flips in (credible, credible + 1):
        claims = {index: CLAIM for index in range(flips)}
        certificates = Certificates(SPEC.against, list(range(IMAGES)), claims, ALPHA, {})
        columns = {"label": 0, "predict": 0, "certified": 1, "radius": 0.01, "attack_norm": 0.0}
        table = pd.DataFrame({"idx": list(claims)}).assign(**columns, flipped=1)
        judged = verdict(SPEC, certificates, table)
        assert (judged.tolerated, judged.refutes) == (credible, flips > credible)
