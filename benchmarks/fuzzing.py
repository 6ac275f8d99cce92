"""Gives hostile files and arguments to the real commands, and counts how they end.

    python benchmarks/fuzzing.py --count 10000 --seed 0 --findings findings

Each case is a command in a folder of its own, with a time limit that only ends a hang, and a limit
on memory. A few cases share a process, which is forked from this one, as that has loaded the
libraries; what is not clean there is run again in a process of its own. A case is clean if the
command succeeds, or says in one line what is wrong: exit code 0, 1, 2 or 130, and on standard error
nothing but warnings of one line each and at most one error, without escape codes. Of the others,
files, command and what it printed are kept. Case I of a kind depends on the seed, the kind and I
alone. Paths of devices are no values here: as root, a command that replaced one would harm the
machine.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import os
import random
import re
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from hostile_cases import KINDS, UNCHANGED, Case, Kinds, prepare, start

_LIMIT_SECONDS = 120  # only a hang lasts so long: the slowest command takes seconds
_LIMIT_BYTES = 2 << 30
_MUCH_BYTES = 1 << 30
_LONGEST_LINE = 2200
_DEFECT = 70
_MOST_EXAMPLES = 4
_TOGETHER = 20


ENDS = ("clean", "traceback", "crash", "hang", "memory", "untidy")


Table = dict[str, Counter[str]]


class Outcome(NamedTuple):
    """How a case ended, one of ``ENDS``, and what tells it from others that ended so."""

    end: str
    signature: str


def _make_folder(case: Case, place: Path, folder: Path) -> None:
    """A copy of ``place`` for a case; of what no command changes, a link."""
    folder.mkdir()
    for source in place.iterdir():
        target = folder / source.name
        if source.is_file():
            shutil.copyfile(source, target)
        elif source.name in UNCHANGED and not any(
            name.startswith(f"{source.name}/") for name in case.files
        ):
            target.symlink_to(source)
        else:
            shutil.copytree(source, target)
    for name, content in case.files.items():
        (folder / name).write_bytes(content)
    (folder / "loop").symlink_to("loop")


def run_cases(cases: Sequence[Case], place: Path, folders: Sequence[Path]) -> list[Outcome]:
    """Run cases, each in its folder, a copy of ``place``; what they print is beside the folders, in
    .out and .err.

    One forked process runs them all; one that is not clean there is judged in a process of its own.
    """
    done = _run_in_one_process(cases, place, folders)
    for number, outcome in enumerate(done):
        if outcome.end != "clean" and len(cases) > 1:
            shutil.rmtree(folders[number])
            folders[number].with_suffix(".end").unlink(missing_ok=True)
            done[number] = _run_in_one_process(
                cases[number : number + 1], place, folders[number : number + 1]
            )[0]
    # The last of those that were begun may have ended the process.
    return (
        done + run_cases(cases[len(done) :], place, folders[len(done) :])
        if len(done) < len(cases)
        else done
    )


def _run_in_one_process(
    cases: Sequence[Case], place: Path, folders: Sequence[Path]
) -> list[Outcome]:
    """The outcomes of the cases that were begun before one, the last of them, ended the process."""
    child = os.fork()
    if not child:
        try:
            os.setsid()
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + _LIMIT_BYTES,) * 2)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            for case, folder in zip(cases, folders):
                _make_folder(case, place, folder)
                _run_here(case, folder)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)  # workers that it has left behind
    return [_judged(folder, status) for folder in folders if folder.exists()]


def _run_here(case: Case, folder: Path) -> None:
    """Run a case in this process, which was forked for it and others; writes .out, .err and .end
    beside the folder.
    """
    for stream, end in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(folder.with_suffix(end), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    sys.stdout, sys.stderr = (
        open(1, "w", closefd=False),
        open(2, "w", closefd=False, errors="backslashreplace"),
    )
    Path("/proc/self/clear_refs").write_text("5")  # the largest memory counts from here
    before, code = _largest_memory(), _DEFECT
    os.chdir(folder)
    signal.alarm(_LIMIT_SECONDS)
    try:
        code = start(case.words)
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    signal.alarm(0)
    sys.stderr.flush()
    folder.with_suffix(".end").write_text(f"{code} {_largest_memory() - before}")


def _largest_memory() -> int:
    """The most memory that this process has had, in bytes."""
    return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


def _judged(folder: Path, status: int) -> Outcome:
    """The outcome of a case, by the files that its process left, or by the ``status`` with which it
    ended.
    """
    if not folder.with_suffix(".end").exists():
        return Outcome("hang", "") if status == -signal.SIGALRM else Outcome("crash", str(status))
    code, memory = map(int, folder.with_suffix(".end").read_text().split())
    out, err = (folder.with_suffix(end).read_text(errors="replace") for end in (".out", ".err"))
    lines = err.split("\n")[:-1]
    if code not in (0, 1, 2, 130):
        frames = re.findall(r'File ".*?(smoothadv/[^"]+)", line (\d+), in (\w+)', err)
        return Outcome(
            "traceback", f"{':'.join(frames[-1]) if frames else '?'} {''.join(lines[-1:])[:150]}"
        )
    if memory > _MUCH_BYTES or "out of memory" in err:
        return Outcome("memory", f"{memory >> 20} MiB: {''.join(lines[-1:])[:100]}")
    errors = [line for line in lines if not line.startswith("warning: ")]
    if len(errors) != (code in (1, 2)) or not all(line.startswith("error: ") for line in errors):
        return Outcome("untidy", (errors or ["exit code without an error"])[0][:100])
    if (
        any(mark in out + err for mark in "\x07\x1b\u202e")
        or max(map(len, lines), default=0) > _LONGEST_LINE
    ):
        return Outcome("untidy", f"escape codes or a long line: {ascii(lines[-1:])[:100]}")
    return Outcome("clean", "")


def fuzz(
    count: int,
    seed: int,
    kinds: Sequence[str],
    findings: Path,
    report: Callable[[str], None] = print,
) -> Table:
    """Run ``count`` cases of each kind; how many ended in which way. Keeps what is not clean in
    ``findings``.
    """
    table: Table = {kind: Counter() for kind in kinds}
    seen: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch) / "place"
        place.mkdir()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            prepare(place)
        makers = Kinds(place)
        gc.freeze()  # so that the forked processes share more of the memory
        for kind, first in (
            (kind, first) for kind in kinds for first in range(0, count, _TOGETHER)
        ):
            numbers = range(first, min(count, first + _TOGETHER))
            cases = [
                getattr(makers, kind)(random.Random(f"{seed} {kind} {number}"))
                for number in numbers
            ]
            folders = [Path(scratch) / f"{kind}-{seed}-{number}" for number in numbers]
            for case, folder, outcome in zip(cases, folders, run_cases(cases, place, folders)):
                table[kind][outcome.end] += 1
                signature = f"{outcome.end} {re.sub('[0-9]+', '#', outcome.signature)}"
                seen[signature] += 1
                if outcome.end != "clean" and seen[signature] <= _MOST_EXAMPLES:
                    _keep(case, folder, findings / folder.name)
                    report(f"{findings / folder.name}: {outcome.end} {outcome.signature}")
                for end in (".out", ".err", ".end"):
                    folder.with_suffix(end).unlink(missing_ok=True)
                shutil.rmtree(folder)
    for signature, number in seen.most_common():
        report(f"{number:6d} times {signature}")
    return table


def _keep(case: Case, folder: Path, target: Path) -> None:
    """Save what reproduces a case: its files, its command, what it printed."""
    for name, content in case.files.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(content)
    target.mkdir(parents=True, exist_ok=True)
    (target / "command").write_text(shlex.join(case.words), errors="surrogateescape")
    for end in (".out", ".err"):
        shutil.copy(folder.with_suffix(end), target / f"printed{end}")


def main() -> None:
    """Run all kinds and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--count",
        type=int,
        default=1000,
        help="cases in all, divided among the kinds (default: 1000)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument(
        "--findings", type=Path, default=Path("findings"), help="folder of what is not clean"
    )
    options = parser.parse_args()
    begun, each = time.monotonic(), -(-options.count // len(options.kinds))
    table = fuzz(
        each,
        options.seed,
        options.kinds,
        options.findings.absolute(),
        lambda line: print(line, flush=True),
    )
    print("\n| kind | " + " | ".join(ENDS) + " |\n|---" + "|---:" * len(ENDS) + "|")
    for kind, counts in table.items():
        print(f"| {kind} | " + " | ".join(str(counts[end]) for end in ENDS) + " |")
    print(
        f"\n{each * len(options.kinds)} cases in {time.monotonic() - begun:.0f} s, seed "
        f"{options.seed}"
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
