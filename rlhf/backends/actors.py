"""The roles as Ray actors, and the handles through which the driver talks to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import ray

from rlhf.backends.cluster import RayCluster, RayFuture, wait_for
from rlhf.backends.megatron.setup import TrainerSetup
from rlhf.backends.vllm.setup import EngineSetup
from rlhf.types import BatchPlan, Experience, Metrics, MiniBatch, Prompts, Rollouts, Sequences

BUCKET_BYTES = 256 * 2**20
"""Weights on their way: large enough to amortise a call, small enough that two fit any object store."""


class TrainerActor:
    """A `MegatronTrainer` in a process of its own. Megatron is imported there, not in the driver."""

    def __init__(self, *args: Any) -> None:
        from rlhf.backends.megatron.trainer import MegatronTrainer

        self.trainer = MegatronTrainer(*args)

    def ready(self) -> None:
        """Answered once the model is loaded."""

    def train(self, experience: Experience) -> Metrics:
        return self.trainer.train(experience)

    def score(self, sequences: Sequences, minibatches: tuple[MiniBatch, ...]) -> None:
        self.trainer.score(sequences, minibatches)

    def evaluate(self, sequences: Sequences, plan: BatchPlan) -> Metrics:
        return self.trainer.evaluate(sequences, plan)

    @ray.method(num_returns="streaming")
    def buckets(self, dtype: str) -> Iterator[Any]:
        yield from self.trainer.buckets(dtype, BUCKET_BYTES)

    def save(self, folder: Path) -> None:
        self.trainer.save(folder)


class EngineActor:
    """A `VllmEngine` in a process of its own."""

    def __init__(self, *args: Any) -> None:
        from rlhf.backends.vllm.engine import VllmEngine

        self.engine = VllmEngine(*args)

    def ready(self) -> None:
        """Answered once the engine can take weights."""

    def begin_update(self) -> None:
        self.engine.begin_update()

    def load(self, bucket: Any) -> None:
        self.engine.load(bucket)

    def finish_update(self) -> int:
        return self.engine.finish_update()

    def generate(self, prompts: Prompts, version: int, greedy: bool) -> Rollouts:
        return self.engine.generate(prompts, version, greedy)


ENGINE_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the actor is the engine's process
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # roles take turns on the same cores
    "VLLM_NO_USAGE_STATS": "1",
}


class RayTrainer:
    """Driver's handle on the trainer processes; implements `Trainer` and, for a colocated teacher, `Scorer`."""

    def __init__(self, cluster: RayCluster, setup: TrainerSetup, share: float) -> None:
        train = setup.train
        self.data_parallel = train.gpus // train.tensor_parallel
        self.version = 0
        actor = cluster.actor(TrainerActor, bundle=0, share=share, environment={})
        self.actors = [actor.remote(setup)]

    def ready(self, timeout_s: float) -> None:
        wait_for("trainer", [actor.ready.remote() for actor in self.actors], timeout_s)

    def train(self, experience: Experience) -> RayFuture[Metrics]:
        self.version += len(experience.minibatches)
        return self._all("train", experience)

    def score(self, sequences: Sequences, minibatches: tuple[MiniBatch, ...]) -> RayFuture[None]:
        return self._all("score", sequences, minibatches)

    def evaluate(self, sequences: Sequences, plan: BatchPlan) -> RayFuture[Metrics]:
        return self._all("evaluate", sequences, plan)

    def buckets(self, dtype: str) -> Iterator[Any]:
        return iter(self.actors[0].buckets.remote(dtype))

    def save(self, folder: Path) -> RayFuture[None]:
        return self._all("save", folder)

    def _all(self, method: str, *args: Any) -> RayFuture[Any]:
        """Call every rank with the same arguments, stored once; rank 0 answers for all."""
        shared = [ray.put(arg) for arg in args]
        references = [getattr(actor, method).remote(*shared) for actor in self.actors]
        return RayFuture("trainer", references, lambda results: results[0])


class RayEngine:
    """Driver's handle on the engine process; implements `Engine`."""

    def __init__(self, cluster: RayCluster, setup: EngineSetup, share: float) -> None:
        actor = cluster.actor(EngineActor, bundle=0, share=share, environment=ENGINE_ENVIRONMENT)
        self.actor = actor.remote(setup)

    def ready(self, timeout_s: float) -> None:
        wait_for("engine", [self.actor.ready.remote()], timeout_s)

    def update_weights(self, buckets: Iterable[Any]) -> RayFuture[int]:
        references = [self.actor.begin_update.remote()]
        references += [self.actor.load.remote(bucket) for bucket in buckets]
        references.append(self.actor.finish_update.remote())
        return RayFuture("engine", references, lambda results: results[-1])

    def generate(self, prompts: Prompts, version: int, greedy: bool = False) -> RayFuture[Rollouts]:
        reference = self.actor.generate.remote(prompts, version, greedy)
        return RayFuture("engine", [reference], lambda results: results[0])
