# The other scripts source this file: it enters the clone, makes .venv there if there is none, installs the packages of
# requirements.txt into it, in the versions of requirements.lock, and activates it. Set PYTHON to choose the interpreter
# (3.10 or newer), and SMOOTHADV_NEWEST=1 to install the newest versions that requirements.txt allows.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    echo "error: $*" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.10 or newer found (tried ${PYTHON:-python3, python3.13 ... python3.10}); set PYTHON=/path/to/python"
}

make_venv() {
    local python
    python=$(find_python) || exit 1
    echo "== making .venv with $("$python" --version)"
    rm -rf .venv
    # Debian has venv in a separate package; virtualenv from PyPI does the same without it.
    "$python" -m venv .venv >/dev/null 2>&1 && return
    rm -rf .venv
    local tools
    tools=$(mktemp -d)
    "$python" -m pip install --quiet --target "$tools" virtualenv >/dev/null 2>&1 \
        && PYTHONPATH="$tools" "$python" -m virtualenv --quiet .venv \
        || fail "$python has neither venv nor pip; on Debian and Ubuntu: apt install python3-venv"
    rm -rf "$tools"
}

pip_install() {
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@" --editable ".[test]"
}

install_requirements() {
    local wanted
    wanted=$(cat requirements.txt requirements.lock setup.py pyproject.toml | cksum)${SMOOTHADV_NEWEST:+ newest}
    [ "$(cat .venv/installed 2>/dev/null)" != "$wanted" ] || return 0
    echo "== installing smoothadv and what it needs into .venv (minutes, PyTorch is large)"
    if [ -n "${SMOOTHADV_NEWEST-}" ]; then
        pip_install --upgrade --upgrade-strategy eager
    elif ! pip_install --constraint requirements.lock 2>.venv/refused; then
        echo "warning: the versions in requirements.lock cannot be installed here, so others are:" \
            "$(grep -m 1 ERROR .venv/refused || tail -n 1 .venv/refused)" >&2
        pip_install
    fi
    echo "$wanted" >.venv/installed
}

# sweep_and_report PAGE GRID... [-- OPTION of `sweep.py run`...]: runs what is missing of the grids, then writes a report on
# all complete logs, even if some are missing. Its exit code is that of the sweep. With --detach it writes no report.
sweep_and_report() {
    local page=$1 grids=() code=0
    shift
    while [ $# -gt 0 ] && [ "$1" != -- ]; do
        grids+=("$1")
        shift
    done
    [ $# -eq 0 ] || shift
    python code/sweep.py run "${grids[@]}" "$@" || code=$?
    case " $* " in *" --detach "*) exit $code ;; esac
    [ $code -lt 128 ] || exit $code # Ctrl-C ends this script too
    python code/sweep.py report "${grids[@]}" -o "$page" || exit 1
    exit $code
}

.venv/bin/python -c '' 2>/dev/null || make_venv
install_requirements
export PATH="$PWD/.venv/bin:$PATH"
