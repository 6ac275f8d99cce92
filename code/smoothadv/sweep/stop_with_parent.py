"""Makes a process stop when its parent dies: ``python -m smoothadv.sweep.stop_with_parent PARENT
COMMAND...``.

The process becomes COMMAND, and the kernel sends it SIGTERM when process PARENT is gone. A stage of
a job must not continue without the process that watches it: another attempt at the job may have
started elsewhere. Only Linux offers this; on other systems COMMAND simply runs. COMMAND ignores
SIGUSR2: schedulers send it to all processes of a job, but only the watching process acts on it.
"""

import ctypes
import os
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2); it outlives exec


def main(arguments: list[str]) -> None:
    """Ask the kernel to stop this process with its parent, then become the command."""
    parent, *command = arguments
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray's workers block it
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != int(parent):  # the parent has died already
            raise SystemExit(128 + signal.SIGTERM)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
