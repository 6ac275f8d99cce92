#!/usr/bin/env bash
# Checks types, style and formatting; installs what that needs first.
set -euo pipefail
SMOOTHADV_EXTRAS=test
source "$(dirname "$0")/environment.sh"

sources=(code tests benchmarks scripts .ci setup.py) # ruff does not look into folders like .ci by itself
python -m mypy
ruff check "${sources[@]}"
ruff format --check "${sources[@]}"
