"""Writes the log of scores: noisy passes for each image, after an attack if there is one."""

import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from smoothadv.api import ArraySpec, Model, spec_of_call, torch_settings_kept
from smoothadv.base.devices import within_memory
from smoothadv.base.errors import UsageError, UserError, counted
from smoothadv.base.settings import (
    output_file,
    perturbation_size,
    positive_int,
    probability,
    refuse_twice,
    setting,
    takes,
)
from smoothadv.evaluation.log import Example, write_log
from smoothadv.evaluation.predict import PredictionPolls, with_attack_batch
from smoothadv.evaluation.setup import prepare
from smoothadv.evaluation.specs import AttackedSpec
from smoothadv.noise import Rows
from smoothadv.records.readers import DataFrame
from smoothadv.records.writer import WrittenLog
from smoothadv.sets.coverage import calibrates
from smoothadv.sets.scores import ScoreLog
from smoothadv.statistics import Draws
from smoothadv.voting.counter import Poll, Result, VoteCounter, not_finite

_AT_LEAST = 0.05


@dataclass(frozen=True, kw_only=True)
class SetsSpec(AttackedSpec):
    """Score all classes of each image, by noisy passes, into the log ``log``: of images that
    calibrate, and of others, which an ``attack`` may have changed.
    """

    log: Path | None = setting(
        None, parse=output_file, flag="outfile", metavar="OUTFILE", help="log to write (TSV)"
    )
    n: int = setting(
        1,
        parse=positive_int,
        flag="--N",
        records="N",
        help="noisy passes per image: 1, or about 100, which the scores then count (BinCP)",
    )
    at_least: float | None = setting(
        None,
        parse=probability,
        metavar="P",
        records="at_least",
        help="of several --N: count those in which a class has at least this probability "
        f"(default: {_AT_LEAST})",
    )
    alpha: float = setting(
        0.1,
        parse=probability,
        records="alpha",
        help="probability that the set of an image lacks its label",
    )
    radii: tuple[float, ...] = setting(
        (),
        parse=perturbation_size,
        records="radii",
        unit="on images in [0, 1]",
        help="l2 norms of the attacks under which alpha holds, all by the same passes (default: 0, "
        "half of sigma, and sigma)",
    )
    calibration: float = setting(
        0.5,
        parse=probability,
        metavar="SHARE",
        records="calibration",
        help="share of the images, chosen at random by --seed, that calibrate and are not tested",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_twice("--radii", self.radii)
        if self.stages is not None:
            raise UsageError(f"sets are of one classifier, and the model is a {self.kind}")
        if self.at_least is not None and self.n == 1:
            raise UsageError(
                "--at-least is not read with one noisy pass: give --N 2 or more, or leave it out"
            )
        self._set(radii=self.radii or (0.0, self.sigma / 2, self.sigma))
        self._set(at_least=_AT_LEAST if self.n > 1 and self.at_least is None else self.at_least)


class Scores(VoteCounter):
    """Answers the request of each poll, ``draws``, with scores of the classes [K], in place of
    votes: probabilities, float64, or in how many draws they are ``at_least`` that, int64. Polls are
    answered in groups of ``at_once`` before the next are made.
    """

    at_once: int
    draws: int
    at_least: float | None

    def run(self, polls: Iterable[Poll]) -> Iterator[Result]:
        waiting = iter(polls)
        while group := list(islice(waiting, self.at_once)):
            start = time.perf_counter()
            found = within_memory(partial(self._scores, group), self._halve)
            seconds = (time.perf_counter() - start) / len(group)
            for poll, scores in zip(group, found):
                next(poll.voting)
                try:
                    poll.voting.send(scores)
                except StopIteration as end:
                    yield Result(poll.tag, end.value, seconds)

    @torch.inference_mode()
    def _scores(self, group: list[Poll]) -> np.ndarray:
        """Of a group of images, [B, K]; the draws of all fill batches together."""
        kind = torch.float64 if self.at_least is None else torch.int64
        scores = torch.zeros(len(group), *self.num_classes, dtype=kind)
        owners = torch.arange(len(group)).repeat_interleave(self.draws)
        for start in range(0, len(owners), self.batch):
            of_batch = owners[start : start + self.batch]
            images, counts = of_batch.unique(return_counts=True)
            rows = [
                Rows(group[k].streams[0], group[k].image, max(0, start - k * self.draws), count)
                for k, count in zip(images.tolist(), counts.tolist())
            ]
            logits = self.logits(rows)[: len(of_batch)].cpu().double()
            if invalid := int((~logits.isfinite()).any(1).sum()):
                raise not_finite(invalid, len(logits))
            found = logits.softmax(1)
            found = found if self.at_least is None else (found >= self.at_least).long()
            scores.index_add_(0, of_batch, found)
            self.on_batch(len(of_batch))
        return scores.numpy()


@dataclass(frozen=True)
class ScorePolls(PredictionPolls):
    """Polls each image for its scores; one that is tested after the attack, if there is one."""

    @property
    def columns(self) -> tuple[str, ...]:
        norms = () if self.attack is None else ("attack_norm",)
        scores = (f"score_{number}" for number in range(self.evaluation.last.num_classes))
        return ("idx", "label", "predict", "correct", "calibration", *norms, *scores, "time")

    def __call__(self, examples: list[Example]) -> Iterator[Poll]:
        spec: Any = self.evaluation.spec
        kept = {one.index: calibrates(one.index, spec.calibration, spec.seed) for one in examples}
        tested = super().__call__([one for one in examples if not kept[one.index]])
        columns = {"calibration": 1, "attack_norm": 0.0}
        for one in examples:
            yield self._poll(one, one.image, columns) if kept[one.index] else next(tested)

    def _poll(self, example: Example, image: torch.Tensor, columns: dict[str, Any]) -> Poll:
        streams = self.evaluation.streams(example.index, image, self.votes)
        return Poll(image, streams, self._scoring(example, columns))

    def _scoring(
        self, example: Example, columns: dict[str, Any]
    ) -> Generator[Draws, np.ndarray, dict[str, Any]]:
        """Ask for the probabilities of one image; returns the columns of its row."""
        scores = yield Draws(self.evaluation.spec.n)
        form = "d" if self.evaluation.spec.n > 1 else ".7g"
        printed = {f"score_{number}": format(one, form) for number, one in enumerate(scores)}
        return {"calibration": 0, "predict": int(scores.argmax()), **columns, **printed}


def write_scores(spec: SetsSpec) -> tuple[WrittenLog, dict[str, Any]]:
    """Write the missing rows of the log ``spec.log``, as ``write_log``; returns its settings,
    too.
    """
    evaluation, attack = with_attack_batch(prepare(spec, spec.log))
    roles = [calibrates(index, spec.calibration, spec.seed) for index in evaluation.indices]
    if len({*roles}) < 2:
        raise UserError(
            f"{sum(roles)} of {counted(len(roles), 'image')} calibrate, and the others are tested: "
            "give more images (--max, --images), or another --calibration"
        )
    voter, batches = evaluation.last, (evaluation.batch, evaluation.device)
    counter = Scores([voter.form], [voter.num_classes], *batches, dtype=voter.form.dtype)
    # Enough images to fill batches; a row does not wait for attacks on more.
    enough = min(evaluation.batch, max(1, 4 * evaluation.batch // spec.n))
    counter.at_once = min(enough, attack.examples_per_pass) if attack else enough
    counter.draws, counter.at_least = spec.n, spec.at_least
    content = ScorePolls(evaluation, attack).content(
        "scoring", settings={"method": "conformal"}, counter=counter
    )
    return write_log(evaluation, content), evaluation.settings


@takes(SetsSpec, ArraySpec)
@torch_settings_kept()
def conformal_sets(model: Model, images: Any, labels: Any = None, **keywords: Any) -> DataFrame:
    """Sets of classes that lack the label of an image with probability at most ``alpha``, whatever
    attack within a radius changed the image before it got its noise (RCP1; BinCP with ``n`` above
    1; docs/conformal.md).

        rows = smoothadv.conformal_sets(model, images, labels, sigma=0.25, radii=[0, 0.25])
        rows.groupby("radius")[["covered", "size"]].mean()

    Some of the images calibrate, the others are tested. ``attack`` is any of
    ``smoothadv.attacks.ATTACKS``. ``log`` is the file to write or to continue (None: no file).

    Returns a row for each radius and each image that is tested: idx, label, radius, threshold (the
    least score), set (a tuple of classes), size and covered. UserError on bad input.
    """
    import pandas as pd

    spec = spec_of_call(SetsSpec, "conformal_sets", model, images, labels, keywords)
    log, settings = write_scores(spec)
    found = ScoreLog(log.path.name or "images", settings, log.table)
    return pd.concat([*map(found.sets, spec.radii)], ignore_index=True)
