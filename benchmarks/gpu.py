"""Speed on an accelerator: certification and training, compared with plain loops and with the
limits of the chip.

    python benchmarks/gpu.py                         # everything; nearly an hour on one GPU
    python benchmarks/gpu.py --minutes 9             # the same command again continues
    python benchmarks/gpu.py --only certify --archs cifar_resnet110 --precision bf16 integers \\
        --modes eager --sound
    python benchmarks/gpu.py --smoke --device cpu    # whether it runs; a minute, mostly to compile

"Plain" means Cohen et al.'s sampling loop and the released SmoothAdv update, eager in float32
(convolutions in TF32, which is PyTorch's default, unless the line says fp32). Every precision and
mode is a part of its own, in which its variants alternate with the plain one; ratios and rates are
medians over rounds. Results are written after each part, to one file, whatever parts a command
chooses; a line that is in it already is not measured again, and of the plain one the first
measurement stands. A variant that fails, for example as the memory is too small for its batch,
becomes a line that says so. Rates include all the work: drawing noise, counting votes, updating
weights. "graph" is an update of training as --cuda-graph makes it, and "compiled-graph" that of a
network that --compile has compiled. Networks are trained for --updates updates on digits.

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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import certification_speed
import torch
import training_speed
from timing import HEAD, Line, Variant, measured, parsed, parser_of, seconds

MODES = tuple(training_speed.MODES)
PLAIN_BATCH = {"cifar_resnet110": 1000, "resnet50": 200}
# What --smoke makes of the options: little, since a CPU without AVX-512 emulates bf16, ten times
# slower than float32.
SMOKE = {
    "archs": ["digits_resnet8"],
    "arch": "digits_resnet8",
    "batches": [2],
    "draws": 4,
    "batch": 4,
    "rounds": 1,
    "warm_ups": 1,
    "updates": 2,
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


def relate(line: Line, found: dict[str, float]) -> None:
    """Set the share of the ceiling, if the work of the case and the speed of its products are
    known.
    """
    kind, arch, *name = line.case.split(" ", 2)
    if arch not in WORK or line.precision not in found or not line.rate:
        return
    work = WORK[arch]
    if kind == "certify":
        flop, moved = work.flop[0], work.bytes[0]
    else:
        _, steps, copies = training_speed.CASES[name[0]]
        flop, moved = (copies * (steps * each[1] + each[2]) for each in (work.flop, work.bytes))
    moved *= 2 if line.precision in ("fp32", "tf32") else 1
    line.of_ceiling = line.rate / min(found["copy"] / moved, found[line.precision] / flop)


def page(content: dict) -> str:
    """The results as Markdown."""
    facts = content["facts"]
    found = content["ceilings"]
    speeds = [f"{name} {rate / 1e12:,.1f}" for name, rate in found.items() if name != "copy"]
    lines = [
        f"# Speed on {facts['device']}",
        "",
        ", ".join(f"{key} {value}" for key, value in facts.items()),
        "",
        f"Measured ceilings: copy {found['copy'] / 1e9:,.0f} GB/s; matrix products in TFLOP/s: "
        + ", ".join(speeds),
        "",
        *HEAD,
        *(Line(**each).row() for each in content["measurements"]),
    ]
    return "\n".join(lines) + "\n"


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; --smoke makes all sizes tiny."""
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument(
        "--smoke", action="store_true", help="check that everything runs: tiny networks and sizes"
    )
    parser.add_argument(
        "--only", nargs="+", choices=("certify", "train"), default=["certify", "train"]
    )
    parser.add_argument(
        "--archs", nargs="+", default=["cifar_resnet110", "resnet50"], help="networks to certify"
    )
    parser.add_argument("--training-arch", dest="arch", default="cifar_resnet110")
    cases = list(training_speed.CASES)
    parser.add_argument("--cases", nargs="+", choices=cases, default=cases, help="updates")
    precisions = certification_speed.PRECISIONS
    parser.add_argument(
        "--precision", nargs="+", choices=precisions, default=["tf32", "bf16", "fp16"]
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES[:3]))
    parser.add_argument("--sound", action="store_true", help="also with the noise of --sound")
    parser.add_argument(
        "--batches", nargs="+", type=int, default=[1024, 4096], help="batches of certification"
    )
    parser.add_argument("--draws", type=int, default=16_384, help="per round and variant")
    parser.add_argument("--training-batch", dest="batch", type=int, default=256)
    parser.add_argument("--updates", type=int, default=100, help="that networks are trained for")
    parser.add_argument(
        "--minutes",
        type=float,
        default=None,
        help="begin no part that may not end within this time",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results"), help="folder for JSON and Markdown"
    )
    parser.set_defaults(warm_ups=2, matrix_size=8192, device=torch.device("cuda"))
    options = parsed(parser, arguments)
    if options.smoke:
        vars(options).update(SMOKE)
        cases = training_speed.CASES
        options.cases = [case for case in options.cases if cases[case][2] <= options.batch]
    if options.device.type == "cpu":
        options.modes = [mode for mode in options.modes if "graph" not in mode]
    return options


def parts(options: argparse.Namespace) -> list[list[Variant]]:
    """What to measure: of each part the plain variant first.

    With --smoke the first case is measured in every precision in the first mode and in every mode
    in the first precision, the other cases in the first pair: the other pairs run the same code
    again.
    """
    found = []
    for arch in options.archs if "certify" in options.only else ():
        batch = min(PLAIN_BATCH.get(arch, 400), options.draws)
        plain = {
            precision: certification_speed.plain(arch, precision, batch, options)
            for precision in ("tf32", "fp32")
        }
        if options.device.type == "cuda":
            found.append([*plain.values()])
        modes = [mode for mode in options.modes if "graph" not in mode]
        for pair in pairs(options, certification_speed.PRECISIONS, modes, arch == options.archs[0]):
            found.append([plain["tf32"], *certification_speed.ours(arch, *pair, options)])
    for case in options.cases if "train" in options.only else ():
        plain_update = training_speed.plain(case, "tf32", options)
        is_first = case == options.cases[0]
        for pair in pairs(options, training_speed.PRECISIONS, options.modes, is_first):
            found.append([plain_update, training_speed.ours(case, *pair, options)])
    return found


def pairs(
    options: argparse.Namespace, precisions: tuple[str, ...], modes: list[str], is_first: bool
) -> list[tuple[str, str]]:
    """The precisions and modes of a case; see ``parts``."""
    chosen = [precision for precision in options.precision if precision in precisions]
    every = [(precision, mode) for precision in chosen for mode in modes]
    if options.smoke and is_first:
        return [pair for pair in every if pair[0] == every[0][0] or pair[1] == every[0][1]]
    return every[:1] if options.smoke else every


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
    found = ceilings(options.device, options.matrix_size)
    return path, {"facts": facts, "ceilings": found, "measurements": []}


def ceilings(device: torch.device, size: int) -> dict[str, float]:
    """Measured limits: bytes per second of a copy (read and written), FLOP per second of products
    of matrices.
    """
    source = torch.empty(16 * size * size, device=device)
    target = torch.empty_like(source)
    found = {"copy": 2 * source.nbytes / quickest(lambda: target.copy_(source), device)}
    dtypes = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
    for precision, dtype in {**dtypes, "fp16": torch.float16}.items():
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        found[precision] = 2 * size**3 / quickest(lambda one=one, other=other: one @ other, device)
    torch.backends.cuda.matmul.allow_tf32 = False
    return found


def quickest(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of ten runs, after two runs to warm up."""
    return min([seconds(work, device) for _ in range(12)][2:])


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write, one part after another."""
    options = options_of(arguments)
    start, longest = time.monotonic(), 0.0
    name = torch.cuda.get_device_name() if options.device.type == "cuda" else platform.machine()
    facts = {"device": name, "date": date.today().isoformat(), "PyTorch": torch.__version__}
    facts |= {"CUDA": torch.version.cuda, "Python": platform.python_version()}
    facts |= {name: getattr(options, name) for name in ("rounds", "draws", "updates")}
    options.out.mkdir(parents=True, exist_ok=True)
    path, content = begun(options, facts)
    known = {Line(**each).key: each for each in content["measurements"]}
    waiting = [part for part in parts(options) if any(v.line.key not in known for v in part)]
    for number, (plain, *others) in enumerate(waiting):
        began = time.monotonic()
        if options.minutes is not None and began - start + longest > 60 * options.minutes:
            remain = len(waiting) - number
            print(f"{remain} parts remain: the same command again continues", file=sys.stderr)
            break
        missing = [variant for variant in others if variant.line.key not in known]
        for line in measured([plain, *missing], options):
            relate(line, content["ceilings"])
            known.setdefault(line.key, asdict(line))
        content["measurements"] = [*known.values()]
        # Written after each part, so that the results so far are not lost with the machine.
        path.write_text(json.dumps(content, indent=1) + "\n")
        path.with_suffix(".md").write_text(page(content))
        if options.device.type == "cuda":
            torch.cuda.empty_cache()
        torch._dynamo.reset()  # the next part compiles its own network
        longest = max(longest, time.monotonic() - began)
    print(page(content), end="")


if __name__ == "__main__":
    main()
