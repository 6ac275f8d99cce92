"""The accuracy of a smoothed classifier under attack: a prediction log and the adversarial images
for each epsilon.
"""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from smoothadv.base.errors import UserError
from smoothadv.evaluation.cascade import prepare
from smoothadv.evaluation.log import write_log
from smoothadv.evaluation.predict import PredictionPolls, with_attack_batch
from smoothadv.evaluation.setup import warn_of_few_draws
from smoothadv.evaluation.specs import AttackSpec
from smoothadv.records.logs import attacked_log
from smoothadv.records.writer import WrittenLog


def attack(spec: AttackSpec) -> Iterator[WrittenLog]:
    """Write the missing rows of the logs in ``spec.outdir``, as ``write_log``; yields each finished
    log.
    """
    warn_of_few_draws(spec)
    specs = specs_by_log(spec)
    first = next((path for path in specs if path.exists()), next(iter(specs)))
    evaluation = prepare(spec, None if spec.outdir is None else first)
    if spec.only is not None:
        complaint = f"{evaluation.settings['dataset']} has no image"
        indices = chosen_images(spec.only, range(len(evaluation.dataset)), complaint)
        evaluation = dataclasses.replace(evaluation, indices=indices)
    _, usual_attack = with_attack_batch(evaluation)
    usual_batch = None if usual_attack is None else usual_attack.batch
    for path, one in specs.items():
        log = None if spec.outdir is None else path
        continued = dataclasses.replace(evaluation, spec=one).continuing(log)
        polls = PredictionPolls(*with_attack_batch(continued, usual_batch))
        content = polls.content(f"attacking, epsilon {one.attack.epsilon:g}", keeps_images=True)
        yield write_log(polls.evaluation, content)


def specs_by_log(spec: AttackSpec) -> dict[Path, AttackSpec]:
    """The logs of a spec, and the spec of each."""
    specs = {}
    for epsilon in spec.epsilons:
        attack = dataclasses.replace(spec.attack, epsilon=epsilon)
        one = dataclasses.replace(spec, attack=attack, epsilons=(epsilon,))
        specs[attacked_log(spec.outdir or Path(), epsilon)] = one
    return specs


def chosen_images(only: Sequence[int], known: Collection[int], complaint: str) -> list[int]:
    """The indices in ``only``, sorted; UserError, which contains ``complaint``, if ``known`` lacks
    one of them.
    """
    missing = [index for index in only if index not in known]
    if missing:
        raise UserError(f"--only {missing[0]}: {complaint} {missing[0]}")
    return sorted(set(only))
