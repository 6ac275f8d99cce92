#!/usr/bin/env bash
# Trains and certifies the paper's ImageNet models. Options go to `sweep.py run`; IMAGENET_DIR, or the option --data-dir
# DIR, says where the images are:
#
#   IMAGENET_DIR=/datasets/imagenet bash scripts/sweep_imagenet.sh --engine slurm --partition gpu
#
# After an interruption it does what is missing.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
source scripts/sweep_and_report.sh

sweep_and_report logs/sweep_imagenet.html scripts/grids/paper-imagenet.toml -- "$@"
