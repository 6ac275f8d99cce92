"""The accuracy of a smoothed classifier under attack: a prediction log and the adversarial images for each epsilon."""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from smoothadv.attacks import SmoothedAttack
from smoothadv.errors import UserError
from smoothadv.evaluation.attacked_images import PredictionPolls, attack_record, fit_to_job
from smoothadv.evaluation.log_writing import LogPlan, write_log
from smoothadv.evaluation.requests import AttackPlan, AttackRequest
from smoothadv.evaluation.smoothing_job import SmoothingJob, prepare, recorded_number, warn_of_few_draws
from smoothadv.records import attacked_log


@dataclass(frozen=True)
class AttackedLog:
    """A log and the batches that made it; ``is_whole`` is False where this process has written only a share of it."""

    path: Path
    is_whole: bool
    batch: int
    attack_batch: int


def attack(request: AttackRequest) -> Iterator[AttackedLog]:
    """Write the missing rows of the logs in ``request.outdir``, one log after the other; yields each finished log.

    UserError where the request cannot be carried out, possibly after some rows; the logs keep the rows written so far.
    """
    warn_of_few_draws(request)
    refuse_file_as_folder(request.outdir)
    plans = attacks_of(request)
    first = next((path for path in plans if path.exists()), next(iter(plans)))
    job = prepare(request, first)
    if request.only is not None:
        job = dataclasses.replace(
            job, indices=chosen_images(request.only, range(len(job.dataset)), f"{job.settings['dataset']} has no image")
        )
    fitted = fit_to_job(request.attack, job, request, first)
    for path, plan in plans.items():
        log_job, smoothed_attack = _job_and_attack_for(request, path, job, plan, fitted.batch)
        polls = PredictionPolls(log_job, smoothed_attack, request.n, request.alpha)
        is_whole = write_log(
            log_job,
            LogPlan(
                request=request,
                path=path,
                columns=polls.columns,
                settings={"N": request.n, **attack_record(smoothed_attack)},
                make_polls=polls,
                description=f"attacking, epsilon {plan.attack.epsilon:g}",
                attack=smoothed_attack,
                keeps_images=True,
            ),
        )
        yield AttackedLog(path, is_whole, log_job.batch, smoothed_attack.batch)


def attacks_of(request: AttackRequest) -> dict[Path, AttackPlan]:
    """The logs of a request, and the attack of each."""
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


def chosen_images(only: Sequence[int], known: Collection[int], complaint: str) -> list[int]:
    """The indices in ``only``, sorted; UserError, which contains ``complaint``, if ``known`` lacks one of them."""
    missing = [index for index in only if index not in known]
    if missing:
        raise UserError(f"--only {missing[0]}: {complaint} {missing[0]}")
    return sorted(set(only))


def _job_and_attack_for(
    request: AttackRequest, path: Path, job: SmoothingJob, plan: AttackPlan, attack_batch: int
) -> tuple[SmoothingJob, SmoothedAttack]:
    """The job and the attack for one of several logs: with the batches with which that log was begun."""
    batch = request.batch or recorded_number(request, path, "batch") or job.batch
    workers = None if job.workers is None else job.workers.for_log(path.name)
    job = dataclasses.replace(job.for_log(request, path, batch), workers=workers)
    attack_batch = plan.batch or recorded_number(request, path, "attack_batch") or attack_batch
    return job, plan.smoothed(request.sigma, job.attack_seed, attack_batch, job.has_plain_noise)
