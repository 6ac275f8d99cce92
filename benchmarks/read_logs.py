"""How long it takes to read, check and tabulate 2,000 certification logs of 500 rows.

    python benchmarks/read_logs.py [--logs 2000] [--rounds 5]

For comparison, a plain loop over pandas.read_csv computes the same numbers and checks nothing. Both
alternate in this process; the medians and their ratio are printed.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from smoothadv.analysis import ANALYSES
from smoothadv.analysis.reading import read_logs
from smoothadv.analysis.table_formats import FORMATS

ROWS, RADII = 500, [0.25, 0.5, 0.75, 1.0]


def write_logs(folder: Path, count: int) -> None:
    """Logs in the released format and layout, with random but consistent rows."""
    generator = np.random.default_rng(0)
    for number in range(count):
        path = folder / f"model_{number:04d}" / "noise_0.50" / "test" / "sigma_0.50"
        path.parent.mkdir(parents=True)
        label = generator.integers(0, 10, ROWS)
        predict = np.where(generator.random(ROWS) < 0.7, label, generator.integers(-1, 10, ROWS))
        radius = np.where(predict >= 0, generator.uniform(0, 1.9, ROWS).round(4), 0.0)
        rows = [
            f"{20 * i}\t{label[i]}\t{predict[i]}\t{radius[i]:.4f}\t{int(label[i] == predict[i])}"
            "\t0:00:15.123456\n"
            for i in range(ROWS)
        ]
        path.write_text("idx\tlabel\tpredict\tradius\tcorrect\ttime\n" + "".join(rows))


def plain(folder: Path) -> str:
    """Certified accuracies as the released analysis computes them."""
    lines = []
    for path in sorted(folder.rglob("sigma_*")):
        table = pd.read_csv(path, delimiter="\t")
        lines.append(
            [path, *((table["correct"] & (table["radius"] >= radius)).mean() for radius in RADII)]
        )
    return "\n".join(map(str, lines))


def ours(folder: Path) -> str:
    """The same as `analyze summary`."""
    return FORMATS["markdown"](ANALYSES["summary"](radii=RADII)(read_logs([str(folder)])))


def seconds(function: Callable[[Path], str], folder: Path) -> float:
    """Wall-clock time of one call."""
    start = time.perf_counter()
    function(folder)
    return time.perf_counter() - start


def main() -> None:
    """Write the logs, time both, print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--logs", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_logs(Path(name), options.logs)
        times = [
            (seconds(plain, Path(name)), seconds(ours, Path(name))) for _ in range(options.rounds)
        ]
    plain_time, our_time = (statistics.median(column) for column in zip(*times))
    ratio = statistics.median(b / a for a, b in times)
    print(
        f"{options.logs} logs of {ROWS} rows, median of {options.rounds} rounds, {os.cpu_count()} "
        "CPUs,"
    )
    print(f"Python {platform.python_version()}, pandas {pd.__version__}, NumPy {np.__version__}:")
    print(f"  read, checked and tabulated      {our_time:6.2f} s")
    print(f"  plain loop over pandas.read_csv  {plain_time:6.2f} s   (ratio {ratio:.2f})")


if __name__ == "__main__":
    main()
