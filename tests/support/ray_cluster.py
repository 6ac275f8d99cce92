"""A real Ray cluster on this one host, whose nodes can be killed as if their machines lost power.

The head schedules no tasks: they run on the worker nodes, and whichever of these is killed, the
head, the driver (which Ray attaches to the head) and the other worker nodes survive. Each node is a
tree of processes in a session of its own, at a loopback address of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from support.patience import wait_for
from support.sweeping import processes_with

HEAD = -1  # its index; the worker nodes' are 0, 1, ...
# a variable that names the node of a process, even if its parents have died
MARK = "SMOOTHADV_TEST_RAY_NODE"

# Settings with which the head notices a killed node within 6 s instead of 15.
FAST = dict.fromkeys(
    (f"RAY_health_check_{name}_ms" for name in ("initial_delay", "period", "timeout")), "1000"
)


def why_not() -> str:
    """Why no cluster can be started here; "" if it can."""
    return (
        ""
        if sys.platform == "linux" and importlib.util.find_spec("ray")
        else "Ray is not installed, or no Linux"
    )


class RayCluster:
    """A head and worker nodes, from entering this context until it is left; what they print is in
    ``folder``.

    Each worker node runs ``cpus`` tasks at a time that ask for one CPU. None has a GPU in Ray's
    books, whether or not this host has any.
    """

    def __init__(self, folder: Path, nodes: int = 2, cpus: int = 1) -> None:
        self.folder, self.nodes, self.cpus = Path(folder), [HEAD, *range(nodes)], cpus
        self.address, self.started = "", dict[int, subprocess.Popen]()

    def __enter__(self) -> RayCluster:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.short = Path(
            tempfile.mkdtemp(prefix="ray", dir="/tmp")
        )  # a socket's path has at most 107 characters
        with socket.socket() as free:
            free.bind((_host(HEAD), 0))
            self.address = f"{_host(HEAD)}:{free.getsockname()[1]}"
        try:
            port = self.address.rpartition(":")[2]
            self._start(HEAD, "--head", f"--port={port}", "--num-cpus=0")
            wait_for(self._up, said=lambda: f"for the head; see {self.folder}")
            for node in self.nodes[1:]:
                self._start(node, f"--address={self.address}", f"--num-cpus={self.cpus}")
            wait_for(self._up, said=lambda: f"for the worker nodes; see {self.folder}")
        except BaseException:
            self.stop()
            raise
        return self

    @property
    def environment(self) -> dict[str, str]:
        """Variables that a driver needs too; with them Ray neither reads nor writes a token in the
        home folder.
        """
        fixed = {
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": str(self.short),
        }
        return {**fixed, **FAST}

    def kill_node(self, index: int) -> list[int]:
        """End a node, or the ``HEAD``, as a power cut does: everything on it at once; returns the
        process ids.

        All of it is stopped before any of it is killed: no process sees another die, says goodbye
        or starts a new one.
        """
        killed = set[int]()
        for number in (signal.SIGSTOP, signal.SIGKILL):
            signalled = set[int]()
            while new := {*self.processes(index)} - signalled:
                for pid in new:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
                signalled |= new
            killed |= signalled
        wait_for(lambda: not self.processes(index))
        return sorted(killed)

    def processes(self, index: int) -> list[int]:
        """The living processes of a node: those with its mark."""
        return processes_with(MARK, f"{self.short.name}/{index}")

    def raylet(self, index: int) -> int:
        """The process id of a node's raylet, which starts and watches its workers."""
        return next(
            pid
            for pid in self.processes(index)
            if Path(f"/proc/{pid}/comm").read_text() == "raylet\n"
        )

    def stop(self, *_) -> None:
        """Kill all that is left of the cluster; harmless if nothing is left."""
        for node in reversed(self.nodes):
            self.kill_node(node)
        for process in self.started.values():
            process.wait()  # no zombie is left either
        shutil.rmtree(self.short, ignore_errors=True)

    __exit__ = stop

    def _start(self, index: int, *arguments: str) -> None:
        """Start a node. If this process is killed, so is the node: Ray's agents last, within a
        minute.
        """
        command = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            "--block",
            "--object-store-memory=80000000",
            "--num-gpus=0",
            *arguments,
            f"--node-ip-address={_host(index)}",
            f"--temp-dir={self.short}/{index}",
        ]
        env = {**os.environ, **self.environment, MARK: f"{self.short.name}/{index}"}
        with open(self.folder / f"node{index}.txt", "wb") as output:
            quiet = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
            self.started[index] = subprocess.Popen(  # PR_SET_PDEATHSIG, SIGKILL:
                command,
                env=env,
                **quiet,
                start_new_session=True,
                preexec_fn=lambda: ctypes.CDLL(None).prctl(1, 9),
            )

    def _up(self) -> bool:
        outputs = [(self.folder / f"node{index}.txt").read_text() for index in self.started]
        if any(process.poll() is not None for process in self.started.values()):
            raise RuntimeError(f"a node has ended: {outputs}")
        return all("Ray runtime started" in output for output in outputs)


def _host(index: int) -> str:
    """A node's address. Ray replaces 127.0.0.1 by the address of the network interface, where
    nobody listens.
    """
    return f"127.0.0.{index + 3}"
