#!/usr/bin/env bash
# Trains and certifies the paper's ImageNet models. Options go to `sweep.py run`; IMAGENET_DIR, or --data-dir DIR among
# them, says where the images are:
#
#   IMAGENET_DIR=/datasets/imagenet bash scripts/sweep_imagenet.sh --engine slurm --partition gpu
#
# Interrupted, it continues with what is missing.
set -euo pipefail
source "$(dirname "$0")/environment.sh"

python code/sweep.py run scripts/grids/paper-imagenet.toml "$@"
python code/sweep.py report scripts/grids/paper-imagenet.toml -o logs/sweep_imagenet.html
