# The other scripts source this file: it enters the clone, makes .venv there if there is none, installs the packages of
# requirements.txt into it, in the versions of requirements.lock, and activates it. A PyTorch that the interpreter has is
# taken. Set PYTHON to choose the interpreter (3.10 or newer), SMOOTHADV_NEWEST=1 to install the newest versions that
# requirements.txt allows, and SMOOTHADV_EXTRAS, like "timm,onnx", to add extras of setup.py. docs/install.md says more.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    echo "error: $*" >&2
    exit 1
}

find_python() {
    local candidate candidates=(python3 python3.13 python3.12 python3.11 python3.10)
    [ -z "${PYTHON-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.10 or newer found (tried ${PYTHON:-python3, python3.13 ... python3.10}); set PYTHON=/path/to/python"
}

# The lines "torch==..." and "torchvision==..." of an interpreter that has both, in versions that requirements.txt allows.
pytorch_of() {
    "$1" - <<'PYTHON' 2>/dev/null
import re, sys, torch, torchvision
from importlib import metadata

def number(version):
    return [int(part) for part in re.findall(r"\d+", version)[:2]]

found = {name: metadata.version(name) for name in ("torch", "torchvision")} # as pip knows them
oldest = dict(re.findall(r"(?m)^(torch\w*)>=(.*)$", open("requirements.txt").read()))
if any(number(version) < number(oldest[name]) for name, version in found.items()):
    sys.exit(1)
print(*(f"{name}=={version}" for name, version in found.items()), sep="\n")
PYTHON
}

# .venv/installed says what is installed; who makes .venv without these scripts has no such file in it.
make_venv() {
    local python tools said shared=
    python=$(find_python) || exit 1
    if "$python" -c 'import sys; sys.exit(sys.prefix != sys.base_prefix)' && pytorch_of "$python" >/dev/null; then
        shared=--system-site-packages
    fi
    echo "== making .venv with $("$python" --version)"
    rm -rf .venv
    # Debian has venv in a separate package; virtualenv from PyPI does the same without it.
    if ! said=$("$python" -m venv $shared .venv 2>&1); then
        ! said=$(grep -m 1 "^Error: \[Errno" <<<"$said") || fail "no .venv can be made in $PWD: ${said#Error: }"
        rm -rf .venv
        tools=$(mktemp -d)
        "$python" -m pip install --quiet --target "$tools" virtualenv >/dev/null 2>&1 \
            && PYTHONPATH="$tools" "$python" -m virtualenv --quiet $shared .venv \
            || fail "$python has neither venv nor pip; on Debian and Ubuntu: apt install python3-venv"
        rm -rf "$tools"
    fi
    [ -n "$shared" ] || touch .venv/installed
}

# Writes .venv/kept: the version of a PyTorch that was there before anything was installed, which none is to replace.
keep_pytorch() {
    [ ! -e .venv/installed ] || [ -s .venv/kept ] || return 0
    pytorch_of .venv/bin/python >.venv/kept || true
    touch .venv/installed
    [ ! -s .venv/kept ] || echo "== taking the PyTorch that is there: $(.venv/bin/python -c \
        'import torch; print(torch.__version__, "in", *torch.__path__)')"
}

# Names what an installation with the extras $1 takes; the numbers, in MB, are of Linux on x86-64.
check_disk() {
    local disk=0 load=0 free
    if ! .venv/bin/python -c 'import statsmodels' 2>/dev/null; then
        disk=700 load=200
        if [ ! -s .venv/kept ] && [ "$(uname)" = Linux ]; then
            disk=6000 load=3100 # with CUDA's packages
        elif [ ! -s .venv/kept ]; then
            disk=1500 load=500
        fi
    fi
    case ",$1," in *,test,*) disk=$((disk + 1000)) load=$((load + 300)) ;; esac
    free=$(($(df -Pk . | awk 'END { print $4 }') / 1024))
    if [ $disk = 0 ]; then
        echo "== updating .venv for smoothadv${1:+[$1]}: requirements.txt, requirements.lock, setup.py or extras have changed"
        return
    fi
    echo "== installing smoothadv${1:+[$1]} into .venv: up to $load MB to download, and $disk MB on the disk, where $free are free"
    [ "$free" -ge "$disk" ] || fail "$PWD has too little space for that; docs/install.md tells how to do with less"
}

# Says on a terminal all that pip does, with its bars; elsewhere one line for each large file.
pip_install() {
    local pip=(.venv/bin/python -m pip install --disable-pip-version-check "$@")
    if [ -t 1 ]; then
        "${pip[@]}"
    else
        "${pip[@]}" | { grep --line-buffered -oE '^ *(Downloading .*\(([0-9.]{4,} M|[0-9.]+ G)B\)|Installing collected packages)' || true; }
        return "${PIPESTATUS[0]}"
    fi
}

# install_requirements EXTRA...: of setup.py, besides those that have been installed before; `test` has all of them.
install_requirements() {
    local wanted extra extras package lock=requirements.lock kept=
    wanted="$(cat requirements.txt requirements.lock setup.py pyproject.toml | cksum)${SMOOTHADV_NEWEST:+ newest} in $(pwd -P)"
    extras=$({ tail -n +2 .venv/installed 2>/dev/null; printf '%s\n' "$@"; } | sort -u | grep . | paste -sd , - || true)
    for extra; do
        grep -qE "^ +\"$extra\": \\[" setup.py || fail "there is no extra '$extra'; docs/install.md lists them"
    done
    case ",$extras," in *,test,*) extras=test ;; esac
    wanted=$wanted${extras:+$'\n'${extras//,/$'\n'}}
    [ "$(cat .venv/installed 2>/dev/null)" != "$wanted" ] || return 0
    # Making .venv may have been interrupted before pip was there.
    .venv/bin/python -c "import pip" 2>/dev/null || .venv/bin/python -m ensurepip >/dev/null 2>&1 \
        || fail "$PWD/.venv has no pip: remove that folder and run this again"
    keep_pytorch
    check_disk "$extras"
    package=.${extras:+[$extras]}
    if [ -s .venv/kept ]; then
        kept="--constraint .venv/kept" lock=.venv/lock
        grep -vE '^(torch|torchvision|triton|(nvidia|cuda)-.*)==' requirements.lock >$lock
    fi
    if [ -n "${SMOOTHADV_NEWEST-}" ]; then
        pip_install --upgrade --upgrade-strategy eager $kept --editable "$package"
    elif ! pip_install --constraint $lock $kept --editable "$package" 2>.venv/refused; then
        # Ctrl-C, the disk or the network: other versions are no help.
        ! grep -E "ERROR.*(cancelled by user|OSError|from versions: none)" .venv/refused >&2 || exit 1
        echo "warning: the versions in requirements.lock cannot be installed here, so others are:" \
            "$(grep -m 1 ERROR .venv/refused || tail -n 1 .venv/refused)" >&2
        pip_install $kept --editable "$package"
    fi
    echo "$wanted" >.venv/installed
}

.venv/bin/python -c '' 2>/dev/null || make_venv
[[ " $* " =~ " --engine"[=\ ](slurm|ray)" " ]] && engine=${BASH_REMATCH[1]} || engine= # among the words of a sweep
IFS=', ' read -ra extras <<<"${SMOOTHADV_EXTRAS-} $engine"
install_requirements ${extras[@]+"${extras[@]}"}
export PATH="$PWD/.venv/bin:$PATH"
