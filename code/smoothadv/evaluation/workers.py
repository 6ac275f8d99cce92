"""The processes that torchrun started for one evaluation: who takes which shard, and when all are done."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterator

import torch
from torch import distributed

_PAUSE_SECONDS = 0.2


class Workers:
    """This process among its equals; they agree through torchrun's store alone, without collective operations.

    ``rank`` counts from 0, ``local_rank`` among the processes of this machine. ``restarted`` tells that torchrun
    started all of them again after one failed.
    """

    def __init__(self) -> None:
        store, self.rank, self.size = next(iter(distributed.rendezvous("env://")))
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        self.restarted = attempt > 0
        # torchrun's store outlives a restart, and what was claimed before is to be claimed again.
        self._store = distributed.PrefixStore(f"attempt {attempt}", store)

    def apart(self, name: str) -> Workers:
        """The same processes with counts of their own: for one of several logs that they write in turn."""
        other = copy.copy(self)
        other._store = distributed.PrefixStore(name, self._store)
        return other

    def claims(self, count: int) -> Iterator[int]:
        """Numbers below ``count`` that nobody else gets, one whenever this process asks."""
        while (number := self._store.add("claimed", 1) - 1) < count:
            yield number

    def report(self, examples: int) -> int:
        """Add to the examples done; how many all processes have done."""
        return self._store.add("examples", examples)

    def agree(self, name: str, value: int) -> int:
        """The value that the first process proposes."""
        if self.rank == 0:
            self._store.set(name, str(value))
        return int(self._store.get(name))

    def wait_for_all(self) -> None:
        """Return once every process has called this."""
        self._store.add("finished", 1)
        while self._store.add("finished", 0) < self.size:
            time.sleep(_PAUSE_SECONDS)
        # The store may live in the first process: it leaves last.
        self._store.add("left", 1)
        while self.rank == 0 and self._store.add("left", 0) < self.size:
            time.sleep(_PAUSE_SECONDS)


def join_workers() -> Workers | None:
    """The present process's place among those that torchrun started; None if it did not start this one."""
    started = distributed.is_available() and distributed.is_torchelastic_launched()
    return Workers() if started else None


def own_device(device: torch.device, local_rank: int | None) -> torch.device:
    """The GPU of this process where several (None: not) share a machine and none was named."""
    if local_rank is None or device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", local_rank % torch.cuda.device_count())
