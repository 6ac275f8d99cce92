#!/usr/bin/env bash
# Runs the tests; installs what they need first. Arguments go to pytest: bash scripts/test.sh tests/test_core.py -x
# With --robust as first argument: only those that compute with networks, and these several times, under the arithmetic
# of other CPUs, with two threads, with other seeds of all that tests train, and in random orders.
set -euo pipefail
SMOOTHADV_EXTRAS=test
source "$(dirname "$0")/environment.sh"

# Two processes with one thread each: most of the time goes into starting commands, which share no work.
export OMP_NUM_THREADS=1
tests=(python -m pytest -n 2 --dist loadscope)
[ "${1-}" = --robust ] || exec "${tests[@]}" "$@"

shift
tests+=(--no-loadscope-reorder --random-order-bucket=module "$@"
    tests/{api,architectures,attacks,cli,evaluation,exact,models,objectives,training}
    tests/voting tests/test_{core,killing,sweep_scripts}.py
    tests/test_training_{chosen,killed,stopped}.py)
failed=0

# under SEED VARIABLE=VALUE...: with this seed of trainings and of the order.
under() {
    echo "== ${*:2} SMOOTHADV_TEST_SEED=$1"
    env SMOOTHADV_TEST_SEED="$1" "${@:2}" "${tests[@]}" --random-order-seed="$1" || failed=1
}

under 1 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2
under 2 ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 OMP_NUM_THREADS=2
exit $failed
