"""What every source does in a step, wherever its responses come from.

(sync weights) ► (evaluate) ► responses ► score ► Experience
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rlhf.batching import describe_plans
from rlhf.data.cursor import Cursor, Draw
from rlhf.roles.protocols import Scorer, Trainer
from rlhf.sources.evaluation import Evaluator
from rlhf.sources.privileged import as_the_teacher_reads, privileged_share
from rlhf.types import Experience, Metrics, MiniBatch, Rollouts, Sequences


@dataclass(kw_only=True)
class StepSource(ABC):
    """Yields one Experience a step."""

    trainer: Trainer
    scorer: Scorer
    evaluator: Evaluator
    cursor: Cursor
    make_minibatches: Callable[[Sequences], tuple[MiniBatch, ...]]
    micro_batch_tokens: int
    """Most tokens in one forward pass, of the teacher as well."""
    batch_samples: int
    steps: int
    seed: int
    phase: Callable[[str], None]
    """Told what is going on, for the progress bar."""
    done: int = 0
    """Steps that an earlier part of the run has trained on."""

    @abstractmethod
    def weights(self, step: int, seconds: Metrics) -> int:
        """Bring the weights to where `step`, and the evaluation before it, need them -> their version."""

    @abstractmethod
    def responses(self, step: int, draw: Draw, version: int, seconds: Metrics) -> tuple[Rollouts, Metrics]:
        """The rows' responses, in the order of the rows, and what there is to say about them."""

    def __iter__(self) -> Iterator[Experience]:
        for step in range(self.done + 1, self.steps + 1):
            seconds: Metrics = {}
            version = self.weights(step, seconds)
            self.phase("eval")
            self.evaluator.after_step(step - 1, version)
            draw = self.cursor.take(self.batch_samples)
            rollouts, described = self.responses(step, draw, version, seconds)
            sequences = rollouts.sequences
            minibatches = self.make_minibatches(sequences)
            with self.timed("score", seconds):
                asked = as_the_teacher_reads(sequences, minibatches, draw.table, self.micro_batch_tokens)
                self.scorer.score(*asked).result()
            self.phase("train")
            yield Experience(
                step=step,
                version=rollouts.version,
                sequences=sequences,
                minibatches=minibatches,
                metrics={
                    **seconds,
                    **self.cursor.metrics(),
                    **described,
                    **describe_plans([minibatch.plan for minibatch in minibatches], sequences.lengths),
                    "batch/privileged_share": privileged_share(draw.table),
                },
            )
        if self.evaluator.due(self.steps):
            version = self.weights(self.steps + 1, {})
            self.phase("eval")
            self.evaluator.after_step(self.steps, version)

    @contextmanager
    def timed(self, name: str, seconds: Metrics) -> Iterator[None]:
        self.phase(name)
        started = time.perf_counter()
        yield
        seconds[f"time/{name}"] = time.perf_counter() - started


def describe(rollouts: Rollouts) -> Metrics:
    """Lengths of a batch of responses, in tokens."""
    sequences = rollouts.sequences
    return {
        "rollout/response_tokens_mean": float(sequences.response_lengths.mean()),
        "rollout/response_tokens_max": float(sequences.response_lengths.max()),
        "rollout/prompt_tokens_mean": float(sequences.prompt_lengths.mean()),
        "rollout/finished_share": float(rollouts.finished.mean()),
    }
