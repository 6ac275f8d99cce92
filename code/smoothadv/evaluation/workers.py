"""The processes that torchrun started for an evaluation: which process takes which shard, and when
all are done.
"""

from __future__ import annotations

import copy
import itertools
import os
import time
from collections.abc import Iterator

from torch import distributed

_PAUSE_SECONDS = 0.2
_jobs = itertools.count()


class Workers:
    """This process and the others of torchrun; they communicate through torchrun's store, not by
    collectives.

    ``rank`` counts all processes from 0, ``local_rank`` those of this machine. ``restarted`` is
    True if torchrun has started all processes again because one failed.
    """

    def __init__(self) -> None:
        store, self.rank, self.size = next(iter(distributed.rendezvous("env://")))
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        self.restarted = attempt > 0
        # torchrun's store outlives a restart, and a program may do several jobs: each has counts of
        # its own.
        self._store = distributed.PrefixStore(f"attempt {attempt}, job {next(_jobs)}", store)

    def for_log(self, name: str) -> Workers:
        """The same processes with separate counts for the log ``name``: they write several logs in
        turn.
        """
        other = copy.copy(self)
        other._store = distributed.PrefixStore(name, self._store)
        return other

    def claims(self, count: int) -> Iterator[int]:
        """Numbers 0 to ``count`` - 1, each given to one process only: the next free number at each
        step.
        """
        while (number := self._store.add("claimed", 1) - 1) < count:
            yield number

    def report(self, examples: int) -> int:
        """Add ``examples`` to the number of finished examples; returns the number of all processes
        together.
        """
        return self._store.add("examples", examples)

    def agree(self, name: str, value: int) -> int:
        """The ``value`` of the first process; the others wait for it."""
        if self.rank == 0:
            self._store.set(name, str(value))
        return int(self._store.get(name))

    def wait_for_all(self, step: str) -> None:
        """Return once every process has called this for the same ``step``."""
        self._store.add(f"reached {step}", 1)
        while self._store.add(f"reached {step}", 0) < self.size:
            time.sleep(_PAUSE_SECONDS)
        # The first process may host the store: it must return last.
        self._store.add(f"left {step}", 1)
        while self.rank == 0 and self._store.add(f"left {step}", 0) < self.size:
            time.sleep(_PAUSE_SECONDS)


def join_workers() -> Workers | None:
    """This process as one of torchrun's processes; None if torchrun did not start it."""
    started = distributed.is_available() and distributed.is_torchelastic_launched()
    return Workers() if started else None
