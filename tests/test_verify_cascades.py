"""scripts/verify_log.py on logs of cascades and routers: accepts what certify writes, and rejects
single fields by which a log claims too much.
"""

import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from statistics import NormalDist

import pytest
import torch

import smoothadv
from smoothadv.analysis.reading import read_logs
from smoothadv.base.errors import UserError
from smoothadv.records.logs import manifest_path
from smoothadv.records.rows import row_checks
from support.commands import header, rows
from support.models import IntervalClassifier
from support.verifier import script as script
from support.verifier import tampered, verdict

# The first pixel: class 2 of four above 127.5 of 255.
GREY = [128, 128, 129, 145, 150, 158, 163, 168, 173, 178, 183, 77, 82, 92, 102]
LOGS = {
    "exact": {"stages": (0.5, 0.2)},
    "three": {"stages": (0.5, 0.3, 0.2), "threshold": 0.6},
    "sound": {"stages": (0.5, 0.2), "sound": True},
    "sequential": {
        "stages": (0.5, 0.2),
        "method": "sequential",
        "settings": {"radii": (0.05, 0.1, 0.2)},
    },
    "router": {"stages": (0.5, 0.2), "router": (IntervalClassifier(0.6), 0.4)},
    "router, sound": {
        "stages": (0.5, 0.3, 0.2),
        "router": (IntervalClassifier(0.45, 0.6), 0.4),
        "sound": True,
    },
    "router, sequential": {
        "stages": (0.5, 0.2),
        "router": (IntervalClassifier(0.6), 0.4),
        "method": "sequential",
        "settings": {"radii": (0.02, 0.05, 0.1)},
    },
}
ROUTERS = [name for name in LOGS if "router" in name]


@pytest.fixture(scope="module")
def logs(tmp_path_factory) -> dict[str, Path]:
    folder, found = tmp_path_factory.mktemp("logs"), {}
    images = torch.full((len(GREY), 1, 2, 2), 51 / 255)
    images[:, 0, 0, 0] = torch.tensor(GREY) / 255
    # Confident at the first stage only far from the plane: certificates of both kinds.
    networks = [IntervalClassifier(-0.4, 0.5, 1.4), *[IntervalClassifier(-9, 0.5, 9)] * 2]
    for name, options in LOGS.items():
        stages = [*zip(networks, options["stages"])]
        keywords = {"n": 400, "log": folder / f"{name}.tsv", **options, "stages": stages}
        labels = torch.full((len(GREY),), 2)
        smoothadv.certify(images=images, labels=labels, device="cpu", **keywords)
        found[name] = folder / f"{name}.tsv"
    return found


def changed(log: Path, target: Path, number: int, fields: dict, settings: dict) -> Path:
    def change(table: list[dict[str, str]], manifest: dict) -> None:
        table[number].update({name: str(value) for name, value in fields.items()})
        manifest["settings"].update(settings)

    return tampered(log, target, change)


@pytest.mark.parametrize("name", LOGS)
def test_honest_logs_are_accepted(script, logs, name, capsys):
    accepted, said = verdict(script, logs[name], capsys)
    assert accepted and f"{len(GREY)} of {len(GREY)} rows hold" in said
    claims = {row["radius"] for row in rows(logs[name]) if row["predict"] != "-1"}
    assert len(claims) >= 3, "several radii, for this to say anything"


def just_above(radius: str) -> str:
    """More than a radius of the grid, and the same float."""
    return f"{Decimal(float(radius)) + Decimal('1e-25'):f}"


def tamperings(row: dict[str, str], settings: dict) -> list[dict]:
    if row["predict"] == "-1":
        return [{"predict": 2}, {"radius": "0.05"}]
    stage, radius, trials = int(row["stage"]), float(row["radius"]), int(row["trials"])
    grid = settings.get("radii")
    larger = [r for r in grid if r > radius] if grid else [radius * (1 + 1e-7), radius * 1.5]
    found = [{"radius": f"{r:.20f}" if grid is None else repr(r)} for r in [*larger, radius + 1e-3]]
    found += [{"stage": 0}, {"stage": 4}, {"trials": trials - 1}, {"successes": trials // 2}]
    found += [{f"stage_{place}_rival": trials} for place in range(1, stage + 1)]
    found += [{f"stage_{place}_rival": -1} for place in range(1, stage + 1)]
    later = range(stage + 1, len(settings["sigmas"]) + 1)
    found += [{f"stage_{place}_rival": 1} for place in later]
    if grid:
        found += [{"radius": just_above(row["radius"])}]
        found += [{f"stage_{stage}_trials": trials + 1}, {"level": int(row["level"]) + 1}]
        found += [{"samples": int(row["trials"])}]
    return found


OF_MANIFEST = {
    "a smaller alpha": {"alpha": 1e-9},
    "smaller noise": {"sigmas": [0.05, 0.02], "sigma": 0.05},
    "sigma is not the largest": {"sigma": 0.3},
    "one stage": {"sigmas": [0.5]},
    "a threshold below 1/2": {"threshold": 0.4},
    "another threshold": {"threshold": 0.5},
    "another procedure": {"method": "exact"},
    "more draws": {"N": 450},
}


def router_tamperings(row: dict[str, str], settings: dict) -> list[dict]:
    found = [{"stage": 0}, {"stage": len(settings["sigmas"])}, {"router_rival": -1}]
    if row["predict"] == "-1":
        return [*found, {"predict": 2}, {"radius": "0.05"}]
    counts = ("successes", "rival", "trials", "router_successes", "router_rival", "router_trials")
    own, rival, trials, routed, routed_rival, drawn = (int(row.get(name, 0)) for name in counts)
    grid = settings.get("radii")
    larger = [r for r in grid if r > float(row["radius"])] if grid else []
    found += [{"radius": repr(r)} for r in [*larger, float(row["radius"]) * 1.001 + 1e-3]]
    found += [{"successes": rival}, {"trials": trials - 1}, {"rival": own}]
    found += [{"router_successes": (routed + routed_rival) // 2}, {"router_successes": trials + 1}]
    found += [{"router_rival": routed}, {"successes": own + rival + 1}]
    if grid:
        found += [{"router_trials": drawn + 1}, {"samples": trials + drawn}]
        found += [{"router_successes": 0, "router_rival": 0, "router_trials": 0}]
        found += [{"radius": just_above(row["radius"])}]
        found += [{"level": int(row["level"]) + 1}]
    return found


@pytest.mark.parametrize("name", LOGS)
def test_fields_that_claim_too_much_are_rejected(script, logs, name, tmp_path, capsys):
    settings, target = json.loads(manifest_path(logs[name]).read_text())["settings"], None
    target, rejected = tmp_path / "x.tsv", 0
    made = router_tamperings if name in ROUTERS else tamperings
    for number, row in [*enumerate(rows(logs[name]))][::3]:
        for fields in made(row, settings):
            accepted, said = verdict(
                script, changed(logs[name], target, number, fields, {}), capsys
            )
            assert not accepted, (row, fields, said)
            rejected += 1
    assert rejected > 30


@pytest.mark.parametrize("stage", [1, 2])
def test_no_radius_exceeds_what_n_draws_of_its_stage_show(logs, stage):
    """Of n successes, the lower bound on p_A is alpha^(1/n) (Clopper and Pearson, 1934)."""
    settings = json.loads(manifest_path(logs["exact"]).read_text())["settings"]
    row = dict(idx=0, label=2, predict=2, correct=1, successes=400, trials=400, stage=stage)
    row |= {"stage_1_rival": 0, "stage_2_rival": 0}
    most = (0.5, 0.2)[stage - 1] * NormalDist().inv_cdf(0.001 ** (1 / 400))
    for radius, holds in ((most * (1 - 1e-6), True), (most * (1 + 1e-6), False)):
        checks = row_checks({**row, "radius": radius}, settings, True)
        assert checks["no draws show so large a radius"] == holds


@pytest.mark.parametrize("fault", OF_MANIFEST)
def test_settings_under_which_the_counts_show_less_are_rejected(
    script, logs, fault, tmp_path, capsys
):
    settings = OF_MANIFEST[fault]
    log = changed(logs["exact"], tmp_path / "x.tsv", 0, {}, settings)
    assert not verdict(script, log, capsys)[0]


# A cascade and a router, each also as its sequential form.
FORGED = ["exact", "sequential", "router", "router, sequential"]


def forgeries(log: Path) -> Iterator[tuple[int, dict, dict]]:
    """Single fields of some rows, and settings: the row's number, its fields, settings."""
    settings = json.loads(manifest_path(log).read_text())["settings"]
    for number, row in [*enumerate(rows(log))][:: 5 if "radii" in settings else 3]:
        radius, claims = float(row["radius"]), row["predict"] != "-1"
        larger = [radius * (1 + 1e-7), radius + 1e-3, 1.5 * radius, *settings.get("radii", [])]
        yield from ((number, {"radius": repr(each)}, {}) for each in larger if each > radius)
        if not claims:
            yield number, {"predict": 2, "correct": 1}, {}
            yield number, {"predict": 2, "correct": 1, "radius": 0.05, "level": 1}, {}
        for name in sorted(row.keys() - {"idx", "label", "predict", "radius", "correct", "time"}):
            value = int(row[name])
            for other in {0, 1, value - 1, value + 1, 2 * value, 400} - {value}:
                yield number, {name: other}, {}
    for name, value in settings.items():
        if name in ("sigma", "threshold", "alpha", "alpha_share", "N", "N0", "num_classes"):
            for factor in (0.5, 1.01):
                yield 0, {}, {name: type(value)(factor * value)}
    for sigmas in ([each * 2 for each in settings["sigmas"]], settings["sigmas"][::-1]):
        yield 0, {}, {"sigmas": sigmas, "sigma": max(sigmas)}
    if "radii" in settings:
        yield 0, {}, {"radii": [0.0, *(2 * radius for radius in settings["radii"][1:])]}


@pytest.mark.parametrize("name", FORGED)
def test_analyses_read_no_forgery_that_the_script_rejects(script, logs, name, tmp_path, capsys):
    tried = passed = 0
    for number, fields, settings in forgeries(logs[name]):
        known = {key: value for key, value in fields.items() if key in header(logs[name])}
        forged = changed(logs[name], tmp_path / "x.tsv", number, known, settings)
        tried += 1
        try:
            read_logs([str(forged)])
        except UserError:
            continue
        passed += 1
        assert verdict(script, forged, capsys)[0], (number, fields, settings)
    assert tried > 120 and passed < tried / 4


@pytest.mark.parametrize("name", ["sound", "router, sound"])
def test_analyses_know_the_distance_of_grey_noise(logs, name, tmp_path):
    """It is proportional to the number of pixels: of 10^14, it is about .01."""
    forged = changed(logs[name], tmp_path / "x.tsv", 0, {}, {})
    assert len(read_logs([str(forged)]).certification) == 1
    manifest = json.loads(manifest_path(forged).read_text())
    manifest["runs"][-1]["image_shape"] = [1, 10**7, 10**7]
    manifest_path(forged).write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="counts do not certify"):
        read_logs([str(forged)])
