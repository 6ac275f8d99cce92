"""The CPUs that this process may use, and how the threads of PyTorch suit them."""

import os

MOST_THREADS = 1024
JOBS_AT_A_TIME = "SMOOTHADV_JOBS"
"""The environment variable that says how many jobs a sweep runs at a time on this machine."""
# Threads that sleep soon gain nothing on images of 8x8 pixels.
_PIXELS_OF_A_THREAD = 64


def usable_cpus() -> int:
    """The CPUs that affinity and the quotas of cgroups leave to this process, one of torchrun's and
    of a sweep's; at least 1.
    """
    import joblib

    processes = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return max(1, joblib.cpu_count() // (processes * int(os.environ.get(JOBS_AT_A_TIME) or 1)))


def suitable_threads(image_shape: tuple[int, ...], most: int) -> int:
    """The threads that suit networks on images [C, H, W]: OMP_NUM_THREADS; else one for each usable
    CPU, at most ``most``, PyTorch's own choice, and fewer for small images.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return most
    return max(
        1, min(most, usable_cpus(), image_shape[-2] * image_shape[-1] // _PIXELS_OF_A_THREAD)
    )
