"""What every source does in a step, wherever its responses come from.

(sync weights) ► (evaluate) ► responses ► score ► Experience
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rlhf.batching import describe_plans
from rlhf.data.cursor import Cursor, Draw
from rlhf.roles.protocols import Scorer, Trainer
from rlhf.sources.evaluation import Evaluator
from rlhf.sources.privileged import as_the_teacher_reads, privileged_share
from rlhf.types import Experience, Metrics, MiniBatch, Rollouts

Timed = Callable[[str], AbstractContextManager[None]]
"""Measures a phase, by its name."""


@dataclass(frozen=True)
class Batch:
    """What a step takes its responses to."""

    step: int
    draw: Draw
    metrics: Metrics
    """Of the rows, when they had been drawn."""
    position: dict[str, Any]
    """Of the cursor, when they had been drawn."""


@dataclass(kw_only=True)
class StepSource(ABC):
    """Yields one Experience a step."""

    trainer: Trainer
    scorer: Scorer | None
    """None without a teacher."""
    evaluator: Evaluator
    cursor: Cursor
    make_minibatches: Callable[[Rollouts], tuple[MiniBatch, ...]]
    """Responses -> optimizer steps, their plans and weights."""
    micro_batch_tokens: int
    """Most tokens in one forward pass, of the teacher as well."""
    batch_samples: int
    """Rows that a step takes."""
    steps: int
    seed: int
    phase: Callable[[str], None]
    """Told what is going on, for the progress bar."""
    done: int = 0
    """Steps that an earlier part of the run has trained on."""
    position: dict[str, Any] = field(default_factory=dict)
    """Where in its rows the run stands with the experience that was yielded last; the cursor may be ahead of it."""

    @abstractmethod
    def weights(self, step: int, timed: Timed) -> int:
        """Bring the weights to where `step`, and the evaluation before it, need them -> their version."""

    @abstractmethod
    def responses(self, batch: Batch, version: int, timed: Timed) -> tuple[Rollouts, Metrics]:
        """The rows' responses, in the order of the rows, and what there is to say about them."""

    def __iter__(self) -> Iterator[Experience]:
        for step in range(self.done + 1, self.steps + 1):
            measured: Metrics = {}
            timed = partial(self.timed, measured)
            version = self.prepare(step, timed)
            yield self.handed_over(*self.make(self.draw(step), version, timed), measured)
        if self.evaluator.due(self.steps):
            self.prepare(self.steps + 1, partial(self.timed, {}))

    def prepare(self, step: int, timed: Timed) -> int:
        """Everything before the responses of `step` -> the version of the weights they are made with."""
        version = self.weights(step, timed)
        self.phase("eval")
        self.evaluator.after_step(step - 1, version)
        return version

    def draw(self, step: int) -> Batch:
        """The next rows of the data."""
        draw = self.cursor.take(self.batch_samples)
        return Batch(step, draw, self.cursor.metrics(), self.cursor.state_dict())

    def make(self, batch: Batch, version: int, timed: Timed) -> tuple[Batch, Experience]:
        """Responses and scores -> the batch, with what was drawn beyond it, and what is trained on."""
        assert self.scorer is not None, "checked when the configuration was composed"
        rollouts, described = self.responses(batch, version, timed)
        sequences = rollouts.sequences
        minibatches = self.make_minibatches(rollouts)
        with timed("score"):
            asked = as_the_teacher_reads(sequences, minibatches, batch.draw.table, self.micro_batch_tokens)
            scores = self.scorer.score(*asked).result()
        return batch, Experience(
            step=batch.step,
            version=rollouts.version,
            sequences=sequences,
            minibatches=minibatches,
            scores=scores,
            rewards=None if rollouts.episodes is None else rollouts.episodes.returns,
            metrics={
                **batch.metrics,
                **described,
                **describe_plans([minibatch.plan for minibatch in minibatches], sequences.lengths),
                "batch/privileged_share": privileged_share(batch.draw.table),
            },
        )

    def handed_over(self, batch: Batch, made: Experience, measured: Metrics) -> Experience:
        """On its way to the trainer, with what was measured of it."""
        self.phase("train")
        self.position = batch.position
        staleness = float(self.trainer.version - made.version)
        return replace(made, metrics={**measured, **made.metrics, "rollout/staleness": staleness})

    @contextmanager
    def timed(self, seconds: Metrics, name: str) -> Iterator[None]:
        self.phase(name)
        started = time.perf_counter()
        yield
        seconds[f"time/{name}"] = seconds.get(f"time/{name}", 0.0) + time.perf_counter() - started


def describe(rollouts: Rollouts) -> Metrics:
    """Lengths of a batch of responses, in tokens that the model wrote, and what became of conversations."""
    sequences, episodes = rollouts.sequences, rollouts.episodes
    of_episodes: Metrics = {}
    if episodes is not None:
        observed = sequences.continuation_lengths - sequences.response_lengths
        of_episodes = {
            "environment/reward_mean": float(episodes.returns.mean()),
            "environment/turns_mean": float(episodes.turns.mean()),
            "environment/done_share": float(episodes.done.mean()),
            "environment/observation_tokens_mean": float(observed.mean()),
            "environment/cut_observations": float(episodes.cut.sum()),
        }
    return {
        **of_episodes,
        "rollout/response_tokens_mean": float(sequences.response_lengths.mean()),
        "rollout/response_tokens_max": float(sequences.response_lengths.max()),
        "rollout/prompt_tokens_mean": float(sequences.prompt_lengths.mean()),
        "rollout/finished_share": float(rollouts.finished.mean()),
    }
