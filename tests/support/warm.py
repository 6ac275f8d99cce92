"""Processes that run a command of this clone at once: forked from one that has loaded the libraries already."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from support.commands import CODE, ENVIRONMENT

_SERVER = """
import importlib, json, os, runpy, sys
import sklearn.datasets
for module in sys.argv[1:]:
    importlib.import_module(module)
for line in sys.stdin:
    command, folder = json.loads(line)
    child = os.fork()
    if not child:
        os.chdir(folder)
        for stream in (0, 1, 2):
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class WarmProcesses:
    """Starts one process after another, each as real as any but for the seconds that loading torch takes."""

    def __init__(self, *modules: str) -> None:
        """Those that run one of ``modules`` (default: of the commands certify and predict) need not load it."""
        modules = modules or ("smoothadv.commands.certify", "smoothadv.commands.predict")
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVER, *modules],
            env={**ENVIRONMENT, "PYTHONPATH": str(CODE)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    def start(self, command: list[str], cwd: Path) -> WarmProcess:
        """Start ``command``, as ``support.commands.script`` makes it; the one before must have ended."""
        assert command[0] == sys.executable
        self._server.stdin.write(json.dumps([command[1:], str(cwd)]).encode() + b"\n")
        return WarmProcess(self._server)

    def close(self) -> None:
        """End the process that the others are forked from."""
        with self._server:
            self._server.stdin.close()


class WarmProcess:
    """As much of ``subprocess.Popen`` as it takes to wait for a moment and kill; its output is thrown away."""

    def __init__(self, server: subprocess.Popen) -> None:
        self._server, self.returncode = server, None
        self.pid = int(server.stdout.readline())

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._server.stdout], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = int(self._server.stdout.readline())
        return self.returncode

    def communicate(self) -> tuple[str, str]:
        self.wait()
        return "", ""
