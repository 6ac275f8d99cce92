#!/usr/bin/env bash
# Sweeps on clusters, each with a fault: jobs of Slurm that are preempted, after an attempt to install it, and a node of
# Ray that is lost. What cannot run is skipped, and pytest says why. All tests of clusters, half an hour:
# bash scripts/test.sh -m slow tests/sweep
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v slurmctld >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get update && apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge; } \
        >/tmp/slurm-installation.log 2>&1 || echo "Slurm cannot be installed here: $(tail -n 1 /tmp/slurm-installation.log)"
fi
# In one process, since all are compared with one undisturbed sweep.
bash scripts/test.sh -n 1 -m slow -rs tests/sweep/test_slurm.py::test_preempted_jobs_go_on \
    "tests/sweep/test_ray.py::test_jobs_of_a_lost_node_are_done_on_another[node]"
