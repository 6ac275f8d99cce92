"""torchrun, as tests start and watch it; nothing of it is left afterwards."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.commands import CODE, ENVIRONMENT, wait_until

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="finds torchrun's processes in /proc"
)


def torchrun(command: list[str], processes: int, restarts: int = 0) -> list[str]:
    """As `torchrun --nproc-per-node PROCESSES code/NAME.py ...`, where ``command`` starts a single
    one.
    """
    launch = [
        command[0],
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
    ]
    return [*launch, f"--max-restarts={restarts}", "--", *command[1:]]


def workers_of(launcher: subprocess.Popen) -> list[int]:
    """The processes that torchrun has started and that still run, in the order of their ranks."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return [
        int(child)
        for child in children
        if os.fsencode(CODE) in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


@contextlib.contextmanager
def launched(
    command: list[str], folder: Path, ready: Callable[[], bool]
) -> Iterator[subprocess.Popen]:
    """A torchrun at work, once it is ``ready``; its output is in the file ``output``."""
    with (folder / "output").open("w") as output:
        launcher = subprocess.Popen(
            command, cwd=folder, env=ENVIRONMENT, stdout=output, stderr=output
        )
    workers: set[int] = set()
    try:
        wait_until(ready, launcher)
        workers |= set(workers_of(launcher))
        yield launcher
    finally:
        if launcher.poll() is None:  # some may have been started again
            workers |= set(workers_of(launcher))
        for process in (launcher.pid, *workers):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        launcher.wait()
