"""The live source: the student's own samples, made with the weights it has now.

sync weights ► (evaluate) ► generate ► score ► Experience
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rlhf.batching import describe_plans
from rlhf.config.rollout import VllmRollout
from rlhf.data.cursor import Cursor
from rlhf.roles.protocols import Engine, Scorer, Trainer
from rlhf.sources.evaluation import Evaluator
from rlhf.sources.requests import prompts_of
from rlhf.types import Experience, Metrics, MiniBatch, Prompts, Rollouts, Sequences


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
    done: int = 0
    """Steps that an earlier part of the run has trained on."""

    def __iter__(self) -> Iterator[Experience]:
        for step in range(self.done + 1, self.steps + 1):
            seconds: Metrics = {}
            version = self._sync(seconds)
            self.phase("eval")
            self.evaluator.after_step(step - 1, version)
            with self._timed("rollout", seconds):
                prompts = self._prompts(step)
                rollouts = self.engine.generate(prompts, version).result()
                self.engine.sleep().result()
            minibatches = self.make_minibatches(rollouts.sequences)
            with self._timed("score", seconds):
                self.scorer.score(rollouts.sequences, minibatches).result()
            self.phase("train")
            yield Experience(
                step=step,
                version=rollouts.version,
                sequences=rollouts.sequences,
                minibatches=minibatches,
                metrics={
                    **seconds,
                    **self.cursor.metrics(),
                    **describe(rollouts),
                    **describe_plans([minibatch.plan for minibatch in minibatches], rollouts.sequences.lengths),
                },
            )
        if self.evaluator.due(self.steps):
            version = self._sync({})
            self.phase("eval")
            self.evaluator.after_step(self.steps, version)

    def _prompts(self, step: int) -> Prompts:
        """The next rows of the data, as requests."""
        draw = self.cursor.take(self.batch_samples)
        return prompts_of(draw.table, range(len(draw.table)), seed=self.seed, step=step, numbers=draw.numbers)

    def _sync(self, seconds: Metrics) -> int:
        """Give the engine the trainer's weights -> the trainer's version, so that one that missed them refuses."""
        with self._timed("sync", seconds):
            self.engine.update_weights(self.trainer.buckets(self.rollout.dtype.value)).result()
        return self.trainer.version

    @contextmanager
    def _timed(self, name: str, seconds: Metrics) -> Iterator[None]:
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
