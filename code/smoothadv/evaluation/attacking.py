"""The accuracy of a smoothed classifier under attack: a prediction log and the adversarial images for each epsilon."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from smoothadv.attacks import SmoothedAttack
from smoothadv.errors import UserError
from smoothadv.evaluation.attacked_images import AttackedBallots, attack_record, fit_to_job, passes_of
from smoothadv.evaluation.log_writing import LogPlan, write_log
from smoothadv.evaluation.requests import AttackPlan, AttackRequest, FalsifyRequest
from smoothadv.evaluation.smoothing_job import SmoothingJob, prepare, recorded_number, warn_of_few_draws
from smoothadv.records import attacked_log


@dataclass(frozen=True)
class AttackedLog:
    """A log that was written, whether it ``is_whole`` now, and the batches that made it."""

    path: Path
    is_whole: bool
    batch: int
    attack_batch: int


def attack(request: AttackRequest) -> Iterator[AttackedLog]:
    """Write what the logs in ``request.outdir`` lack, one after the other; yields each when its end is reached.

    UserError where what is asked for cannot be done, also in the middle; the rows written so far stay.
    """
    warn_of_few_draws(request)
    refuse_file_as_folder(request.outdir)
    plans = attacks_of(request)
    first = next((path for path in plans if path.exists()), next(iter(plans)))
    job = prepare(request, first)
    if request.only is not None:
        job = dataclasses.replace(
            job, indices=chosen(request.only, range(len(job.dataset)), f"{job.settings['dataset']} has no image")
        )
    fitted = fit_to_job(request.attack, job, request, first)
    for path, plan in plans.items():
        log_job, attack_at_work = for_log(request, path, job, plan, fitted.batch)
        ballots = AttackedBallots(log_job, attack_at_work, request.n, request.alpha)
        is_whole = write_log(
            log_job,
            LogPlan(
                path=path,
                shard=request.shard,
                existing=request.existing,
                columns=ballots.columns,
                settings={"N": request.n, **attack_record(attack_at_work)},
                ballots=ballots,
                description=f"attacking, epsilon {plan.attack.epsilon:g}",
                title="correct",
                scores=lambda row: bool(row["correct"]),
                keeps_images=True,
                **passes_of(attack_at_work, log_job),
            ),
        )
        yield AttackedLog(path, is_whole, log_job.batch, attack_at_work.batch)


def attacks_of(request: AttackRequest) -> dict[Path, AttackPlan]:
    """The attack behind each log of a request."""
    return {
        attacked_log(request.outdir, epsilon): dataclasses.replace(
            request.attack, attack=dataclasses.replace(request.attack.attack, epsilon=epsilon)
        )
        for epsilon in request.epsilons
    }


def refuse_file_as_folder(outdir: Path) -> None:
    """UserError where the folder for the logs is a file."""
    if outdir.is_file():
        raise UserError(f"{outdir} is a file: name a folder for the logs")


def chosen(only: Sequence[int], known: Collection[int], complaint: str) -> list[int]:
    """The indices in ``only``, sorted; UserError that begins with ``complaint`` where one is not among the known."""
    missing = [index for index in only if index not in known]
    if missing:
        raise UserError(f"--only {missing[0]}: {complaint} {missing[0]}")
    return sorted(set(only))


def for_log(
    request: AttackRequest | FalsifyRequest, path: Path, job: SmoothingJob, plan: AttackPlan, attack_batch: int
) -> tuple[SmoothingJob, SmoothedAttack]:
    """The job and the attack as they make one of several logs, in the batches with which it was begun."""
    batch = request.batch or recorded_number(request, path, "batch") or job.batch
    workers = None if job.workers is None else job.workers.apart(path.name)
    job = dataclasses.replace(job, batch=batch, settings={**job.settings, "batch": batch}, workers=workers)
    attack_at_work = plan.smoothed(request.sigma, request.seed)
    attack_at_work.batch = plan.batch or recorded_number(request, path, "attack_batch") or attack_batch
    return job, attack_at_work
