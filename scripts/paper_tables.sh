#!/usr/bin/env bash
# Regenerates the tables and figures of the SmoothAdv paper (Salman et al., NeurIPS 2019) from the released logs.
# docs/replication.md says which file holds which table or figure.
#
#   bash scripts/paper_tables.sh LOGDIR [OUTDIR]
#
# LOGDIR is a clone of the released repository, or any part of its data/ and data_cohen/: what is
# missing is named and left out. OUTDIR (default: logs/paper) gets a .md, .tex and .csv file per table and a .png
# and .pdf file per figure.
set -euo pipefail

usage() {
    echo "usage: bash scripts/paper_tables.sh LOGDIR [OUTDIR]; LOGDIR holds the released data/ and data_cohen/" >&2
    exit 2
}
[ $# -eq 1 ] || [ $# -eq 2 ] || usage
logs=$(cd "$1" 2>/dev/null && pwd) || usage
[ -d "$logs/data" ] || [ -d "$logs/data_cohen" ] || usage
start=$PWD
source "$(dirname "$0")/environment.sh"
clone=$PWD
out=${2:-$clone/logs/paper}
case $out in /*) ;; *) out=$start/$out ;; esac
mkdir -p "$out"
cd "$logs" # so that logs are named by the released folders
made=0
exec 3>&1 # for messages about missing logs, which are shown even if the output of the analysis is not

# analyze NAME ARGUMENTS...: runs the analysis on the groups whose logs exist; fails if there are none.
analyze() {
    local name=$1 argument options=() groups=0 present=""
    shift
    for argument in "$@"; do
        # Unquoted, so that a pattern in the path is matched.
        # shellcheck disable=SC2086
        if [[ $argument == *=data* ]] && ! compgen -G "${argument#*=}" >/dev/null; then
            echo "   not there: ${argument#*=}" >&3
            continue
        fi
        if [[ $argument == *=data* ]]; then
            groups=$((groups + 1))
            present+="<${argument%%=*}>"
        elif [[ $argument == --baseline || $argument == --split-baseline || $argument == Cohen ]] \
            && [[ $present != *"<Cohen>"* ]]; then
            continue # without the logs of the baseline, the figure shows the other groups
        fi
        options+=("$argument")
    done
    [ "$groups" -gt 0 ] || return 1
    local messages status=0
    messages=$(mktemp)
    python "$clone/code/analyze.py" "$name" "${options[@]}" 2>"$messages" || status=$?
    grep '^error: ' "$messages" | sed 's/^/   /' >&3 || true
    grep -v '^error: ' "$messages" >>"$out/warnings.txt" || true
    rm -f "$messages"
    return "$status"
}

table() {
    local file=$1
    shift
    echo "== $file"
    analyze "$@" -o "$out/$file.md" -o "$out/$file.tex" -o "$out/$file.csv" || { echo "   left out"; return; }
    made=$((made + 1))
    cat "$out/$file.md"
}

figure() {
    local file=$1
    shift
    echo "== $file"
    analyze "$@" -o "$out/$file.png" >/dev/null || { echo "   left out"; return; }
    made=$((made + 1))
}

: >"$out/warnings.txt"
best=data/certify/best_models
grid=data/certify/cifar10
cohen_cifar=(Cohen=data_cohen/certify/cifar10/resnet110/noise_0.12/test/sigma_0.12
    Cohen=data_cohen/certify/cifar10/resnet110/noise_0.25/test/sigma_0.25
    Cohen=data_cohen/certify/cifar10/resnet110/noise_0.50/test/sigma_0.50
    Cohen=data_cohen/certify/cifar10/resnet110/noise_1.00/test/sigma_1.00)
cohen_imagenet=(Cohen=data_cohen/certify/imagenet/resnet50/noise_0.25/test/sigma_0.25
    Cohen=data_cohen/certify/imagenet/resnet50/noise_0.50/test/sigma_0.50
    Cohen=data_cohen/certify/imagenet/resnet50/noise_1.00/test/sigma_1.00)
replicated_imagenet=(Cohen=data/certify/imagenet/replication)
best_imagenet=(SmoothAdv=$best/imagenet/{PGD_1step,DDN_2steps}/eps_{127,255,512,1024})
grid_imagenet=(SmoothAdv=data/certify/imagenet/PGD_1step/imagenet/eps_{127,255,512,1024,2048}
    SmoothAdv=data/certify/imagenet/DDN_2steps/eps_{127,255,512,1024})
one_sample=(SmoothAdv=$grid/{PGD,DDN}_{2,4,6,8,10}steps)
more_samples=(SmoothAdv=$grid/PGD_{2,10}steps_multiNoiseSamples/{2,4,8}-multitrain/eps_{64,127,255,512}
    SmoothAdv=$grid/DDN_{4,10}steps_multiNoiseSamples/{2,4,8,16}-multitrain/eps_{64,127,255,512})
radii_cifar=(0.25 0.5 0.75 1.0 1.25 1.5 1.75 2.0 2.25)
radii_imagenet=(0.5 1.0 1.5 2.0 2.5 3.0 3.5)
groups_cifar=("Cohen=$best/cifar10/cohen" "SmoothAdv=$best/cifar10/ours" "+ pre-training=$best/cifar10/ours_pretraining"
    "+ semi-supervision=$best/cifar10/ours_selftraining" "+ both=$best/cifar10/ours_pretraining_selftraining")

table table1_imagenet envelope "${cohen_imagenet[@]}" "${best_imagenet[@]}" --radii "${radii_imagenet[@]}"
table table2_cifar10 envelope "${groups_cifar[@]}" --radii "${radii_cifar[@]}"
table table3_cifar10_linf envelope "${groups_cifar[@]}" --norm linf --radii 2/255
table table4_cifar10_abstention envelope "${groups_cifar[@]}" --radii "${radii_cifar[@]}" --show abstention_rate
table table5_imagenet_linf envelope "${cohen_imagenet[@]}" "${best_imagenet[@]}" --norm linf --radii 1/255
table abstention_imagenet envelope "${cohen_imagenet[@]}" "${best_imagenet[@]}" --radii "${radii_imagenet[@]}" \
    --show abstention_rate
table selected_cifar10 envelope "${groups_cifar[@]}" --radii "${radii_cifar[@]}" --show model

figure figure1_left_cifar10 plot_empirical "${cohen_cifar[@]}" "${one_sample[@]}" "${more_samples[@]}" \
    "Cohen=data/predict/predict_cifar_cohen/N10000/*/num_128" \
    "SmoothAdv=data/predict/predict_cifar_ours/N100000/*/num_128"
figure figure1_middle_cifar10 plot_envelope "${cohen_cifar[@]}" "${one_sample[@]}" "${more_samples[@]}" \
    --group-by sigma --baseline Cohen --split-baseline
figure figure1_right_cifar10 plot_envelope "${cohen_cifar[@]}" \
    "SmoothAdv=$grid/PGD_2steps_multiNoiseSamples/8-multitrain/eps_255" \
    --group-by sigma --baseline Cohen --split-baseline
figure figure2_left_imagenet plot_envelope "${replicated_imagenet[@]}" "${grid_imagenet[@]}" --baseline Cohen
figure figure2_middle_imagenet plot_envelope "${replicated_imagenet[@]}" "${grid_imagenet[@]}" \
    --group-by sigma --baseline Cohen --split-baseline
figure figure2_right_imagenet plot_envelope "${replicated_imagenet[@]}" \
    SmoothAdv=data/certify/imagenet/PGD_1step/imagenet/eps_255 --group-by sigma --baseline Cohen --split-baseline
figure figure3_left_attacked_cohen plot_empirical "${cohen_cifar[@]}" Cohen=data/predict/predict_cifar_cohen/N10000 \
    --group-by num_noise_vec
figure figure3_right_attacked_smoothadv plot_empirical "${one_sample[@]}" "${more_samples[@]}" \
    SmoothAdv=data/predict/predict_cifar_ours/N100000 --group-by num_noise_vec
figure figure4_vanilla_pgd plot_envelope "${cohen_cifar[@]}" \
    "SmoothAdv=$grid/PGD_2steps_baseAttackExp/with_noise" \
    "Vanilla PGD=$grid/PGD_2steps_baseAttackExp/without_noise/*/cifar10/resnet110/noise_0.00" \
    "Vanilla PGD + noise=$grid/PGD_2steps_baseAttackExp/without_noise/*/cifar10/resnet110/noise_[!0]*" \
    "Vanilla PGD + noise=$grid/PGD_2steps_baseAttackExp/without_noise/*/cifar10/resnet110/noise_0.[!0]*" \
    --baseline Cohen
figure figure5_number_of_samples plot_envelope "${cohen_cifar[@]}" \
    SmoothAdv=$grid/{DDN_10steps,DDN_4steps,PGD_2steps,PGD_10steps} \
    SmoothAdv=$grid/{DDN_10,DDN_4,PGD_2,PGD_10}steps_multiNoiseSamples/{2,4,8}-multitrain/eps_{64,127,255,512} \
    --group-by num_noise_vec --baseline Cohen
figure figure6_epsilon plot_envelope "${cohen_cifar[@]}" SmoothAdv=$grid/PGD_{2,4,6,8,10}steps \
    SmoothAdv=$grid/PGD_{2,10}steps_multiNoiseSamples/{2,4,8}-multitrain/eps_{64,127,255,512} \
    --group-by epsilon --baseline Cohen
figure figure8_predict_draws_cohen plot_empirical "Cohen=data/predict/predict_cifar_cohen/N1*[05]/*/num_128" \
    --group-by N
figure figure8_predict_draws_smoothadv plot_empirical "SmoothAdv=data/predict/predict_cifar_ours/N1*/*/num_128" \
    --group-by N
figure figure9_gradient_free plot_empirical "${cohen_cifar[@]}" \
    "plug-in=data/predict/predict_cifar_cohen/N10000/*/num_128" \
    "gradient-free=data/predict/predict_cifar_cohen/N10000_nogradtrick" --group-by num_noise_vec

[ -s "$out/warnings.txt" ] && sort -u -o "$out/warnings.txt" "$out/warnings.txt"
[ "$made" -gt 0 ] || fail "$logs holds none of the released logs"
echo "$made tables and figures are in $out; the warnings of the analyses are in $out/warnings.txt"
