#!/usr/bin/env bash
# Runs the tests; installs what they need first. Arguments go to pytest: bash scripts/test.sh tests/test_core.py -x
# With --robust as first argument: a part, which computes with networks in this process, once, under the arithmetic of an
# old CPU, with two threads, another seed of all that tests train, in random order, and on a device that is not the CPU
# unless a test names one (tests/support/stand_in.py). The slowest tests are listed at the end.
set -euo pipefail
SMOOTHADV_EXTRAS=test
source "$(dirname "$0")/environment.sh"

# Two processes with one thread each: most of the time goes into starting commands, which share no work.
export OMP_NUM_THREADS=1
tests=(python -m pytest -n 2 --dist loadscope --durations=40)
[ "${1-}" = --robust ] || exec "${tests[@]}" "$@"

shift
export SMOOTHADV_TEST_DEVICE=standin SMOOTHADV_TEST_SEED=1
export ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 OMP_NUM_THREADS=2
exec "${tests[@]}" --no-loadscope-reorder --random-order-bucket=module --random-order-seed=1 "$@" \
    tests/{api,architectures,attacks,evaluation,models,objectives,training,voting} \
    tests/cli/test_certify.py tests/test_core.py
