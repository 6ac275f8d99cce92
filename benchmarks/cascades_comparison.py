"""Single noise levels, cascades, routers and an oracle on digits, and the tables in
docs/cascades.md.

    python benchmarks/cascades_comparison.py

For each of three seeds, SmoothAdv trains a model at each noise level, routers are trained from
their logs on half of the training images, and all are certified on every second test image. The
oracle takes of each image the single model with the largest radius; it knows the labels. One
router learns the best stage of each image with the schedule of the recipe ``router``, and one by
the whole recipe, as dual randomized smoothing does.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from comparing import (
    SEEDS,
    call,
    cell,
    certified_radii,
    head,
    parser_of,
    resampled,
    row,
    shares,
    write_between,
)

SIGMAS = (1.0, 0.5, 0.25)
RADII = (0.0, 0.25, 0.5, 0.75, 1.0)
THRESHOLD = 0.7
DRAWS, DRAWS_TO_ROUTE = 5_000, 500
ATTACK = ["--attack", "PGD", "--epsilon", "0.5", "--num-steps", "2", "--num-noise-vec", "2"]
CASCADES = {"cascade 1 > .5 > .25": SIGMAS, "cascade .5 > .25": SIGMAS[1:]}
HARD = ("--objective", "gaussian", "--route-labels", "hard", "--route-weights", "even")
ROUTERS = {
    "router, hard labels": ("router_hard", ("--recipe", "router", *HARD)),
    "router of Dual RS": ("router_soft", ("--recipe", "router")),
}


def name_of(sigma: float) -> str:
    return f"sigma {sigma:g}"


def stages(folder: Path, sigmas: tuple[float, ...]) -> str:
    """The tables of a file of stages."""
    lines = []
    for sigma in sigmas:
        checkpoint = folder / f"model_{sigma}" / "checkpoint.pth.tar"
        lines += ["[[stage]]", f'checkpoint = "{checkpoint}"', f"sigma = {sigma}"]
    return "\n".join(lines) + "\n"


def certify(folder: Path, model: Path, sigma: object, name: str, *options: str) -> Path:
    log = folder / f"{name}.tsv"
    call("certify", "digits", str(model), str(sigma), str(log), "--skip", "2", *options)
    return log


def run_seed(folder: Path, seed: int) -> dict[str, Path]:
    """Train and certify all that has this seed; the log of each row of the table."""
    folder = folder / f"seed_{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    logs, to_route, draws = {}, [], ("--N", str(DRAWS))
    schedule = ["--seed", str(seed), "--resume"]
    for sigma in SIGMAS:
        model = folder / f"model_{sigma}"
        options = ["--noise", str(sigma), *ATTACK, "--epochs", "40", *schedule]
        call("train_pgd", "digits", "digits_resnet8", str(model), *options)
        checkpoint, two = model / "checkpoint.pth.tar", ("--method", "two-sided")
        logs[name_of(sigma)] = certify(folder, checkpoint, sigma, f"single_{sigma}", *two, *draws)
        few = (*two, "--N", str(DRAWS_TO_ROUTE), "--split", "train")
        to_route.append(certify(folder, checkpoint, sigma, f"train_{sigma}", *few))
    for number, (name, sigmas) in enumerate(CASCADES.items()):
        file = folder / f"cascade_{number}.toml"
        file.write_text(f"threshold = {THRESHOLD}\n{stages(folder, sigmas)}")
        logs[name] = certify(folder, file, "stages", file.stem, *draws)
    for name, (place, options) in ROUTERS.items():
        words = ["digits", "digits_resnet8", str(folder / place), "--noise", str(max(SIGMAS))]
        call("train", *words, *options, *schedule, "--route", *map(str, to_route))
        file = folder / f"{place}.toml"
        head = f'[router]\ncheckpoint = "{place}/checkpoint.pth.tar"\nsigma = {max(SIGMAS)}\n'
        file.write_text(head + stages(folder, SIGMAS))
        logs[name] = certify(folder, file, "stages", place, *draws)
    return logs


def table(found: dict[str, np.ndarray]) -> str:
    """The table; ``found`` has radii [seeds, images]."""
    draws = resampled(next(iter(found.values())).shape[1])
    lines = head(["model", "average certified radius"], RADII, 1)
    for name, radii in found.items():
        average = cell(radii.clip(min=0).mean(0), draws, 3)
        lines.append(row([name, average, *shares(radii, RADII)]))
    return "\n".join(lines)


def differences(found: dict[str, np.ndarray]) -> str:
    """The last router minus each other one, and minus sigma .25, in pairs."""
    *others, last = ROUTERS
    draws = resampled(found[last].shape[1])
    lines = head([f"{last} minus", "average certified radius"], RADII, 1)
    for name in (*others, name_of(0.25)):
        average = (found[last].clip(min=0) - found[name].clip(min=0)).mean(0)
        at = [100.0 * ((found[last] >= r).mean(0) - (found[name] >= r).mean(0)) for r in RADII]
        cells = [cell(average, draws, 3, "+"), *(cell(one, draws, 1, "+") for one in at)]
        lines.append(row([name, *cells]))
    return "\n".join(lines)


def main() -> None:
    """Train, certify, compare."""
    options = parser_of(__doc__, "cascades_comparison", "cascades.md").parse_args()
    folder = options.folder.resolve()
    with ThreadPoolExecutor(options.processes) as pool:
        logs = [*pool.map(lambda seed: run_seed(folder, seed), SEEDS)]
    found = {name: np.stack([certified_radii(each[name]) for each in logs]) for name in logs[0]}
    found["oracle"] = np.max([found[name_of(sigma)] for sigma in SIGMAS], axis=0)
    for name, text in (("cascades", table(found)), ("routers", differences(found))):
        write_between(options.page, text, f"{name} comparison")
        print(text)


if __name__ == "__main__":
    main()
