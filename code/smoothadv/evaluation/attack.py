"""The accuracy of a smoothed classifier under attack: a prediction log and the adversarial images
for each epsilon.
"""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from smoothadv.base.errors import UserError
from smoothadv.evaluation.log import write_log
from smoothadv.evaluation.predict import PredictionPolls, fit_to_job
from smoothadv.evaluation.setup import prepare, warn_of_few_draws
from smoothadv.evaluation.specs import AttackPlan, AttackRequest
from smoothadv.records.logs import attacked_log
from smoothadv.records.writer import WrittenLog


def attack(request: AttackRequest) -> Iterator[WrittenLog]:
    """Write the missing rows of the logs in ``request.outdir``, as ``write_log``; yields each
    finished log.
    """
    warn_of_few_draws(request)
    refuse_file_as_folder(request.outdir)
    plans = attacks_of(request)
    first = next((path for path in plans if path.exists()), next(iter(plans)))
    in_memory = request.outdir is None
    job = prepare(request, None if in_memory else first)
    if request.only is not None:
        job = dataclasses.replace(
            job,
            indices=chosen_images(
                request.only, range(len(job.dataset)), f"{job.settings['dataset']} has no image"
            ),
        )
    usual_batch = fit_to_job(request.attack, job).batch
    for path, plan in plans.items():
        log_job = job.for_log(None if in_memory else path)
        polls = PredictionPolls(log_job, fit_to_job(plan, log_job, usual_batch))
        yield write_log(
            log_job,
            polls.plan(f"attacking, epsilon {plan.attack.epsilon:g}", {}, keeps_images=True),
        )


def attacks_of(request: AttackRequest) -> dict[Path, AttackPlan]:
    """The logs of a request, and the attack of each."""
    return {
        attacked_log(request.outdir or Path(), epsilon): dataclasses.replace(
            request.attack, attack=dataclasses.replace(request.attack.attack, epsilon=epsilon)
        )
        for epsilon in request.epsilons
    }


def refuse_file_as_folder(outdir: Path | None) -> None:
    """UserError where the folder for the logs is a file."""
    if outdir is not None and outdir.is_file():
        raise UserError(f"{outdir} is a file: name a folder for the logs")


def chosen_images(only: Sequence[int], known: Collection[int], complaint: str) -> list[int]:
    """The indices in ``only``, sorted; UserError, which contains ``complaint``, if ``known`` lacks
    one of them.
    """
    missing = [index for index in only if index not in known]
    if missing:
        raise UserError(f"--only {missing[0]}: {complaint} {missing[0]}")
    return sorted(set(only))
