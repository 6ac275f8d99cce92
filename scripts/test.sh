#!/usr/bin/env bash
# Runs the tests; installs what they need first. Arguments go to pytest: bash scripts/test.sh tests/test_core.py -x
set -euo pipefail
SMOOTHADV_EXTRAS=test
source "$(dirname "$0")/environment.sh"

# Two processes with one thread each: most of the time goes into starting commands, which share no work.
export OMP_NUM_THREADS=1
exec python -m pytest -n 2 --dist loadscope "$@"
