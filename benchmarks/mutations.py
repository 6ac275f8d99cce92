"""Whether the tests notice small faults: mutations of the code, each of which a test must kill.

    python benchmarks/mutations.py                 # all of mutations.txt
    python benchmarks/mutations.py --only noise    # those whose file, tests or words match

Each mutation is made in a copy of this clone, in a temporary folder, where the tests named for it
run until one fails; the table names that test. First, all these tests must pass without a mutation.
A mutation that survives although the list gives no reason for it is a hole in the tests: the exit
code is then 1, as where one is killed in spite of its reason. All together take some minutes.

In mutations.txt, "# FILE: TESTS" begins the mutations of a file in code/smoothadv, or of
scripts/NAME, with test files in tests. Each is a line that says what is wrong, lines "- " with text
that is there exactly once, lines "+ " with that in its place, and perhaps a line "survives: " with
a reason why no test can or need notice it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_suffix(".txt")
_MUTATION = re.compile(r"(\w.*\n)((?:- .*\n)+)((?:\+ .*\n)+)(survives: .*\n)?")
LIMIT_SECONDS = 900
"""Tests that take longer are ended: the mutation has made them hang, which also kills it."""
LOADED = ("pytest", "torch", "torch.fx", "numpy", "scipy.stats", "scipy.signal", "mpmath", "pandas")


@dataclass(frozen=True)
class Mutation:
    """In ``file``, whose place is ``path``, ``new`` replaces ``old``; some of ``tests``, below
    tests, must fail.

    ``fault`` says what is wrong then. ``survives`` is the reason why no test can or need notice it,
    "" if one must.
    """

    file: str
    tests: tuple[str, ...]
    fault: str
    old: str
    new: str
    survives: str = ""

    @property
    def path(self) -> str:
        """Below the clone: files are below code/smoothadv, but for those in scripts."""
        return self.file if self.file.startswith("scripts/") else f"code/smoothadv/{self.file}"

    def applied(self, source: str) -> str:
        """The mutated source of the file; ValueError unless ``old`` is there exactly once."""
        if source.count(self.old) != 1:
            raise ValueError(
                f"{self.file} has {source.count(self.old)} times, not once: {self.old}"
            )
        return source.replace(self.old, self.new)


def read_list(text: str) -> list[Mutation]:
    """The mutations in the text of a list; ValueError where it is none."""
    mutations: list[Mutation] = []
    for section in re.split("^# ", text, flags=re.MULTILINE)[1:]:
        heading, _, body = section.partition("\n")
        file, _, tests = heading.partition(": ")
        found = [each.groups(default="") for each in _MUTATION.finditer(body)]
        if "".join(map("".join, found)) != re.sub("\n+$", "\n", body):
            raise ValueError(f"the mutations of {file} are not written as they should be")
        for fault, old, new, reason in found:
            old, new = (
                re.sub("^[-+] ", "", lines, flags=re.MULTILINE).removesuffix("\n")
                for lines in (old, new)
            )
            survives = reason.removeprefix("survives: ").rstrip()
            mutations.append(
                Mutation(file, tuple(tests.split()), fault.rstrip(), old, new, survives)
            )
    return mutations


def copy_clone(folder: Path) -> None:
    """Copy what git knows of this clone, and what it does not ignore, to ``folder``."""
    names = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def run_tests(clone: Path, tests: Sequence[str]) -> str:
    """Run test files of a copy of this clone until one test fails: its name, "" if none fails.

    RuntimeError where there is nothing to run. The tests run in a fork of this process, which has
    loaded the libraries.
    """
    output = clone / "output.txt"
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        os.chdir(clone)
        # Bytecode is recognised by the second in which its source was written: that of the last
        # mutation might run.
        os.environ.update(PYTHONPATH=str(clone / "code"), PYTHONDONTWRITEBYTECODE="1")
        sys.dont_write_bytecode = True
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        words = [
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "--basetemp",
            str(clone / "made"),
            "--no-header",
            "--tb=short",
        ]
        code = importlib.import_module("pytest").main(
            [*words, *(f"tests/{name}" for name in tests)]
        )
        sys.stdout.flush()
        os._exit(code)
    code = _exit_code(child)
    if code in (3, 4, 5):
        raise RuntimeError(f"{', '.join(tests)} cannot be run: {output.read_text()[-500:]}")
    if code == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", output.read_text(), re.MULTILINE)
    return failed[1] if failed else "a hang" if code is None else f"exit code {code}"


def _exit_code(child: int) -> int | None:
    """The exit code of a process, which leads a group; None if it had to be ended."""
    deadline, code = time.monotonic() + LIMIT_SECONDS, None
    while code is None and time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if ended else None
        time.sleep(0.02)
    try:
        os.killpg(child, signal.SIGKILL)  # also what the tests have started
    except ProcessLookupError:
        pass
    if code is None:
        os.waitpid(child, 0)
    return code


def unexpected_outcomes(mutations: Sequence[Mutation], clone: Path) -> list[Mutation]:
    """Run the tests of each mutation in ``clone``, and print the table; those whose outcome is not
    that of the list.
    """
    unexpected = []
    print("| file | what is wrong | killed by | seconds |\n|---|---|---|---|")
    for mutation in mutations:
        path, began = clone / mutation.path, time.monotonic()
        source = path.read_text()
        path.write_text(mutation.applied(source))
        try:
            killer = run_tests(clone, mutation.tests)
        finally:
            path.write_text(source)
        if bool(killer) == bool(mutation.survives):
            unexpected.append(mutation)
        verdict = killer or (
            f"survives: {mutation.survives}" if mutation.survives else "**survives**"
        )
        print(
            f"| {mutation.file} | {mutation.fault} | {verdict} | {time.monotonic() - began:.1f} |",
            flush=True,
        )
    return unexpected


def main() -> int:
    """Run the mutations that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", metavar="PATTERN", default="", help="a regular expression, sought in the list"
    )
    pattern = re.compile(parser.parse_args().only)
    mutations = [
        each
        for each in read_list(LIST.read_text())
        if pattern.search(" ".join([each.file, *each.tests, each.fault]))
    ]
    if not mutations:
        parser.error(f"no mutation matches {pattern.pattern}")
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in LOADED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder)
        copy_clone(clone)
        failed = run_tests(clone, sorted({name for each in mutations for name in each.tests}))
        if failed:
            raise SystemExit(f"{failed} fails without any mutation")
        unexpected = unexpected_outcomes(mutations, clone)
    argued = sum(bool(each.survives) for each in mutations)
    print(f"\n{len(mutations)} mutations, {argued} argued, {len(unexpected)} not as the list says")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
