#!/usr/bin/env bash
# Denoised smoothing in one command: trains a classifier of scikit-learn's 8x8 digits without noise and a denoiser, and
# certifies the classifier alone and behind the denoiser on the same test images. docs/denoised.md says more.
# Existing models and logs are reused; to start anew: rm -r models/denoised logs/denoised
set -euo pipefail
source "$(dirname "$0")/environment.sh"
[ $# = 0 ] || fail "this script takes no arguments, found $1"

sigma=0.25
models=models/denoised
logs=logs/denoised
classifier=$models/classifier/checkpoint.pth.tar
denoiser=$models/denoiser/checkpoint.pth.tar

say() { printf '\n== %s\n' "$*"; }

say "1/4  training a classifier without noise"
python code/train.py digits digits_resnet8 $models/classifier --noise 0 --epochs 30 --lr-step-size 10 --resume

say "2/4  training a denoiser for noise of $sigma, by mean squared error (Salman et al., 2020)"
python code/train_denoiser.py digits digits_dncnn $models/denoiser --noise $sigma --recipe denoiser --epochs 40 \
    --lr-step-size 15 --classifier $classifier --resume

say "3/4  certifying every second test image alone and behind the denoiser, 1,000 noise draws each"
python code/certify.py digits $classifier $sigma $logs/alone.tsv --skip 2 --N 1000
python code/certify.py digits $classifier $sigma $logs/denoised.tsv --skip 2 --N 1000 --denoiser $denoiser

say "4/4  certified accuracy (%) at each l2 radius, on the same test images"
python code/analyze.py table alone=$logs/alone.tsv denoised=$logs/denoised.tsv --radii 0 0.25 0.5 -o $logs/table.md
cat $logs/table.md
printf '\nThe models are in %s, the logs and the table in %s.\n' "$models" "$logs"
