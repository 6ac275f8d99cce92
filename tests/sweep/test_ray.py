"""Sweeps on a real Ray cluster: whichever machine is lost, models and logs equal those of an
undisturbed sweep.
"""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import sweep_runs
from support.commands import ENVIRONMENT
from support.patience import wait_for
from support.ray_cluster import HEAD, RayCluster, why_not
from support.sweep_runs import NAMES
from support.sweeping import processes_with

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]
RUN = ["run", "--engine", "ray", "--device", "cpu"]


@pytest.fixture
def cluster(tmp_path) -> Iterator[RayCluster]:
    """Two nodes that run two jobs each."""
    with RayCluster(tmp_path / "ray", cpus=2) as running:
        yield running


@pytest.fixture
def own_ray() -> Iterator[dict[str, str]]:
    """An environment in which a sweep starts Ray in a temporary folder of its own."""
    place = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # a socket's path has at most 107 characters
    others = {name: value for name, value in ENVIRONMENT.items() if not name.startswith("RAY_")}
    yield {**others, "RAY_TMPDIR": place, "RAY_USAGE_STATS_ENABLED": "0"}
    shutil.rmtree(place, ignore_errors=True)


def on(cluster: RayCluster) -> tuple[list[str], dict[str, str]]:
    """The options and the environment with which a sweep runs on a cluster."""
    return [*RUN, "--address", cluster.address], {**ENVIRONMENT, **cluster.environment}


def stages_by_name(folder: Path) -> dict[str, int]:
    return {name: process for name in NAMES for process in sweep_runs.stages(folder, name)}


def trains_everywhere(folder: Path) -> bool:
    return len(sweep_runs.in_training(folder)) == len(stages_by_name(folder)) == 4


@pytest.mark.parametrize("what", ["node", "raylet"])
def test_jobs_of_a_lost_node_are_done_on_another(cluster, folder, reference, what):
    """While all four jobs train, everything on one of two nodes dies at once; or Ray's process
    there, and its workers with it, whose stages then stop by themselves. 70 seconds."""
    words, environment = on(cluster)
    with sweep_runs.started(folder, *words, environment=environment) as running:
        running.wait_until(lambda: trains_everywhere(folder))
        working, there = stages_by_name(folder), cluster.processes(0)
        if what == "node":
            there = cluster.kill_node(0)
        else:
            os.kill(cluster.raylet(0), signal.SIGKILL)
        lost = [name for name in NAMES if working[name] in there]
        sweep_runs.assert_done(running, reference)
    assert len(lost) == 2
    assert [sweep_runs.attempts(folder, name) for name in NAMES] == [
        1 + (name in lost) for name in NAMES
    ]
    for name in lost:
        log = sweep_runs.job_log(folder, name)
        assert "resuming" in log and (
            what == "node" or "resuming" in log.partition("stopped by SIGTERM")[2]
        ), log
        assert what == "node" or "resuming" not in log.partition("stopped by SIGTERM")[0], log


def test_lost_head_ends_the_sweep_and_another_one_takes_it_on(folder, reference, tmp_path):
    with RayCluster(tmp_path / "ray", cpus=2) as cluster:
        words, environment = on(cluster)
        with sweep_runs.started(folder, *words, environment=environment) as running:
            running.wait_until(lambda: trains_everywhere(folder))
            cluster.kill_node(HEAD)
            assert running.wait() == 1
        assert running.err.startswith("error: ") and running.err.count("\n") == 1, running.err
        assert cluster.address in running.err and "gone" in running.err
    with RayCluster(tmp_path / "another", cpus=2) as cluster:
        words, environment = on(cluster)
        left = sweep_runs.ran(folder, "status").out.count("| stopped |")
        with sweep_runs.started(folder, *words, environment=environment) as running:
            sweep_runs.assert_done(running, reference, left)


def test_interrupted_sweep_stops_the_ray_that_it_has_started(own_ray, folder, reference):
    """Ctrl-C ends all that it has started, and no work is lost. Two jobs run, for this machine may
    have few CPUs. 60 seconds.
    """
    with sweep_runs.started(folder, *RUN, "--jobs", 2, environment=own_ray) as running:
        running.wait_until(lambda: len(sweep_runs.in_training(folder)) == 2)
        running.interrupt()
        assert running.wait() == 130
    assert running.err.count("interrupted") == 1 and "Traceback" not in running.err, running.err
    assert sweep_runs.stages(folder) == []
    assert [sweep_runs.attempts(folder, name) for name in NAMES].count(1) == 2
    stopped = ["stopped by SIGTERM" in sweep_runs.job_log(folder, name) for name in NAMES]
    output = sweep_runs.ran(folder, "status").out
    assert sum(stopped) == 2 and "2 stopped" in output.splitlines()[-1], output
    assert "running" not in output
    wait_for(lambda: not processes_with("RAY_TMPDIR", own_ray["RAY_TMPDIR"]))
    assert (folder / "logs/tiny/ray.log").exists()
    with sweep_runs.started(folder, *RUN, environment=own_ray) as running:
        sweep_runs.assert_done(running, reference)


@pytest.mark.parametrize("way", ["option", "variable"])
def test_address_without_a_head_is_an_error_at_once(folder, own_ray, way):
    options = ["--address", "127.0.0.1:1"] if way == "option" else []
    environment = {**own_ray, "RAY_ADDRESS": "127.0.0.1:1"} if way == "variable" else own_ray
    done = sweep_runs.ran(folder, *RUN, *options, environment=environment)
    assert done.process.returncode == 1
    assert done.err.startswith("error: --address 127.0.0.1:1: ") and done.err.count("\n") == 1, (
        done.err
    )
    assert "ray start --head" in done.err
    assert not (folder / "logs").exists() and not (folder / "models").exists()


def test_gpus_that_no_machine_has_are_an_error_at_once(cluster, folder):
    """Without --device cpu a cluster must have GPUs, because this machine may not be one that
    computes.
    """
    words, environment = on(cluster)
    done = sweep_runs.ran(
        folder,
        *[word for word in words if word not in ("--device", "cpu")],
        environment=environment,
    )
    assert done.process.returncode == 1
    assert done.err == "error: no machine of this Ray has 1 GPUs; --device cpu needs none\n"
    assert not (folder / "models").exists()
    assert sweep_runs.ran(folder, "status").out.endswith("tiny: 4 jobs: 4 waiting\n")
