#!/usr/bin/env bash
# Compares Gaussian augmentation, Vanilla PGD, Vanilla PGD + noise and SmoothAdv on digits, over seeds and with intervals,
# and writes the tables to docs/replication.md; about an hour of one core, shared by all. Options go to
# benchmarks/digits_comparison.py. Interrupted, it continues; to start anew: rm -r logs/digits_comparison
set -euo pipefail
source "$(dirname "$0")/environment.sh"
exec python benchmarks/digits_comparison.py "$@"
