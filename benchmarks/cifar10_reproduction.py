"""SmoothAdv against Gaussian augmentation on CIFAR-10's images, with a schedule that takes minutes
on one GPU.

    python benchmarks/cifar10_reproduction.py IMAGES --minutes 9    # again until all is done

IMAGES is a folder with train/CLASS/* and test/CLASS/*, or a tar archive of one. For each sigma the
script trains a Gaussian model and a model of SmoothAdv-PGD (T=2, m=1), certifies both on every 20th
test image with N = 100,000 (exact) and on all test images adaptively, and attacks them. This is a
sweep: its grid is written to FOLDER/cifar10_short.toml, and it continues where it was stopped. Then
the script writes FOLDER/report.html and FOLDER/results.md: certified accuracies with intervals and
their paired differences. --page also puts results.md between the markers of a page.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

from smoothadv.cli import main as command

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- cifar10 reproduction: begin -->", "<!-- cifar10 reproduction: end -->"
RADII = ("0", "0.25", "0.5", "0.75", "1", "1.25", "1.5", "1.75")
GAUSSIAN, SMOOTHADV = "Gaussian", "SmoothAdv"
# Exit codes of a sweep that was asked to stop; the last two if it ended before it could handle the
# signal.
STOPPED = (143, -signal.SIGTERM, -signal.SIGKILL)
# Seconds for a sweep to save before it is killed.
GRACE = 60
GRID = """# Gaussian augmentation and SmoothAdv-PGD on CIFAR-10's images, short schedules.
about = "Gaussian augmentation and SmoothAdv-PGD on CIFAR-10's images, {epochs} epochs"
models = "{folder}/models"
logs = "{folder}/logs"
{threads}
[fixed]
dataset = "imagefolder:{images}"
arch = "{arch}"
recipe = "fast"
epochs = {epochs}
batch = {batch}
noise = [{sigmas}]
{training}
[[sweep]]
group = "Gaussian"

[[sweep]]
group = "SmoothAdv"
attack = "PGD"
num-steps = 2
warmup = {warmup}
epsilon = [{epsilons}]

[[certify]]
skip = {skip}
N = {draws}
{certification}
[[certify]]
name = "adaptive"
method = "adaptive"
skip = {adaptive_skip}
N = {adaptive_draws}
{certification}
[[attack]]
skip = {skip}
epsilon = [0.25, 0.5, 1.0]
num-steps = {attack_steps}
num-noise-vec = {attack_draws}
N = {prediction_draws}
"""


# Values that --smoke gives to options.
SMOKE = {
    "arch": "cifar_resnet20",
    "epochs": 1,
    "warmup": 0,
    "batch": 20,
    "skip": 10,
    "adaptive_skip": 10,
    "draws": 200,
    "adaptive_draws": 400,
    "attack_steps": 2,
    "attack_draws": 2,
    "prediction_draws": 100,
    "jobs": 2,
    "compile": False,
    "precision": "fp32",
    "certify_precision": "fp32",
    "device": "cpu",
}


def unpacked(images: Path, folder: Path) -> Path:
    """The folder of images; an archive is unpacked beside the results, unless that was done
    before.
    """
    if images.is_dir():
        return images
    target, done = folder / "images", folder / "images" / ".complete"
    if not done.exists():
        with tarfile.open(images) as archive:
            archive.extractall(target, filter="data")
        done.touch()
    return target


def execution(precision: str, is_compiled: bool) -> str:
    """Lines of a grid that set precision and compilation."""
    return f'precision = "{precision}"\ncompile = {str(is_compiled).lower()}\n'


def write_grid(options: argparse.Namespace, images: Path) -> Path:
    """The grid of this reproduction, a file in the folder of its results."""
    given = {
        **vars(options),
        "images": images,
        "sigmas": ", ".join(map(str, options.sigmas)),
        "epsilons": ", ".join(map(str, options.epsilons)),
        "threads": "threads = 1\n" if options.device == "cpu" else "",
        "training": execution(options.precision, options.compile),
        "certification": execution(options.certify_precision, options.compile),
    }
    text = GRID.format(**given)
    path = options.folder / "cifar10_short.toml"
    path.write_text(text)
    return path


def sweep(grid: Path, options: argparse.Namespace) -> int:
    """Run what is missing of the sweep; returns its exit code. After --minutes it is asked to stop,
    and saves.
    """
    words = [
        sys.executable,
        str(ROOT / "code/sweep.py"),
        "run",
        str(grid),
        "--jobs",
        str(options.jobs),
    ]
    process = subprocess.Popen(words + ["--device", "cpu"] * (options.device == "cpu"))
    try:
        return process.wait(60 * options.minutes if options.minutes else None)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            return process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def output_of(*words: object) -> str:
    """The standard output of a command that runs in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = command(list(map(str, words)))
    if code:
        raise SystemExit(code)
    return output.getvalue().strip()


def logs_of(folder: Path, group: str, sigma: float, name: str) -> list[Path]:
    """The certification logs of a group at a sigma; SmoothAdv has one for each epsilon."""
    kind = "gaussian" if group == GAUSSIAN else "PGD_2steps"
    found = sorted((folder / "logs" / kind).rglob(f"noise_{sigma:.2f}*/*/{name}"))
    return [path for path in found if path.is_file()]


def results(options: argparse.Namespace) -> str:
    """Certified accuracies with intervals, and their paired differences from the Gaussian model's,
    as Markdown.
    """
    parts = []
    for sigma in options.sigmas:
        stem = f"sigma_{sigma:.2f}"
        for title, name in (("exact", f"{stem}.tsv"), ("adaptive", f"{stem}_adaptive.tsv")):
            (gaussian,) = logs_of(options.folder, GAUSSIAN, sigma, name)
            others = logs_of(options.folder, SMOOTHADV, sigma, name)
            named = [f"{GAUSSIAN}={gaussian}", *(f"{SMOOTHADV}={log}" for log in others)]
            table = output_of("analyze", "table", *named, "--radii", *RADII, "--confidence", 0.95)
            parts.append(f"sigma = {sigma:g}, {title}:\n\n{table}")
            for other in others:
                compared = output_of(
                    "analyze", "compare", gaussian, other, "--radii", *RADII, "--confidence", 0.95
                )
                parts.append(f"{other.parts[-6]} against Gaussian, the same images:\n\n{compared}")
    return "\n\n".join(parts) + "\n"


def write_between(page: Path, text: str) -> None:
    """Replace what is between the markers of a page."""
    content = page.read_text()
    if BEGIN not in content or END not in content:
        raise SystemExit(f"{page} lacks the line {BEGIN} or {END}")
    head, rest = content.split(BEGIN)
    page.write_text(f"{head}{BEGIN}\n\n{text}\n{END}{rest.split(END)[1]}")


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "images",
        type=Path,
        help="folder with train/CLASS/* and test/CLASS/*, or a tar archive of one",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("logs/cifar10_reproduction"),
        help="folder for models, logs and results",
    )
    parser.add_argument("--sigmas", type=float, nargs="+", default=[0.5])
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0], help="of SmoothAdv")
    parser.add_argument("--arch", default="cifar_resnet110")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=5, help="epochs over which epsilon grows")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument(
        "--skip", type=int, default=20, help="certify and attack every SKIP-th image"
    )
    parser.add_argument("--draws", type=int, default=100_000, help="N of the exact certificates")
    parser.add_argument(
        "--adaptive-skip", type=int, default=1, help="certify every K-th image adaptively"
    )
    parser.add_argument(
        "--adaptive-draws", type=int, default=125_000, help="most draws of an image, adaptively"
    )
    parser.add_argument("--attack-steps", type=int, default=20)
    parser.add_argument("--attack-draws", type=int, default=32, help="m of the attack")
    parser.add_argument(
        "--prediction-draws", type=int, default=10_000, help="N of PREDICT on attacked images"
    )
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    parser.add_argument(
        "--minutes",
        type=float,
        default=None,
        help="stop after this time; the same command continues",
    )
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16", help="of training")
    parser.add_argument("--certify-precision", choices=("fp32", "bf16", "fp16"), default="fp16")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument(
        "--page", type=Path, default=None, help="page for the tables, like docs/results/cifar10.md"
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="check that everything runs: a small network, few draws",
    )
    options = parser.parse_args(arguments)
    if options.smoke:
        vars(options).update(SMOKE)
    return options


def main(arguments: list[str] | None = None) -> None:
    """Unpack, sweep, report."""
    options = parsed(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    grid = write_grid(options, unpacked(options.images, options.folder))
    code = sweep(grid, options)
    if code in STOPPED:
        print(f"stopped after {options.minutes:g} minutes: the same command again continues")
        raise SystemExit(STOPPED[0])
    if code:
        raise SystemExit(code)
    print(output_of("sweep", "report", grid, "-o", options.folder / "report.html"))
    text = results(options)
    (options.folder / "results.md").write_text(text)
    if options.page is not None:
        write_between(options.page, text)
    print(text)


if __name__ == "__main__":
    main()
