"""How long it takes to read, check and tabulate 2,000 certification logs of 500 rows.

    python benchmarks/read_logs.py [--logs 2000] [--rounds 5]

For comparison, a plain loop over pandas.read_csv computes the same numbers and checks nothing. Both
alternate in this process; the medians and their ratio are printed.
"""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from timing import conditions, in_turns, parsed, parser_of, print_rates

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


def main() -> None:
    """Write the logs, time both, print the figures."""
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--logs", type=int, default=2000)
    options = parsed(parser)
    with tempfile.TemporaryDirectory() as name:
        write_logs(Path(name), options.logs)
        runs = {"plain": partial(plain, Path(name)), "ours": partial(ours, Path(name))}
        times = in_turns(runs, options)
    print(f"{options.logs} logs of {ROWS} rows, {os.cpu_count()} CPUs, {conditions(options)},")
    print(f"pandas {pd.__version__}, NumPy {np.__version__}:")
    print_rates(times, "plain", options.logs, "logs/s", width=6)


if __name__ == "__main__":
    main()
