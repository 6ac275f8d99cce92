"""The benchmarks for accelerators run from end to end on a CPU, in small: their figures mean
nothing there.
"""

import importlib
import json
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from support.commands import CODE, rows, run_process
from support.recorded_graphs import recorded_graphs as recorded_graphs

BENCHMARKS = CODE.parent / "benchmarks"
CLASSES = ("airplane", "cat", "ship")


def run_benchmark(name: str, folder: Path, *words: object):
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *map(str, words)]
    return run_process(command, folder, PYTHONPATH=str(CODE))


@pytest.fixture
def imported(monkeypatch) -> Callable[[str], ModuleType]:
    """A benchmark as a module, which finds those beside it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def gpu(imported) -> ModuleType:
    return imported("gpu")


@pytest.fixture
def variants(imported) -> ModuleType:
    return imported("gpu_variants")


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
    ]
    words += ["--cases", "PGD T=2 m=1", "DDN T=4 m=1"]
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


def certificates(predictions: list[int], radii: list[float]) -> pd.DataFrame:
    """Of images of class 1."""
    columns = {"idx": range(len(predictions)), "label": 1, "predict": predictions, "radius": radii}
    return pd.DataFrame(columns).assign(
        correct=lambda table: (table.predict == table.label).astype(np.int64)
    )


def test_agreement_counts_classes_and_radii(imported):
    agreement = imported("precision_agreement").agreement
    reference = certificates([1, 1, 2, -1, 1], [0.5, 0.75, 0.1, 0.0, 0.25])
    other = certificates([1, 1, 2, 1, -1], [0.5, 0.7, 0.1, 0.3, 0.0])
    found = agreement(reference, other)
    assert (found.images, found.other_class, found.other_radius) == (5, 2, 1)
    assert found.largest == pytest.approx(0.05) and found.mean == pytest.approx(0.05 / 3)
    assert found.accuracy == pytest.approx((0, 0, 0, -20, 0))
    assert agreement(reference, reference).other_radius == 0
    with pytest.raises(ValueError, match="different images"):
        agreement(reference, certificates([1], [0.5]))


def test_certificates_of_precisions_are_compared(
    imported, checkpoint, warm, tmp_path, monkeypatch, capsys
):
    """By the command, in processes as the benchmark starts them."""
    words = [
        "digits",
        checkpoint,
        0.25,
        "logs",
        "--precisions",
        "bf16",
        "--device",
        "cpu",
    ]
    benchmark = imported("precision_agreement")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["precision_agreement.py", *map(str, words), "--N", "100", "--skip", "30"]
    )
    started = SimpleNamespace(run=lambda command: warm.run(list(map(str, command)), tmp_path))
    monkeypatch.setattr(benchmark, "subprocess", started)
    benchmark.main()
    assert [len(rows(tmp_path / f"logs/{name}.tsv")) for name in ("fp32", "bf16")] == [12, 12]
    assert (tmp_path / "logs/agreement.md").read_text() in capsys.readouterr().out
    assert "| bf16 | 12 | " in (tmp_path / "logs/agreement.md").read_text()


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """An archive of images of three classes, each of a colour of its own."""
    folder = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    with tarfile.open(folder / "images.tar.xz", "w:xz") as archive:
        for split, count in [("train", 20), ("test", 20)]:
            for label, name in enumerate(CLASSES):
                place = folder / split / name
                place.mkdir(parents=True)
                for number in range(count):
                    pixels = generator.integers(0, 100, (32, 32, 3), dtype=np.uint8)
                    pixels[..., label] += 150
                    Image.fromarray(pixels).save(place / f"{number:04d}.jpg")
            archive.add(folder / split, split)
    return folder / "images.tar.xz"


@pytest.mark.slow
def test_cifar10_is_reproduced_from_images_to_tables(images, tmp_path):
    """A minute: two models, each certified twice and attacked, a report, and the page."""
    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- cifar10 reproduction: begin -->\nold\n<!-- cifar10 reproduction: end "
        "-->\nafter\n"
    )
    words = [images, "--smoke", "--folder", "made", "--page", page]
    done = run_benchmark("cifar10_reproduction", tmp_path, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "made/results.md").read_text()
    assert (
        "sigma = 0.5, exact:" in text
        and "sigma = 0.5, adaptive:" in text
        and text.count("against Gaussian") == 2
    )
    assert page.read_text() == (
        "before\n<!-- cifar10 reproduction: begin -->\n\n"
        + text
        + "\n<!-- cifar10 reproduction: end -->\nafter\n"
    )
    assert "Upper envelopes" in (tmp_path / "made/report.html").read_text()
    logs = sorted((tmp_path / "made/logs").rglob("sigma_0.50*.tsv"))
    assert len(logs) == 4 and all(len(rows(log)) == 6 for log in logs)
