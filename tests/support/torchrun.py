"""torchrun, as a user starts it, and what its processes find of it."""

from torch.distributed import TCPStore


def torchrun(command: list[str], processes: int) -> list[str]:
    """As `torchrun --nproc-per-node PROCESSES code/NAME.py ...`, where ``command`` starts a single
    one; torchrun forks its processes, which have loaded what it has.
    """
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [command[0], *launch, "--start-method=fork", "--run-path", "--", *command[1:]]


def agent(port: int, attempt: int) -> dict[str, str]:
    """The environment of processes that torchrun, whose store has this port, starts for the
    ``attempt``-th time, from 0 on.
    """
    return {
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
    }


def store_of_agent() -> TCPStore:
    """What torchrun keeps while it starts its processes again."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
