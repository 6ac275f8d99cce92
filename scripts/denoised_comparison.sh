#!/usr/bin/env bash
# Compares denoised smoothing with training under noise on digits, and writes table and picture to docs/results/denoised.md. Options
# go to benchmarks/denoised_comparison.py. After an interruption it continues; to start anew: rm -r logs/denoised_comparison
set -euo pipefail
SMOOTHADV_EXTRAS=diffusers
source "$(dirname "$0")/environment.sh"
exec python benchmarks/denoised_comparison.py "$@"
