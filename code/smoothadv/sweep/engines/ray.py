"""ray: the machines of a running Ray cluster, or this machine's GPUs; a job whose machine is lost
is tried again.
"""

import contextlib
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from smoothadv.base.errors import UserError, first_line, optional_module
from smoothadv.base.settings import SettingError, non_negative_int, setting
from smoothadv.sweep.engines import ENGINES, Engine, ReportEnd, SweepContext, wait_for_jobs
from smoothadv.sweep.jobs import FAILED, STOPPED, SweepJob, execute, stage_environment

_KNOCK_SECONDS = 5.0
# After this time without an answer the head counts as lost. Ray itself would end this process after
# 60 s, without an exception.
_HEAD_GONE_SECONDS = 20.0
# How long to wait for jobs that were asked to stop: a training finishes its update and saves.
_GRACE_SECONDS = 120.0
# These notice a machine that does not answer any more; with Ray's defaults, 300 s and 120 s,
# minutes would be lost.
_KEEPALIVE = {
    "RAY_grpc_client_keepalive_time_ms": "60000",
    "RAY_grpc_client_keepalive_timeout_ms": "30000",
}


def _host_and_port(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()):
        raise SettingError(f"'{text}' is not HOST:PORT, like 10.0.0.1:6379")
    return text


@ENGINES.register("ray")
@dataclass(frozen=True)
class Ray(Engine):
    """a Ray cluster whose machines share this folder, or the GPUs here in Ray's queue; lost jobs
    are tried again
    """

    address: str | None = setting(
        None,
        parse=_host_and_port,
        help="HOST:PORT of a running Ray head (default: RAY_ADDRESS; if that is not set, Ray is "
        "started here)",
    )
    retries: int = setting(
        3, parse=non_negative_int, help="how often a job is tried again after its machine is lost"
    )

    def run(self, jobs: Sequence[SweepJob], context: SweepContext, report_end: ReportEnd) -> None:
        address = self.address or os.environ.get("RAY_ADDRESS") or None  # None starts Ray here
        # Ray's import reads these.
        os.environ.update({name: os.environ.get(name, value) for name, value in _KEEPALIVE.items()})
        if address is None and "RAY_AUTH_MODE" not in os.environ:
            # Else Ray writes a secret into the user's home.
            os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
        ray = optional_module("ray", '--engine ray needs Ray: pip install "smoothadv[ray]" or ray')
        if address is not None and not _answers(address):
            raise UserError(
                f"--address {address}: no Ray head answers there; start one with `ray start "
                "--head`, or name its port, by default 6379"
            )
        # A Ray that is started here has this machine's GPUs, perhaps none.
        wants_gpus = context.wants_gpus and (address is not None or bool(context.gpus))
        gpus = max(job.processes for job in jobs) if wants_gpus else 0
        # _connected redirects standard output, to which Ray prints from its own threads.
        terminal = sys.stdout

        def report_on_terminal(job: SweepJob, outcome: str) -> None:
            with contextlib.redirect_stdout(terminal):
                report_end(job, outcome)

        context.folder.mkdir(parents=True, exist_ok=True)
        with _connected(ray, address, jobs[0], context, gpus):
            self._work(ray, jobs, address, gpus, report_on_terminal)

    def _work(
        self,
        ray: Any,
        jobs: Sequence[SweepJob],
        address: str | None,
        gpus: int,
        report_end: ReportEnd,
    ) -> None:
        """Hand out all jobs and wait for them; an interruption stops them."""
        remote = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=self.retries)(attempt_job)
        handles, answered = dict[Future[str], Any](), time.monotonic()

        def submit(job: SweepJob) -> Future[str]:
            handle = remote.remote(job)
            future = handle.future()
            handles[future] = handle
            return future

        def look() -> None:
            nonlocal answered
            if address is None or _answers(address):
                answered = time.monotonic()
            elif time.monotonic() - answered > _HEAD_GONE_SECONDS:
                raise UserError(
                    f"the Ray head at {address} is gone: start it, and run the same command again"
                )

        try:
            outcome = partial(_outcome, ray)
            wait_for_jobs(jobs, submit, self.jobs or len(jobs), report_end, outcome, look)
        finally:
            running = [handle for future, handle in handles.items() if not future.done()]
            for handle in running:
                ray.cancel(handle)
            if running:
                ray.wait(running, num_returns=len(running), timeout=_GRACE_SECONDS)


def _answers(address: str) -> bool:
    """Whether some process listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_KNOCK_SECONDS).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True


@contextlib.contextmanager
def _connected(
    ray: Any, address: str | None, job: SweepJob, context: SweepContext, gpus: int
) -> Iterator[None]:
    """Within, Ray is connected to the cluster at ``address``, or started here; its output goes to
    the file ray.log.
    """
    # By default Ray kills the processes that its workers have started, but a stage must save first.
    variables = {**stage_environment(job), "RAY_kill_child_processes_on_worker_exit": "false"}
    where: dict[str, Any] = {"address": address}
    if address is None:
        count = len(context.gpus) if context.wants_gpus else None
        where = {"include_dashboard": False, "num_gpus": count}
    handler: Callable | int | None = signal.getsignal(signal.SIGTERM)
    with (
        (context.folder / "ray.log").open("a", buffering=1) as log,
        contextlib.redirect_stdout(log),
    ):
        try:
            ray.init(
                **where,
                log_to_driver=False,
                logging_level="ERROR",
                configure_logging=False,
                runtime_env={"env_vars": variables},
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UserError(
                f"Ray at {address or 'this machine'} cannot be used: {first_line(error)}"
            ) from error
        finally:
            signal.signal(signal.SIGTERM, handler)  # Ray has replaced it
        try:
            alive = [node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]]
            if gpus and not any(count >= gpus for count in alive):  # else Ray would wait for ever
                raise UserError(f"no machine of this Ray has {gpus} GPUs; --device cpu needs none")
            yield
        finally:
            ray.shutdown()


def _outcome(ray: Any, future: Future[str]) -> str:
    try:
        return future.result()
    except ray.exceptions.RayTaskError as error:  # a defect: the job raised an exception
        print(error)
        return FAILED
    except (
        ray.exceptions.RayError
    ):  # the machine or the process was lost more often than ``retries`` allows
        return STOPPED


def attempt_job(job: SweepJob) -> str:
    """What Ray runs for each job, in the main thread of a worker; Ray interrupts it by
    KeyboardInterrupt.
    """
    try:
        return execute(job, {}, threading.Event(), {"engine": "ray"})
    except (KeyboardInterrupt, SystemExit):
        return STOPPED  # else Ray would take the exception for a crash, and try the job again
