"""The verdict on certificates that all hold their alpha, simulated on images with two nearly equally likely classes.

There almost nothing is certified, and about half of the certificates are false. That is allowed: before its noise is
drawn, each image gets a false certificate with probability at most alpha.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from smoothadv.attacks.pgd import PGD
from smoothadv.bounds import certified_radius
from smoothadv.evaluation.falsifying import Certificates, Claim, verdict
from smoothadv.evaluation.requests import AttackPlan, FalsifyRequest

ALPHA, N, IMAGES, RUNS = 0.001, 1000, 5000, 60
REQUEST = FalsifyRequest(
    classifier=Path("checkpoint.pth.tar"),
    images="digits",
    sigma=0.25,
    alpha=ALPHA,
    against=Path("log.tsv"),
    outdir=Path("out"),
    attack=AttackPlan(attack=PGD(0.0, 1)),
)


def certified_and_flipped(seed: int) -> tuple[Certificates, pd.DataFrame]:
    """A log by CERTIFY, whose class was selected from 100 draws; and attacks that PREDICT answers without any error.

    The smoothed classifier is class 0 everywhere, with a probability of 0.5001.
    """
    random = np.random.default_rng(seed)
    selected = (random.binomial(100, 0.5001, IMAGES) < 50).astype(int)
    votes = random.binomial(N, np.where(selected == 0, 0.5001, 0.4999))
    images = np.flatnonzero([certified_radius(k, N, 1.0, ALPHA) is not None for k in votes.tolist()]).tolist()
    claims = {index: Claim(0, int(selected[index]), 0.01) for index in images}
    table = pd.DataFrame({"idx": images, "certified": [claim.certified for claim in claims.values()]})
    table = table.assign(label=0, predict=0, radius=0.01, attack_norm=0.0, flipped=table.certified)
    return Certificates(REQUEST.against, list(range(IMAGES)), claims, ALPHA, 0.999, None), table


def test_a_log_that_holds_its_alpha_is_not_accused():
    """The verdict promises a false alarm in at most 0.001 of all runs: two in 60 would come with less than 0.002."""
    runs = [certified_and_flipped(seed) for seed in range(RUNS)]
    assert sum(verdict(REQUEST, *run).refutes for run in runs) <= 1
    false = np.array([table.flipped.sum() for _, table in runs])
    assert stats.binomtest(int(false.sum()), RUNS * IMAGES, ALPHA, alternative="greater").pvalue > 1e-6
    assert false.sum() > 20, "there are false certificates among them"
    # The negative control, of the certified images alone: far more than a share alpha of these are false.
    alone = [(dataclasses.replace(each, images=sorted(each.claims)), table) for each, table in runs]
    assert sum(verdict(REQUEST, *run).refutes for run in alone) > RUNS / 10


def test_one_flip_more_than_is_credible_accuses_a_log():
    """Of 5,000 images ten flip at 0.002 in the mean; the most that more than one log in 1,000 exceeds is no proof."""
    certificates, table = certified_and_flipped(0)
    credible = int(stats.binom.isf(0.001, IMAGES, ALPHA + REQUEST.alpha))
    assert stats.binom.sf(credible, IMAGES, 0.002) <= 0.001 < stats.binom.sf(credible - 1, IMAGES, 0.002)
    for flips in (credible, credible + 1):
        claims = {index: Claim(0, 1, 0.01) for index in range(flips)}
        flipped = pd.concat([table.head(1).assign(idx=index, certified=1, flipped=1) for index in claims])
        judged = verdict(REQUEST, dataclasses.replace(certificates, claims=claims), flipped)
        assert (judged.tolerated, judged.refutes) == (credible, flips > credible)
