"""Held-out evaluation: divergence from the teacher, and one sample completion to look at."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from rlhf.batching import plan_batch
from rlhf.config.run import Eval, EvalResponses
from rlhf.config.train import Train
from rlhf.data.table import PromptTable
from rlhf.roles.protocols import Engine, Scorer, Trainer
from rlhf.sources.requests import prompts_of, reference_sequences
from rlhf.types import Metrics, Sequences


@dataclass
class Evaluator:
    """Measures the weights the engine holds. Called by the source, between sync and generation."""

    spec: Eval
    train: Train
    held_out: PromptTable
    trainer: Trainer
    scorer: Scorer
    engine: Engine
    seed: int
    total_steps: int
    report: Callable[[int, Metrics], None]
    """Called with the step and its metrics."""
    results: dict[int, Metrics] = field(default_factory=dict)
    samples: dict[int, np.ndarray] = field(default_factory=dict)
    """Step -> token ids of the greedy completion of the first held-out prompt."""

    def due(self, step: int) -> bool:
        """Step 0 is before the first; it and the last step always are."""
        first_or_last = step in (0, self.total_steps)
        on_the_way = self.spec.every > 0 and step % self.spec.every == 0
        return self.spec.samples > 0 and (first_or_last or on_the_way)

    def after_step(self, step: int, version: int) -> None:
        """Evaluate if it is due."""
        if not self.due(step):
            return
        started = time.perf_counter()
        prompt = prompts_of(self.held_out, [0], seed=self.seed, step=0)
        completion = self.engine.generate(prompt, version, greedy=True).result().sequences
        self.samples[step] = completion.tokens[completion.prompt_lengths[0] :]
        sequences = self._sequences(version)
        plan = plan_batch(
            sequences.lengths,
            data_parallel=self.trainer.data_parallel,
            micro_batch_tokens=self.train.micro_batch_tokens,
            padding_free=self.train.padding_free,
            pad_multiple=self.train.pad_multiple,
        )
        hidden = self.scorer.hidden_rows(sequences, plan).result()
        self.results[step] = self.trainer.evaluate(sequences, plan, hidden).result()
        self.report(step, {**self.results[step], "time/eval": time.perf_counter() - started})

    def _sequences(self, version: int) -> Sequences:
        if self.spec.responses is EvalResponses.dataset:
            return reference_sequences(self.held_out, self.spec.max_response_tokens)
        prompts = prompts_of(self.held_out, range(len(self.held_out)), seed=self.seed, step=0)
        return self.engine.generate(prompts, version).result().sequences
