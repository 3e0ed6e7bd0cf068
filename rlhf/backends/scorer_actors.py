"""A standalone teacher's replicas as Ray actors, and the handle through which the driver talks to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import ray
from jaxtyping import Float32

from rlhf.backends.actors import engine_environment, names
from rlhf.backends.calls import Call, RayFuture, wait_for
from rlhf.backends.cluster import RayCluster
from rlhf.backends.scores import PackedScores
from rlhf.backends.vllm.setup import ScorerSetup
from rlhf.batching import spread
from rlhf.types import BatchPlan, MiniBatch, Sequences

References = tuple[list[Any], ...]
"""By data-parallel rank: references of the `PackedScores` of its samples; there may be other ranks' among them."""


class ScorerActor:
    """A `VllmScorer` in a process of its own. It keeps what it answers in the object store and returns references, so
    that the driver, which waits for them, never holds a score."""

    def __init__(self, setup: ScorerSetup) -> None:
        self.setup = setup

    def ready(self) -> None:
        """Start vLLM and load the teacher."""
        from rlhf.backends.vllm.scorer import VllmScorer

        self.scorer = VllmScorer(self.setup)
        self.writer = ThreadPoolExecutor(1)

    def score(self, sequences: Sequences, samples: list[int]) -> list[Any]:
        return self._stored(self.scorer.score(sequences, samples))

    def logprobs(self, sequences: Sequences, samples: list[int], temperature: float) -> Any:
        return self.scorer.logprobs(sequences, samples, temperature)

    def hidden_rows(self, sequences: Sequences, samples: list[int]) -> list[Any]:
        return self._stored(self.scorer.hidden_rows(sequences, samples))

    def _stored(self, parts: Iterator[PackedScores]) -> list[Any]:
        """References to parts in shared memory, where each is written while the next is made."""
        writing = [self.writer.submit(ray.put, part) for part in parts]
        return [written.result() for written in writing]


class RayScorer:
    """Driver's handle on the replicas; implements `Scorer`."""

    def __init__(
        self, cluster: RayCluster, setup: ScorerSetup, bundles: Sequence[Sequence[int]], share: float = 1.0
    ) -> None:
        """
        Args:
            bundles: of each replica.
            share: of a bundle.
        """
        environment = engine_environment(cluster, setup.engine.enforce_eager)
        self.replicas = [
            cluster.start(name, ScorerActor, setup, bundles=of_one, share=share, environment=environment)
            for name, of_one in zip(names("teacher", "replica", len(bundles)), bundles, strict=True)
        ]
        self.starting = [replica.call("ready") for replica in self.replicas]
        self.begun: list[tuple[Call, list[int], int]] = []
        """Calls of `begin` that `score` hasn't asked for yet: their sample ids, and their replica."""

    @property
    def begins(self) -> bool:
        """Its devices have nothing else to do."""
        return True

    def begin(self, sequences: Sequences) -> None:
        """By the replica that has the fewest samples to do since the last `score`."""
        load = [0] * len(self.replicas)
        for _, ids, replica in self.begun:
            load[replica] += len(ids)
        idle = load.index(min(load))
        call = self.replicas[idle].call("score", sequences, list(range(len(sequences))))
        self.begun.append((call, sequences.sample_ids.tolist(), idle))

    def ready(self, timeout_s: float) -> None:
        """Wait until vLLM runs."""
        wait_for(self.starting, timeout_s)

    def score(self, sequences: Sequences, minibatches: tuple[MiniBatch, ...]) -> RayFuture[References]:
        begun, self.begun = self.begun, []
        return self._ask("score", sequences, [minibatch.plan for minibatch in minibatches], begun)

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

    def _ask(
        self,
        method: str,
        sequences: Sequences,
        plans: list[BatchPlan],
        begun: Iterable[tuple[Call, list[int], int]] = (),
    ) -> RayFuture[References]:
        """The samples of each rank that aren't begun, spread over the replicas by tokens."""
        stored, lengths = ray.put(sequences), sequences.lengths.tolist()
        rank_of = rank_of_samples(sequences, plans)
        calls, asked_for = [call for call, _, _ in begun], [{rank_of[one] for one in ids} for _, ids, _ in begun]
        done = {sample_id for _, ids, _ in begun for sample_id in ids}
        for rank in range(len(plans[0].ranks)):
            samples = [
                row
                for plan in plans
                for micro in plan.ranks[rank]
                for row in micro.rows
                if int(sequences.sample_ids[row]) not in done
            ]
            shares = spread(lengths, samples, len(self.replicas))
            for replica, share in zip(self.replicas, shares, strict=True):
                if share:
                    calls.append(replica.call(method, stored, share))
                    asked_for.append({rank})

        def by_rank(answers: list[list[Any]]) -> References:
            found: References = tuple([] for _ in plans[0].ranks)
            for ranks, answer in zip(asked_for, answers, strict=True):
                for rank in ranks:
                    found[rank].extend(answer)
            return found

        return RayFuture(calls, by_rank)


def rank_of_samples(sequences: Sequences, plans: Iterable[BatchPlan]) -> dict[int, int]:
    """Sample id -> the data-parallel rank that trains on it."""
    return {
        int(sequences.sample_ids[row]): rank
        for plan in plans
        for rank, micros in enumerate(plan.ranks)
        for micro in micros
        for row in micro.rows
    }
