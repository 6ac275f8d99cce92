#!/usr/bin/env bash
# From a fresh clone to certified accuracies in one command: trains two classifiers on scikit-learn's 8x8 digits, one
# under Gaussian noise and one with SmoothAdv, certifies both on the same test images and compares them.
# Existing models and logs are reused; to start anew: rm -r models/quickstart logs/quickstart
set -euo pipefail
source "$(dirname "$0")/environment.sh"
[ $# = 0 ] || fail "this script takes no arguments, found $1"

sigma=0.25
models=models/quickstart
logs=logs/quickstart

say() { printf '\n== %s\n' "$*"; }

say "1/5  training under Gaussian noise, sigma $sigma (Cohen et al., 2019)"
python code/train.py digits digits_resnet8 $models/gaussian --noise $sigma --resume

say "2/5  training with SmoothAdv, sigma $sigma, attacks of l2 norm 0.5 (Salman et al., 2019)"
python code/train_pgd.py digits digits_resnet8 $models/smoothadv --noise $sigma \
    --attack PGD --epsilon 0.5 --num-steps 4 --num-noise-vec 2 --epochs 30 --lr-step-size 12 --warmup 10 --resume

say "3/5  certifying every second test image with both, 10,000 noise draws each"
for model in gaussian smoothadv; do
    python code/certify.py digits $models/$model/checkpoint.pth.tar $sigma $logs/$model.tsv \
        --skip 2 --N 10000 --resume
done

say "4/5  plotting certified accuracy"
python code/analyze.py plot $logs/gaussian.tsv $logs/smoothadv.tsv -o $logs/certified_accuracy

say "5/5  certified accuracy (%) at each l2 radius, on the same test images"
for file in table.csv table.md; do
    python code/analyze.py table $logs/gaussian.tsv $logs/smoothadv.tsv --radii 0 0.25 0.5 0.75 -o $logs/$file
done
python code/analyze.py summary $logs/gaussian.tsv $logs/smoothadv.tsv --radii 0.25 0.5 0.75 -o $logs/summary.md
cat $logs/table.md
printf '\nThe logs, the tables and the plot are in %s.\n' "$logs"
