#!/usr/bin/env bash
# Trains and certifies the paper's CIFAR-10 models: sigma x epsilon x T x m, PGD and DDN, and the baselines. Options go to
# `sweep.py run`:
#
#   bash scripts/sweep_cifar10.sh                                     # on this machine, a model per GPU
#   bash scripts/sweep_cifar10.sh --only '*noise_0.25*'               # a part
#   bash scripts/sweep_cifar10.sh --engine slurm --partition gpu      # on a cluster
#
# After an interruption it does what is missing. The grids are in scripts/grids: copy and change them for your own.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
source scripts/sweep_and_report.sh

sweep_and_report logs/sweep_cifar10.html \
    scripts/grids/{vanilla-baselines,paper-cifar10-pgd,paper-cifar10-ddn,paper-cifar10-mtrain}.toml -- "$@"
