"""The benchmark for accelerators runs from end to end on a CPU, in small: its figures mean nothing
there; and the bound in that of stopping is its closed form.
"""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from support.plain import plain_module

SMOKE = ["--smoke", "--device", "cpu"]


gpu = plain_module("gpu")


def test_speed_of_everything_is_measured_and_written(tmp_path, capsys):
    """Seconds, also where a CPU emulates bf16."""
    words = [*SMOKE, "--precision", "fp32", "bf16", "integers", "--modes", "eager", "--sound"]
    gpu.main([*words, "--out", str(tmp_path)])
    written, page = sorted(tmp_path.iterdir())
    assert (written.suffix, page.suffix) == (".json", ".md")
    assert capsys.readouterr().out == page.read_text()
    content = json.loads(written.read_text())
    assert {"device", "date"} <= content["facts"].keys() and min(content["ceilings"].values()) > 0
    seen = {(each["case"], each["precision"], each["mode"]) for each in content["measurements"]}
    assert len(seen) == len(content["measurements"]) == 13
    network, first, *others = "digits_resnet8", "PGD T=2 m=1", "PGD T=4 m=4", "DDN T=4 m=1"
    kinds = [("fp32", "eager, --sound"), ("bf16", "eager, --sound"), ("integers", "eager")]
    assert seen >= {(f"certify {network}", *kind) for kind in [("tf32", "plain"), *kinds]}
    assert seen >= {(f"train {network} {name}", "fp32", "eager") for name in [first, *others]}
    assert (f"train {network} {first}", "bf16", "eager") in seen
    for each in content["measurements"]:
        assert each["trouble"] == "" and each["rate"] > 0 and each["ratio"] > 0
        assert each["mode"] != "plain" or each["ratio"] == pytest.approx(1)


@pytest.mark.parametrize("works", [-1, 1])
def test_variant_that_fails_is_named_and_the_others_are_measured(works):
    """Where it is made, as when a CUDA graph cannot be captured, or once it is timed."""
    options, runs, kernels = gpu.options_of(SMOKE), [], []

    def broken() -> None:
        runs.append(None)
        if len(runs) > works:
            raise RuntimeError("no such kernel\nand more")

    def found() -> None:
        cudnn, every = torch.backends.cudnn, torch.are_deterministic_algorithms_enabled()
        kernels.append((cudnn.allow_tf32, cudnn.deterministic, every))

    ways = [
        ("tf32", "any", lambda: lambda: sum(range(10_000))),
        ("tf32", "any", broken if works < 0 else lambda: broken),
        ("tf32", "any", lambda: found),
        ("fp32", "deterministic", lambda: found),
        ("bf16", "sound", lambda: found),
    ]
    made = [
        gpu.Variant(gpu.Line("certify x", precision, "", 1), run, 10, asked)
        for precision, asked, run in ways
    ]
    plain, failed, *others = gpu.measured(made, options)
    assert failed.trouble == "RuntimeError: no such kernel" and failed.rate == 0
    assert plain.ratio == 1 and others[0].rate > 0 and others[0].ratio > 1
    assert "| RuntimeError: no such kernel |" in failed.row()
    found()
    usual, strict, sound = (True, False, False), (False, True, False), (True, True, True)
    assert set(kernels) == {usual, strict, sound} and kernels[-1] == usual


def test_parts_are_continued_where_they_stopped(tmp_path, capsys, monkeypatch):
    """Also with other modes: one file, and no line of it twice."""
    words = [*SMOKE, "--out", str(tmp_path), "--cases", "PGD T=2 m=1", "DDN T=4 m=1"]
    eager, seen = [*words, "--precision", "fp32", "--modes", "eager"], []

    def measured(variants, options):
        seen.append([variant.line.key for variant in variants])
        return [variant.line for variant in variants]

    clock = iter(range(0, 10**6, 50))  # a part takes 50 s
    monkeypatch.setattr(gpu, "measured", measured)
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    gpu.main([*eager, "--minutes", "2"])
    assert len(seen) == 1
    assert "2 parts remain: the same command again continues" in capsys.readouterr().err
    gpu.main(eager)
    gpu.main(eager)
    assert len(seen) == 3, "all is measured"
    gpu.main([*words, "--precision", "fp32", "bf16", "--modes", "compiled", "eager"])
    (written,) = tmp_path.glob("*.json")
    lines = json.loads(written.read_text())["measurements"]
    keys = [key for part in seen for key in part]
    assert [gpu.Line(**each).key for each in lines] == [*dict.fromkeys(keys)]
    assert "compiled" in {each["mode"] for each in lines}
    monkeypatch.setitem(gpu.SMOKE, "rounds", 2)
    with pytest.raises(SystemExit, match="results of other settings: move it"):
        gpu.main(eager)


@pytest.mark.parametrize(
    "case, precision, rate, found, share",
    [
        ("certify cifar_resnet110", "bf16", 500, {"copy": 5.3e9, "bf16": 1e15}, 0.5),
        ("certify cifar_resnet110", "tf32", 500, {"copy": 5.3e9, "tf32": 1e15}, 1),
        ("certify cifar_resnet110", "integers", 500, {"copy": 5.3e9}, None),
        ("train cifar_resnet110 PGD T=2 m=1", "bf16", 1, {"copy": 1e18, "bf16": 3.54e9}, 1),
    ],
)
def test_share_of_the_ceiling_is_that_of_whichever_is_lower(case, precision, rate, found, share):
    """ResNet-110 moves 5.3 MB and computes 0.506 GFLOP per image in half precision, twice the bytes
    in float32; two steps of 1.01 GFLOP and an update of 1.52.
    """
    line = gpu.Line(case, precision, "eager", 1, rate)
    gpu.relate(line, found)
    assert line.of_ceiling == (share and pytest.approx(share))


@pytest.mark.parametrize("device, kernels", [("cpu", ["any", "sound"]), ("cuda", ["any"])])
def test_sound_noise_is_measured_wherever_certify_takes_it(device, kernels):
    options = gpu.options_of([*SMOKE, "--sound"])
    options.device = torch.device(device)
    made = gpu.certification_speed.ours("digits_resnet8", "bf16", "compiled", options)
    assert [each.kernels for each in made] == kernels


def test_walds_bound_is_that_of_the_highest_radius_within_reach():
    p = stats.norm.cdf(np.array([-0.1, 0.01, 0.3, 0.6, 9.0]))
    bound = plain_module("stopping_limit").wald_bound(p, sigma=1.0)
    t = stats.norm.cdf([0.25, 0.5, 2.25])
    divergence = p[2:] * np.log(p[2:] / t) + (1 - p[2:]) * np.log(
        np.maximum(1 - p[2:], 1e-300) / (1 - t)
    )
    assert bound == pytest.approx([0, 0, *(math.log(1000) / divergence)], rel=1e-9)
