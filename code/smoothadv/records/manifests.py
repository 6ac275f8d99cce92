"""What a manifest may hold, and what the rows of a certification log must satisfy under it. No
torch.

The stand-alone scripts/verify_log.py has the same text, as it imports nothing of this package.
"""

import json
import math
from itertools import combinations
from statistics import NormalDist
from typing import Any

# Here begins what code/smoothadv/records/manifests.py and scripts/verify_log.py both have, word
# for word: a test compares them.
_SETTINGS = """
text: dataset precision arch library noise device torch cpu_capability generator
text: arch_given classifier_sha256 noise_kernel method tables_sha256 weights_given
text: resize local_noise
text or null: split dataset_fingerprint logits_sha256
text or null or list of text or null: input_layer
text or object: checkpoint_sha256 module_sha256
object: denoiser against plugins shard
object or null: attack
object or null or list of object or null: training
flag: compiled pretrained folded fused tf32 sound label_aware ladder images_saved base_attack
number 5e-324 to 10: sigma
list of number 5e-324 to 10: sigmas
number 0.5 to 0.999: threshold
number 5e-324 to 0.9999999999999999: alpha alpha_share
list of number 0 to 1.7976931348623157e308: radii
list of number -1e300 to 1e300: mean std
whole 1 to 4000000000: N0
whole 1 to 1000000000000000000: N
whole 1 to 1000000: batch attack_batch
whole 1 to 100000: top_k
whole 1 to 2000000000: num_classes threads
whole 0 to 340282366920938463463374607431768211455: seed restarts
whole 0 to 340282366920938463463374607431768211455 or null: num_noise_vec
whole 0 to 2000000000 or text or null: target
"""
_RUN = """
text: device started smoothadv python platform denoiser
text or null: checkpoint git_commit logits_sha256
list of text: command
object: packages
list of object: plugins
whole 0 to 4000000000000000000: first_row images shard
whole 1 to 4000000000: skip
whole 1 to 2000000000: torch_threads
whole 1 to 4000000000000000000 or null: max
list of whole 1 to 2000000000: image_shape
whole 1 to 1000000: batch attack_batch
"""
SETTINGS, RUN = (
    {
        name: form
        for form, _, names in (line.partition(": ") for line in table.split("\n"))
        for name in names.split()
    }
    for table in (_SETTINGS, _RUN)
)
KINDS = {
    "text": "str",
    "flag": "bool",
    "object": "dict",
    "null": "NoneType",
    "whole": "int",
    "number": "int float",
}
WORDS = {
    "text": "a text",
    "flag": "true or false",
    "object": "an object",
    "list": "a list",
    "of": "of which each is",
}
WORDS |= {"whole": "a whole number from", "number": "a number from"}
NEEDED = (
    "dataset split dataset_fingerprint arch input_layer num_classes sigma alpha seed noise N0 N "
    "method sound"
)
METHODS = {  # the settings and the columns of each procedure that not all have
    "exact": ("", ""),
    "two-sided": ("alpha_share", "rival"),
    "top-k": ("alpha_share top_k", ""),
    "adaptive": ("radii label_aware ladder tables_sha256", "samples level looks"),
    "sequential": ("radii label_aware alpha_share tables_sha256", "samples level looks rival"),
    "cascade": ("alpha_share sigmas threshold", "stage"),
    "sequential-cascade": (
        "radii label_aware alpha_share tables_sha256 sigmas threshold",
        "samples level looks stage",
    ),
    "router": ("alpha_share sigmas", "stage rival router_successes router_rival"),
    "sequential-router": (
        "radii label_aware alpha_share tables_sha256 sigmas",
        "samples level looks stage rival router_successes router_rival router_trials",
    ),
}


def fits(value: Any, form: str) -> bool:
    """Whether a value in a manifest has a form, like those above; true and false are no numbers."""
    kinds, _, each = form.partition("list of ")
    if type(value) is list:
        return bool(each) and all(fits(one, each) for one in value)
    for kind, *ends in map(str.split, filter(None, kinds.split(" or "))):
        if type(value).__name__ in KINDS[kind].split():
            number = int if kind == "whole" else float
            return not ends or bool(number(ends[0]) <= value <= number(ends[2]))
    return False


def manifest_fault(manifest: Any) -> str:
    """What is impossible in a manifest: no settings and runs, or a value of another form; "" if
    nothing is.
    """
    content = {"settings": None, "runs": None, **(manifest if fits(manifest, "object") else {})}
    settings, runs = content["settings"], content["runs"]
    if not fits(settings, "object") or not fits(runs, "list of object"):
        return "holds no settings and runs"
    for part, forms in [(settings, SETTINGS), *((run, RUN) for run in runs)]:
        for name, value in part.items():
            if name in forms and not fits(value, forms[name]):
                expected = " ".join(WORDS.get(word, word) for word in forms[name].split())
                return f"says that {name} is {json.dumps(value)[:60]}; {expected} is expected"
    return ""


def images_of(settings: dict[str, Any], run: dict[str, Any]) -> range:
    """The indices of the images that a run selects, or of those in a shard."""
    part = settings.get("shard", {"index": 0, "count": 1})
    return range(0, run["images"], run["skip"])[: run["max"]][part["index"] :: part["count"]]


def log_fault(manifest: dict[str, Any]) -> str:
    """What a certification log's settings, or its last run, lack, have too much or contradict; ""
    if nothing.
    """
    settings, run = manifest["settings"], (manifest["runs"] or [{}])[-1]
    if settings.get("method") not in METHODS:
        return f"names no method, one of {', '.join(METHODS)}"
    own = METHODS[settings["method"]][0].split()
    of_methods = {name for names, _ in METHODS.values() for name in names.split()}
    allowed = {*SETTINGS}.difference(of_methods, ["attack", "against"]).union(own)
    needed = [*NEEDED.split(), "images", "skip", "max", "image_shape", *own]
    if lacking := [name for name in needed if name not in {**settings, **run}]:
        return f"lacks {lacking[0]!r}"
    if foreign := [name for name in settings if name not in allowed]:
        return f"states {foreign[0]!r}, which no such log has"
    whole, radii = images_of({}, run), settings.get("radii", [0])
    sigmas = settings.get("sigmas", [settings["sigma"]])
    selection = [whole.start, whole.stop, whole.step]
    usual = {"index": 0, "count": 1, "examples": selection}
    shard = settings.get("shard", usual)
    part = {**usual, **shard}
    index, count = part["index"], part["count"]
    contradictions = {
        "noise that is not that of its sound": settings["noise"]
        != "Rounded" * settings["sound"] + "GaussianNoise",
        "radii that do not ascend from 0": radii[:1] != [0]
        or any(a >= b for a, b in zip(radii, radii[1:])),
        "an N above 4000000000": settings["N"] > 4 * 10**9,
        "a sigma that is not the largest of its sigmas": settings["sigma"]
        != max(sigmas, default=0),
        "fewer than two stages": "sigmas" in own and len(sigmas) - ("threshold" not in own) < 2,
        "a top_k of all its classes": settings.get("top_k", 0) >= max(2, settings["num_classes"]),
        "an impossible shard": not len(part) == len(shard) == 3
        or not fits([index, count], "list of whole 0 to 1000000000")
        or index >= count,
        "a shard of other images": part["examples"] != selection,
    }
    return next((f"has {fault}" for fault, holds in contradictions.items() if holds), "")


def certification_columns(settings: dict[str, Any]) -> list[str]:
    """The columns of a certification log of one of METHODS, in their order."""
    own = METHODS[settings["method"]][1]
    columns = f"idx label predict radius correct time successes trials {own}".split()
    columns += [f"rival_{number + 1}" for number in range(settings.get("top_k", 0))]
    stages = range(1, 1 + len(settings["sigmas"]) if "threshold" in settings else 1)
    columns += [f"stage_{number}_rival" for number in stages]
    columns += [f"stage_{number}_trials" for number in stages if "radii" in settings]
    columns += ["label_aware"] * settings.get("label_aware", False)
    return columns + ["squared_radius"] * settings["sound"]


def row_checks(row: Any, settings: dict[str, Any], images: range) -> dict[str, Any]:
    """The rules for a row, or for all rows if ``row`` has arrays: whether each holds, by words for
    its violation.

    ``A <= B`` of truth values means: if A, then B. All rules but the radius bound are arithmetic.
    """
    idx, label, predict, radius, successes, trials = (
        row[name] for name in ("idx", "label", "predict", "radius", "successes", "trials")
    )
    classes, n, claims = settings["num_classes"], settings["N"], predict >= 0
    rivals = [row[name] for name in certification_columns(settings) if name.startswith("rival")]
    others, order = trials - successes - sum(rivals), [trials - successes, *rivals]
    squared = row.get("squared_radius", 0)
    # All draws are successes; the sum of the bounds on the rivals of a set adds Phi^-1(1 - 1 / k) <
    # 5 at most.
    z = -NormalDist().inv_cdf(min(1 - 2**-53, -math.expm1(math.log(settings["alpha"]) / n)))
    z += 5 * ("top_k" in settings)
    sigma = settings["sigma"]
    if "sigmas" in settings:
        sigma = sum((row["stage"] == k) * each for k, each in enumerate(settings["sigmas"], 1))
    is_decided = (trials > 0) if "radii" in settings else (trials == n)
    checks = {
        "its image is not among those selected": (images.start <= idx)
        & (idx < images.stop)
        & ((idx - images.start) % images.step == 0),
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
        "its class does not lead the rival": (claims & (rivals != []) & (settings["alpha"] <= 0.5))
        <= (successes > sum(rivals[-1:])),
        "it is a certificate of no trials, or of a number that decides nothing": claims
        <= is_decided,
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
        "label_aware is not whether its class was wrong": (
            (claims & settings["label_aware"]) <= (predict == label)
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
        possible &= (claims & (number <= stage)) <= (trials > 0)
        possible &= is_own <= ((rival <= rest) & (rest - rival <= others * rival))
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
        & (claims <= ((routed > 0) & (rest <= (stages - 1) * rival))),
        "its classifiers have more draws than samples": (row["trials"] + drawn)
        <= (row["samples"] - 2 * settings["N0"] if known else row["trials"] + drawn),
    }


# Here ends it.


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
