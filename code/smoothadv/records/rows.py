"""What the rows of logs must satisfy under their manifests. No torch.

scripts/write_schema.py copies the rules for certification logs into scripts/verify_log.py, which
imports nothing of this package.
"""

import math
from itertools import combinations
from statistics import NormalDist
from typing import Any


def row_checks(row: Any, settings: dict[str, Any], is_selected: Any) -> dict[str, Any]:
    """The rules for a row, or for all rows if ``row`` has arrays: whether each holds, by words for
    its violation. ``is_selected`` says whether its image was selected.

    All rules but the radius bound are arithmetic.
    """
    label, predict, radius, successes, trials = (
        row[name] for name in ("label", "predict", "radius", "successes", "trials")
    )
    classes, n, claims = settings["num_classes"], settings["N"], predict >= 0
    rivals = [row[name] for name in row if name.startswith("rival")]
    others, order = trials - successes - sum(rivals), [trials - successes, *rivals]
    squared = row.get("squared_radius", 0)
    # All draws are successes; the sum of the bounds on the rivals of a set adds Phi^-1(1 - 1 / k) <
    # 5 at most.
    z = -NormalDist().inv_cdf(min(1 - 2**-53, -math.expm1(math.log(settings["alpha"]) / n)))
    z += 5 * ("top_k" in settings)
    sigma = settings["sigma"]
    if "sigmas" in settings:
        sigma = sum((row["stage"] == k) * each for k, each in enumerate(settings["sigmas"], 1))
    # Without a grid of radii, a sample is fixed: only abstentions have fewer draws.
    is_decided = (trials > 0) if "radii" in settings else (trials == n)
    checks = {
        "its image is not among those selected": is_selected,
        "its label or predict is no class": (0 <= label)
        & (label < classes)
        & (-1 <= predict)
        & (predict < classes),
        "correct is not whether predict is the label": row["correct"] == (predict == label),
        "an abstention has predict -1 and radius 0": (radius >= 0) & (claims | (radius == 0)),
        "no draws show so large a radius": radius <= sigma * max(0, z) * (1 + 1e-9),
        # The pigeonhole principle: of the other classes, none has more votes than the last of the
        # rivals.
        "its counts are impossible": (0 <= successes)
        & (0 <= order[-1])
        & (trials <= n)
        & (0 <= others)
        & (others <= (classes - 1 - len(rivals)) * [trials, *rivals][-1]),
        "its rivals do not descend": sum((a < b) * 1 for a, b in zip(order, order[1:])) == 0,
        "its class does not lead the rival": if_then(
            claims & (rivals != []) & (settings["alpha"] <= 0.5), successes > sum(rivals[-1:])
        ),
        "it is a certificate of no trials, or of a number that decides nothing": if_then(
            claims, is_decided
        ),
        "squared_radius is not below (255 R)^2": ((0 <= squared) & (squared < (255 * radius) ** 2))
        | (squared == 0),
    }
    checks |= grid_checks(row, settings) if "radii" in settings else {}
    checks |= stage_checks(row, settings) if "threshold" in settings else {}
    return checks | (router_checks(row, settings) if "router_rival" in row else {})


def grid_checks(row: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """As ``row_checks``, of procedures that look several times at the votes."""
    label, predict, trials, looks = (row[name] for name in "label predict trials looks".split())
    claims, aware = predict >= 0, row.get("label_aware", 0)
    stages = 2 if "router_rival" in row else len(settings.get("sigmas", [0]))
    drawn = row["samples"] - stages * settings["N0"]
    return {
        "trials, samples and looks disagree": (trials <= drawn)
        & (drawn <= stages * settings["N"])
        & (claims | (trials == drawn) | ("sigmas" in settings))
        & (0 <= looks)
        & (looks <= drawn)
        & ((looks > 0) == (drawn > 0)),
        "level is not that of its radius": row["level"] + 1
        == claims * sum((r <= 1.0 * row["radius"]) * 1 for r in settings["radii"]),
        "label_aware is not whether its class was wrong": if_then(
            claims & settings["label_aware"], predict == label
        )
        & (((aware == 1) & (drawn == 0)) | (aware == 0)),
    }


def stage_checks(row: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """As ``row_checks``, of cascades."""
    stage, claims, n, known = row["stage"], row["predict"] >= 0, settings["N"], "radii" in settings
    numbers = range(1, 1 + len(settings["sigmas"]))
    rivals = [row[f"stage_{number}_rival"] for number in numbers]
    drawn = [
        row[f"stage_{number}_trials"] if known else n * (number <= stage) for number in numbers
    ]
    sums, own, rest = 0, 0, row["trials"] - row["successes"]
    possible, others = True, (settings["num_classes"] - 2)
    for number, rival, trials in zip(numbers, rivals, drawn):
        is_own, sums = stage == number, sums + trials
        own += is_own * trials
        possible &= (0 <= rival) & (rival <= trials) & (trials <= n)
        possible &= (number <= stage) | (trials == 0)
        possible &= if_then(claims & (number <= stage), trials > 0)
        possible &= if_then(is_own, (rival <= rest) & (rest - rival <= others * rival))
    return {
        "its stage is none of the cascade's": (1 <= stage) & (stage <= numbers[-1]),
        "the counts of its stages are impossible": possible,
        "trials are not those of its stage": (row["trials"] == own) | (not known),
        "its stages have more draws than samples": sums
        <= (row["samples"] - len(numbers) * settings["N0"] if known else sums),
    }


def router_checks(row: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """As ``row_checks``, of routers."""
    claims, known, stages = row["predict"] >= 0, "radii" in settings, len(settings["sigmas"]) - 1
    routed, rival = row["router_successes"], row["router_rival"]
    drawn = row["router_trials"] if known else settings["N"]
    rest = drawn - routed
    return {
        "its stage is none of the router's": (1 <= row["stage"]) & (row["stage"] <= stages),
        "the counts of its router are impossible": (0 <= routed)
        & (0 <= rival)
        & (rival <= rest)
        & (drawn <= settings["N"])
        & if_then(claims, (routed > 0) & (rest <= (stages - 1) * rival)),
        "its classifiers have more draws than samples": (row["trials"] + drawn)
        <= (row["samples"] - 2 * settings["N0"] if known else row["trials"] + drawn),
    }


def if_then(condition: Any, consequence: Any) -> Any:
    """Whether a consequence holds where its condition does; both are truth values, or arrays."""
    return condition <= consequence


def prediction_checks(row: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """As ``row_checks``, of arrays, of a log of predictions, clean or under attack, or of attacks
    on certificates.
    """
    classes, label, predict = settings.get("num_classes", 2**31), row["label"], row["predict"]
    wanted, norm = row.get("certified", label), row.get("attack_norm", 0)
    of_set = [row[name] for name in row if name.startswith("class_")] or [predict]
    known = [label, *(row[name] for name in ("basePredict", "certified", "target") if name in row)]
    among, flips = sum((c == wanted) * 1 for c in of_set) > 0, (predict >= 0) & (predict != wanted)
    return {
        "its label, basePredict, certified or target is no class": sum(
            ((c < 0) | (c >= classes)) * 1 for c in known
        )
        == 0,
        "its classes are no set of classes": sum(((c < -1) | (c >= classes)) * 1 for c in of_set)
        + sum((a == b) & (a >= 0) | ((a < 0) != (b < 0)) for a, b in combinations(of_set, 2))
        == 0,
        "predict is not the class wanted, or the first, of a set": (among & (predict == wanted))
        | ((among == 0) & (predict == of_set[0])),
        "abstain is not whether predict is -1": row.get("abstain", predict == -1)
        == (predict == -1),
        # The norm was computed in float32: it may exceed epsilon by rounding.
        "attack_norm is not from 0 to epsilon": (0 <= norm)
        & (norm <= row.get("epsilon", 0) * (1 + 1e-5) + 1e-6),
        "flipped is not whether another class is within radius": row.get("flipped", flips)
        == (flips & (norm < row.get("radius", math.inf))),
    }
