"""A standalone teacher's replicas as Ray actors, and the handle through which the driver talks to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from jaxtyping import Float32

from rlhf.backends.actors import ENGINE_ENVIRONMENT, names
from rlhf.backends.cluster import RayCluster, RayFuture, wait_for
from rlhf.backends.vllm.setup import ScorerSetup
from rlhf.batching import spread
from rlhf.types import BatchPlan, MiniBatch, Sequences

References = tuple[list[Any], ...]
"""By data-parallel rank: references of the `PackedScores` of its samples."""


class ScorerActor:
    """A `VllmScorer` in a process of its own. It keeps what it answers in the object store and returns references, so
    that the driver, which waits for them, never holds a score."""

    def __init__(self, setup: ScorerSetup) -> None:
        self.setup = setup

    def ready(self) -> None:
        """Start vLLM and load the teacher."""
        from rlhf.backends.vllm.scorer import VllmScorer

        self.scorer = VllmScorer(self.setup)

    def score(self, sequences: Sequences, samples: list[int]) -> list[Any]:
        return [ray.put(self.scorer.score(sequences, samples))]

    def logprobs(self, sequences: Sequences, samples: list[int], temperature: float) -> Any:
        return self.scorer.logprobs(sequences, samples, temperature)

    def hidden_rows(self, sequences: Sequences, samples: list[int]) -> list[Any]:
        return [ray.put(self.scorer.hidden_rows(sequences, samples))]


class RayScorer:
    """Driver's handle on the replicas; implements `Scorer`."""

    def __init__(self, cluster: RayCluster, setup: ScorerSetup, bundles: Sequence[int]) -> None:
        """
        Args:
            bundles: of each replica, which has all of it.
        """
        self.replicas = [
            cluster.start(name, ScorerActor, setup, bundle=bundle, share=1.0, environment=ENGINE_ENVIRONMENT)
            for name, bundle in zip(names("teacher", "replica", len(bundles)), bundles, strict=True)
        ]
        self.starting = [replica.call("ready") for replica in self.replicas]

    def ready(self, timeout_s: float) -> None:
        """Wait until vLLM runs."""
        wait_for(self.starting, timeout_s)

    def score(self, sequences: Sequences, minibatches: tuple[MiniBatch, ...]) -> RayFuture[References]:
        return self._ask("score", sequences, [minibatch.plan for minibatch in minibatches])

    def logprobs(
        self, sequences: Sequences, minibatches: tuple[MiniBatch, ...], temperature: float
    ) -> RayFuture[Float32[np.ndarray, " R"]]:
        """Numbers, not references: the driver has a use for them."""
        samples = [row for minibatch in minibatches for row in minibatch.plan.samples]
        shares = [share for share in spread(sequences.lengths.tolist(), samples, len(self.replicas)) if share]
        stored = ray.put(sequences)
        calls = [
            replica.call("logprobs", stored, share, temperature)
            for replica, share in zip(self.replicas, shares, strict=False)
        ]

        def in_order(answers: list[Float32[np.ndarray, " rows"]]) -> Float32[np.ndarray, " R"]:
            offsets = sequences.response_offsets
            found = np.full(offsets[-1], np.nan, dtype=np.float32)
            for share, answer in zip(shares, answers, strict=True):
                places = np.concatenate([np.arange(offsets[row], offsets[row + 1]) for row in share])
                found[places] = answer
            return found

        return RayFuture(calls, in_order)

    def hidden_rows(self, sequences: Sequences, plan: BatchPlan) -> RayFuture[References]:
        return self._ask("hidden_rows", sequences, [plan])

    def _ask(self, method: str, sequences: Sequences, plans: list[BatchPlan]) -> RayFuture[References]:
        """The samples of each rank, spread over the replicas so that all of them have about the same tokens."""
        stored, lengths = ray.put(sequences), sequences.lengths.tolist()
        calls, asked_for = [], []
        for rank in range(len(plans[0].ranks)):
            samples = [row for plan in plans for micro in plan.ranks[rank] for row in micro.rows]
            shares = spread(lengths, samples, len(self.replicas))
            for replica, share in zip(self.replicas, shares, strict=True):
                if share:
                    calls.append(replica.call(method, stored, share))
                    asked_for.append(rank)

        def by_rank(answers: list[list[Any]]) -> References:
            found: References = tuple([] for _ in plans[0].ranks)
            for rank, answer in zip(asked_for, answers, strict=True):
                found[rank].extend(answer)
            return found

        return RayFuture(calls, by_rank)
