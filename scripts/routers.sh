#!/usr/bin/env bash
# Routers on CIFAR-10 beside their stages (docs/cascades.md): a small ResNet at each noise level, trained with Gaussian noise for
# few epochs and certified on 2,500 training images, with n = 100; from these logs a router by the best stage of each image and one by the
# recipe "router", with the same schedule; all are certified on 400 test images, and tables go to logs/routers.
# Takes about an hour and a half on one core. More words are options of all trainings:
#
#   bash scripts/routers.sh
#   DATASET=imagefolder:/data/cifar bash scripts/routers.sh --crop-padding 4 --horizontal-flip   # your own copy
#
# After an interruption the same command continues. To start anew: rm -r models/routers logs/routers
set -euo pipefail
source "$(dirname "$0")/environment.sh"

made=logs/routers models=models/routers dataset=${DATASET:-cifar10} sigmas=(0.5 0.25)
mkdir -p $made $models
say() { printf '\n== %s\n' "$*"; }

train() { # MODEL OPTION...
    python code/train.py "$dataset" digits_resnet8 "$models/$1" --threads 1 --resume "${@:2}" >"$made/train_$1.txt" 2>&1 \
        || fail "the training of $1 failed: $made/train_$1.txt says why"
}

certify() { # MODEL SIGMA LOG OPTION...
    python code/certify.py "$dataset" "$models/$1" "$2" "$made/$3.tsv" --threads 1 "${@:4}"
}

say "1/4  training the stages; logs are $made/train_*.txt"
for sigma in "${sigmas[@]}"; do
    train sigma_$sigma --noise $sigma --recipe fast --epochs 6 "$@"
done

say "2/4  certifying the stages, on training images to train routers, and on test images"
for sigma in "${sigmas[@]}"; do
    certify sigma_$sigma/checkpoint.pth.tar $sigma train_$sigma --split train --skip 20 --N 100 --N0 20
    certify sigma_$sigma/checkpoint.pth.tar $sigma sigma_$sigma --method sequential --skip 25 --N 1000
done

say "3/4  training routers and certifying them"
logs=("${sigmas[@]/#/$made/train_}")
schedule=(--noise 0.5 --recipe router --epochs 30 --lr-step-size 10)
train hard "${schedule[@]}" --objective gaussian --route-labels hard --route-weights even "$@" --route "${logs[@]/%/.tsv}"
train router "${schedule[@]}" "$@" --route "${logs[@]/%/.tsv}"
for router in hard router; do
    {
        printf '[router]\ncheckpoint = "%s/checkpoint.pth.tar"\nsigma = 0.5\n' $router
        printf '[[stage]]\ncheckpoint = "sigma_%s/checkpoint.pth.tar"\nsigma = %s\n' 0.5 0.5 0.25 0.25
    } >$models/$router.toml
    certify $router.toml stages $router --method sequential --skip 25 --N 1000
done

say "4/4  certified accuracy (%) at each l2 radius, on the same test images"
radii=(0 0.25 0.5 0.75 1)
named=("sigma .5=$made/sigma_0.5.tsv" "sigma .25=$made/sigma_0.25.tsv" "router, hard labels=$made/hard.tsv"
    "router of Dual RS=$made/router.tsv")
python code/analyze.py table "${named[@]}" --radii "${radii[@]}" --confidence 0.95 -o $made/table.md
for other in hard sigma_0.5 sigma_0.25; do
    python code/analyze.py compare $made/$other.tsv $made/router.tsv --radii "${radii[@]}" -o $made/compare_$other.md
done
cat $made/table.md $made/compare_*.md
