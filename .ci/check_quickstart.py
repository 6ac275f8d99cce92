"""Checks the folder that scripts/quickstart.sh wrote: SmoothAdv certifies more than Gaussian at
every radius >= 0.5.
"""

import csv
import sys
from pathlib import Path

folder = Path(sys.argv[1])
with (folder / "table.csv").open() as file:
    rows = {
        row.pop("log"): {float(radius): float(accuracy) for radius, accuracy in row.items()}
        for row in csv.DictReader(file)
    }
radii = [radius for radius in rows["gaussian"] if radius >= 0.5]
assert radii, f"the table has no radius of at least 0.5: {list(rows['gaussian'])}"
for radius in radii:
    gaussian, smoothadv = rows["gaussian"][radius], rows["smoothadv"][radius]
    assert smoothadv > gaussian, (
        f"at radius {radius} SmoothAdv certifies {smoothadv:.3f}, Gaussian {gaussian:.3f}"
    )
for name in (
    "certified_accuracy.png",
    "certified_accuracy.pdf",
    "table.md",
    "summary.md",
    "gaussian.tsv.manifest.json",
):
    assert (folder / name).stat().st_size > 100, f"{name} is as good as empty"
print(f"quickstart: SmoothAdv certifies more than Gaussian at {', '.join(map(str, radii))}")
