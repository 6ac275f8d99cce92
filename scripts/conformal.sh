#!/usr/bin/env bash
# Conformal sets without and under attack: the tables and the figure of docs/conformal.md. Trains a network under Gaussian noise
# of .25; three times, with other noise and other images that calibrate, scores the test images as they are and under PGD of .25,
# by one noisy pass and by 100.
# Logs, table.csv and figure.png go to logs/conformal/NAME. Takes ten minutes for digits and an hour for CIFAR-10 on two cores.
# SKIP takes every SKIP-th image; more words are options of the training:
#
#   bash scripts/conformal.sh digits digits digits_resnet8 1 --recipe fast
#   bash scripts/conformal.sh cifar10 imagefolder:/data/cifar digits_resnet8 10 --recipe fast --epochs 6 \
#       --horizontal-flip --crop-padding 4
#
# After an interruption the same command continues.
set -euo pipefail
source "$(dirname "$0")/environment.sh"

[ $# -ge 4 ] || fail "give NAME DATASET ARCH SKIP"
name=$1 dataset=$2 arch=$3 skip=$4 made=logs/conformal/$1 model=models/conformal/$1
python code/train.py "$dataset" "$arch" "$model" --noise 0.25 --threads 1 --resume "${@:5}"

score() { # NAME SEED OPTION...
    python code/sets.py "$dataset" "$model/checkpoint.pth.tar" 0.25 "$made/$1_$2.tsv" --radii 0 0.125 0.25 \
        --seed "$2" --skip "$skip" "${@:3}"
}
for seed in 0 1 2; do
    for passes in 1 100; do
        score clean_$passes $seed --N $passes
        score attacked_$passes $seed --N $passes --attack PGD --epsilon 0.25 --num-steps 10 --num-noise-vec 8
    done
done
python scripts/verify_log.py "$made"/*.tsv
python code/analyze.py sets "$made"/*.tsv -o "$made/table.csv"
python code/analyze.py sets "$made"/{clean,attacked}_{1,100}_0.tsv -o "$made/figure.png"
python - "$made/table.csv" <<'PROGRAM'
import sys

import pandas as pd

rows = pd.read_csv(sys.argv[1]).sort_values(["attack", "radius", "passes", "log"])
print("| attack | radius | coverage (%) of three seeds, 1 pass | 100 passes | classes in a set |\n|---|---|---|---|---|")
for (attack, radius), of_both in rows.groupby(["attack", "radius"]):
    covered, sizes = [], []
    for _, of_seeds in of_both.groupby("passes"):
        covered += [
            ", ".join(
                f"{100 * row.coverage:.1f} ({100 * row.coverage_low:.1f}–{100 * row.coverage_high:.1f})"
                for row in of_seeds.itertuples()
            )
        ]
        sizes += [f"{of_seeds['size'].mean():.2f}"]
    print(f"| {attack or 'none'} | {radius:g} | {' | '.join(covered)} | {', '.join(sizes)} |")
PROGRAM
