#!/usr/bin/env bash
# Certifies every checkpoint below a folder, each on its dataset and at the noise of its training.
#
#   bash scripts/certify_all.sh MODELS_DIR [LOGS_DIR] [OPTION...]
#
# Logs go to LOGS_DIR (default: logs/certify_all), in folders like those of the models. Options go to certify.py, for
# example --skip 20. A released checkpoint does not record its dataset and noise: they are then taken from folders like
# cifar10/.../noise_0.25, and --input-layer must be among the options. After an interruption it continues.
set -euo pipefail

usage() {
    echo "usage: bash scripts/certify_all.sh MODELS_DIR [LOGS_DIR] [OPTION of certify.py...]" >&2
    exit 2
}
[ $# -ge 1 ] || usage
models=$(cd "$1" 2>/dev/null && pwd) || usage
start=$PWD
shift
logs=logs/certify_all
case ${1-} in "" | -*) ;; *) logs=$1 && shift ;; esac
case $logs in /*) ;; *) logs=$start/$logs ;; esac
source "$(dirname "$0")/environment.sh"

# Noise and dataset of a model's training, as "NOISE DATASET": from its args.json, else from its path.
trained_with() {
    python - "$1" <<'PYTHON' || sed -nE 's#^.*/(cifar10|imagenet32|imagenet)/.*/noise_([0-9.]+)/.*$#\2 \1#p' <<<"$1"
import json, pathlib, sys
recipe = json.loads(pathlib.Path(sys.argv[1]).with_name("args.json").read_text())["recipe"]
print(recipe["objective"]["noise_sd"], recipe["dataset"])
PYTHON
}

found=0 failed=0
while read -r checkpoint; do
    found=$((found + 1))
    name=${checkpoint#"$models"/}
    read -r sigma dataset < <(trained_with "$checkpoint" 2>/dev/null) || true
    if [ -z "${sigma-}" ] || [[ $sigma =~ ^0(\.0*)?$ ]]; then
        echo "left out: $name: it was trained without noise, or its noise is not recorded: certify it with certify.py" >&2
        failed=$((failed + 1))
        continue
    fi
    which=$(basename "$name" .pth.tar)
    [ "$which" = checkpoint ] && which= || which=${which}_
    echo "== $name, sigma $sigma"
    code=0
    python code/certify.py "$dataset" "$checkpoint" "$sigma" "$logs/$(dirname "$name")/${which}sigma_$sigma.tsv" "$@" \
        </dev/null || code=$?
    [ $code -lt 128 ] || exit $code # Ctrl-C ends this script too
    [ $code = 0 ] || failed=$((failed + 1))
done < <(find "$models" -name '*.pth.tar' | sort)
[ "$found" -gt 0 ] || fail "$models holds no checkpoint, a file whose name ends in .pth.tar"
echo "$((found - failed)) of $found models are certified, in $logs"
[ "$failed" -eq 0 ]
