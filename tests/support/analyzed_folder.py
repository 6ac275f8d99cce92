"""A folder with logs as released ones, for analyses, and how these refuse."""

import json
from pathlib import Path

from smoothadv.records.logs import manifest_path
from support.commands import Outcome

TRAINING = "epoch\ttime\tlr\ttrain loss\ttrain acc\ttestloss\ttest acc\n"
TRAINING += "0\t9.1\t0.1\t1.5\t40.0\t1.4\t45.0\n1\t9\t0.1\t1\t60\t1.1\t55\n"


def certification(
    path: str, outcomes: list[tuple[str, float]], start: int = 0, column: str = "radius"
) -> None:
    """A released log: R for right, W for wrong, A for an abstention, each with its radius; label
    1.
    """
    rows = [
        f"{start + 20 * number}\t1\t{ {'R': 1, 'W': 0, 'A': -1}[letter] }\t{radius}\t"
        f"{int(letter == 'R')}\t0:00:15\n"
        for number, (letter, radius) in enumerate(outcomes)
    ]
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(f"idx\tlabel\tpredict\t{column}\tcorrect\ttime\n" + "".join(rows))


def predictions(path: str, outcomes: str) -> None:
    certification(path, [(letter, 1) for letter in outcomes], column="basePredict")


COHEN = "cohen/cifar10/resnet110/noise_{0}/test/sigma_{0}"
OURS = "ours/PGD_2steps/eps_{1}/cifar10/resnet110/noise_{0}/test/sigma_{0}"
ORACLE = [("R", 0.5), ("R", 0.25), ("A", 0.0), ("W", 0.8), ("R", 1.0)]


def fill_folder() -> None:
    """Write two certification logs of each of two groups, attacks, and a training log into the
    current folder.
    """
    certification(
        COHEN.format("0.25"), [("R", 0.5), ("R", 0.25), ("R", 0.3), ("W", 0.8), ("W", 0.1)]
    )
    certification(COHEN.format("0.50"), ORACLE)
    certification(
        OURS.format("0.25", 64), [("R", 0.5), ("R", 0.75), ("R", 0.75), ("R", 0.25), ("A", 0.0)]
    )
    certification(
        OURS.format("0.50", 255), [("R", 1.5), ("R", 0.5), ("A", 0.0), ("A", 0.0), ("R", 1.0)]
    )
    for epsilon, m, outcomes in [
        ("0.250", 1, "RRRAW"),
        ("0.250", 8, "RRWAW"),
        ("0.500", 1, "RWWAW"),
    ]:
        predictions(f"attacked/N100/PGD_{epsilon}/num_{m}/predictions", outcomes)
    Path("trained").mkdir()
    Path("trained/log.txt").write_text(TRAINING)


SELECTION = {"images": 20, "skip": 2, "max": None}  # ten images
FIVE = {**SELECTION, "max": 5}


def log(path: str, radii: list[float], idx=None, run=SELECTION, attack=None, **settings) -> Path:
    """A log of ours on every second image: right within each radius, wrong where it is negative, or
    an abstention where it is 0.
    """
    place = Path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    idx = list(idx or range(0, 2 * len(radii), 2))
    rows = [
        f"{i}\t1\t{int(radius > 0) if radius else -1}\t{abs(radius)}\t{int(radius > 0)}\n"
        for i, radius in zip(idx, radii)
    ]
    place.write_text("idx\tlabel\tpredict\tradius\tcorrect\n" + "".join(rows))
    if attack is not None:
        fields = [row.split("\t") for row in rows]
        lines = ["\t".join(row[:3] + row[4:]) for row in fields]
        place.write_text("idx\tlabel\tpredict\tcorrect\n" + "".join(lines))
        settings["attack"] = {"name": "PGD", "epsilon": attack}
    known = {"dataset": "digits", "split": "test", "dataset_fingerprint": "ab"}
    known |= {"sigma": 0.5, "N": 1000, "alpha": 0.001, "checkpoint_sha256": place.name}
    manifest_path(place).write_text(json.dumps({"settings": {**known, **settings}, "runs": [run]}))
    return place


def refusal(outcome: Outcome, code: int) -> str:
    """The one line, after any warnings, with which the command ends."""
    *warnings, line = outcome.err.splitlines()
    assert (outcome.code, outcome.out) == (code, ""), outcome
    assert all(warning.startswith("warning: ") for warning in warnings) and line.startswith(
        "error: "
    )
    return line.removeprefix("error: ")


def records(outcome: Outcome) -> list[dict]:
    """What the command prints in JSON, once it has ended well."""
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out)
