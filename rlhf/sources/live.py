"""The live source: the student's own samples, made with the weights it has now.

sync weights ► (evaluate) ► generate ► score ► Experience

A teacher on devices of its own begins to score while others are still generated (but for conversations).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from rlhf.config.rollout import VllmRollout
from rlhf.data.table import PromptTable
from rlhf.roles.protocols import Engine
from rlhf.roles.replicas import in_order_of
from rlhf.sources.conversations import Conversations, sampled
from rlhf.sources.privileged import privileged_sequences
from rlhf.sources.requests import prompts_of
from rlhf.sources.steps import Batch, StepSource, Timed, describe
from rlhf.types import Metrics, Prompts, Rollouts


@dataclass(kw_only=True)
class LiveSource(StepSource):
    """Weights go to the engine before every generation, so that a fresh start, a resume and a woken engine are one
    case; after the last step they go once more, for the last evaluation."""

    engine: Engine
    rollout: VllmRollout
    conversations: Conversations | None = None
    """None: a sample is one response."""

    def weights(self, step: int, timed: Timed) -> int:
        """Give the engine the trainer's weights -> the trainer's version, so that one that missed them refuses."""
        with timed("sync"):
            self.engine.update_weights(self.trainer.buckets(self.rollout.dtype.value)).result()
        return self.trainer.version

    def responses(self, batch: Batch, version: int, timed: Timed) -> tuple[Rollouts, Metrics]:
        """One sample a row."""
        draw = batch.draw
        with timed("rollout"):
            rows = range(len(draw.table))
            prompts = prompts_of(draw.table, rows, seed=self.seed, step=batch.step, numbers=draw.numbers)
            if self.conversations is None and self.scorer is not None and self.scorer.begins:
                rollouts, head_start = self._scored_as_they_finish(prompts, draw.table, version)
            else:
                rollouts = sampled(self.engine, self.conversations, prompts, draw.table.columns, version)
                head_start = {}
            self.engine.sleep().result()
        return rollouts, {**describe(rollouts), "rollout/weight_version": float(rollouts.version), **head_start}

    def _scored_as_they_finish(self, prompts: Prompts, table: PromptTable, version: int) -> tuple[Rollouts, Metrics]:
        """The rollouts, which the teacher has begun to score, and for how long it has."""
        assert self.scorer is not None
        parts, began = [], math.inf
        row_of = {int(sample_id): row for row, sample_id in enumerate(prompts.sample_ids)}
        for part in self.engine.stream(prompts, version):
            began = min(began, time.perf_counter())
            rows = [row_of[int(sample_id)] for sample_id in part.sequences.sample_ids]
            privileged = privileged_sequences(part.sequences, table.select(rows))
            self.scorer.begin(part.sequences if privileged is None else privileged)
            parts.append(part)
        return in_order_of(prompts, parts), {"score/head_start": time.perf_counter() - began}
