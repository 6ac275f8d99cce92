#!/usr/bin/env bash
# A cascade on CIFAR-10 beside its stages (docs/cascades.md): SmoothAdv trains a ResNet-20 at sigma .5 and one at .25, both and
# their cascade are certified on 500 test images, the cascade's certificates are attacked, and tables go to logs/cifar10_cascade.
# Takes about four hours on two cores. More words are options of both trainings:
#
#   bash scripts/cifar10_cascade.sh
#   DATASET=imagefolder:/data/cifar bash scripts/cifar10_cascade.sh --crop-padding 4 --horizontal-flip   # your own copy
#
# After an interruption the same command continues. To start anew: rm -r models/cifar10_cascade logs/cifar10_cascade
set -euo pipefail
source "$(dirname "$0")/environment.sh"

made=logs/cifar10_cascade models=models/cifar10_cascade dataset=${DATASET:-cifar10}
mkdir -p $made $models

trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
say() { printf '\n== %s\n' "$*"; }

train() { # SIGMA OPTION...
    python code/train_pgd.py "$dataset" cifar_resnet20 "$models/sigma_$1" --recipe fast --noise "$1" \
        --attack PGD --epsilon 0.5 --num-steps 1 --threads 1 --resume "${@:2}" >"$made/train_$1.txt" 2>&1 \
        || fail "the training at sigma $1 failed: $made/train_$1.txt says why"
}

certify() { # MODEL SIGMA NAME
    python code/certify.py "$dataset" "$1" "$2" "$made/$3.tsv" --method sequential --N 8000 --skip 20
}

say "1/4  training; logs are $made/train_*.txt"
train 0.5 "$@" &
train 0.25 "$@"
wait $! || exit 1

say "2/4  certifying both models and their cascade"
{
    echo "threshold = 0.7"
    for sigma in 0.5 0.25; do
        printf '[[stage]]\ncheckpoint = "sigma_%s/checkpoint.pth.tar"\nsigma = %s\n' $sigma $sigma
    done
} >$models/cascade.toml
for sigma in 0.5 0.25; do
    certify $models/sigma_$sigma/checkpoint.pth.tar $sigma sigma_$sigma
done
certify $models/cascade.toml stages cascade

say "3/4  attacking the cascade's certificates"
python code/attack.py "$dataset" $models/cascade.toml stages $made/falsified --against $made/cascade.tsv \
    --num-noise-vec 16 --num-steps 10 --N 1000

say "4/4  certified accuracy (%) at each l2 radius, on the same test images"
radii=(0 0.25 0.5 0.75 1 1.25)
logs=("sigma .5=$made/sigma_0.5.tsv" "sigma .25=$made/sigma_0.25.tsv" "cascade=$made/cascade.tsv")
python code/analyze.py table "${logs[@]}" --radii "${radii[@]}" --confidence 0.95 -o $made/table.md
for sigma in 0.5 0.25; do
    python code/analyze.py compare "$made/sigma_$sigma.tsv" $made/cascade.tsv --radii "${radii[@]}" -o $made/compare_$sigma.md
done
cat $made/table.md $made/compare_*.md
