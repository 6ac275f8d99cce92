# Scripts that run grids source this file.

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
