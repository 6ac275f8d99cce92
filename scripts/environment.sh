# The other scripts source this file: it enters the clone, makes .venv there if there is none, installs the packages of
# requirements.txt into it, in the versions of requirements.lock, and activates it. An installed PyTorch
# is reused. Set PYTHON to choose the interpreter (3.10 or newer), SMOOTHADV_NEWEST=1 to install the newest versions that
# requirements.txt allows, and SMOOTHADV_EXTRAS, like "timm,onnx", to add extras of setup.py. docs/install.md says more.
[[ "${1-}" != @(--help|-h) ]] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" && exit; } # the comment at the head of the script
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { echo "error: $*" >&2 && exit 1; }
# Writes .venv/kept: the versions of torch and torchvision that are in .venv already, if requirements.txt allows them.
keep_pytorch() {
    .venv/bin/python - >.venv/kept 2>/dev/null <<'PYTHON' || rm .venv/kept
import re
from importlib.metadata import version

for name, *oldest in re.findall(r"(?m)^(torch\w*)>=(\d+)\.(\d+)$", open("requirements.txt").read()):
    assert list(map(int, re.findall(r"\d+", version(name))[:2])) >= list(map(int, oldest))
    print(f"{name}=={version(name)}")
PYTHON
}

make_venv() {
    local python
    for python in "${PYTHON:-python3}" python3.{13,12,11,10} none; do
        ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || break
        [ -z "${PYTHON-}" ] && [ "$python" != none ] || fail "no Python 3.10 or newer found: set PYTHON=/path/to/python"
    done
    echo "== making .venv with $("$python" --version)"
    "$python" -m venv --clear --system-site-packages .venv || fail "no .venv can be made in $PWD (Debian: apt install python3-venv)"
    keep_pytorch
    [ -e .venv/kept ] || { "$python" -m venv --clear .venv && touch .venv/installed; }
}

# install_requirements EXTRA...: of setup.py, besides those that .venv/installed lists; `test` has all of them.
install_requirements() {
    local wanted extra extras lock=requirements.lock kept= options
    for extra; do
        grep -qE "^ +\"$extra\": \\[" setup.py || fail "there is no extra '$extra'; docs/install.md lists them"
    done
    extras=$({ tail -n +2 .venv/installed; printf '%s\n' "$@"; } 2>/dev/null | sort -u | grep . | paste -sd , - || true)
    [[ ,$extras, != *,test,* ]] || extras=test
    wanted="$(cat requirements.txt requirements.lock setup.py pyproject.toml | cksum)${SMOOTHADV_NEWEST:+ newest} in $(pwd -P)
${extras//,/$'\n'}"
    ! cmp -s .venv/installed - <<<"$wanted" || return 0
    .venv/bin/python -m pip --version >/dev/null 2>&1 || .venv/bin/python -m ensurepip >/dev/null # left out by uv and others
    [ -e .venv/installed ] || keep_pytorch
    if [ -e .venv/kept ]; then
        echo "== taking the PyTorch that is there: $(paste -sd ' ' .venv/kept)"
        lock=.venv/lock kept="--constraint .venv/kept"
        grep -vE '^(torch|torchvision|triton|(nvidia|cuda)-.*)==' requirements.lock >$lock
    fi
    [ -n "${SMOOTHADV_NEWEST-}" ] && options=(--upgrade --upgrade-strategy eager) || options=(--constraint $lock)
    .venv/bin/python -m pip install --disable-pip-version-check "${options[@]}" $kept --editable ".${extras:+[$extras]}" \
        || fail "pip could not install that; SMOOTHADV_NEWEST=1 tries other versions than those of requirements.lock"
    echo "$wanted" >.venv/installed
}

.venv/bin/python -c '' 2>/dev/null || make_venv
[[ " $* " =~ " --engine"[=\ ](slurm|ray)" " ]] && engine=${BASH_REMATCH[1]} || engine= # among the words of a sweep
install_requirements $(tr , ' ' <<<"${SMOOTHADV_EXTRAS-} $engine")
export PATH="$PWD/.venv/bin:$PATH"
