"""What predict --attack and attack share: from options to an attack on the smoothed classifier, and its rows."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from smoothadv.attacks import SmoothedAttack
from smoothadv.attacks.estimators import ESTIMATORS
from smoothadv.attacks.shared.geometry import in_grey_levels, l2_norm
from smoothadv.attacks.target_rules import EVERY, KNOWN_TARGETS, TARGET_RULES
from smoothadv.certification import ABSTAIN, Draws
from smoothadv.certification.prediction import predict
from smoothadv.commands.components import settings_record
from smoothadv.commands.options import add_attack, compose_attack, given_attack_flags
from smoothadv.commands.runner import Parser
from smoothadv.commands.smoothing import SmoothingJob, recorded_number
from smoothadv.evaluation import Example
from smoothadv.inference import default_attack_batch
from smoothadv.noise import Purpose, RoundedGaussianNoise
from smoothadv.records import ATTACK_COLUMNS
from smoothadv.settings import Setting, batch_size, positive_int
from smoothadv.voting import Poll

BASE = "base"
_PASSES, _TURNS = 4, 4


def add_evaluation_attack(
    parser: Parser,
    adapt: Callable[[Setting], Setting] = lambda setting: setting,
    default: str | None = None,
    default_draws: int = 1,
) -> None:
    """--attack and its settings, and what an attack on a smoothed classifier needs besides."""
    same_as = {
        "--no-grad-attack": "the same as --gradient stein",
        "--hard-no-grad-attack": "the same as --gradient hard-stein",
    }
    group = add_attack(parser, adapt, default, same_as)
    group.add_argument(
        "--num-noise-vec",
        type=positive_int,
        default=None,
        metavar="M",
        help=f"noise draws that the attack averages over (default: {default_draws}; paper: up to 512)",
    )
    kinds = {name: ESTIMATORS[name].description for name in ESTIMATORS}
    kinds[BASE] = "of the base classifier, without noise"
    said = "; ".join(f"{name}: {what}" for name, what in kinds.items())
    group.add_argument(
        "--gradient",
        choices=list(kinds),
        default=None,
        help=f"where gradients come from (default: plug-in). {said}",
    )
    group.add_argument("--base-attack", action="store_true", help=f"the same as --gradient {BASE}")
    group.add_argument(
        "--restarts",
        type=positive_int,
        default=None,
        metavar="R",
        help="runs of the attack, all but the first from random points; the strongest counts (default: 1)",
    )
    group.add_argument(
        "--target",
        type=_target,
        default=None,
        metavar="CLASS",
        help=f"class that the attack wants: a number, {', '.join(TARGET_RULES)}, or {EVERY} (each in turn; the "
        "strongest counts); images of that class are left alone (default: anything but the label)",
    )
    group.add_argument(
        "--attack-batch",
        type=batch_size,
        default=None,
        metavar="B",
        help="noisy images per forward and backward pass of the attack (default: on a CPU 16, or the M of one image if "
        "those are more; by free memory on an accelerator); halved where memory runs out",
    )


def _target(text: str) -> int | str:
    if text.isascii() and text.isdigit():
        return int(text)
    if text not in KNOWN_TARGETS:
        raise argparse.ArgumentTypeError(
            f"'{text}' is no target: write a class number, {', '.join(TARGET_RULES)} or {EVERY}"
        )
    return text


def given_evaluation_flags(options: argparse.Namespace) -> list[str]:
    """Those of the options that are on the command line: what a command that makes no attack must refuse."""
    own = {
        "--num-noise-vec": options.num_noise_vec is not None,
        "--gradient": options.gradient is not None,
        "--base-attack": options.base_attack,
        "--restarts": options.restarts is not None,
        "--target": options.target is not None,
        "--attack-batch": options.attack_batch is not None,
    }
    return given_attack_flags(options) + [flag for flag, given in own.items() if given]


def compose_evaluation_attack(parser: Parser, options: argparse.Namespace, default_draws: int = 1) -> SmoothedAttack:
    """The attack that the options describe; a usage error where something is missing or contradictory."""
    if options.base_attack and options.gradient is not None:
        parser.error("--base-attack and --gradient say the same thing: leave one of them out")
    is_base = options.base_attack or options.gradient == BASE
    if is_base and options.num_noise_vec is not None:
        said = "--base-attack" if options.base_attack else f"--gradient {BASE}"
        parser.error(f"--num-noise-vec is not read with {said}, which attacks without noise: leave one out")
    sigma = 0.0 if is_base else options.sigma
    return SmoothedAttack(
        compose_attack(parser, options, sigma),
        sigma,
        1 if is_base else options.num_noise_vec or default_draws,
        seed=options.seed,
        restarts=options.restarts or 1,
        target=options.target,
    )


def attack_settings(attack: SmoothedAttack | None) -> dict[str, Any]:
    """What a log's manifest says of the attack that decides its numbers."""
    if attack is None:
        return {"attack": None, "num_noise_vec": None, "base_attack": False}
    return {
        "attack": settings_record(attack.attack),
        "num_noise_vec": attack.num_noise_vec,
        "base_attack": attack.sigma == 0,
        "restarts": attack.restarts,
        "target": attack.target,
        "attack_batch": attack.batch,
    }


def shared_with(attack: SmoothedAttack, job: SmoothingJob) -> dict[str, Any]:
    """What an ``Evaluation`` must know of an attack beside its ballots."""
    group = attack.examples_per_pass
    if group > 1:  # of the places of one pass, its own examples would fill but half
        group *= _PASSES
    if job.workers is not None:  # a process that takes many images leaves others without any
        group = max(1, min(group, len(job.indices) // (_TURNS * job.workers.size)))
    return {
        "group": group,
        "attack_memory": attack,
        "run": lambda: {"attack_batch": attack.batch},
    }


def fit_to_job(parser: Parser, attack: SmoothedAttack, job: SmoothingJob, options: argparse.Namespace) -> None:
    """Choose the attack's batch: as asked, else that of the log to be continued, else what suits the device."""
    classes = job.dataset.description.num_classes
    if isinstance(attack.target, int) and attack.target >= classes:
        parser.error(f"--target {attack.target}: the classes of {options.dataset} are 0 to {classes - 1}")
    batch = options.attack_batch or recorded_number(options, "attack_batch")
    if batch is None:
        shape, alike = job.dataset.description.image_shape, options.shard is not None
        batch = default_attack_batch(job.attacked, shape, job.device, attack.num_noise_vec, alike)
    attack.batch = batch if job.workers is None else job.workers.agree("attack_batch", batch)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True


@dataclass(frozen=True)
class AttackedBallots:
    """Puts examples to the vote after ``attack``, to PREDICT with ``n`` draws: a callable for ``evaluate_examples``."""

    job: SmoothingJob
    attack: SmoothedAttack
    n: int
    alpha: float
    votes: ClassVar[Purpose] = Purpose.VOTES

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the rows; one more where there is a target for each example."""
        return (*ATTACK_COLUMNS, "target") if self.attack.target not in (None, EVERY) else ATTACK_COLUMNS

    def __call__(self, examples: list[Example]) -> Iterator[Poll]:
        job, attack = self.job, self.attack
        images = torch.stack([example.image for example in examples]).to(job.device)
        indices = [example.index for example in examples]
        aims = [self.aim(example) for example in examples]
        labels = torch.tensor([label for label, _ in aims], device=job.device)
        epsilon = torch.tensor([epsilon for _, epsilon in aims], dtype=torch.float64)
        targets = attack.choose_targets(job.attacked, images, labels, indices)
        adversarial = attack(job.attacked, images, labels, indices, epsilon=epsilon, targets=targets)
        if isinstance(job.noise, RoundedGaussianNoise):
            adversarial = in_grey_levels(images, adversarial, epsilon)
        norms = l2_norm(adversarial.double() - images.double()).tolist()
        for row, example in enumerate(examples):
            columns = {"attack_norm": norms[row], "epsilon": float(epsilon[row])}
            if targets is not None:
                columns["target"] = int(targets[row])
            columns["basePredict"] = base_prediction(job, adversarial[row])
            yield Poll(adversarial[row], job.stream(example.index, self.votes), self._voting(example, columns))

    def aim(self, example: Example) -> tuple[int, float]:
        """The label to leave, and the l2 norm to stay below on the way."""
        return example.label, self.attack.attack.epsilon

    def outcome(self, example: Example, prediction: int, norm: float) -> dict[str, Any]:
        """Further columns of the row of an example, moved by ``norm``."""
        return {}

    def _voting(self, example: Example, columns: dict[str, Any]) -> Generator[Draws, np.ndarray, dict[str, Any]]:
        """PREDICT at work on one attacked image; returns the columns of its row."""
        prediction = yield from predict(self.n, self.alpha)
        abstain = int(prediction == ABSTAIN)
        more = self.outcome(example, prediction, columns["attack_norm"])
        return {"predict": prediction, "abstain": abstain, **columns, **more}


@torch.inference_mode()
def base_prediction(job: SmoothingJob, image: torch.Tensor) -> int:
    """The base classifier's own class for an image [C, H, W], without noise."""
    return int(job.classifier(image.unsqueeze(0)).argmax())
