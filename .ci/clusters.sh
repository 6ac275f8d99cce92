#!/usr/bin/env bash
# The worst that can happen to a sweep on a cluster: a preempted and a killed job of Slurm, after an attempt to install
# it, and a node of Ray that is lost. What cannot run is skipped, and pytest says why. All tests of clusters, 20 minutes:
# bash scripts/test.sh -m slow tests/sweep
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v slurmctld >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get update && apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge; } \
        >/tmp/slurm-installation.log 2>&1 || echo "Slurm cannot be installed here: $(tail -n 1 /tmp/slurm-installation.log)"
fi
bash scripts/test.sh -m slow -rs -k "preempted_jobs or killed_job or lost_node_are or sweep_starts_ray" \
    tests/sweep/test_slurm.py tests/sweep/test_ray.py
