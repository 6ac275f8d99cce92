#!/usr/bin/env bash
# Makes cards of released logs in docs/board, and the ranking of docs/board.md from the cards.
#
#   bash scripts/board.sh CLONES     # cards of the logs in the clones that are there; then as below
#   bash scripts/board.sh            # rankings of docs/board; cards of logs/quickstart, if it is there, go to logs/board
#   bash scripts/board.sh check      # every entry with a log, docs/board/NAME.tsv, has the card docs/board/NAME.json
#
# CLONES holds clones under the names of their repositories: eth-sri/acr-weakness, alinlab/smoothing-catrs,
# jh-jeong/smoothing-consistency, jh-jeong/smoothmix, Hadisalman/smoothing-adversarial, locuslab/smoothing. Logs without counts of
# votes cannot be recomputed: their cards say so.
set -euo pipefail
[ $# -le 1 ] || { echo "usage: bash scripts/board.sh [CLONES | check]" >&2 && exit 2; }
clones=${1:+$([ "$1" = check ] || realpath "$1")}
source "$(dirname "$0")/environment.sh"

if [ "${1-}" = check ]; then
    shopt -s nullglob
    for log in docs/board/*.tsv; do
        python code/analyze.py card "$log" --check "${log%.tsv}.json"
    done
    exit
fi

# of OWNER/REPOSITORY: the logs that follow are of this clone.
of() { repository=$1 && folder=$clones/${1#*/}/data; [ -d "$folder" ] || echo "   not there: $folder" >&2; }

# card LOG SIGMA ARCHITECTURE NAME PAPER [EXTRA_DATA]
card() {
    [ -f "$folder/$1" ] || return 0
    python code/analyze.py card "$folder/$1" -o docs/board --fact "sigma=$2" "arch=$3" --method-name "$4" \
        --paper "$5" --url "https://github.com/$repository" ${6:+--extra-data "$6"}
}

salman="Salman et al., 2019" cohen="Cohen et al., 2019" sun="Sun et al., 2024" jeong="Jeong and Shin, 2020"
if [ -n "$clones" ]; then
    of eth-sri/acr-weakness
    for sigma in 0.25 0.5 1.0; do
        path=certify/cifar10/%s/noise_$sigma.tsv
        for method in "ours;ACR weakness;$sun" "gaussian;Gaussian;$cohen, by $sun" "macer;MACER;Zhai et al., 2020, by $sun" \
            "consistency;Consistency;$jeong, by $sun" "smoothadv;SmoothAdv;$salman, by $sun" \
            "smoothmix;SmoothMix;Jeong et al., 2021, by $sun"; do
            IFS=';' read -r place name paper <<<"$method"
            # shellcheck disable=SC2059
            card "$(printf "$path" "$place")" $sigma resnet110 "$name" "$paper"
        done
    done
    for sigma in 0.5 1.0; do
        card certify/imagenet/ours/noise_$sigma.tsv $sigma resnet50 "ACR weakness" "$sun"
        card certify/imagenet/smoothmix/noise_$sigma.tsv $sigma resnet50 SmoothMix "Jeong et al., 2021"
    done
    card certify/imagenet/ours/noise_0.25 0.25 resnet50 "ACR weakness" "$sun"

    of alinlab/smoothing-catrs
    for sigma in 0.25 0.5 1.0; do
        card cifar10/noise_$sigma/cat-rs/noise_$sigma.tsv $sigma resnet110 CAT-RS "Jeong et al., 2023"
    done
    card imagenet/noise_1.0.tsv 1 resnet50 CAT-RS "Jeong et al., 2023"

    of jh-jeong/smoothing-consistency
    path=certify/cifar10/consistency
    card $path/cohen/num_2/lbd_20.0/eta_0.5/cifar_resnet110/noise_0.25 0.25 resnet110 Consistency "$jeong"
    card $path/cohen/num_2/lbd_10.0/eta_0.5/cifar_resnet110/noise_0.50 0.5 resnet110 Consistency "$jeong"
    card $path/cohen/num_2/lbd_10.0/eta_0.5/cifar_resnet110/noise_1.00 1 resnet110 Consistency "$jeong"
    card $path/salman_255.0_10_10/num_4/lbd_2.0/eta_0.5/cifar_resnet110/noise_0.25 0.25 resnet110 "Consistency + SmoothAdv" "$jeong"
    card $path/salman_512.0_10_10/num_2/lbd_1.0/eta_0.5/cifar_resnet110/noise_0.50 0.5 resnet110 "Consistency + SmoothAdv" "$jeong"
    card $path/salman_512.0_10_10/num_2/lbd_1.0/eta_0.5/cifar_resnet110/noise_1.00 1 resnet110 "Consistency + SmoothAdv" "$jeong"
    path=certify/imagenet/consistency/cohen/num_2/lbd_5.0
    card $path/eta_0.5/noise_0.50 0.5 resnet50 Consistency "$jeong"
    card $path/eta_0.1/noise_1.00 1 resnet50 Consistency "$jeong"

    of jh-jeong/smoothmix
    card certify/cifar10/smoothmix/noise_0.25 0.25 resnet110 SmoothMix "Jeong et al., 2021"
    card certify/cifar10/smoothmix/noise_0.5_adv 0.5 resnet110 SmoothMix "Jeong et al., 2021"

    of Hadisalman/smoothing-adversarial
    path=certify/best_models/cifar10
    for sigma in 0.25 0.50 1.00; do
        card $path/cohen/resnet110/noise_$sigma/test/sigma_$sigma $sigma resnet110 Gaussian "$cohen"
    done
    both=$path/ours_pretraining_selftraining/cifar10/finetune_cifar_from_imagenetPGD2steps
    while read -r log sigma extra; do
        card "$path/$log/cifar10/resnet110/noise_$sigma/test/sigma_$sigma" "$sigma" resnet110 SmoothAdv "$salman" "$extra"
    done <<END
ours/cifar10/PGD_10steps_multiNoiseSamples/8-multitrain/eps_255 0.25
ours/cifar10/PGD_2steps_multiNoiseSamples/8-multitrain/eps_512 0.50
ours/cifar10/PGD_10steps_multiNoiseSamples/2-multitrain/eps_512 1.00
ours_pretraining/cifar10/finetune_cifar_from_imagenetPGD2steps/PGD_4steps_30epochs_multinoise/2-multitrain/eps_127 0.25 ImageNet
ours_pretraining/cifar10/finetune_cifar_from_imagenetPGD2steps/PGD_4steps_30epochs_multinoise/4-multitrain/eps_512 0.50 ImageNet
ours_pretraining/cifar10/finetune_cifar_from_imagenetPGD2steps/PGD_6steps_30epochs/eps_512 1.00 ImageNet
ours_selftraining/cifar10/self_training/PGD_4steps/weight_1.0/eps_127 0.25 Tiny Images
ours_selftraining/cifar10/self_training/PGD_2steps/weight_0.5/eps_255 0.50 Tiny Images
ours_selftraining/cifar10/self_training/PGD_8steps/weight_0.5/eps_512 1.00 Tiny Images
${both#"$path/"}/self_training_PGD_4steps/weight_1.0/eps_127 0.25 ImageNet, Tiny Images
${both#"$path/"}/self_training_PGD_2steps/weight_0.5/eps_512 0.50 ImageNet, Tiny Images
${both#"$path/"}/self_training_PGD_4steps/weight_0.5/eps_512 1.00 ImageNet, Tiny Images
END
    path=certify/best_models/imagenet
    for model in DDN_2steps/eps_512:0.25 PGD_1step/eps_255:0.50 PGD_1step/eps_512:1.00; do
        sigma=${model#*:}
        card $path/${model%:*}/resnet50/noise_$sigma/test/sigma_$sigma $sigma resnet50 SmoothAdv "$salman"
        card $path/replication/resnet50/noise_$sigma/test/sigma_$sigma $sigma resnet50 Gaussian "$cohen, by $salman"
    done

    of locuslab/smoothing
    for sigma in 0.25 0.50 1.00; do
        card certify/cifar10/resnet110/noise_$sigma/test/sigma_$sigma $sigma resnet110 Gaussian "$cohen"
        card certify/imagenet/resnet50/noise_$sigma/test/sigma_$sigma $sigma resnet50 Gaussian "$cohen"
    done
fi

if compgen -G "logs/quickstart/*.tsv" >/dev/null; then
    python code/analyze.py card logs/quickstart/*.tsv -o logs/board
fi
rankings() { python code/analyze.py board "$@"; }
text=$(
    rankings docs/board/*_cifar10_0.5_*.json --top 3 --radii 0.5 1 | awk '/^### / { n++ } n == 1'
)
{
    sed '/<!-- rankings -->/q' docs/board.md
    printf '\n%s\n\n' "$text"
    sed -n '/<!-- end of the rankings -->/,$p' docs/board.md
} >docs/board.md.new
mv docs/board.md.new docs/board.md
echo "wrote docs/board.md"
