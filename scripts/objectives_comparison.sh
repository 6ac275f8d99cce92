#!/usr/bin/env bash
# Compares all training objectives on digits, for as many epochs each and at equal cost, over seeds and with intervals, and
# writes tables and curves to docs/results/objectives.md. Takes about four hours of one core, which all cores share. Options go to
# benchmarks/objectives_comparison.py. After an interruption it continues; to start anew: rm -r logs/objectives_comparison
set -euo pipefail
source "$(dirname "$0")/environment.sh"
exec python benchmarks/objectives_comparison.py "$@"
