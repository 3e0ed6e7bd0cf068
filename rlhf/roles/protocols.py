"""What the loop and the sources know of the roles. Every call returns a future; only the loop waits for training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from jaxtyping import Float32

from rlhf.environments.base import Turn
from rlhf.types import BatchPlan, Experience, Metrics, MiniBatch, Prompts, Rewards, Rollouts, Sequences

T_co = TypeVar("T_co", covariant=True)


class Future(Protocol[T_co]):
    """A result on its way."""

    def result(self) -> T_co:
        """Wait for it.

        Raises:
            RoleDied: the process that owed it ended.
            RlhfError: what the role itself raised.
        """
        ...


class Trainer(Protocol):
    """The student."""

    @property
    def data_parallel(self) -> int:
        """Ranks that share a batch."""
        ...

    @property
    def version(self) -> int:
        """Optimizer steps done: the version of the weights."""
        ...

    def train(self, experience: Experience) -> Future[Metrics]: ...

    def evaluate(
        self,
        sequences: Sequences,
        plan: BatchPlan,
        teacher: tuple[Sequences, BatchPlan] | None = None,
        hidden: Any = None,
    ) -> Future[Metrics]:
        """Held-out divergences.

        Args:
            teacher: the same responses as the teacher reads them, on the same ranks; None: it reads what the student
                reads.
            hidden: what the scorer's `hidden_rows` gave for what the teacher reads.
        """
        ...

    def buckets(self, dtype: str) -> Iterator[Any]:
        """References to the weights' buckets, in order; what they hold never passes through the caller."""
        ...

    def save(self, folder: Path) -> Future[None]: ...

    def save_state(self, folder: Path) -> Future[int]:
        """Write what continuing exactly from here needs, beside what `save` writes; the future gives how many files
        (`*.pt`) that is."""
        ...

    def load_state(self, folder: Path) -> None:
        """Continue where `save_state` wrote; `version` says where that is."""
        ...


class Scorer(Protocol):
    """The teacher. Scores stay where they are used, or go there without passing through the caller."""

    def score(self, sequences: Sequences, minibatches: tuple[MiniBatch, ...]) -> Future[Any]:
        """Ask about every response token. The prompts are the teacher's, and so are the plans' micro-batches; samples,
        responses and ranks are those that the trainer gets. The future gives `Experience.scores`."""
        ...

    @property
    def begins(self) -> bool:
        """Whether it works while the engine does: then `begin` is worth a call."""
        ...

    def begin(self, sequences: Sequences) -> None:
        """Score these already; `score` will be asked about them, and others, once all are known."""
        ...

    def logprobs(
        self, sequences: Sequences, minibatches: tuple[MiniBatch, ...], temperature: float
    ) -> Future[Float32[np.ndarray, " R"]]:
        """The log-probability of every response token at a temperature (distill=sampled): numbers, for the caller.
        Arguments are those of `score`."""
        ...

    def hidden_rows(self, sequences: Sequences, plan: BatchPlan) -> Future[Any]:
        """The teacher's whole distributions, for `Trainer.evaluate`; None if the trainer has the teacher itself."""
        ...


class Engine(Protocol):
    """The sampler."""

    def update_weights(self, buckets: Iterable[Any]) -> Future[int]:
        """Load a full set of weights; the future gives their version."""
        ...

    def generate(self, prompts: Prompts, version: int, greedy: bool = False) -> Future[Rollouts]: ...

    def stream(self, prompts: Prompts, version: int) -> Iterator[Rollouts]:
        """The rollouts of `generate` in parts, as they are finished; each sample is in one part."""
        ...

    def sleep(self) -> Future[None]:
        """Free the device's memory for those who share it; the next update of weights wakes the engine."""
        ...


class Rewarder(Protocol):
    """The reward functions."""

    def score(self, sequences: Sequences, rows: Sequence[Mapping[str, Any]]) -> Future[Rewards]:
        """Reward every response.

        Args:
            sequences: n prompts with their responses.
            rows: the columns of the data's row that each of them answers; several responses may share one.

        Raises:
            RewardError: a function failed or gave no number; the message names the function and the row.
        """
        ...

    def metrics(self) -> Metrics:
        """What there is to say about the calls since the last time it was asked."""
        ...

    def close(self) -> None:
        """End what runs. Who waits for a result gets a RewardError."""
        ...


class Environments(Protocol):
    """What the model talks with. Conversations are known by their number in the batch."""

    def reset(self, rows: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> Future[None]:
        """Begin conversations 0 to n - 1; those before have been ended.

        Args:
            rows: the columns of the data's row of each.
            seeds: what each may draw from.

        Raises:
            EnvironmentFailed: as of all calls; the message names the environment and the row.
        """
        ...

    def step(self, episodes: Sequence[int], responses: Sequence[str]) -> Future[list[Turn]]:
        """What some of them answer to a turn of the model, in this order."""
        ...

    def end(self, episodes: Sequence[int]) -> Future[Any]:
        """Some of them are over."""
        ...

    def close(self) -> None:
        """End what runs."""
        ...
