"""Speed on an accelerator: certification and training, compared with plain loops and with the
limits of the chip.

    python benchmarks/gpu.py                         # everything; nearly an hour on one GPU
    python benchmarks/gpu.py --minutes 9             # the same command again continues
    python benchmarks/gpu.py --only certify --archs cifar_resnet110 --precision bf16 fp16 \\
        --modes compiled
    python benchmarks/gpu.py --smoke --device cpu    # whether it runs; a minute, mostly to compile

"Plain" means Cohen et al.'s sampling loop and the released SmoothAdv update, eager in float32
(convolutions in TF32, which is PyTorch's default, unless the line says fp32). Every precision and
mode is a part of its own, in which its variants alternate with the plain one; ratios and rates are
medians over rounds. Results are written after each part, and what is in the file already is not
measured again. A variant that fails, for example as the memory is too small for its batch, becomes
a line that says so. Rates include all the work: drawing noise, counting votes, updating weights.
"graph" replays a batch's forward pass in certification as a CUDA graph, which the commands do not
do: it shows what launching kernels costs. An update of training is then one as --cuda-graph makes
it.

The ceiling of a case is the smaller of two rates: measured copy bandwidth divided by its bytes, and
measured matrix speed divided by its FLOP. The bytes are those of the activations that even fused
kernels have to move.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch
from gpu_variants import UPDATES, Measurement, ceilings, certifications, measured, updates

MODES = ("eager", "compiled", "graph")
TRAINING_PRECISIONS = ("fp32", "tf32", "bf16")
CERTIFICATION_PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
# What --smoke makes of the options: little, since a CPU without AVX-512 emulates bf16, ten times
# slower than float32.
SMOKE = {
    "archs": ["digits_resnet8"],
    "training_arch": "digits_resnet8",
    "batches": [2],
    "draws": 4,
    "training_batch": 4,
    "rounds": 1,
    "warm_ups": 1,
    "matrix_size": 64,
}


@dataclass(frozen=True)
class Work:
    """FLOP and bytes (with 2-byte activations) per image of a forward pass, a step of an attack,
    and an update.

    For ResNet-110 at 32x32 and ResNet-50 at 224x224. Every convolution reads its input and writes
    its output once; normalization, sum and ReLU are fused into it; an update also stores the inputs
    of normalizations.
    """

    flop: tuple[float, float, float]
    bytes: tuple[float, float, float]


WORK = {
    "cifar_resnet110": Work((0.506e9, 1.01e9, 1.52e9), (5.3e6, 11.3e6, 32e6)),
    "resnet50": Work((8.18e9, 16.4e9, 24.5e9), (56.6e6, 121e6, 340e6)),
}


def ways(
    options: argparse.Namespace, precisions: tuple[str, ...], modes: tuple[str, ...], is_first: bool
) -> list[tuple[str, str]]:
    """The chosen ones of the given precisions and modes in which a case is measured: every pair of
    them.

    With --smoke the first case is measured in every precision in the first mode and in every mode
    in the first precision, the other cases in the first pair: the other pairs run the same code
    again.
    """
    chosen = [precision for precision in options.precision if precision in precisions]
    pairs = [(precision, mode) for precision in chosen for mode in options.modes if mode in modes]
    if options.smoke and pairs:
        precision, mode = pairs[0]
        pairs = (
            [pair for pair in pairs if pair[0] == precision or pair[1] == mode]
            if is_first
            else pairs[:1]
        )
    return pairs


def relate(measurement: Measurement, found: dict[str, float]) -> None:
    """Set the share of the ceiling, if the work of the case is known."""
    kind, arch, *name = measurement.case.split(" ", 2)
    if arch not in WORK or not measurement.rate:
        return
    work = WORK[arch]
    if kind == "certify":
        flop, moved = work.flop[0], work.bytes[0]
    else:
        _, steps, copies = UPDATES[name[0]]
        flop, moved = (copies * (steps * each[1] + each[2]) for each in (work.flop, work.bytes))
    moved *= 2 if measurement.precision in ("fp32", "tf32") else 1
    ceiling = min(found["copy"] / moved, found[measurement.precision] / flop)
    measurement.of_ceiling = measurement.rate / ceiling


def page(facts: dict[str, object], found: dict[str, float], measurements: list[Measurement]) -> str:
    """The results as Markdown."""
    lines = [
        f"# Speed on {facts['device']}",
        "",
        ", ".join(f"{key} {value}" for key, value in facts.items()),
        "",
    ]
    lines += [
        f"Measured ceilings: copy {found['copy'] / 1e9:,.0f} GB/s; matrix products in TFLOP/s: "
    ]
    lines[-1] += ", ".join(
        f"{name} {rate / 1e12:,.1f}" for name, rate in found.items() if name != "copy"
    )
    lines += [
        "",
        "| case | precision | mode | batch | images/s | x plain | of the ceiling | peak MiB |",
    ]
    lines += ["|---|---|---|---:|---:|---:|---:|---:|"]
    for each in measurements:
        share = "" if each.of_ceiling is None else f"{each.of_ceiling:.1%}"
        memory = "" if each.memory is None else f"{each.memory:,.0f}"
        result = each.trouble or f"{each.rate:,.1f} | {each.ratio:.2f} | {share} | {memory}"
        lines.append(f"| {each.case} | {each.precision} | {each.mode} | {each.batch} | {result} |")
    return "\n".join(lines) + "\n"


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; --smoke makes all sizes tiny."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--smoke", action="store_true", help="check that everything runs: tiny networks and sizes"
    )
    parser.add_argument(
        "--only", nargs="+", choices=("certify", "train"), default=["certify", "train"]
    )
    parser.add_argument(
        "--archs", nargs="+", default=["cifar_resnet110", "resnet50"], help="networks to certify"
    )
    parser.add_argument("--training-arch", default="cifar_resnet110")
    parser.add_argument(
        "--cases", nargs="+", choices=list(UPDATES), default=list(UPDATES), help="training updates"
    )
    parser.add_argument(
        "--precision", nargs="+", choices=CERTIFICATION_PRECISIONS, default=["tf32", "bf16", "fp16"]
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["eager", "compiled", "graph"])
    parser.add_argument(
        "--batches", nargs="+", type=int, default=[1024, 4096], help="batches of certification"
    )
    parser.add_argument("--draws", type=int, default=16_384, help="per round and variant")
    parser.add_argument("--training-batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--minutes",
        type=float,
        default=None,
        help="begin no part that may not end within this time",
    )
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results"), help="folder for JSON and Markdown"
    )
    parser.set_defaults(warm_ups=2, matrix_size=8192)
    options = parser.parse_args(arguments)
    if options.smoke:
        vars(options).update(SMOKE)
        options.cases = [
            case for case in options.cases if UPDATES[case][2] <= options.training_batch
        ]
    if options.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here: --smoke --device cpu shows whether the benchmark runs")
    if options.device.type == "cpu":
        options.modes = [mode for mode in options.modes if mode != "graph"]
    return options


def parts(options: argparse.Namespace) -> list[tuple[str, str, str, str]]:
    """What to measure: kind, architecture or update, precision, mode."""
    chosen = []
    for arch in options.archs if "certify" in options.only else ():
        if options.device.type == "cuda":
            chosen.append(("certify", arch, "fp32", "plain"))
        pairs = ways(options, CERTIFICATION_PRECISIONS, MODES, arch == options.archs[0])
        chosen += [("certify", arch, *pair) for pair in pairs]
    for case in options.cases if "train" in options.only else ():
        pairs = ways(options, TRAINING_PRECISIONS, MODES, case == options.cases[0])
        chosen += [("train", case, *pair) for pair in pairs]
    return chosen


def begun(options: argparse.Namespace, facts: dict[str, object]) -> tuple[Path, dict]:
    """The file of results so far with these facts, whatever its date, and what it holds; a new one
    if there is none.
    """
    device = str(facts["device"]).replace(" ", "_")
    for path in sorted(options.out.glob(f"gpu_*_{device}.json"), reverse=True):
        content = json.loads(path.read_text())
        if {**content["facts"], "date": ""} == {**facts, "date": ""}:
            return path, content
    path = options.out / f"gpu_{facts['date']}_{device}.json"
    if path.exists():
        raise SystemExit(f"{path} has results of other settings: move it, or give another --out")
    return path, {
        "facts": facts,
        "ceilings": ceilings(options.device, options.matrix_size),
        "measurements": [],
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write, one part after another."""
    options = parsed(arguments)
    start, longest = time.monotonic(), 0.0
    name = torch.cuda.get_device_name() if options.device.type == "cuda" else platform.machine()
    facts = {"device": name, "date": date.today().isoformat(), "PyTorch": torch.__version__}
    facts |= {
        "CUDA": torch.version.cuda,
        "Python": platform.python_version(),
        "rounds": options.rounds,
    }
    facts |= {
        "draws": options.draws,
        "batches": options.batches,
        "training_batch": options.training_batch,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path, content = begun(options, facts)
    found, measurements = (
        content["ceilings"],
        [Measurement(**each) for each in content["measurements"]],
    )

    def lines() -> set[tuple[str, str, str]]:
        return {(each.case, each.precision, each.mode) for each in measurements}

    waiting = []
    for part in parts(options):
        kind, name, precision, mode = part
        case = f"certify {name}" if kind == "certify" else f"train {options.training_arch} {name}"
        if (case, precision, mode) not in lines():
            waiting.append(part)
    for number, (kind, name, precision, mode) in enumerate(waiting):
        began = time.monotonic()
        if options.minutes is not None and began - start + longest > 60 * options.minutes:
            print(
                f"{len(waiting) - number} parts remain: the same command again continues",
                file=sys.stderr,
            )
            break
        make = certifications if kind == "certify" else updates
        done = measured(make(name, precision, mode, options), options)
        for each in done:
            relate(each, found)
            if each.mode != "plain" or (each.case, each.precision, each.mode) not in lines():
                measurements.append(each)
        content["measurements"] = [asdict(each) for each in measurements]
        # Written after each part, so that the results so far are not lost with the machine.
        path.write_text(json.dumps(content, indent=1) + "\n")
        path.with_suffix(".md").write_text(page(content["facts"], found, measurements))
        if options.device.type == "cuda":
            torch.cuda.empty_cache()
        torch._dynamo.reset()  # the next part compiles its own network
        longest = max(longest, time.monotonic() - began)
    print(page(content["facts"], found, measurements), end="")


if __name__ == "__main__":
    main()
