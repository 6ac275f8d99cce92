#!/usr/bin/env bash
# Compares Gaussian augmentation, Vanilla PGD, Vanilla PGD + noise and SmoothAdv on digits, over seeds and with intervals,
# and writes the tables to docs/results/digits.md. Takes about an hour of one core, which all cores share. Options go to
# benchmarks/digits_comparison.py. After an interruption it continues; to start anew: rm -r logs/digits_comparison
set -euo pipefail
source "$(dirname "$0")/environment.sh"
exec python benchmarks/digits_comparison.py "$@"
