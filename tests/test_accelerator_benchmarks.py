"""The benchmark for accelerators runs from end to end on a CPU, in small: its figures mean nothing
there.
"""

import importlib
import json
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest

from support.commands import CODE
from support.recorded_graphs import recorded_graphs as recorded_graphs

BENCHMARKS = CODE.parent / "benchmarks"


@pytest.fixture
def gpu(monkeypatch) -> ModuleType:
    """The benchmark as a module, which finds those beside it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu")


@pytest.fixture
def variants(gpu) -> ModuleType:
    return importlib.import_module("gpu_variants")


def test_speed_of_everything_is_measured_and_written(gpu, tmp_path, capsys):
    """Seconds, also where a CPU emulates bf16."""
    words = ["--smoke", "--device", "cpu", "--precision", "fp32", "bf16", "--modes", "eager"]
    gpu.main([*words, "--out", str(tmp_path)])
    written, page = sorted(tmp_path.iterdir())
    assert (
        written.suffix == ".json"
        and page.suffix == ".md"
        and capsys.readouterr().out == page.read_text()
    )
    content = json.loads(written.read_text())
    assert {"device", "date", "PyTorch", "Python"} <= content["facts"].keys()
    assert min(content["ceilings"].values()) > 0
    seen = {
        (each["case"].split()[0], each["precision"], each["mode"])
        for each in content["measurements"]
    }
    assert {
        ("certify", "tf32", "plain"),
        ("certify", "bf16", "eager"),
        ("train", "bf16", "eager"),
    } <= seen
    trained = [each for each in content["measurements"] if each["case"].startswith("train")]
    assert {each["case"].split(" ", 2)[2] for each in trained} == {
        "PGD T=2 m=1",
        "PGD T=4 m=4",
        "DDN T=4 m=1",
    }
    assert all(each["batch"] == 4 for each in trained)
    for each in content["measurements"]:
        assert each["trouble"] == "" and each["rate"] > 0 and each["ratio"] > 0
        assert (
            each["mode"] != "plain"
            or each["ratio"] == pytest.approx(1)
            or each["precision"] == "fp32"
        )


@pytest.mark.parametrize("works", [-1, 0, 1])
def test_variant_that_fails_is_named_and_the_others_are_measured(works, gpu, variants):
    """Where it is made, as when a CUDA graph cannot be captured, at its first run, or once it is
    timed.
    """
    options, runs = gpu.parsed(["--smoke", "--device", "cpu"]), []

    def broken() -> None:
        runs.append(None)
        if len(runs) > works:
            raise RuntimeError("no such kernel\nand more")

    def prepare() -> Callable[[], None]:
        if works < 0:
            broken()
        return broken

    prepared = {
        "plain": lambda: lambda: sum(range(1000)),
        "graph": prepare,
        "eager": lambda: lambda: sum(range(10)),
    }
    made = [variants.Measurement("certify x", "tf32", mode, 1) for mode in prepared]
    made = [variants.Variant(each, make, 10) for each, make in zip(made, prepared.values())]
    plain, failed, other = variants.measured(made, options)
    assert failed.trouble == "RuntimeError: no such kernel" and failed.rate == 0
    assert plain.ratio == 1 and other.rate > 0 and other.ratio > 1
    assert "| RuntimeError: no such kernel |" in gpu.page({"device": "x"}, {"copy": 1.0}, [failed])


@pytest.mark.parametrize("fails", ["", "CUDA out of memory."])
def test_updates_by_a_graph_are_timed_or_named(fails, gpu, variants, recorded_graphs):
    options = gpu.parsed(["--smoke", "--device", "cpu"])
    options.warm_ups, recorded_graphs.fails = 2, fails
    plain, timed = variants.measured(
        variants.updates("DDN T=4 m=1", "fp32", "graph", options), options
    )
    assert plain.rate > 0 and timed.trouble.endswith(fails) and bool(timed.rate) == (not fails)
    assert [graph.replays for graph in recorded_graphs.graphs] == [0 if fails else 2]


def test_parts_are_continued_where_they_stopped(gpu, tmp_path, capsys, monkeypatch):
    words = [
        "--smoke",
        "--device",
        "cpu",
        "--precision",
        "fp32",
        "--modes",
        "eager",
        "--out",
        str(tmp_path),
        "--cases",
        "PGD T=2 m=1",
        "DDN T=4 m=1",
    ]
    seen = []

    def measured(variants, options):
        seen.append(variants[-1].measurement.case)
        return [variant.measurement for variant in variants]

    clock = iter(range(0, 10**6, 50))  # a part takes 50 s
    monkeypatch.setattr(gpu, "measured", measured)
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    gpu.main([*words, "--minutes", "2"])
    assert (
        len(seen) == 1
        and "2 parts remain: the same command again continues" in capsys.readouterr().err
    )
    gpu.main(words)
    assert len(seen) == len(set(seen)) == 3
    (written,) = tmp_path.glob("*.json")
    lines = json.loads(written.read_text())["measurements"]
    assert [each["mode"] for each in lines] == ["plain", "eager"] * 3
    gpu.main(words)
    assert len(seen) == 3, "all is measured"
    monkeypatch.setitem(gpu.SMOKE, "rounds", 2)
    with pytest.raises(SystemExit, match="results of other settings: move it"):
        gpu.main(words)


def test_share_of_the_ceiling_is_that_of_whichever_is_lower(gpu):
    """ResNet-110 moves 5.3 MB and computes 0.506 GFLOP per image in half precision, twice the bytes
    in float32.
    """
    found = {"copy": 5.3e9, "bf16": 1e15, "tf32": 1e15}
    for precision, rate, share in [("bf16", 500.0, 0.5), ("tf32", 500.0, 1.0)]:
        measurement = gpu.Measurement("certify cifar_resnet110", precision, "eager", 1, rate)
        gpu.relate(measurement, found)
        assert measurement.of_ceiling == pytest.approx(share)
    found = {"copy": 1e18, "bf16": 3.54e9}
    measurement = gpu.Measurement("train cifar_resnet110 PGD T=2 m=1", "bf16", "eager", 1, 0.25)
    gpu.relate(measurement, found)
    assert measurement.of_ceiling == pytest.approx(0.25), (
        "two steps of 1.01 GFLOP and an update of 1.52"
    )
