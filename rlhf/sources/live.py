"""The live source: the student's own samples, made with the weights it has now.

sync weights ► (evaluate) ► generate ► score ► Experience
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from rlhf.batching import describe_plans
from rlhf.config.rollout import VllmRollout
from rlhf.data.cursor import Cursor
from rlhf.roles.protocols import Engine, Scorer, Trainer
from rlhf.sources.evaluation import Evaluator
from rlhf.sources.requests import prompts_of
from rlhf.types import Experience, Metrics, MiniBatch, Prompts, Rollouts, Sequences

Timed = Callable[[str], AbstractContextManager[None]]
"""Measures a phase, by its name."""


@dataclass(frozen=True)
class Batch:
    """What a step generates from."""

    step: int
    prompts: Prompts
    metrics: Metrics
    """Of the rows they were drawn from, at that moment."""


@dataclass
class LiveSource:
    """Yields one Experience a step. Weights go to the engine before every generation, so that a fresh start, a resume
    and a woken engine are one case; after the last step they go once more, for the last evaluation."""

    trainer: Trainer
    scorer: Scorer
    engine: Engine
    evaluator: Evaluator
    cursor: Cursor
    make_minibatches: Callable[[Sequences], tuple[MiniBatch, ...]]
    rollout: VllmRollout
    batch_samples: int
    steps: int
    seed: int
    phase: Callable[[str], None]
    """Told what is going on, for the progress bar."""

    def __iter__(self) -> Iterator[Experience]:
        for step in range(1, self.steps + 1):
            seconds: Metrics = {}
            version = self._sync_and_evaluate(step - 1, seconds)
            made = self._make(self._draw(step), version, partial(self._timed, seconds))
            yield self._handed_over(made, seconds)
        if self.evaluator.due(self.steps):
            self._sync_and_evaluate(self.steps, {})

    def _sync_and_evaluate(self, steps_done: int, seconds: Metrics) -> int:
        """Give the engine the trainer's weights -> the trainer's version, so that one that missed them refuses."""
        with self._timed(seconds, "sync"):
            self.engine.update_weights(self.trainer.buckets(self.rollout.dtype.value)).result()
        version = self.trainer.version
        self.phase("eval")
        self.evaluator.after_step(steps_done, version)
        return version

    def _draw(self, step: int) -> Batch:
        """The next rows of the data, as requests."""
        draw = self.cursor.take(self.batch_samples)
        prompts = prompts_of(draw.table, range(len(draw.table)), seed=self.seed, step=step, numbers=draw.numbers)
        return Batch(step, prompts, self.cursor.metrics())

    def _make(self, batch: Batch, version: int, timed: Timed) -> Experience:
        """Generate and score."""
        with timed("rollout"):
            rollouts = self.engine.generate(batch.prompts, version).result()
            self.engine.sleep().result()
        minibatches = self.make_minibatches(rollouts.sequences)
        with timed("score"):
            scores = self.scorer.score(rollouts.sequences, minibatches).result()
        return Experience(
            step=batch.step,
            version=rollouts.version,
            sequences=rollouts.sequences,
            minibatches=minibatches,
            scores=scores,
            metrics={
                **batch.metrics,
                **describe(rollouts),
                **describe_plans([minibatch.plan for minibatch in minibatches], rollouts.sequences.lengths),
            },
        )

    def _handed_over(self, made: Experience, measured: Metrics) -> Experience:
        """On its way to the trainer, with what was measured of it."""
        self.phase("train")
        staleness = float(self.trainer.version - made.version)
        return replace(made, metrics={**measured, **made.metrics, "rollout/staleness": staleness})

    @contextmanager
    def _timed(self, seconds: Metrics, name: str) -> Iterator[None]:
        self.phase(name)
        started = time.perf_counter()
        yield
        seconds[f"time/{name}"] = time.perf_counter() - started


def describe(rollouts: Rollouts) -> Metrics:
    """Lengths of a batch of rollouts, in tokens."""
    sequences = rollouts.sequences
    return {
        "rollout/response_tokens_mean": float(sequences.response_lengths.mean()),
        "rollout/response_tokens_max": float(sequences.response_lengths.max()),
        "rollout/prompt_tokens_mean": float(sequences.prompt_lengths.mean()),
        "rollout/finished_share": float(rollouts.finished.mean()),
        "rollout/weight_version": float(rollouts.version),
    }
