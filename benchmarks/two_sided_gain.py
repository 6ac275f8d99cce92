"""What a bound on the strongest rival adds to certificates, from the same votes: `--method
two-sided` logs, read twice.

    python benchmarks/two_sided_gain.py logs/two_sided/*.tsv [--radii 0 0.25 0.5 0.75]
    python benchmarks/two_sided_gain.py \\
        --pool logs/digits-two-sided/gaussian/*/digits/*/noise_0.50/test/sigma_0.50.tsv

Each row of such a log has the votes for its class and for the strongest rival. Printed are, for
each log, the average certified radius, the share of abstentions and the certified accuracy of
``exact`` on these votes at the full alpha, of ``two-sided`` as logged, and their difference with a
95 % interval for the mean over images (paired; normal approximation). ``--pool`` takes logs of
several models for the same images and prints one table of the models' means, with intervals over
images. Where ``two-sided`` abstains early, ``exact`` does too: it needs more successes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from smoothadv.records.logs import recorded_settings
from smoothadv.records.readers import read_certification_log
from smoothadv.statistics.bounds import certified_radius


def radii_of(log: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each row the radius by ``exact`` and as logged, -1 for an abstention, and whether its
    class is right: [N].
    """
    table, settings = read_certification_log(log), recorded_settings(log)
    if settings.get("method") != "two-sided":
        raise SystemExit(f"{log} was not made with --method two-sided")
    alone = [
        certified_radius(successes, trials, settings["sigma"], settings["alpha"])
        if trials == settings["N"]
        else None
        for successes, trials in zip(table["successes"].tolist(), table["trials"].tolist())
    ]
    exact = np.array([-1.0 if radius is None else radius for radius in alone])
    both = np.where(table["predict"] < 0, -1.0, table["radius"])
    right = np.where(table["predict"] < 0, False, table["predict"] == table["label"])
    return exact, both, right


def line(name: str, before: np.ndarray, after: np.ndarray) -> str:
    """The two means of values [models, images], their difference and its interval."""
    before, after = before.mean(axis=0), after.mean(axis=0)
    difference = after - before
    half = 1.96 * difference.std(ddof=1) / np.sqrt(len(difference))
    mean = difference.mean()
    return (
        f"  {name:<22} {before.mean():7.3f} {after.mean():10.3f}   {mean:+.3f} "
        f"[{mean - half:+.3f}, {mean + half:+.3f}]"
    )


def main() -> None:
    """Print a table for each log."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG")
    parser.add_argument("--radii", nargs="+", type=float, default=[0.0, 0.25, 0.5, 0.75])
    parser.add_argument(
        "--pool", action="store_true", help="one table of all logs, of the same images"
    )
    options = parser.parse_args()
    for logs in [options.logs] if options.pool else [[log] for log in options.logs]:
        found = [radii_of(log) for log in logs]
        if len({len(right) for *_, right in found}) > 1:
            raise SystemExit("--pool needs logs of the same images")
        exact, both, right = (np.stack(values) for values in zip(*found))
        print(f"{', '.join(map(str, logs))}: {right.shape[1]} images")
        print(f"  {'':<22} {'exact':>7} {'two-sided':>10}   difference")
        print(
            line("average radius", *(np.where(right, np.maximum(r, 0), 0) for r in (exact, both)))
        )
        print(line("abstentions", *((r < 0).astype(float) for r in (exact, both))))
        for radius in options.radii:
            print(
                line(
                    f"certified at {radius:g}",
                    *((right & (r >= radius)).astype(float) for r in (exact, both)),
                )
            )


if __name__ == "__main__":
    main()
