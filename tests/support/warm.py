"""Processes that run a command of this clone at once: forked from one that has loaded the libraries
already.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest

from support.commands import CODE, ENVIRONMENT, finding
from support.patience import HANG_SECONDS
from support.torchrun import agent, store_of_agent

# Reads what to run and forks a process that forks it, prints its id at once and writes its exit
# code to a file.
_SERVER = """
import atexit, functools, gc, importlib, json, os, runpy, signal, sys, threading
# PyTorch 2.4 would load it, with threads that hold locks when a process is forked.
sys.modules["onnxruntime"] = None
for module in sys.argv[1:]:
    importlib.import_module(module)
del sys.modules["onnxruntime"]
# What does not depend on the command: the digits, and what made the files of this clone.
sys.modules["smoothadv.datasets"].get_dataset("digits", "test")
metadata = importlib.import_module("importlib.metadata")
metadata.version = functools.cache(metadata.version)
sys.modules["smoothadv.base.provenance"].provenance()
gc.freeze()  # to look for garbage, a process would copy all of this memory
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    command, folder, environment, code, *files = json.loads(line)
    if os.fork():
        continue
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child:
        os.write(1, b"%d\\n" % child)
        with open(code + ".tmp", "w") as file:
            file.write(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
        os.rename(code + ".tmp", code)
        os._exit(0)
    # As in a process that a person starts, also where the tests run in the background, which
    # ignores Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), stream)
    ended = 0
    try:
        if command[0] == "-c":
            sys.argv = ["-c", *command[2:]]
            exec(command[1], {"__name__": "__main__"})
        elif command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            sys.path.insert(0, os.path.dirname(command[0]))
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        ended = end.code or 0
    # As Python ends, but without taking down the libraries, which takes longer than most commands.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended)
os._exit(0)
"""
_COMMANDS = [
    f"smoothadv.cli.{name}" for name in ("certify", "predict", "attack", "train", "train_pgd")
]
# What the commands load when they need it.
_LATER = ["sklearn.datasets", "torch._dynamo"]


# Before a program: it knows torch, but not this package, nor where it is.
FORGETTING = """
import sys
for name in [each for each in sys.modules if each.partition(".")[0] == "smoothadv"]:
    del sys.modules[name]
sys.path = [one for one in sys.path if not one.rstrip("/").endswith("code")]
"""


class WarmProcesses:
    """Starts processes, each as real as any but for the seconds that loading torch takes."""

    def __init__(self) -> None:
        self._outputs = tempfile.TemporaryDirectory()
        self._count, self._lock = 0, threading.Lock()
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVER, *_COMMANDS, *_LATER],
            env={**ENVIRONMENT, **finding(CODE, CODE.parent / "tests")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    def start(
        self, command: list[str], cwd: Path, output: Path | None = None, **environment: str
    ) -> WarmProcess:
        """Start a command line of Python: a script, ``-m MODULE`` or ``-c PROGRAM``; all output
        goes to ``output``.
        """
        assert command[0] == sys.executable
        with self._lock:
            self._count += 1
            code, out, err = (
                Path(self._outputs.name) / f"{self._count}.{kind}"
                for kind in ("code", "out", "err")
            )
            out, err = (output or file for file in (out, err))
            for file in (out, err):
                file.touch()
            request = [command[1:], str(cwd), environment, str(code), str(out), str(err)]
            self._server.stdin.write(json.dumps(request).encode() + b"\n")
            return WarmProcess(int(self._server.stdout.readline()), code, out, err)

    def run(self, command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
        """As ``support.commands.run_process``."""
        process = self.start(command, cwd)
        out, err = process.communicate()
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    @contextlib.contextmanager
    def workers(
        self, count: int, command: list[str], cwd: Path, **environment: str
    ) -> Iterator[list[WarmProcess]]:
        """The processes that ``torchrun --nproc-per-node COUNT`` starts, without torchrun but with
        its store; killed in the end.
        """
        store = store_of_agent()
        places = {
            "MASTER_ADDR": "127.0.0.1",
            **agent(store.port, 0),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count)),
            "TORCHELASTIC_RUN_ID": "warm",
            **environment,
        }
        ranks = [dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) for rank in range(count)]
        started = [self.start(command, cwd, **places, **rank) for rank in ranks]
        try:
            yield started
        finally:
            for process in started:
                process.kill()
                process.wait()

    def run_workers(
        self, count: int, command: list[str], cwd: Path, **environment: str
    ) -> list[subprocess.CompletedProcess[str]]:
        """Let such processes come to their ends."""
        with self.workers(count, command, cwd, **environment) as started:
            outputs = [process.communicate() for process in started]
        return [
            subprocess.CompletedProcess(command, each.returncode, *text)
            for each, text in zip(started, outputs)
        ]

    def close(self) -> None:
        """End the process that the others are forked from."""
        with self._server:
            self._server.stdin.close()
        self._outputs.cleanup()


class WarmProcess:
    """As much of ``subprocess.Popen`` as tests need."""

    def __init__(self, pid: int, code: Path, out: Path, err: Path) -> None:
        self.pid, self._code, self._out, self._err = pid, code, out, err

    def __enter__(self) -> WarmProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.wait()

    @property
    def returncode(self) -> int | None:
        return int(self._code.read_text()) if self._code.exists() else None

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended this moment
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended."""
        deadline = time.monotonic() + (timeout or HANG_SECONDS)
        while self.poll() is None:
            if time.monotonic() > deadline:
                assert timeout, f"it does not end: {self._err.read_text()}"
                raise subprocess.TimeoutExpired([], timeout)
            time.sleep(0.005)
        return self.returncode

    def communicate(self) -> tuple[str, str]:
        """All that it has printed, once it has ended."""
        self.wait()
        return self._out.read_text(), self._err.read_text()


def patch_stages(warm: WarmProcesses, patch: pytest.MonkeyPatch) -> None:
    """Let the stages of the sweeps of this process be such processes; they do not end with it."""
    from smoothadv.sweep import jobs as sweep_jobs

    def start(
        command: list[str], cwd: Path, env: dict[str, str], stdout: IO[bytes], **_: object
    ) -> WarmProcess:
        stage = command[command.index(sys.executable, 1) :]  # after what stops it with its parent
        return warm.start(stage, cwd, Path(stdout.name).absolute(), **env)

    patch.setattr(sweep_jobs, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": start}))
