#!/usr/bin/env bash
# Attacks the quickstart's two models with every attack at the same epsilons, on the same 300 test images, and prints the
# results beside their certificates: the tables of docs/results/attacks.md. Takes half an hour on two cores. After an interruption
# it continues; to start anew: rm -r logs/attack_comparison
set -euo pipefail
source "$(dirname "$0")/environment.sh"
[ $# = 0 ] || fail "this script takes no arguments, found $1"

sigma=0.25
out=logs/attack_comparison
epsilons="0.25 0.5 0.75"
[ -e models/quickstart/smoothadv/checkpoint.pth.tar ] || bash scripts/quickstart.sh

attack() { # MODEL NAME OPTION...
    python code/attack.py digits "models/quickstart/$1/checkpoint.pth.tar" $sigma "$out/$1/$2" \
        --epsilon $epsilons --num-steps 20 --max 300 --N 2000 "${@:3}"
}

attacks() { # MODEL
    python code/certify.py digits "models/quickstart/$1/checkpoint.pth.tar" $sigma "$out/$1/certified.tsv" --max 300 --N 10000
    for m in 1 8 64; do
        attack "$1" plug_in_$m --num-noise-vec $m
        attack "$1" stein_$m --gradient stein --num-noise-vec $m
    done
    attack "$1" base --gradient base
    attack "$1" expected_loss_64 --gradient expected-loss --num-noise-vec 64
    attack "$1" ddn_64 --attack DDN --num-noise-vec 64
    attack "$1" restarts --num-noise-vec 64 --restarts 3
}

attacks gaussian &
attacks smoothadv
wait %1

for model in gaussian smoothadv; do
    here=$out/$model
    python code/analyze.py empirical "$here" --group-by attack gradient num_noise_vec restarts --confidence 0.95 -o "$here/attacked.md"
    python code/analyze.py gap "$here" -o "$here/gap.md"
    python code/analyze.py plot_empirical "certified=$here/certified.tsv" "stein, 64 draws=$here/stein_64" \
        "plug-in, 1 draw=$here/plug_in_1" "plug-in, 8 draws=$here/plug_in_8" "base classifier=$here/base" \
        "plug-in, 64 draws=$here/plug_in_64" --confidence 0.95 -o "$here/attacked"
    for pair in plug_in_1:plug_in_8 plug_in_8:plug_in_64 plug_in_64:restarts expected_loss_64:plug_in_64 base:plug_in_1 \
        ddn_64:plug_in_64 stein_1:stein_64 stein_64:plug_in_64 stein_64:base; do
        python code/analyze.py compare "$here/${pair%:*}/epsilon_0.5.tsv" "$here/${pair#*:}/epsilon_0.5.tsv" \
            -o "$here/compare_${pair/:/_}.md"
    done
    cat "$here/attacked.md" "$here/gap.md"
done
