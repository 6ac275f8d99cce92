"""Verify a certification log: python scripts/verify_log.py logs/quickstart/gaussian.tsv

Shares no statistics with smoothadv, only the words on what a manifest and a row may hold: Python's
integers and mpmath compute the rest. A row "class c, radius R" is true if c has probability p_A > t
= Phi(R / sigma) under noise (Cohen et al., 2019, Theorem 1 with p_B = 1 - p_A). The row holds if
its counts reject the hypothesis "p_A <= t" at the level alpha of the manifest:
  exact     all N draws were made, and P[Binomial(N, t) >= successes] <= alpha (Clopper and Pearson,
            1934)
  adaptive  at the look after `trials` draws, the successes reach the boundary of each radius r <= R
            of the grid; the boundaries of r are computed anew, such that p_A = Phi(r / sigma)
            reaches one with probability <= alpha
Or it is true if p_A > Phi(z) and all other classes have less than Phi(-y), z + y >= 2 R / sigma
(Theorem 1 as it is):
  two-sided   as exact, at the level alpha_share * alpha; or the successes reject "p_A <= Phi(z)" at
              this level, and the draws that were not for the strongest `rival` reject
              "1 - p_rival <= Phi(y)" at the rest of alpha
  sequential  as adaptive, with z = r / sigma or a multiple of 1/50 from -2, and y a multiple of
  1/50 above 0
Or c is among the k most probable classes (Jia et al., 2020, Theorem 1) if the t smallest of k
bounds on rivals have a sum S for which t Phi(z - R / sigma) > Phi(Phi^-1(S) + R / sigma), or all k
have, with S at most 1 - Phi(z):
  top-k     as two-sided, for one z, and for the rival_1 to rival_k each at the rest of alpha,
            divided by k
Or each of the stages up to `stage` does its part in a cascade, whose threshold is p0 (the class of
the first stage that has one with more than p0; else the most probable one of the last):
  cascade   as exact; at a stage before it, all classes but the strongest rival have more than
            Phi(R / sigma - Phi^-1(p0)); at `stage`, the class has more than Phi(R / sigma +
            Phi^-1(p0)); where that is the last one, as two-sided
  sequential-cascade  the same, by the boundaries of adaptive; at the last stage as sequential
Or a router, the last one of the sigmas, chooses `stage`, and the class is that of this stage:
  router    as two-sided, for router_successes and router_rival, and for successes and rival
  sequential-router  the same, as sequential
Or it has the scores of all classes of an image, whose label is in its set with probability 1 -
alpha under any attack within each of the radii (RCP1 and BinCP, both 2025): thresholds and sets are
computed anew, and their coverage is printed
  conformal  the set has the classes whose score reaches the m-th smallest score that the labels of
             n calibration images have, m <= (n + 1) Phi(Phi^-1(alpha) - r / sigma); of N draws, m
             <= (n + 1) 9/10 alpha, and s draws suffice where P[Binomial(N, Phi(Phi^-1(p) - r /
             sigma)) <= s] > alpha / 20, P[Binomial(N, p) >= that m-th score] = alpha / 20
  --sound   t = Phi(R / sigma + z) + d, d the distance of the noise from a Gaussian, Phi(z) >= 1/2
            + d; and the `squared_radius`, in squared grey levels, is below (255 R)^2, or 0 where R
            is 0; of two hypotheses, each has + d, and z + y >= 2 (R / sigma + e), Phi(m + e)
            - Phi(m - e) >= 2 d, m = (z - y) / 2; top-k: p_A, S and both sides of the inequality may
            be off by d
Probabilities are whole numbers of units 2^-160, rounded to the side on which a row fails. No log
can show that its counts are the classifier's, its draws independent, and N, alpha and the radii
chosen beforehand. A --ladder and sequential logs take minutes, of millions of draws hours. Exit
code 0: all rows hold and no image is missing; 1: not so, or not to be verified.
"""

import argparse
import hashlib
import json
import math
import re
import sys
from bisect import bisect_left
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, count, islice, takewhile
from math import ceil, floor, prod
from pathlib import Path
from statistics import NormalDist
from typing import Any

from mpmath import iv, mp

BITS = 160
ONE = 1 << BITS
mp.prec = iv.prec = BITS + 64
RESERVE = (
    ONE // 10**12
)  # of its allowance, each look leaves this to those who compute boundaries in float64
COARSE = (
    Fraction(1, 2),
    Fraction(5, 4),
    50,
)  # of adaptive: the share spent before N; the growth and step of its looks
FORMS = {
    "time": "[^\t]*",
    "radius": "[0-9]{1,9}([.][0-9]{1,400})?",
    **dict.fromkeys(("attack_norm", "score_"), "[0-9]{1,9}([.][0-9]{1,40})?(e-[0-9]{1,3})?"),
}  # other columns have whole numbers


# Here begins what scripts/write_schema.py writes.
SETTINGS = """
N N0 alpha alpha_share arch arch_given attack_batch base_attack batch checkpoint_sha256
classifier_sha256 compiled cpu_capability dataset dataset_fingerprint denoiser device
folded fused generator image_set images_saved input_layer label_aware ladder library
local_noise logits_sha256 mean method module_sha256 noise noise_kernel num_classes
num_noise_vec plugins precision pretrained radii resize restarts seed shard sigma sigmas
sound split std tables_sha256 target tf32 threads threshold timestep top_k torch training
weights_given
"""
NEEDED = """
dataset split dataset_fingerprint arch input_layer num_classes sigma alpha seed noise N0 N
method sound
"""
METHODS = {  # the settings and the columns of each procedure that not all have
    "two-sided": (
        "alpha_share",
        "rival",
    ),
    "adaptive": (
        "radii label_aware ladder tables_sha256",
        "samples level looks",
    ),
    "top-k": (
        "alpha_share top_k",
        "",
    ),
    "sequential": (
        "radii label_aware alpha_share tables_sha256",
        "samples level looks rival",
    ),
    "cascade": (
        "alpha_share sigmas threshold",
        "stage",
    ),
    "sequential-cascade": (
        "radii label_aware alpha_share sigmas threshold tables_sha256",
        "samples level looks stage",
    ),
    "exact": (
        "",
        "",
    ),
    "router": (
        "alpha_share sigmas",
        "stage rival router_successes router_rival",
    ),
    "sequential-router": (
        "radii label_aware alpha_share sigmas tables_sha256",
        "samples level looks stage rival router_successes router_rival router_trials",
    ),
}


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


# Here ends it.

WHOLE = {  # of what is computed with, the least and the largest number
    "N": (1, 10**18),
    "N0": (1, 4 * 10**9),
    "num_classes": (1, 4 * 10**9),
    "top_k": (1, 100_000),
    "images": (0, 4 * 10**9),
    "skip": (1, 4 * 10**9),
    "max": (1, 4 * 10**9),
    "seed": (0, 2**128 - 1),
}
REAL = {
    "sigma": (5e-324, 10),
    "alpha": (5e-324, 1 - 2**-53),
    "alpha_share": (5e-324, 1 - 2**-53),
    "calibration": (5e-324, 1 - 2**-53),
    "at_least": (5e-324, 1 - 2**-53),
    "threshold": (0.5, 0.999),
}
LISTS = {
    "radii": (REAL, 0, sys.float_info.max),
    "sigmas": (REAL, 5e-324, 10),
    "image_shape": (WHOLE, 1, 10**9),
}
FLAGS = ("sound", "ladder", "label_aware")
OF_SETS = "N alpha calibration dataset_fingerprint images max noise num_classes radii seed".split()
OF_SETS += ["sigma", "skip"]


def is_number(value, kind, low, high):
    """Whether a value is a number of WHOLE or REAL, from low to high; true and false are none."""
    types = (int,) if kind is WHOLE else (int, float)
    return type(value) in types and low <= value <= high


def value_fault(name, value):
    """What is wrong with a value in a manifest with which this script computes; "" if nothing."""
    holds = True
    if name in LISTS:
        holds = type(value) is list and all(is_number(each, *LISTS[name]) for each in value)
    elif name in FLAGS:
        holds = type(value) is bool
    elif name in WHOLE or name in REAL:
        kind = WHOLE if name in WHOLE else REAL
        holds = is_number(value, kind, *kind[name]) or (name == "max" and value is None)
    elif name == "noise":
        holds = type(value) is str
    return "" if holds else f"says that {name} is {json.dumps(value)[:60]}, which cannot be"


def indices_of(record):
    """The indices in a manifest's record of images that have a name, ascending; None where its
    count, or the SHA-256 of the indices, one a line, is not theirs.
    """
    known = {"named", "count", "sha256", "indices"}
    text = str(record["indices"]) if type(record) is dict and record.keys() == known else ""
    if not re.fullmatch("[0-9]{1,10}(,[0-9]{1,10})*", text):
        return None
    found = [int(index) for index in text.split(",")]
    lines = "".join(f"{index}\n" for index in found)
    known = len(found), hashlib.sha256(lines.encode()).hexdigest()
    ascends = all(one < other for one, other in zip(found, found[1:]))
    return found if ascends and known == (record["count"], record["sha256"]) else None


def images_of(settings, run):
    """The indices of the images that a run selects, or of those in a shard."""
    part = settings.get("shard", {"index": 0, "count": 1})
    share = slice(part["index"], None, part["count"])
    if "image_set" in settings:
        return frozenset(indices_of(settings["image_set"])[share])
    return range(0, run["images"], run["skip"])[: run["max"]][share]


def manifest_fault(manifest):
    """What the settings of a manifest, or its last run, lack, have too much or contradict; "" if
    nothing.
    """
    content = manifest if type(manifest) is dict else {}
    settings, runs = content.get("settings"), content.get("runs")
    if type(settings) is not dict or type(runs) is not list or type((runs or [{}])[-1]) is not dict:
        return "holds no settings and runs"
    run = (runs or [{}])[-1]
    if settings.get("method") == "conformal":
        return fault_of_sets(settings, run)
    if settings.get("method") not in [*METHODS]:
        return f"names no method, one of {', '.join(METHODS)}"
    own = METHODS[settings["method"]][0].split()
    of_methods = {name for names, _ in METHODS.values() for name in names.split()}
    needed = [*NEEDED.split(), "images", "skip", "max", "image_shape", *own]
    if lacking := [name for name in needed if name not in {**settings, **run}]:
        return f"lacks {lacking[0]!r}"
    if foreign := {*settings}.difference(SETTINGS.split()) | {*settings}.intersection(
        of_methods
    ) - {*own}:
        return f"states {min(foreign)!r}, which no such log has"
    known = {**run, **settings}
    if faults := [fault for name in known if (fault := value_fault(name, known[name]))]:
        return faults[0]
    if fault := selection_fault(settings, run):
        return fault
    radii, sigmas = settings.get("radii", [0]), settings.get("sigmas", [settings["sigma"]])
    contradictions = {
        "noise that is not that of its sound": settings["noise"]
        != "Rounded" * settings["sound"] + "GaussianNoise",
        "radii that do not ascend from 0": radii[:1] != [0]
        or any(a >= b for a, b in zip(radii, radii[1:])),
        "a sigma that is not the largest of its sigmas": settings["sigma"]
        != max(sigmas, default=0),
        "fewer than two stages": "sigmas" in own and len(sigmas) - ("threshold" not in own) < 2,
        "a top_k of all its classes": settings.get("top_k", 0) >= max(2, settings["num_classes"]),
    }
    return next((f"has {fault}" for fault, holds in contradictions.items() if holds), "")


def selection_fault(settings, run):
    """What the settings and the last run contradict about the images that were selected; "" if
    nothing.
    """
    whole, last = images_of({}, run), -1
    selection = [whole.start, whole.stop, whole.step]
    if "image_set" in settings:
        if (found := indices_of(settings["image_set"])) is None:
            return "has an image_set whose count, sha256 and indices are not of one set"
        selection, last = {"only": found}, found[-1]
    usual = {"index": 0, "count": 1, "examples": selection}
    shard = settings.get("shard", usual)
    part = shard if type(shard) is dict and shard.keys() == usual.keys() else {**usual, "count": 0}
    index, count = part["index"], part["count"]
    contradictions = {
        "an impossible shard": not is_number(count, WHOLE, 1, 10**9)
        or not is_number(index, WHOLE, 0, count - 1),
        "images that its dataset has not": last >= run["images"],
        "a shard of other images": part["examples"] != usual["examples"],
    }
    return next((f"has {fault}" for fault, holds in contradictions.items() if holds), "")


def fault_of_sets(settings, run):
    """As ``manifest_fault``, of a log of conformal sets."""
    known = {**run, **settings}
    lacking = [f"lacks {name!r}" for name in OF_SETS if name not in known]
    faults = (value_fault(name, known[name]) for name in known)
    if fault := next(filter(None, [*lacking, *faults]), ""):
        return fault
    attack = settings.get("attack")
    contradictions = {
        "other noise, or another number of draws, than sets have": settings["noise"]
        != "GaussianNoise"
        or not (1 < settings["N"] <= 4 * 10**9 if "at_least" in settings else settings["N"] == 1)
        or bool({"sigmas", "sound", "threshold"} & settings.keys()),
        "no radii": not settings["radii"],
        "an attack without an epsilon": attack is not None
        and (type(attack) is not dict or not is_number(attack.get("epsilon"), REAL, 1e-300, 1e300)),
    }
    found = next((f"has {fault}" for fault, holds in contradictions.items() if holds), "")
    return found or selection_fault(settings, run)


def certification_columns(settings):
    """The columns of a certification log of one of METHODS, in their order."""
    own = METHODS[settings["method"]][1]
    columns = f"idx label predict radius correct time successes trials {own}".split()
    columns += [f"rival_{number + 1}" for number in range(settings.get("top_k", 0))]
    stages = range(1, 1 + len(settings["sigmas"]) if "threshold" in settings else 1)
    columns += [f"stage_{number}_rival" for number in stages]
    columns += [f"stage_{number}_trials" for number in stages if "radii" in settings]
    columns += ["label_aware"] * settings.get("label_aware", False)
    return columns + ["squared_radius"] * settings["sound"]


def below(interval):
    """The lower end of an mpmath interval, in units, rounded down."""
    return int(mp.floor(mp.mpf(interval.a) * ONE))


def normal_cdf(x):
    """1/2 + phi(x) (x + x^3 / 3 + x^5 / (3 * 5) + ...), from above by < 2^-109; Abramowitz and
    Stegun, 26.2.11.
    """
    if x < 0:
        return ONE - normal_cdf(-x) + (ONE >> 110)
    if x > 13:
        return ONE  # above Phi(x) by less than 2^-120
    x = ceil(x * ONE)
    term, total, odd = x, x, 1
    while (
        term > 1 or odd * ONE**2 < 2 * x**2
    ):  # from then on, each term is less than half of the one before
        odd += 2
        term = -(-term * x**2 // (odd * ONE**2))
        total += term
    density = -below(-iv.exp(-((iv.mpf(x) / ONE) ** 2) / 2) / iv.sqrt(2 * iv.pi))
    return min(ONE, ONE // 2 - (-density * (total + term) // ONE))


def quantile_above(t):
    """Phi^-1 of t, in units, from above."""
    guess = mp.sqrt(2) * mp.erfinv(2 * mp.mpf(t) / ONE - 1) if t < ONE else mp.inf
    above = Fraction(int(mp.ceil(guess * ONE)), ONE) + Fraction(1, 10**15) if guess < 13 else 13
    if normal_cdf(above) - (ONE >> 100) < t:
        raise ValueError("its threshold is too near to 1")
    return above


def binomial(draws, t):
    """(a, [P[a], P[a + 1], ...]) of Binomial(draws, t), below: P[s] / P[s - 1] = (draws - s + 1) t
    / (s (1 - t)).
    """
    if t <= 0:
        return 0, [ONE]
    if t >= ONE:
        return draws, [0]
    mode = min(draws, (draws + 1) * t // ONE)
    log = iv.loggamma(draws + 1) - iv.loggamma(mode + 1) - iv.loggamma(draws - mode + 1)
    peak = below(
        iv.exp(
            log + mode * iv.log(iv.mpf(t) / ONE) + (draws - mode) * iv.log(iv.mpf(ONE - t) / ONE)
        )
    )
    up = accumulate(
        range(mode + 1, draws + 1),
        lambda w, s: w * (draws - s + 1) * t // (s * (ONE - t)),
        initial=peak,
    )
    down = accumulate(
        range(mode, 0, -1), lambda w, s: w * s * (ONE - t) // ((draws - s + 1) * t), initial=peak
    )
    lower = list(takewhile(bool, down))[:0:-1]
    return mode - len(lower), lower + list(takewhile(bool, up))


def convolution(a, b):
    """Of lists of probabilities, from below: half of their bits are digits of two integers, which
    are multiplied.
    """
    width = BITS // 8 + 1
    size = width * (len(a) + len(b) - 1)
    digits = (
        b"".join((v >> BITS // 2).to_bytes(width, "little") for v in values) for values in (a, b)
    )
    product = prod(int.from_bytes(number, "little") for number in digits).to_bytes(size, "little")
    return [int.from_bytes(product[i : i + width], "little") for i in range(0, size, width)]


def boundaries(t, looks, allowances):
    """Yield the successes that reject "p_A <= t" at each look; by look k, P <= allowances[k]
    (Lan and DeMets, 1983).
    """
    # alive[i] <= P[start + i successes, and no rejection so far]: whatever is not surely alive
    # counts as rejected.
    alive, start, drawn = [ONE], 0, 0
    for k, (n, allowance) in enumerate(zip(looks, allowances), start=1):
        low, weights = binomial(n - drawn, t)
        alive, start, drawn = convolution(alive, weights) if drawn else weights, start + low, n
        rejected, limit = ONE - sum(alive), allowance - k * RESERVE
        while rejected + alive[-1] <= limit:
            rejected += alive.pop()
        yield start + len(alive) if rejected <= limit else n + 1  # n + 1 is out of reach
        dead = next((i for i, weight in enumerate(alive) if weight), 0)
        alive, start = alive[dead:], start + dead


def noise_distance(sigma, dimension):
    """d: the total variation between an image's integer noise and round(N(0, (255 sigma)^2)), from
    above.
    """
    # A pixel's noise is at most i, -M <= i < M, with probability T_i / 2^62, T_i = round(2^62
    # Phi((i + 1/2) / (255 sigma))) and M = 255 + ceil(6 * 255 sigma): d = dimension * sum |T_i /
    # 2^62 - Phi(.)|, half of it for i < 0.
    unit, steps = ONE >> 62, range(255 + ceil(6 * 255 * sigma))
    exact = [normal_cdf(min(Fraction(13), (i + Fraction(1, 2)) / (255 * sigma))) for i in steps]
    return (
        2
        * dimension
        * sum(abs((value + unit // 2) // unit * unit - value) + (ONE >> 110) for value in exact)
    )


class Procedure:
    """What decides the rows of a log: the settings of its manifest, and its last run, which says of
    what images.
    """

    def __init__(self, settings, run, threshold=Fraction(1, 2)):
        self.settings, self.images = settings, images_of(settings, run)
        self.sigma, self.alpha, self.n = (
            Fraction(settings["sigma"]),
            settings["alpha"],
            settings["N"],
        )
        self.adaptive, self.sound = (
            settings["method"] in ("adaptive", "sequential"),
            settings["sound"],
        )
        self.both, dimension = (
            "alpha_share" in settings,
            prod(run["image_shape"]) if self.sound else 1,
        )
        if not 0 < dimension <= 10**9:
            raise ValueError(f"its manifest has images of {dimension} numbers")
        self.rivals = [name for name in certification_columns(settings) if name.startswith("rival")]
        self.share = Fraction(settings["alpha_share"]) if self.both else Fraction(1)
        # Before a diffusion model, the noise may be a little larger than the sigma of the radius.
        noise_sd = Fraction(settings.get("denoiser", {}).get("noise_sd", self.sigma))
        self.distance = noise_distance(noise_sd, dimension) if self.sound else 0
        # Phi(z) - 1/2 >= z phi(z) >= z (1 - z^2 / 2) / sqrt(2 pi) >= z / 2.52 = d for z far below
        # 0.1.
        self.loss = Fraction(252, 100) * self.distance / ONE
        if threshold != Fraction(1, 2):
            self.loss = quantile_above(ceil(threshold * ONE) + self.distance)
        self.boundaries, self.edges = {}, {}
        self.looks = [self.n]
        if self.adaptive:
            self.radii, self.n0 = sorted(map(float, settings["radii"])), settings["N0"]
            rungs = range(-100, 650) if self.both else range(1300 if settings["ladder"] else 0)
            self.early, self.growth, self.step = (
                (Fraction(9, 10), Fraction(27, 25), 10) if self.both else COARSE
            )
            ladder = [float(self.sigma) * rung / (50 if self.both else 100) for rung in rungs]
            self.grid, self.looks = sorted({*self.radii, *ladder}), self.make_looks()
        # Of each part of alpha, what may be spent by each look; one look has no use for the
        # reserve.
        reserve, self.parts = (
            0 if self.adaptive else RESERVE,
            (self.share, (1 - self.share) / max(1, len(self.rivals))),
        )
        self.allowances = [
            [below(self.spending(n, part)) + reserve for n in self.looks] for part in self.parts
        ]
        if self.alpha * min(filter(None, self.parts)) < 2**-100:
            raise ValueError(
                "a share of its alpha is below 2^-100, too small for probabilities in units of "
                "2^-160"
            )

    def null(self, z):
        """Phi(z) + d, from above."""
        return min(ONE, normal_cdf(z) + self.distance)

    def spending(self, n, part):
        """What part of alpha may be spent up to n draws: early * ln(1 + n / 100) / ln(1 + N / 100)
        of it; all at N.
        """
        if n < self.n:
            part, share = (
                part * self.early,
                iv.log(1 + iv.mpf(n) / 100) / iv.log(1 + iv.mpf(self.n) / 100),
            )
        return iv.mpf(self.alpha) * part.numerator / part.denominator * (share if n < self.n else 1)

    def make_looks(self):
        """100 growth^i to the nearest step; 100,000; N; the first multiple with Phi(r / sigma)^n <=
        spending(n).
        """
        added, steps = (
            {100_000, self.n} if self.n > 100_000 else {self.n},
            range(self.step, self.n, self.step),
        )
        for z in [Fraction(radius) / self.sigma + self.loss for radius in self.radii]:
            log = iv.log(iv.mpf(self.null(z)) / ONE)
            first = bisect_left(
                steps, True, key=lambda n: bool(n * log <= iv.log(self.spending(n, self.share)))
            )
            added.update(steps[first : first + 1])
        geometric = [100 * self.growth**i for i in range(99 if self.growth > 1.2 else 250)]
        rising = {
            self.step * max(1, round(n / self.step))
            for n in geometric
            if self.growth * n**2 < self.n**2
        }
        apart = Fraction(4, 25) * (self.growth - 1)
        return sorted(
            added | {n for n in rising if all(abs(n - near) > apart * near for near in added)}
        )

    def fault(self, row):
        """Why a row does not hold; None if it does."""
        claims, radius, checks = (
            row["predict"] >= 0,
            row["radius"],
            row_checks(row, self.settings, row["idx"] in self.images),
        )
        if self.adaptive:
            made = [0, *self.looks][row["looks"] : row["looks"] + 1]
            checks["trials, samples and looks disagree"] &= row["samples"] - self.n0 in made
            checks["it is a certificate of no trials, or of a number that decides nothing"] &= (
                not claims or row["trials"] in self.looks
            )
            checks["its radius is not on the grid"] = (
                self.both or radius <= float(radius) in self.grid
            )
        if all(checks.values()) and claims:
            of_both = self.lacks_of_set if "rival_1" in row else self.lacks_of_two
            find = (
                self.lacks_on_grid
                if self.adaptive and self.both
                else of_both
                if self.both
                else self.lacks
            )
            lacking = find(
                radius,
                row["trials"],
                row["successes"],
                *([row[name] for name in self.rivals] or [0]),
            )
            checks[lacking] = not lacking
        return next((fault for fault, holds in checks.items() if not holds), None)

    def lacks(self, radius, n, successes, rival):
        """What the counts lack to reject "p_A <= t" for the radius, and for those of the grid
        below; "" if nothing.
        """
        tested = [(radius, radius / self.sigma + self.loss)]
        if self.adaptive:
            tested = [each for each in self.hypotheses if each[0] <= float(radius)]
        for r, z in tested:
            needed = self.needed(z, n)
            if successes < needed:
                return f"radius {float(r)} needs {needed} of {n} draws"
        return ""

    def lacks_of_two(self, radius, n, successes, rival):
        """As ``lacks``, also by two hypotheses: z is where the successes just reject, which leaves
        the least for y.
        """
        if not successes or not self.lacks(radius, n, successes, 0):
            return "" if successes else "no draw was a success"
        z = self.just_rejected(successes, n)
        y = 2 * (radius / self.sigma + self.loss_between(z - radius / self.sigma)) - z
        needed = self.needed(z, n), self.needed(y, n, 1)
        holds = successes >= needed[0] and n - rival >= needed[1]
        return (
            ""
            if holds
            else f"radius {float(radius)} needs fewer than {rival} of {n} draws for the rival"
        )

    def lacks_of_set(self, radius, n, successes, *rivals):
        """As ``lacks``, for a class among the k most probable ones: k bounds on other classes, and
        sums of them.
        """
        lacking, r = (
            f"radius {float(radius)} is more than {successes} of {n} draws show",
            radius / self.sigma,
        )
        if not successes:
            return lacking
        z, sets = self.just_rejected(successes, n), [0]
        for others in (n - rival for rival in reversed(rivals)):
            y = self.just_rejected(others, n, 1)
            most = normal_cdf(-y) - self.distance if others >= self.needed(y, n, 1) else ONE
            sets.append(sets[-1] + most)
        sets[-1] = min(sets[-1], normal_cdf(-z) - self.distance)
        least = ONE - normal_cdf(r - z) - self.distance
        for size, most in enumerate(sets[1:], start=1):
            if most + self.distance < ONE and successes >= self.needed(z, n):
                quantile = mp.sqrt(2) * mp.erfinv(2 * mp.mpf(most + self.distance) / ONE - 1)
                w = Fraction(int(mp.ceil(quantile * ONE)), ONE) + Fraction(1, 10**15)
                is_above = ONE - normal_cdf(-w) >= most + self.distance
                if is_above and size * least > normal_cdf(w + r) + self.distance:
                    return ""
        return lacking

    def just_rejected(self, successes, n, part=0):
        """About the largest z for which the successes reject "p <= Phi(z) + d" at a part of alpha,
        a little below.
        """
        if (successes, part) not in self.edges:
            level = below(self.spending(n, self.parts[part]))

            def excess(z):
                # How far the logarithm of P[Binomial(n, Phi(z) + d) >= successes] is above its
                # level's.
                start, weights = binomial(n, self.null(Fraction(int(mp.floor(z * ONE)), ONE)))
                return mp.log(
                    max(1, ONE - sum(weights[: max(0, successes - start)])) / mp.mpf(level)
                )

            spread = (
                3 * (successes * (n - successes) / n + 9 / 4) ** 0.5
            )  # the guess is a score interval at 3 sigma
            guess = NormalDist().inv_cdf((successes + 9 / 2 - spread) / (n + 9))
            root = mp.findroot(excess, (guess, guess + 1e-3), solver="secant", tol=1e-40)
            self.edges[successes, part] = Fraction(int(mp.floor(root * ONE)), ONE) - Fraction(
                1, 10**15
            )
        return self.edges[successes, part]

    def lacks_on_grid(self, radius, n, successes, rival):
        """As ``lacks``, by two hypotheses of the grid; all of the grid below them must be rejected
        too.
        """
        rejected = list(
            takewhile(lambda each: successes >= self.needed(each[1], n), self.hypotheses)
        )
        y = sum(
            1
            for _ in takewhile(
                lambda j: n - rival >= self.needed(self.beyond(Fraction(j, 50)), n, 1), count(1)
            )
        )
        if rejected:
            shown, step = Fraction(rejected[-1][0]), self.steps(rejected[-1][0])
            both = Fraction(step + y, 100) - (
                self.loss_between(Fraction(step - y, 100)) if self.distance else 0
            )
            if radius <= max(shown, both * self.sigma * (1 + Fraction(3, 10**16))):
                return ""
        return (
            f"radius {float(radius)} is more than {successes} of {n} draws, and {rival} for the "
            "rival, show"
        )

    @cached_property
    def hypotheses(self):
        """Of each radius of the grid: (radius, the z of its hypothesis on the class)."""
        if not self.both:
            return [(r, Fraction(r) / self.sigma + self.loss) for r in self.grid]
        at_least = ((r, Fraction(self.steps(r), 50)) for r in self.grid)
        return [(r, self.beyond(max(Fraction(r) / self.sigma, step))) for r, step in at_least]

    def steps(self, radius):
        """How many steps of 1/50 are in a radius, in units of sigma."""
        return floor(Fraction(radius) / self.sigma * 50 + Fraction(1, 10**9))

    def beyond(self, z):
        """A hypothesis of the grid, a little beyond, for the rounding of a radius that is a sum in
        float64.
        """
        return z + abs(z) * 3 / 10**16 + self.loss

    def loss_between(self, m):
        """e such that Phi(m + e) - Phi(m - e) >= 2 d, if the true m is off by e at most: the
        density at |m| + 2 e.
        """
        if not self.distance:
            return 0
        slack = -below(
            -iv.exp((iv.mpf(abs(m).numerator) / abs(m).denominator + iv.mpf("0.1")) ** 2 / 2)
        )
        e = Fraction(251, 100) * self.distance * slack / ONE**2
        return e if e < Fraction(1, 20) else 1000  # far too much

    def needed(self, z, n, part=0):
        """The successes that reject "p <= Phi(z) + d" at the look after n draws, at a part of
        alpha.
        """
        if (z, part) not in self.boundaries:
            self.boundaries[z, part] = (
                [],
                boundaries(self.null(z), self.looks, self.allowances[part]),
            )
        found, further = self.boundaries[z, part]  # later looks take longer, and few rows get there
        look = self.looks.index(n)
        found.extend(islice(further, max(0, look + 1 - len(found))))
        return found[look]


class StagedProcedure:
    """As ``Procedure``, for logs of several classifiers: ``bounds`` has the procedure of each bound
    that a certificate may need.
    """

    def __init__(self, settings, run):
        self.settings, self.images = settings, images_of(settings, run)
        foreign = "sigmas", "threshold", "alpha_share"
        common = {name: value for name, value in settings.items() if name not in foreign}
        self.sequential, self.bounds = "radii" in settings, {}
        one, both = ("adaptive", "sequential") if self.sequential else ("exact", "two-sided")
        self.alone = {**common, "method": one, "ladder": False}
        self.of_two = {**common, "method": both, "alpha_share": settings["alpha_share"]}
        self.add_bounds(run)

    def fault(self, row):
        """Why a row does not hold; None if it does."""
        checks = row_checks(row, self.settings, row["idx"] in self.images)
        radius = row["radius"]
        if self.sequential:
            grid = self.settings["radii"]
            checks["its radius is not on the grid"] = radius <= float(radius) in grid
        holds = all(checks.values()) and row["predict"] >= 0
        for name, bound, n, successes, rival in self.used(row) if holds else ():
            find = bound.lacks
            if bound.both:
                find = bound.lacks_on_grid if self.sequential else bound.lacks_of_two
            lacking = "its trials are no look" if n not in bound.looks else ""
            lacking = lacking or find(radius, n, successes, rival)
            checks[f"{name}: {lacking}"] = not lacking
        return next((fault for fault, holds in checks.items() if not holds), None)


class CascadeProcedure(StagedProcedure):
    """For logs of cascades: bounds by stage, from 0, and by whether they are about the rivals
    alone.
    """

    def add_bounds(self, run):
        """A bound on the class and one on the rivals; of both at the last stage."""
        sigmas, p0 = self.settings["sigmas"], Fraction(self.settings["threshold"])
        for stage, sigma in enumerate(sigmas[:-1]):
            for of_rivals in (False, True):
                null = 1 - p0 if of_rivals else p0
                self.bounds[stage, of_rivals] = Procedure({**self.alone, "sigma": sigma}, run, null)
        self.bounds[len(sigmas) - 1, False] = Procedure({**self.of_two, "sigma": sigmas[-1]}, run)

    def used(self, row):
        """Name, bound, draws, successes and rival of each stage up to that of the row."""
        last = row["stage"] - 1
        for stage in range(last + 1):
            bound, rival = self.bounds[stage, stage < last], row[f"stage_{stage + 1}_rival"]
            n = row.get(f"stage_{stage + 1}_trials", bound.n)
            successes = row["successes"] if stage == last else n - rival
            yield f"stage {stage + 1}", bound, n, successes, rival


class RouterProcedure(StagedProcedure):
    """For logs of routers: bounds by stage, from 0, and last that of the router."""

    def add_bounds(self, run):
        """One of each classifier."""
        for place, sigma in enumerate(self.settings["sigmas"]):
            self.bounds[place] = Procedure({**self.of_two, "sigma": sigma}, run)

    def used(self, row):
        """As for cascades, of the router and of the stage in the row."""
        router, stage = self.bounds[len(self.bounds) - 1], self.bounds[row["stage"] - 1]
        n = row.get("router_trials", router.n)
        yield "the router", router, n, row["router_successes"], row["router_rival"]
        yield f"stage {row['stage']}", stage, row["trials"], row["successes"], row["rival"]


class ConformalSets:
    """For logs of conformal sets, of which all ``rows`` together say what the sets are."""

    def __init__(self, settings, run):
        self.settings, self.images, self.rows = settings, images_of(settings, run), []
        self.scores = [f"score_{number}" for number in range(settings["num_classes"])]
        norm = ["attack_norm"] * bool(settings.get("attack"))
        first = "idx label predict correct calibration".split()
        self.columns = [*first, *norm, *self.scores, "time"]
        self.is_counted = "at_least" in settings

    def fault(self, row):
        """Why a row cannot be; None if it can."""
        label, predict, scores = row["label"], row["predict"], [row[name] for name in self.scores]
        address = f"smoothadv calibration {self.settings['seed']} {row['idx']}"
        word = int(hashlib.sha256(address.encode()).hexdigest()[:16], 16)
        is_kept = word < Fraction(self.settings["calibration"]) * 2**64
        epsilon = 0 if is_kept else (self.settings.get("attack") or {"epsilon": 0})["epsilon"]
        checks = {
            "its image is not among those selected": row["idx"] in self.images,
            "its label or predict is no class": 0 <= min(label, predict)
            and max(label, predict) < len(scores),
            "correct is not 1 where predict is the label": row["correct"] == (predict == label),
            "calibration is not that of its image": row["calibration"] == is_kept,
            "its scores are no probabilities": self.is_counted
            or abs(sum(scores) - 1) <= Fraction(1, 10**6),
            "its scores count no draws": not self.is_counted
            or all(score.denominator == 1 and score <= self.settings["N"] for score in scores),
            "predict has not the largest score": max(scores) == row.get(f"score_{predict}"),
            "its attack goes beyond epsilon": row.get("attack_norm", 0)
            <= Fraction(epsilon) * (1 + Fraction(1, 10**5)) + Fraction(1, 10**6),
        }
        self.rows.append(row)
        return next((fault for fault, holds in checks.items() if not holds), None)

    def shifted(self, chance, radius):
        """Phi(Phi^-1(chance) - radius / sigma), in units, rounded down."""
        z = mp.sqrt(2) * mp.erfinv(2 * mp.mpf(chance.numerator) / chance.denominator - 1)
        return int(mp.floor(mp.ncdf(z - mp.mpf(radius) / mp.mpf(self.settings["sigma"])) * ONE))

    def draws_under_attack(self, least, radius, level):
        """The fewest draws of a label under attack that had ``least`` without; ``level`` is that of
        two bounds on its probability, in units.
        """
        n = self.settings["N"]

        def at_most(draws, t):
            start, weights = binomial(n, t)
            return sum(weights[: max(0, draws - start + 1)])

        p, step = 0, ONE >> 1
        while step:
            p += step * (ONE - at_most(least - 1, p + step) <= level)
            step >>= 1
        t = self.shifted(Fraction(p, ONE), radius)
        return bisect_left(range(least), True, key=lambda draws: at_most(draws, t) > level)

    def coverage(self):
        """For each radius a line with the threshold, the coverage and the size of the sets."""
        own = [(row["calibration"], row[f"score_{row['label']}"]) for row in self.rows]
        kept, tested = (sorted(score for which, score in own if which == k) for k in (1, 0))
        if not kept or not tested:
            raise ValueError("no image calibrates, or none is tested")
        alpha = Fraction(str(self.settings["alpha"]))
        for radius in self.settings["radii"]:
            share = min(Fraction(self.shifted(alpha, radius), ONE), alpha) if radius else alpha
            is_counted = radius and self.is_counted
            rank = floor((len(kept) + 1) * (alpha * 9 / 10 if is_counted else share))
            least = kept[rank - 1] if rank else 0
            if is_counted:
                least = self.draws_under_attack(int(least), radius, int(alpha / 20 * ONE))
            sizes = sum(
                row[name] >= least
                for row in self.rows
                for name in self.scores
                if not row["calibration"]
            )
            covered = sum(score >= least for score in tested)
            yield (
                f"  radius {radius:g}: {covered} of {len(tested)} sets have the label, "
                f"{sizes / len(tested):.3f} classes each; threshold {float(least):.7g} of "
                f"{len(kept)} images"
            )


def verify(log):
    """Print a line for each row that does not hold, and a summary; return whether all rows hold and
    none is missing.
    """
    manifest = json.loads(log.with_name(f"{log.name}.manifest.json").read_text())
    if fault := manifest_fault(manifest):
        raise ValueError(f"its manifest {fault}")
    kind = RouterProcedure if "sigmas" in manifest["settings"] else Procedure
    kind = CascadeProcedure if "threshold" in manifest["settings"] else kind
    kind = ConformalSets if manifest["settings"]["method"] == "conformal" else kind
    procedure, messages, seen = kind(manifest["settings"], manifest["runs"][-1]), [], set()
    is_of_sets = kind is ConformalSets
    columns, (header, *lines) = (
        procedure.columns if is_of_sets else certification_columns(procedure.settings),
        log.read_text().removesuffix("\n").split("\n"),
    )
    if header.split("\t") != columns:
        raise ValueError(f"its columns are not {' '.join(columns)}")
    kinds = {name: "score_" if name.startswith("score_") else name for name in columns}
    form = "\t".join(FORMS.get(kinds[name], "-?[0-9]{1,15}") for name in columns)
    for number, line in enumerate(lines, start=2):
        fault, fields = "it is no row of such a log", zip(columns, line.split("\t"))
        if re.fullmatch(form, line):
            row = {
                name: Fraction(text) if kinds[name] in FORMS else int(text)
                for name, text in fields
                if name != "time"
            }
            fault = "its image is there twice" if row["idx"] in seen else procedure.fault(row)
            seen.add(row["idx"])
        messages += [f"{log}, line {number}: {fault}"] if fault else []
    missing = len(procedure.images) - sum(idx in procedure.images for idx in seen)
    state = f"; unfinished: {missing} of {len(procedure.images)} images are missing" * (missing > 0)
    state += "; label-aware: images of which the class selected was wrong were given up" * (
        "label_aware" in columns
    )
    print(
        *messages, f"{log}: {len(lines) - len(messages)} of {len(lines)} rows hold{state}", sep="\n"
    )
    if is_of_sets and not messages and not missing and "shard" not in procedure.settings:
        print(*procedure.coverage(), sep="\n")
    return not messages and not missing


def main():
    """Verify the logs named on the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "logs",
        metavar="LOG",
        type=Path,
        nargs="+",
        help="certification log, LOG.manifest.json beside it",
    )
    sys.stdout.reconfigure(errors="backslashreplace")  # a log may have any name
    holds = True
    for log in parser.parse_args().logs:
        try:
            holds &= verify(log)
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            OSError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            print(f"error: {log} cannot be verified: {error}", file=sys.stderr)
            holds = False
    return int(not holds)


if __name__ == "__main__":
    sys.exit(main())
