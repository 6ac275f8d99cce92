#!/usr/bin/env bash
# Classifiers behind a diffusion model of OpenAI's form, on digits: the table in docs/results/denoised.md.
#     bash scripts/diffusion_digits.sh [FOLDER]
set -euo pipefail
code=$(cd "$(dirname "$0")/.." && pwd)/code
out=${1:-models/diffusion_digits}
mkdir -p "$out"
run() { python "$code/$1.py" "${@:2}" --device cpu --resume; }

unet=$out/unet.pt
[ -e "$unet" ] || python "$code/../scripts/train_diffusion.py" "$unet"
train() { run train digits digits_resnet8 "$out/$1" "${@:2}" --evaluate-every 10; }
train clean --noise 0 --epochs 30 --lr-schedule one-cycle
run train_pgd digits digits_resnet8 "$out/smoothadv" --noise 0.25 --attack PGD --epsilon 0.5 \
    --num-steps 2 --num-noise-vec 2 --epochs 40 --lr-schedule one-cycle --evaluate-every 10
behind() {
    train "$1" --noise 0.5 --denoiser "openai:$unet" --epochs 20 --lr 0.02 \
        --pretrained-model "$out/clean/checkpoint.pth.tar" "${@:2}"
}
behind tuned --lr-schedule one-cycle
behind ft-cadis --objective ft-cadis --noise-epsilon 0.25 --clip-gradients 0.3 \
    --lr-schedule cosine --lr-rise 2

# NAME MODEL OPTIONS: of all test images, at sigma .5
certify() {
    run certify digits "$out/$2/checkpoint.pth.tar" 0.5 "$out/$1.tsv" --N 400 "${@:3}"
}
certify clean clean
certify smoothadv smoothadv
behind=(--denoiser "openai:$unet")
certify clean-denoised clean "${behind[@]}"
certify smoothadv-denoised smoothadv "${behind[@]}"
certify diffsmooth smoothadv "${behind[@]}" --local-noise 0.25
certify tuned tuned "${behind[@]}"
certify ft-cadis ft-cadis "${behind[@]}"

# Certificates are recomputed from their counts, and attacked through the denoiser.
attack() {
    run attack digits "$out/$2/checkpoint.pth.tar" 0.5 "$out/attacked-$1" --against "$out/$1.tsv" \
        --num-steps 4 --num-noise-vec 4 --N 400 --skip 10 "${behind[@]}" "${@:3}"
}
attack clean-denoised clean
attack diffsmooth smoothadv --local-noise 0.25
attack ft-cadis ft-cadis
python "$code/../scripts/verify_log.py" "$out"/*.tsv
cd "$out"
table() { python "$code/analyze.py" "$@"; }
table table {clean,clean-denoised,smoothadv,smoothadv-denoised,diffsmooth,tuned,ft-cadis}.tsv \
    --radii 0 0.25 0.5 0.75
table compare clean-denoised.tsv ft-cadis.tsv
table compare smoothadv-denoised.tsv diffsmooth.tsv
