"""The roles as Ray actors, and the handles through which the driver talks to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import ray

from rlhf.backends.cluster import RayCluster, RayFuture, iterate, wait_for
from rlhf.backends.megatron.setup import TrainerSetup
from rlhf.backends.vllm.setup import EngineSetup
from rlhf.types import BatchPlan, Experience, Metrics, MiniBatch, Prompts, Rollouts, Sequences

BUCKET_BYTES = 128 * 2**20
"""Weights on their way: large enough to amortise a call, small enough that a few fit any object store."""
IN_FLIGHT = 2
"""Buckets that wait to be loaded, and buckets made ahead of them."""


class TrainerActor:
    """A `MegatronTrainer` in a process of its own. Megatron is imported there, not in the driver."""

    def __init__(self, setup: TrainerSetup) -> None:
        self.setup = setup

    def ready(self) -> None:
        """Load the models. Not in `__init__`: an actor that fails there dies, and its reason is lost in Ray's words."""
        from rlhf.backends.megatron.trainer import MegatronTrainer

        self.trainer = MegatronTrainer(self.setup)

    def train(self, experience: Experience) -> Metrics:
        return self.trainer.train(experience)

    def score(self, sequences: Sequences, minibatches: tuple[MiniBatch, ...]) -> None:
        self.trainer.score(sequences, minibatches)

    def evaluate(self, sequences: Sequences, plan: BatchPlan) -> Metrics:
        return self.trainer.evaluate(sequences, plan)

    @ray.method(num_returns="streaming", _generator_backpressure_num_objects=IN_FLIGHT)
    def buckets(self, dtype: str) -> Iterator[Any]:
        yield from self.trainer.buckets(dtype, BUCKET_BYTES)

    def save(self, folder: Path) -> None:
        self.trainer.save(folder)


class EngineActor:
    """A `VllmEngine` in a process of its own."""

    def __init__(self, setup: EngineSetup) -> None:
        self.setup = setup

    def ready(self) -> None:
        """Start vLLM, so that it can take weights."""
        from rlhf.backends.vllm.engine import VllmEngine

        self.engine = VllmEngine(self.setup)

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

        self.starting = [actor.ready.remote() for actor in self.actors]

    def ready(self, timeout_s: float) -> None:
        """Wait until the models are loaded."""
        wait_for("trainer", self.starting, timeout_s)

    def train(self, experience: Experience) -> RayFuture[Metrics]:
        self.version += len(experience.minibatches)
        return self._all("train", experience)

    def score(self, sequences: Sequences, minibatches: tuple[MiniBatch, ...]) -> RayFuture[None]:
        return self._all("score", sequences, minibatches)

    def evaluate(self, sequences: Sequences, plan: BatchPlan) -> RayFuture[Metrics]:
        return self._all("evaluate", sequences, plan)

    def buckets(self, dtype: str) -> Iterator[Any]:
        return iterate("trainer", self.actors[0].buckets.remote(dtype))

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

        self.starting = [self.actor.ready.remote()]

    def ready(self, timeout_s: float) -> None:
        """Wait until vLLM runs."""
        wait_for("engine", self.starting, timeout_s)

    def update_weights(self, buckets: Iterable[Any]) -> RayFuture[int]:
        loads = [self.actor.begin_update.remote()]
        for bucket in buckets:
            loads.append(self.actor.load.remote(bucket))
            if len(loads) > IN_FLIGHT:  # the object store holds a few buckets, not the model
                wait_for("engine", [loads[-1 - IN_FLIGHT]])
        return RayFuture("engine", [*loads, self.actor.finish_update.remote()], lambda results: results[-1])

    def generate(self, prompts: Prompts, version: int, greedy: bool = False) -> RayFuture[Rollouts]:
        reference = self.actor.generate.remote(prompts, version, greedy)
        return RayFuture("engine", [reference], lambda results: results[0])
