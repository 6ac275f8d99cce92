"""Writes the log of scores: one noisy pass for each image, after an attack if there is one."""

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
    probability,
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


@dataclass(frozen=True, kw_only=True)
class SetsSpec(AttackedSpec):
    """Score all classes of each image, by one noisy pass, into the log ``log``: of images that
    calibrate, and of others, which an ``attack`` may have changed.
    """

    log: Path | None = setting(
        None, parse=output_file, flag="outfile", metavar="OUTFILE", help="log to write (TSV)"
    )
    n: int = setting(1, keyword=False, records="N")
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
        help="l2 norms of the attacks under which alpha holds, all by the same pass (default: 0, "
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
        if self.stages is not None:
            raise UsageError(f"sets are of one classifier, and the model is a {self.kind}")
        self._set(radii=self.radii or (0.0, self.sigma / 2, self.sigma))


class OnePass(VoteCounter):
    """Answers the request of each poll, one draw, with the probabilities of the classes, float64
    [K], in place of counts; of at most ``at_once`` images before the next are made.
    """

    at_once: int

    def run(self, polls: Iterable[Poll]) -> Iterator[Result]:
        waiting = iter(polls)
        while group := list(islice(waiting, self.at_once)):
            begun = time.perf_counter()
            found = within_memory(partial(self._probabilities, group), self._halve)
            seconds = (time.perf_counter() - begun) / len(group)
            self.on_batch(len(group))
            for poll, probabilities in zip(group, found):
                next(poll.voting)
                try:
                    poll.voting.send(probabilities)
                except StopIteration as end:
                    yield Result(poll.tag, end.value, seconds)

    @torch.inference_mode()
    def _probabilities(self, group: list[Poll]) -> np.ndarray:
        rows = [Rows(poll.streams[0], poll.image, 0, 1) for poll in group]
        passes = [rows[start : start + self.batch] for start in range(0, len(rows), self.batch)]
        logits = torch.cat([self.logits(each)[: len(each)].cpu().double() for each in passes])
        if invalid := int((~logits.isfinite()).any(1).sum()):
            raise not_finite(invalid, len(rows))
        return logits.softmax(1).numpy()


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
        scores = yield Draws(1)
        printed = {f"score_{number}": f"{one:.7g}" for number, one in enumerate(scores)}
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
    counter = OnePass([voter.form], [voter.num_classes], *batches, dtype=voter.form.dtype)
    # A row does not wait for attacks on a whole batch.
    counter.at_once = attack.examples_per_pass if attack else evaluation.batch
    settings = {"method": "conformal"}
    content = ScorePolls(evaluation, attack).content("scoring", settings=settings, counter=counter)
    return write_log(evaluation, content), evaluation.settings


@takes(SetsSpec, ArraySpec)
@torch_settings_kept()
def conformal_sets(model: Model, images: Any, labels: Any = None, **keywords: Any) -> DataFrame:
    """Sets of classes that lack the label of an image with probability at most ``alpha``, whatever
    attack within a radius changed the image before it got its noise (RCP1, docs/conformal.md).

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
