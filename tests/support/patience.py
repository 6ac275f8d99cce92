"""How long tests wait for what other processes and threads do: no test knows how fast a machine
is.
"""

import time
from collections.abc import Callable

# After so long, what is waited for hangs: ten times what the slowest has taken on two slow, busy
# cores.
HANG_SECONDS = 1800


def wait_for(
    condition: Callable[[], object],
    ended: Callable[[], bool] = lambda: False,
    said: Callable[[], object] = lambda: "",
) -> None:
    """Return as soon as ``condition`` holds; fail, with what was ``said``, if what makes it true
    has ``ended`` before, or it does not for too long."""
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert not ended(), f"ended too early: {said()}"
        assert time.monotonic() < deadline, f"waited in vain: {said()}"
        time.sleep(0.01)
