#!/usr/bin/env bash
# A real CIFAR-10 result in hours on two cores, or minutes on a GPU: trains a ResNet-20 under Gaussian noise and one with
# SmoothAdv (scripts/grids/cifar10-small.toml), certifies both on 500 test images, attacks every certificate, and writes a table,
# a figure and a report to logs/cifar10_small. First it says how long that takes here. Options go to `sweep.py run`:
#
#   bash scripts/cifar10_small.sh
#   PRECISION=bf16 bash scripts/cifar10_small.sh                       # a processor with AMX, or a GPU
#   DATASET=imagefolder:/data/cifar bash scripts/cifar10_small.sh      # images of your own copy
#
# After an interruption it continues, with the same DATASET and PRECISION. To start anew: rm -r models/cifar10-small
# logs/cifar10-small logs/cifar10_small
set -euo pipefail
source "$(dirname "$0")/environment.sh"

made=logs/cifar10_small
grid=$made/cifar10-small.toml
mkdir -p $made
sed -e "s#\"cifar10\"#\"${DATASET:-cifar10}\"#; s#\"fp32\"#\"${PRECISION:-fp32}\"#" scripts/grids/cifar10-small.toml >$grid.new
[ ! -e $grid ] || cmp -s $grid $grid.new || { rm $grid.new && fail "$made is of another DATASET or PRECISION: set those of $grid, or start anew"; }
mv $grid.new $grid

say() { printf '\n== %s\n' "$*"; }

say "1/4  what there is to do, and how long it takes on this machine"
python code/sweep.py plan $grid

say "2/4  training and certifying"
python -c 'import sys, torch; sys.exit(torch.cuda.is_available())' && jobs=(--jobs 2) || jobs=()
python code/sweep.py run $grid ${jobs[@]+"${jobs[@]}"} "$@"

say "3/4  attacking the certificates"
gaussian=$(find logs/cifar10-small/gaussian -name 'sigma_*.tsv')
smoothadv=$(find logs/cifar10-small/PGD_2steps -name 'sigma_*.tsv')
for log in "$gaussian" "$smoothadv"; do
    model=$(dirname "$(dirname "${log#logs/}")")
    python code/attack.py "${DATASET:-cifar10}" "models/$model/checkpoint.pth.tar" 0.25 "$made/falsified/${model#*/}" \
        --against "$log" --precision "${PRECISION:-fp32}" --num-noise-vec 16 --N 1000
done

say "4/4  certified accuracy (%) at each l2 radius, on the same test images"
python code/analyze.py plot "Gaussian=$gaussian" "SmoothAdv=$smoothadv" --confidence 0.95 -o $made/certified_accuracy
for file in table.csv table.md; do
    python code/analyze.py table "Gaussian=$gaussian" "SmoothAdv=$smoothadv" --radii 0 0.25 0.5 0.75 --confidence 0.95 -o $made/$file
done
python code/analyze.py compare "$gaussian" "$smoothadv" --radii 0 0.25 0.5 0.75 -o $made/compare.md
python code/sweep.py report $grid -o $made/report.html
cat $made/table.md
echo
cat $made/compare.md
printf '\nThe tables, the figure and report.html are in %s.\n' "$made"
