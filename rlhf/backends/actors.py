"""The roles as Ray actors, and the handles through which the driver talks to them."""

from __future__ import annotations

import importlib.util
import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from jaxtyping import Float32

from rlhf.backends.calls import Call, RayFuture, arrivals, iterate, wait_for
from rlhf.backends.cluster import RayCluster
from rlhf.backends.megatron.setup import TrainerSetup
from rlhf.backends.vllm.setup import EngineSetup
from rlhf.config.cluster import Device
from rlhf.roles.replicas import merge, split
from rlhf.types import BatchPlan, Experience, Metrics, MiniBatch, Prompts, Rollouts, Sequences

BUCKET_BYTES = 128 * 2**20
"""Weights on their way: large enough to amortise a call, small enough that a few fit any object store."""
IN_FLIGHT = 2
"""Buckets that wait to be loaded, and buckets made ahead of them."""


class TrainerActor:
    """A `MegatronTrainer` in a process of its own. Megatron is imported there, not in the driver."""

    def __init__(self, setup: TrainerSetup, rank: int) -> None:
        self.setup = setup
        self.rank = rank
        self.store: Any = None
        self.channel: Any = None

    def open_store(self) -> tuple[str, int]:
        """On rank 0: the store through which the ranks, and the ends of a channel, find each other -> host and port.

        It is open from here on, so no other process can have taken the port when the others come.
        """
        from torch.distributed import TCPStore

        host = ray.util.get_node_ip_address()
        self.store = TCPStore(host, 0, self.setup.train.gpus, is_master=True, wait_for_workers=False)
        return host, self.store.port

    def ready(self, address: tuple[str, int]) -> None:
        """Load the models. Not in `__init__`: an actor that fails there dies, and its reason is lost in Ray's words.

        Args:
            address: of rank 0's store.
        """
        from torch.distributed import TCPStore

        from rlhf.backends.megatron.trainer import MegatronTrainer

        if self.store is None:
            self.store = TCPStore(*address, self.setup.train.gpus, is_master=False)
        self.trainer = MegatronTrainer(self.setup, self.rank, self.store)

    def open_channel(self, size: int) -> None:
        """On rank 0: push weights from here on, to `size - 1` devices of engines."""
        from rlhf.backends.channel import TRAINER, WeightChannel

        self.channel = WeightChannel(self.store, TRAINER, size)

    def train(self, experience: Experience) -> Metrics:
        return self.trainer.train(experience, self._fetched(experience.scores))

    def score(self, sequences: Sequences, minibatches: tuple[MiniBatch, ...]) -> None:
        self.trainer.score(sequences, minibatches)

    def logprobs(self, sequences: Sequences, minibatches: tuple[MiniBatch, ...], temperature: float) -> Any:
        return self.trainer.logprobs(sequences, minibatches, temperature)

    def evaluate(
        self, sequences: Sequences, plan: BatchPlan, teacher: tuple[Sequences, BatchPlan] | None, hidden: Any
    ) -> Metrics:
        return self.trainer.evaluate(sequences, plan, teacher, self._fetched(hidden))

    def _fetched(self, references: Any) -> list[Any]:
        """A standalone teacher's scores of this rank's samples."""
        return [] if references is None else ray.get(references[self.trainer.data_parallel_rank])

    @ray.method(num_returns="streaming", _generator_backpressure_num_objects=IN_FLIGHT)
    def buckets(self, dtype: str) -> Iterator[Any]:
        yield from self.trainer.buckets(dtype, BUCKET_BYTES, self.channel)

    def take_part_in_export(self) -> None:
        self.trainer.take_part_in_export()

    def save(self, folder: Path) -> None:
        self.trainer.save(folder)

    def save_state(self, folder: Path) -> None:
        self.trainer.save_state(folder)

    def load_state(self, folder: Path) -> int:
        return self.trainer.load_state(folder)


class EngineActor:
    """A `VllmEngine` in a process of its own."""

    def __init__(self, setup: EngineSetup) -> None:
        self.setup = setup

    def ready(self) -> None:
        """Start vLLM, so that it can take weights."""
        from rlhf.backends.vllm.engine import VllmEngine

        self.engine = VllmEngine(self.setup)

    def join_channel(self, address: tuple[str, int], rank: int, size: int) -> None:
        self.engine.join_channel(address, rank, size)

    def begin_update(self) -> None:
        self.engine.begin_update()

    def load(self, *buckets: Any) -> None:
        self.engine.load(buckets)

    def finish_update(self) -> int:
        return self.engine.finish_update()

    def generate(self, prompts: Prompts, version: int, greedy: bool) -> Rollouts:
        return self.engine.generate(prompts, version, greedy)

    @ray.method(num_returns="streaming")
    def stream(self, prompts: Prompts, version: int) -> Iterator[Rollouts]:
        yield from self.engine.stream(prompts, version)

    def sleep(self) -> None:
        self.engine.sleep()


ENGINE_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the actor is the engine's process
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # roles take turns on the same cores
    "VLLM_NO_USAGE_STATS": "1",
    # Without the package flashinfer, which is no requirement of vLLM, its sampler can't be used.
    **({} if importlib.util.find_spec("flashinfer") else {"VLLM_USE_FLASHINFER_SAMPLER": "0"}),
}


def engine_environment(cluster: RayCluster, enforce_eager: bool) -> dict[str, str]:
    """Of a process with vLLM. On CPUs, eager means no compiler at all: vLLM has torch compile a function of its sampler
    even so, which takes a C++ compiler and seconds of every start."""
    if cluster.spec.device is Device.cpu and enforce_eager:
        return {**ENGINE_ENVIRONMENT, "TORCH_COMPILE_DISABLE": "1"}
    return ENGINE_ENVIRONMENT


TRAINER_ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron overlaps communication by the order of launches
}


def names(role: str, kind: str, count: int) -> list[str]:
    """What messages call the processes of a role: its name, with a number if there are several."""
    return [role] if count == 1 else [f"{role} {kind} {number}" for number in range(count)]


@dataclass(frozen=True)
class LentBucket:
    """A bucket of weights that exists on every device, in the memory of the trainer rank there."""

    on: Mapping[int, Any]
    """Bundle -> the reference of the rank's `Bucket` there."""

    def on_each(self, bundles: Sequence[int]) -> list[Any]:
        return [self.on[bundle] for bundle in bundles]


class RayTrainer:
    """Driver's handle on the trainer processes; implements `Trainer` and, for a colocated teacher, `Scorer`."""

    def __init__(
        self, cluster: RayCluster, setup: TrainerSetup, bundles: Sequence[int], share: float, lends: bool = False
    ) -> None:
        """
        Args:
            bundles: of each rank.
            share: of a bundle.
            lends: weights go to engines on the same devices as handles of GPU memory, which no other device can open:
                every rank hands out the whole model itself.
        """
        self.bundles = tuple(bundles)
        self.lends = lends
        self.tensor_parallel = setup.train.tensor_parallel
        self.data_parallel = setup.train.data_parallel
        self.version = 0
        self.in_order = threading.Lock()
        """Ranks meet in collectives: all of them must get the calls of two threads in the same order."""
        self.ranks = [
            cluster.start(
                name, TrainerActor, setup, rank, bundles=[bundle], share=share, environment=TRAINER_ENVIRONMENT
            )
            for rank, (name, bundle) in enumerate(zip(names("trainer", "rank", len(bundles)), bundles, strict=True))
        ]
        self.address = self.ranks[0].call("open_store").reference
        self.starting = [rank.call("ready", self.address) for rank in self.ranks]

    def ready(self, timeout_s: float) -> None:
        """Wait until the models are loaded."""
        wait_for(self.starting, timeout_s)

    def train(self, experience: Experience) -> RayFuture[Metrics]:
        self.version += len(experience.minibatches)
        return self._all("train", experience)

    def score(self, sequences: Sequences, minibatches: tuple[MiniBatch, ...]) -> RayFuture[None]:
        return self._all("score", sequences, minibatches)

    @property
    def begins(self) -> bool:
        """No: the teacher's devices are busy with what the engine does, or with training."""
        return False

    def begin(self, sequences: Sequences) -> None:
        """Nothing: `score` does it all."""

    def logprobs(
        self, sequences: Sequences, minibatches: tuple[MiniBatch, ...], temperature: float
    ) -> RayFuture[Float32[np.ndarray, " R"]]:
        return self._all("logprobs", sequences, minibatches, temperature)

    def hidden_rows(self, sequences: Sequences, plan: BatchPlan) -> RayFuture[None]:
        """Nothing: the teacher is where they are needed."""
        return RayFuture([], lambda results: None)

    def evaluate(
        self,
        sequences: Sequences,
        plan: BatchPlan,
        teacher: tuple[Sequences, BatchPlan] | None = None,
        hidden: Any = None,
    ) -> RayFuture[Metrics]:
        return self._all("evaluate", sequences, plan, teacher, hidden)

    def buckets(self, dtype: str) -> Iterator[Any]:
        """Rank 0 makes them, with the help of the ranks that share its model; or every rank does, see `lends`."""
        if self.lends:
            with self.in_order:
                streams = [rank.call("buckets", dtype) for rank in self.ranks]
            return (LentBucket(dict(zip(self.bundles, parts, strict=True))) for parts in iterate(streams))
        with self.in_order:
            stream = self.ranks[0].call("buckets", dtype)
            helpers = [rank.call("take_part_in_export") for rank in self.ranks[1 : self.tensor_parallel]]
        return (bucket for (bucket,) in iterate([stream], helpers))

    def save(self, folder: Path) -> RayFuture[None]:
        return self._all("save", folder)

    def save_state(self, folder: Path) -> RayFuture[int]:
        """A file a rank."""
        with self.in_order:
            calls = [rank.call("save_state", folder) for rank in self.ranks]
        return RayFuture(calls, len)

    def load_state(self, folder: Path) -> None:
        self.version = self._all("load_state", folder).result()

    def _all(self, method: str, *args: Any) -> RayFuture[Any]:
        """Call every rank with the same arguments, stored once; rank 0 answers for all."""
        shared = [ray.put(arg) for arg in args]
        with self.in_order:
            calls = [rank.call(method, *shared) for rank in self.ranks]
        return RayFuture(calls, lambda results: results[0])


class RayEngine:
    """Driver's handle on the engine processes, one a replica; implements `Engine`."""

    def __init__(
        self,
        cluster: RayCluster,
        setup: EngineSetup,
        bundles: Sequence[Sequence[int]],
        share: float,
        role: str = "engine",
    ) -> None:
        """
        Args:
            bundles: of each replica.
            share: of a bundle.
            role: what messages call it.
        """
        self.bundles = tuple(tuple(of_one) for of_one in bundles)
        environment = engine_environment(cluster, setup.rollout.enforce_eager)
        self.replicas = [
            cluster.start(name, EngineActor, setup, bundles=of_one, share=share, environment=environment)
            for name, of_one in zip(names(role, "replica", len(bundles)), self.bundles, strict=True)
        ]
        self.starting = self._all("ready")

    def ready(self, timeout_s: float) -> None:
        """Wait until vLLM runs."""
        wait_for(self.starting, timeout_s)

    def update_weights(self, buckets: Iterable[Any]) -> RayFuture[int]:
        """Every replica gets every bucket, as it is on each of its own devices."""
        loads = [self._all("begin_update")]
        for bucket in buckets:
            loads.append(
                [
                    replica.call("load", *(bucket.on_each(own) if isinstance(bucket, LentBucket) else [bucket]))
                    for replica, own in zip(self.replicas, self.bundles, strict=True)
                ]
            )
            if len(loads) > IN_FLIGHT:  # the object store holds a few buckets, not the model
                wait_for(loads[-1 - IN_FLIGHT])
        calls = [*itertools.chain(*loads), *self._all("finish_update")]
        return RayFuture(calls, lambda results: results[-1])

    def generate(self, prompts: Prompts, version: int, greedy: bool = False) -> RayFuture[Rollouts]:
        """Each replica gets a share of the prompts."""
        shares = split(prompts, len(self.replicas))
        busy = zip(self.replicas, shares, strict=False)  # a single prompt needs a single replica
        calls = [replica.call("generate", share, version, greedy) for replica, share in busy]
        return RayFuture(calls, merge)

    def stream(self, prompts: Prompts, version: int) -> Iterator[Rollouts]:
        """The same, in parts of all replicas as they are finished."""
        shares = split(prompts, len(self.replicas))
        return arrivals(
            [replica.call("stream", share, version) for replica, share in zip(self.replicas, shares, strict=False)]
        )

    def connect(self, trainer: RayTrainer, timeout_s: float) -> None:
        """From here on weights are pushed: the buckets that the trainer hands over only say what comes."""
        size = 1 + sum(map(len, self.bundles))
        calls = [trainer.ranks[0].call("open_channel", size)]
        rank = 1
        for replica, own in zip(self.replicas, self.bundles, strict=True):
            calls.append(replica.call("join_channel", trainer.address, rank, size))
            rank += len(own)
        wait_for(calls, timeout_s)

    def sleep(self) -> RayFuture[None]:
        return RayFuture(self._all("sleep"), lambda results: None)

    def _all(self, method: str, *args: Any) -> list[Call]:
        return [replica.call(method, *args) for replica in self.replicas]
