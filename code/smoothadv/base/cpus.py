"""The CPUs that this process may use, and how the threads of PyTorch suit them."""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

MOST_THREADS = 1024
JOBS_AT_A_TIME = "SMOOTHADV_JOBS"
"""The environment variable that says how many jobs a sweep runs at a time on this machine."""
# Threads that sleep soon gain nothing on images of 8x8 pixels (benchmarks/threads.py).
_PIXELS_OF_A_THREAD = 64


def usable_cpus(root: Path = Path("/")) -> int:
    """The CPUs that affinity and the quotas of cgroups leave to this process, one of torchrun's and
    of a sweep's.

    At least 1; a part of a CPU is left out. ``root`` is the folder of the system's files.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE") or 1) * int(
        os.environ.get(JOBS_AT_A_TIME) or 1
    )
    return max(1, int(min([cpus, *_quotas(root)])) // sharing)


def _quotas(root: Path) -> Iterator[float]:
    """The CPUs that the cgroups of this process, and those around them, may use: of version 1 and
    2.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, place = line.split(":", 2)
        mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        if controllers and "cpu" not in controllers.split(","):
            continue
        for group in (PurePosixPath(place), *PurePosixPath(place).parents):
            folder = mount / str(group).lstrip("/")
            texts = [
                _read(folder / name)
                for name in ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")
            ]
            quota, *period = " ".join(texts).split() or ["max"]
            if quota not in ("max", "-1") and period:
                yield int(quota) / int(period[0])


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # there is no such group, or another system
        return ""


def suitable_threads(image_shape: tuple[int, ...], most: int) -> int:
    """The threads that suit networks on images [C, H, W]: OMP_NUM_THREADS; else one for each usable
    CPU, at most ``most``, PyTorch's own choice, and fewer for small images.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return most
    return max(
        1, min(most, usable_cpus(), image_shape[-2] * image_shape[-1] // _PIXELS_OF_A_THREAD)
    )
