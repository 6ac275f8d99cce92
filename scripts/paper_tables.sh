#!/usr/bin/env bash
# Regenerates the tables and figures of the SmoothAdv paper (Salman et al., NeurIPS 2019) from the released logs.
# docs/replication.md says which file holds which table or figure.
#
#   bash scripts/paper_tables.sh LOGDIR [OUTDIR]
#
# LOGDIR is a clone of the released repository, or any part of its data/ and data_cohen/: what is
# missing is named and left out. OUTDIR (default: logs/paper) gets a .md, .tex and .csv file per table, a .png
# and .pdf file per figure, a verdict on each cell that the paper prints (verdicts.md, verdicts.csv) and
# cannot_be_made.md. If a table or a figure fails although its logs are there, the exit code is 1.
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
made=() failed=() missing=()
exec 3>&1 # for messages about missing logs, which are shown even if the output of the analysis is not

# holds_file PATTERN: whether a file matches, or lies in a folder that matches.
holds_file() {
    # Unquoted, so that a pattern in the path is matched.
    # shellcheck disable=SC2086
    compgen -G "$1" >/dev/null && [ -n "$(find -L $1 -type f -print -quit)" ]
}

# analyze FILE NAME ARGUMENTS...: runs the analysis NAME for FILE on the groups whose logs exist. If logs that it cannot do
# without are missing, nothing is made; if it fails, FILE is added to those that failed.
analyze() {
    local file=$1 name=$2 argument options=() present="" attacks=0
    shift 2
    for argument in "$@"; do
        if [[ $argument == *=data* ]] && ! holds_file "${argument#*=}"; then
            [[ " ${missing[*]} " == *" ${argument#*=} "* ]] || echo "   not there: ${argument#*=}" >&3
            missing+=("${argument#*=}")
            continue
        fi
        if [[ $argument == *=data* ]]; then
            present+="<${argument%%=*}>"
            [[ $argument != *=data/predict/* ]] || attacks=1
        elif [[ $argument == --baseline || $argument == --split-baseline || $argument == Cohen ]] \
            && [[ $present != *"<Cohen>"* ]]; then
            continue # without the logs of the baseline, the figure shows the other groups
        fi
        options+=("$argument")
    done
    if [[ -z $present || ($name == plot_envelope && -z ${present//<Cohen>/}) ]] \
        || [[ $name == plot_empirical && $attacks = 0 ]]; then
        echo "   left out: its logs are not there" >&3
        return 1
    fi
    local messages status=0
    messages=$(mktemp)
    python "$clone/code/analyze.py" "$name" "${options[@]}" --debug 2>"$messages" || status=$?
    grep -v '^error: ' "$messages" >>"$out/warnings.txt" || true
    if [ "$status" -eq 0 ]; then
        made+=("$file")
    else
        failed+=("$file")
        { echo "== $file" && cat "$messages"; } >>"$out/errors.txt"
        echo "   failed: $(tail -n 1 "$messages")" >&3
    fi
    rm -f "$messages"
    return "$status"
}

# table FILE NAME ARGUMENTS...
table() {
    echo "== $1"
    analyze "$@" -o "$out/$1.md" -o "$out/$1.tex" -o "$out/$1.csv" || return 0
    [ "$2" = table ] || cat "$out/$1.md" # those with a row per model are long
}

figure() {
    echo "== $1"
    analyze "$@" -o "$out/$1.png" >/dev/null || true
}

# models FILE GROUP=LOG...: a row for each model that was trained, at the radii of the paper.
models() {
    local radii=("${radii_cifar[@]}")
    [[ $1 != *imagenet* ]] || radii=("${radii_imagenet[@]}")
    table "$1" table "${@:2}" --label-by sigma epsilon --radii 0 "${radii[@]}"
}

rm -f "$out/errors.txt"
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

models table6_imagenet "${cohen_imagenet[@]}" SmoothAdv-PGD=data/certify/imagenet/PGD_1step \
    SmoothAdv-DDN=data/certify/imagenet/DDN_2steps
models table7_cifar10_2steps "${cohen_cifar[@]}" SmoothAdv-{PGD=$grid/PGD,DDN=$grid/DDN}_2steps
models table8_cifar10_4steps "${cohen_cifar[@]}" SmoothAdv-{PGD=$grid/PGD,DDN=$grid/DDN}_4steps
models table9_cifar10_6steps "${cohen_cifar[@]}" SmoothAdv-{PGD=$grid/PGD,DDN=$grid/DDN}_6steps
number=10
for attack in DDN_4steps DDN_10steps PGD_2steps PGD_10steps; do
    several=$grid/${attack}_multiNoiseSamples
    models "table${number}_cifar10_${attack,,}" "${cohen_cifar[@]}" "1 sample=$grid/$attack" \
        {"2 samples=$several/2","4 samples=$several/4","8 samples=$several/8"}-multitrain/eps_{64,127,255,512}
    number=$((number + 1))
done

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
[ "${#made[@]}" -gt 0 ] || [ "${#failed[@]}" -gt 0 ] || fail "$logs holds none of the released logs"
{
    echo "# What cannot be made from the released logs, and why"
    sed -n '/<!-- cannot be made: begin -->/,/<!-- cannot be made: end -->/{/<!--/!p}' "$clone/docs/replication.md"
    printf '## Released logs that LOGDIR lacks\n\n'
    if [ "${#missing[@]}" -eq 0 ]; then echo none; else printf -- '- %s\n' "${missing[@]}" | sort -u; fi
} >"$out/cannot_be_made.md"
echo "${#made[@]} tables and figures are in $out; the warnings of the analyses are in $out/warnings.txt"
python "$clone/scripts/paper_verdicts.py" "$out" "${made[@]}"
echo "each cell beside the paper's is in $out/verdicts.md, what the logs cannot give in $out/cannot_be_made.md"
[ "${#failed[@]}" -eq 0 ] \
    || fail "${#failed[@]} tables or figures could not be made, as the tracebacks in $out/errors.txt say: ${failed[*]}"
