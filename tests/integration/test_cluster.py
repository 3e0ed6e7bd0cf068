"""Several processes of a role on Ray: the first failure is reported, by the name of the process that failed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from rlhf.backends import actors
from rlhf.backends import calls as module
from rlhf.backends.calls import Process, iterate, wait_for
from rlhf.backends.cluster import RayCluster, threads_each
from rlhf.config.cluster import Cluster
from rlhf.config.rollout import VllmRollout
from rlhf.config.train import Train
from rlhf.errors import ClusterError, MisalignedScores, RoleDied, RoleFailed


class Worker:
    """Does what ranks do when one of them fails."""

    def work(self, result: int) -> int:
        return result

    def hang(self) -> None:
        time.sleep(600)

    def fail(self, seconds: float) -> None:
        time.sleep(seconds)
        raise RuntimeError("Connection closed by peer")

    def refuse(self) -> None:
        raise MisalignedScores("sample 3 needs 5 rows")

    def die(self, seconds: float) -> None:
        time.sleep(seconds)
        os._exit(1)

    def threads(self) -> str:
        return os.environ["OMP_NUM_THREADS"]

    @ray.method(num_returns="streaming", _generator_backpressure_num_objects=2)
    def stream(self, count: int, then_hang: bool) -> Iterator[int]:
        yield from (number for number in range(count))  # Ray asks for a generator
        if then_hang:
            time.sleep(600)


@pytest.fixture(scope="module")
def two_devices() -> Iterator[RayCluster]:
    cluster = RayCluster(Cluster(object_store_gb=0.2), bundles=2)
    yield cluster
    cluster.close()


@pytest.fixture
def ranks(two_devices: RayCluster) -> Iterator[list[Process]]:
    two_devices.processes.clear()
    ranks = [
        two_devices.start(f"trainer rank {rank}", Worker, bundles=[rank], share=0.5, environment={}) for rank in (0, 1)
    ]
    wait_for([rank.call("work", 0) for rank in ranks])
    yield ranks
    for rank in ranks:
        ray.kill(rank.actor)


def test_results_are_in_the_order_of_the_calls(ranks: list[Process]) -> None:
    assert wait_for([rank.call("work", number) for number, rank in enumerate(ranks)]) == [0, 1]
    assert [ray.get(list(row)) for row in iterate([ranks[0].call("stream", 5, False)], [ranks[1].call("work", 0)])] == [
        [number] for number in range(5)
    ]
    streams = [rank.call("stream", 5, False) for rank in ranks]
    assert [ray.get(list(row)) for row in iterate(streams)] == [[number] * 2 for number in range(5)]


def test_the_first_failure_is_reported_while_others_hang(ranks: list[Process]) -> None:
    started = time.monotonic()
    with pytest.raises(MisalignedScores, match="sample 3 needs 5 rows"):
        wait_for([ranks[0].call("hang"), ranks[1].call("refuse")])
    assert time.monotonic() - started < module.NOTICE_S


def test_a_failure_names_its_rank(ranks: list[Process], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NOTICE_S", 0.5)
    with pytest.raises(RoleFailed, match="the trainer rank 1 failed with RuntimeError: Connection closed by peer"):
        wait_for([ranks[0].call("hang"), ranks[1].call("fail", 0.0)])


def test_a_death_is_reported_rather_than_what_it_did_to_others(ranks: list[Process]) -> None:
    """Rank 0 fails first: its connection breaks before Ray notices that rank 1 is gone."""
    with pytest.raises(RoleDied, match=r"^the trainer rank 1 process ended unexpectedly"):
        wait_for([ranks[0].call("fail", 0.0), ranks[1].call("die", 0.3)])


def test_a_stream_ends_when_who_helps_with_it_dies(ranks: list[Process]) -> None:
    stream = iterate([ranks[0].call("stream", 3, True)], [ranks[1].call("die", 0.3)])
    with pytest.raises(RoleDied, match=r"^the trainer rank 1 process ended unexpectedly"):
        list(stream)


def test_a_stream_ends_when_who_receives_it_dies(ranks: list[Process], monkeypatch: pytest.MonkeyPatch) -> None:
    """A broadcast waits for a receiver that is gone, and nothing else fails."""
    monkeypatch.setattr(module, "STUCK_S", 0.2)
    monkeypatch.setattr(module, "NOTICE_S", 2.0)
    stream = iterate([ranks[0].call("stream", 1, True)])
    next(stream)
    ray.kill(ranks[1].actor)
    with pytest.raises(RoleDied, match=r"^the trainer rank 1 process ended unexpectedly"):
        next(stream)


def test_what_is_late_is_named(ranks: list[Process]) -> None:
    with pytest.raises(ClusterError, match=r"the trainer rank 1 process was not ready within .*=0\.5 seconds"):
        wait_for([ranks[0].call("work", 0), ranks[1].call("hang")], timeout_s=0.5)


class LendingTrainer:
    """Stands for a trainer process: its buckets say which rank they are of."""

    def __init__(self, setup: Any, rank: int) -> None:
        self.rank = rank

    def open_store(self) -> None: ...

    def ready(self, address: None) -> None: ...

    @ray.method(num_returns="streaming", _generator_backpressure_num_objects=2)
    def buckets(self, dtype: str) -> Iterator[tuple[int, int]]:
        yield from ((self.rank, number) for number in range(5))


class ReceivingEngine:
    """Stands for an engine process: remembers what it was given."""

    def __init__(self, setup: Any) -> None:
        self.loaded: list[tuple[tuple[int, int], ...]] = []

    def ready(self) -> None: ...

    def begin_update(self) -> None: ...

    def load(self, *buckets: tuple[int, int]) -> None:
        self.loaded.append(buckets)

    def finish_update(self) -> list[tuple[tuple[int, int], ...]]:
        return self.loaded


@pytest.mark.parametrize(
    ("lends", "replicas", "expected"),
    [
        (True, [[1], [0]], [[1], [0]]),
        (False, [[1], [0]], [[0], [0]]),
        (True, [[1, 0]], [[1, 0]]),
        (False, [[1, 0]], [[0]]),
    ],
)
def test_a_replica_gets_what_was_lent_on_its_own_devices(
    two_devices: RayCluster,
    monkeypatch: pytest.MonkeyPatch,
    lends: bool,
    replicas: list[list[int]],
    expected: list[list[int]],
) -> None:
    """The first replica begins where rank 1 is. Where nothing is lent, rank 0 hands out copies for all."""
    monkeypatch.setattr(actors, "TrainerActor", LendingTrainer)
    monkeypatch.setattr(actors, "EngineActor", ReceivingEngine)
    two_devices.processes.clear()
    setup: Any = SimpleNamespace(train=Train(gpus=2), rollout=VllmRollout())
    try:
        trainer = actors.RayTrainer(two_devices, setup, bundles=[0, 1], share=0.5, lends=lends)
        engine = actors.RayEngine(two_devices, setup, bundles=replicas, share=0.5)
        calls = engine.update_weights(trainer.buckets("float32")).calls
        loaded = wait_for(calls)[-len(replicas) :]
        assert loaded == [[tuple((rank, number) for rank in ranks) for number in range(5)] for ranks in expected]
    finally:
        for process in two_devices.processes:
            ray.kill(process.actor)


class Seer:
    def visible(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]


SEEN = """
import ray
from rlhf.backends.calls import wait_for
from rlhf.backends.cluster import RayCluster
from rlhf.config.cluster import Cluster, Device
from tests.integration.test_cluster import Seer

ray.init(address="local", num_gpus=4, include_dashboard=False, log_to_driver=False)
cluster = RayCluster(Cluster(device=Device.cuda), bundles=4)
for bundles in ([2], [2, 3], [1, 0], [0]):
    process = cluster.start("engine", Seer, bundles=bundles, share=0.5, environment={})
    print("SEEN", *wait_for([process.call("visible")]))
"""


def test_a_replica_of_several_gpus_sees_them_all_in_its_order(tmp_path: Path) -> None:
    """Ray counts GPUs that it is told of, so no card is needed."""
    done = subprocess.run([sys.executable, "-c", SEEN], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    alone, pair, turned, first = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("SEEN")]
    pair_gpus, turned_gpus = pair.split(","), turned.split(",")
    assert sorted([*pair_gpus, *turned_gpus]) == ["0", "1", "2", "3"]
    assert pair_gpus[0] == alone and turned_gpus[1] == first


def test_too_few_devices_are_named_before_a_role_starts(two_devices: RayCluster) -> None:
    """Trainer, engine and standalone teacher on a cluster with two slots."""
    with pytest.raises(ClusterError, match=r"^the run needs 3 device\(s\), the Ray cluster has 2 .* or teacher\.gpus$"):
        RayCluster(Cluster(), bundles=3)


def test_devices_of_a_node_share_its_cores(two_devices: RayCluster, ranks: list[Process]) -> None:
    assert len(two_devices.nodes) == 2 and len(set(two_devices.nodes)) == 1
    cores = len(os.sched_getaffinity(0))
    assert wait_for([rank.call("threads") for rank in ranks]) == [str(max(1, cores // 2))] * 2
    assert threads_each(["a"], 8) == 8
    assert threads_each(["a", "a", "a", "b"], 8) == 2
    assert threads_each(["a"] * 4, 2) == 1
