"""Processes that run a command of this clone at once: forked from one that has loaded the libraries already."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from support.commands import CODE, ENVIRONMENT

# Reads what to run, forks, prints the process id at once and the exit code in the end; one process after the other.
_SERVER = """
import importlib, json, os, runpy, signal, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
for line in sys.stdin:
    command, folder, *files = json.loads(line)
    child = os.fork()
    if not child:
        # As in a process that a person starts, also where the tests run in the background, which ignores Ctrl-C.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_WRONLY), stream)
        if command[0] == "-c":
            sys.argv = ["-c", *command[2:]]
            exec(command[1], {"__name__": "__main__"})
        else:
            sys.argv = command
            runpy.run_path(command[0], run_name="__main__")
        sys.exit(0)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
_COMMANDS = [f"smoothadv.commands.{name}" for name in ("certify", "predict", "attack", "train", "train_pgd")]
# What the commands load when they need it.
_LATER = ["sklearn.datasets", "torch._dynamo"]


class WarmProcesses:
    """Starts one process after another, each as real as any but for the seconds that loading torch takes."""

    def __init__(self) -> None:
        self._outputs = tempfile.TemporaryDirectory()
        self._count = 0
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVER, *_COMMANDS, *_LATER],
            env={**ENVIRONMENT, "PYTHONPATH": str(CODE)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    def start(self, command: list[str], cwd: Path) -> WarmProcess:
        """Start ``command``, a Python script as ``support.commands.script`` makes it, or ``python -c PROGRAM``.

        The one before must have ended.
        """
        assert command[0] == sys.executable
        self._count += 1
        files = [Path(self._outputs.name) / f"{self._count}.{stream}" for stream in ("out", "err")]
        for file in files:
            file.touch()
        self._server.stdin.write(json.dumps([command[1:], str(cwd), *map(str, files)]).encode() + b"\n")
        return WarmProcess(self._server, *files)

    def run(self, command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
        """As ``support.commands.run_process``."""
        process = self.start(command, cwd)
        out, err = process.communicate()
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def close(self) -> None:
        """End the process that the others are forked from."""
        with self._server:
            self._server.stdin.close()
        self._outputs.cleanup()


class WarmProcess:
    """As much of ``subprocess.Popen`` as tests need."""

    def __init__(self, server: subprocess.Popen, out: Path, err: Path) -> None:
        self._server, self._out, self._err, self.returncode = server, out, err, None
        self.pid = int(server.stdout.readline())

    def __enter__(self) -> WarmProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.wait()

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._server.stdout], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = int(self._server.stdout.readline())
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that it has printed, once it has ended; ``timeout`` is left to the test's own."""
        self.wait()
        return self._out.read_text(), self._err.read_text()
