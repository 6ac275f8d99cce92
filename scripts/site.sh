#!/usr/bin/env bash
# Builds the site in site/ from README.md, docs/, the grids and the docstrings, and a gallery with the report of a sweep.
#
#   bash scripts/site.sh [REPORT]
#
# REPORT is what `reproduce_paper.sh digits` writes (default: logs/reproduced_digits.html; made first, in some minutes, if
# it is not there). The site's tools go into .venv-site. A warning is an error. To look at it: open site/index.html, or for
# its search python3 -m http.server -d site
set -euo pipefail
report=$(realpath -m "${1:-$(dirname "$0")/../logs/reproduced_digits.html}")
source "$(dirname "$0")/environment.sh"

if [ ! -f "$report" ]; then
    bash scripts/reproduce_paper.sh digits --jobs 2
fi
# Without pip, which is in a separate package on Debian: that of .venv does.
[ -x .venv-site/bin/python ] || python -m venv --without-pip .venv-site
python -m pip --python .venv-site/bin/python install --quiet --disable-pip-version-check -r docs/requirements.txt

# docs/ reads well where it lies. Links that leave it are changed in a copy, which the site is made of.
pages=build/pages
rm -rf "$pages" site
mkdir -p "$pages"
cp -r docs/*.{md,png,css} docs/results "$pages"
cp README.md "$pages/index.md"
cp CHANGELOG.md "$pages/changelog.md"
cp CONTRIBUTING.md "$pages/contributing.md"
.venv-site/bin/python - <<'PROGRAM' >"$pages/tour.md"
import json

for cell in json.load(open("docs/tour.ipynb"))["cells"]:
    text = "".join(cell["source"])
    print(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```", end="\n\n")
PROGRAM
cp benchmarks/results/README.md "$pages/measured.md"
cp benchmarks/results/gpu_*.md "$pages"
cp "$report" "$pages/digits_report.html"
sed -i -E \
    -e 's#\]\((\.\./)*docs/#](#g' \
    -e 's#\]\(\.\./README\.md#](index.md#g' \
    -e 's#\]\((\.\./)?benchmarks/results/README\.md#](measured.md#g' \
    -e 's#\]\(CONTRIBUTING\.md#](contributing.md#g' \
    -e 's#\]\((\.\./)?scripts/grids\)#](grids.md)#g' \
    -e 's#\]\(tour\.ipynb\)#](tour.md)#g' "$pages"/*.md "$pages"/results/*.md
python code/analyze.py board docs/board -o "$pages/all_rankings.html"
sed -i 's/^<!-- rankings -->$/[All rankings, with filters](all_rankings.html){ .md-button }/' "$pages/board.md"
sed -i 's/^## Figures$/[Open this report](digits_report.html){ .md-button }\n\n&/' "$pages/gallery.md"
{
    printf '# Grids\n\nThe files of scripts/grids, which [sweeps](sweeps.md) run.\n'
    for grid in scripts/grids/*.toml; do
        printf '\n## %s\n\n```toml\n%s\n```\n' "$(basename "$grid" .toml)" "$(<"$grid")"
    done
} >"$pages/grids.md"

.venv-site/bin/zensical build --clean --strict
