#!/usr/bin/env bash
# Runs the tests that need a cluster: Slurm's, after an attempt to install it, and Ray's. What cannot run is skipped, and
# pytest says why.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v slurmctld >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get update && apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge; } \
        >/tmp/slurm-installation.log 2>&1 || echo "Slurm cannot be installed here: $(tail -n 1 /tmp/slurm-installation.log)"
fi
bash scripts/test.sh -m slow -rs tests/sweeps/test_slurm.py tests/sweeps/test_ray.py
