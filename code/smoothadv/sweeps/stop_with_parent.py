"""Makes a process stop when its parent dies: ``python -m smoothadv.sweeps.stop_with_parent PARENT COMMAND...``.

A stage of a job must not go on where nobody watches over it: another attempt at the job may have begun elsewhere. Only
Linux can do that; elsewhere this is COMMAND and nothing more. COMMAND does not hear SIGUSR2, which schedulers send to
all processes and mean for those that watch.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2); it outlives exec


def main(arguments: list[str]) -> None:
    """Tie this process to its parent, then become the command."""
    parent, *command = arguments
    if hasattr(signal, "pthread_sigmask"):
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # which Ray's workers do not hear
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != int(parent):  # it was faster
            raise SystemExit(128 + signal.SIGTERM)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
