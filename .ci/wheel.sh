#!/usr/bin/env bash
# What a person meets who installs the package without a clone: builds the wheel, installs it into an empty environment
# that borrows the libraries of .venv, and trains, certifies, analyzes and plans in an empty folder.
set -euo pipefail
cd "$(dirname "$0")/.."
SMOOTHADV_EXTRAS=test
source scripts/environment.sh

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cp -r code scripts setup.py pyproject.toml requirements.txt README.md CHANGELOG.md LICENSE MANIFEST.in "$folder" # no build/
(cd "$folder" && python -m pip wheel --quiet --no-deps --wheel-dir wheel .)
libraries=$(python -c 'import sys; print(*(place for place in sys.path if place.endswith("-packages")), sep="\n")')
python -m venv --without-pip "$folder/venv"
mkdir "$folder/empty"
cd "$folder/empty"
export PYTHONNOUSERSITE=1 OMP_NUM_THREADS=1
unset PYTHONPATH
python -m pip --python ../venv/bin/python install --quiet --no-deps ../wheel/*.whl
PATH="$folder/venv/bin:$PATH"
# Folders in a .pth file come after the wheel, and the .pth file in them that would bring the clone is not read.
echo "$libraries" >"$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/libraries.pth"

python - "$folder" <<'PYTHON'
import sys, smoothadv, smoothadv.sweep
for module in (smoothadv, smoothadv.sweep):
    assert module.__file__.startswith(sys.argv[1]), f"{module.__file__} is not that of the wheel"
assert callable(smoothadv.certify)
PYTHON
smoothadv --version
smoothadv train digits digits_resnet8 model --noise 0.25 --recipe smoke --epochs 1 --device cpu
smoothadv certify digits model/checkpoint.pth.tar 0.25 log.tsv --max 5 --N 100 --device cpu
smoothadv analyze summary log.tsv --radii 0.25
smoothadv cite log.tsv model -o made.bib
grep -q '^@misc{smoothadv,' made.bib
smoothadv sweep plan digits-smoke
python -c 'import smoothadv; print(len(smoothadv.certify("model/checkpoint.pth.tar", "digits", sigma=0.25, n=100, limit=2)))'
