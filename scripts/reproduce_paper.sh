#!/usr/bin/env bash
# Runs the paper's grids (Salman et al., NeurIPS 2019): prints the jobs and their estimated time, trains and certifies
# all models, and writes a page with tables, curves and heat maps.
#
#   bash scripts/reproduce_paper.sh WHAT [OPTION of `sweep.py run`...]
#
# WHAT is cifar10 (664 models), released (424 of these, of which the authors released logs), cohen (the 4 models of Cohen et al., and the
# paper's attacks on them), imagenet (27), extras (pre-training and self-training on CIFAR-10: 816), or digits (8), which shows in some
# minutes on two cores that everything works. The estimate is for all models, one at a time on this machine.
# docs/replication.md lists the paper's tables with their commands. After an interruption it does what is missing.
set -euo pipefail
grids() { printf 'scripts/grids/%s.toml\n' "$@"; }
case ${1-} in
    cifar10) all=$(grids vanilla-baselines paper-cifar10-pgd paper-cifar10-ddn paper-cifar10-mtrain) ;;
    released) all=$(grids vanilla-baselines paper-cifar10-pgd paper-cifar10-ddn released-cifar10-mtrain) ;;
    cohen) all=$(grids cohen-cifar10) ;;
    imagenet) all=$(grids paper-imagenet) ;;
    extras) all=$(grids pretraining finetune selftraining) ;;
    digits) all=$(grids digits-smoke) ;;
    *)
        echo "usage: bash scripts/reproduce_paper.sh cifar10|released|cohen|imagenet|extras|digits [OPTION of sweep.py run...]" >&2
        exit 2
        ;;
esac
what=$1
shift
source "$(dirname "$0")/environment.sh"
source scripts/sweep_and_report.sh

mapfile -t all <<<"$all"
python code/sweep.py plan "${all[@]}"
if [ "$what" = extras ]; then # the others start from these models
    python code/sweep.py run "${all[0]}" "$@"
fi
sweep_and_report "logs/reproduced_$what.html" "${all[@]}" -- "$@"
