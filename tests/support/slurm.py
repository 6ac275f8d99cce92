"""A real Slurm of two nodes on this machine, for tests: it lives in one folder and ends with its
context.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from support.commands import ENVIRONMENT
from support.patience import HANG_SECONDS, wait_for

NODES = ("n0", "n1")
_CLIENTS = ("sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")
_DAEMONS = ("slurmctld", "slurmd", "munged")
# Jobs find this Python first; Slurm's daemons may not be on the user's path.
_PATH = os.pathsep.join(
    [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]
)

_SCHEDULER = (
    "bf_interval=1",
    "sched_interval=1",
    "batch_sched_delay=0",
    "requeue_delay=1",
    "preempt_youngest_first",
)
_SETTINGS = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control_port}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=10
MinJobAge=600
FirstJobId={first_job}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters={scheduler}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={n0_port} CPUs=2 RealMemory=1000 Gres=gpu:2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={n1_port} CPUs=2 RealMemory=1000 Gres=gpu:2
PartitionName=low Nodes=n0,n1 Default=YES PriorityTier=1 PreemptMode=REQUEUE \
  GraceTime={grace} MaxTime=INFINITE
PartitionName=high Nodes=n0,n1 PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE
"""
# Devices that exist on every machine take the place of GPUs: Slurm assigns their numbers.
_GPUS = "NodeName=n[0-1] Name=gpu File=/dev/tty[0-1]\n"


def why_not() -> str | None:
    """The reason why Slurm cannot run here, None if it can."""
    missing = [name for name in (*_DAEMONS, *_CLIENTS) if not shutil.which(name, path=_PATH)]
    if missing:
        return (
            f"{missing[0]} is not installed (apt-get install slurmctld slurmd slurm-client munge)"
        )
    if os.geteuid() != 0:
        return "only root can start slurmd"
    if not (Path("/dev/tty0").exists() and Path("/dev/tty1").exists()):
        return "there are no /dev/tty0 and /dev/tty1 to stand for GPUs"
    return None


class Cluster:
    """Slurm with two nodes of 2 CPUs and 2 pretended GPUs, running within the context.

    Jobs go to the partition ``low`` unless they ask for ``high``, whose jobs take the place of
    those in ``low``: these get SIGTERM, have ``grace`` seconds, and are queued again. The folder's
    path must be short, for there are sockets in it. Several clusters may run at once: each has its
    own ports and its own numbers of jobs.
    """

    def __init__(self, folder: Path, grace: int = 5) -> None:
        self.folder = folder.resolve()
        self._grace = grace
        self._daemons: list[subprocess.Popen] = []
        self._settings = self.folder / "slurm.conf"
        mine = {
            name: value
            for name, value in ENVIRONMENT.items()
            if not name.startswith(("SLURM", "SBATCH", "SRUN"))
        }
        self._mark = {"SLURM_CONF": str(self._settings)}
        # The variables that make Slurm's commands use this cluster.
        self.environment = {**mine, "PATH": _PATH, **self._mark}

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def run(self, *words: object, cwd: Path | None = None) -> str:
        """The output of a command of Slurm, like ``run("scontrol", "requeue", job)``; it must
        succeed.
        """
        command = list(map(str, words))
        done = subprocess.run(
            command,
            cwd=cwd,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def submit(self, *words: object, cwd: Path) -> int:
        """The number of the job that ``sbatch WORDS`` makes."""
        return int(self.run("sbatch", "--parsable", *words, cwd=cwd).split(";")[0])

    def jobs(self) -> dict[str, str]:
        """The states of all jobs, also of ended ones, by their numbers, which are like "7", or
        "7_0" in arrays.
        """
        lines = self.run(
            "squeue", "--noheader", "--array", "--states=all", "--format=%i %T"
        ).splitlines()
        return dict(line.split() for line in lines)

    def job(self, number: object) -> dict[str, str]:
        """All that Slurm knows about a job: JobState, Restarts, ExitCode, Reason, ..."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return as soon as ``condition`` holds; fail if it never does."""
        wait_for(condition, said=lambda: f"{self.jobs()}\n{self._log('slurmctld')}")

    def lose(self, node: str) -> None:
        """Let a node die with all that runs on it; Slurm notices within half a minute."""
        self._end(self.folder / node, {**self._mark, "SLURMD_NODENAME": node})

    def recover(self, node: str) -> None:
        """Start a lost node again."""
        self._launch("slurmd", "-D", "-N", node, cwd=self.folder / node)

    def _start(self) -> None:
        (self.folder / "state").mkdir(parents=True)
        for node in NODES:
            (self.folder / node).mkdir()
        control_port, n0_port, n1_port = _free_ports(3)
        self._settings.write_text(
            _SETTINGS.format(
                host=socket.gethostname().split(".")[0],
                scheduler=",".join(_SCHEDULER),
                folder=self.folder,
                grace=self._grace,
                control_port=control_port,
                n0_port=n0_port,
                n1_port=n1_port,
                # Not 1: programs compute other numbers from a job's number, like the port at which
                # processes meet.
                first_job=random.SystemRandom().randrange(10_000, 60_000),
            )
        )
        (self.folder / "gres.conf").write_text(_GPUS)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        names = {
            "key-file": key.name,
            "socket": "munge.socket",
            "pid-file": "munge.pid",
            "log-file": "munged.log",
        }
        options = [f"--{option}={self.folder / name}" for option, name in names.items()]
        options.append(f"--seed-file={self.folder / 'munge.seed'}")
        self._launch("munged", "--foreground", "--force", *options, cwd=self.folder)
        self._wait_for_daemons((self.folder / "munge.socket").exists)
        self._launch("slurmctld", "-D", cwd=self.folder)
        for node in NODES:
            self.recover(node)
        self._wait_for_daemons(self._is_idle)

    def _is_idle(self) -> bool:
        command = ["sinfo", "--noheader", "--partition=low", "--Node", "--format=%T"]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        return done.stdout.split() == ["idle"] * len(NODES)

    def _launch(self, *command: str, cwd: Path) -> None:
        """Start a daemon in a folder by which its processes, and those of its jobs' steps, can be
        recognized.
        """
        with (self.folder / f"{command[0]}.output").open("a") as output:
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            self._daemons.append(
                subprocess.Popen(command, env=self.environment, cwd=cwd, **streams)
            )

    def _wait_for_daemons(self, condition: Callable[[], bool]) -> None:
        wait_for(
            condition,
            ended=lambda: any(daemon.poll() is not None for daemon in self._daemons),
            said=lambda: "\n".join(map(self._log, ("munged", "slurmctld", *NODES))),
        )

    def _log(self, name: str) -> str:
        file = self.folder / f"{name}.log"
        return (
            "\n".join(file.read_text(errors="replace").splitlines()[-20:]) if file.exists() else ""
        )

    def _stop(self) -> None:
        """Kill the daemons first, so that they start nothing more, then what is left of their
        jobs.
        """
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()
        self._end(self.folder, self._mark)

    def _end(self, folder: Path, variables: dict[str, str]) -> None:
        """Kill all processes that work in ``folder`` or below, or have all these variables in their
        environment.
        """
        deadline = time.monotonic() + HANG_SECONDS
        while left := _processes(folder, variables):
            assert time.monotonic() < deadline, f"cannot end the processes {left}"
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            for daemon in self._daemons:
                daemon.poll()  # so that it does not stay as a zombie
            time.sleep(0.05)


def _processes(folder: Path, variables: dict[str, str]) -> list[int]:
    wanted = {f"{name}={value}".encode() for name, value in variables.items()}
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(
            OSError, ValueError
        ):  # no process, or one that has ended meanwhile
            place, environment = (
                (entry / "cwd").readlink(),
                (entry / "environ").read_bytes().split(b"\0"),
            )
            if int(entry.name) != os.getpid() and (
                place.is_relative_to(folder) or wanted <= set(environment)
            ):
                found.append(int(entry.name))
    return found


def _free_ports(count: int) -> list[int]:
    """Ports that nobody uses, below the range from which Linux chooses ports itself."""
    draws, ports = random.SystemRandom(), set()
    while len(ports) < count:
        port = draws.randrange(10_000, 20_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.add(port)
    return list(ports)
