"""The live source: the student's own samples, made with the weights it has now.

sync weights ► (evaluate) ► generate ► score ► Experience
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.rollout import VllmRollout
from rlhf.roles.protocols import Engine
from rlhf.sources.requests import prompts_of
from rlhf.sources.steps import Batch, StepSource, Timed, describe
from rlhf.types import Metrics, Rollouts


@dataclass(kw_only=True)
class LiveSource(StepSource):
    """Weights go to the engine before every generation, so that a fresh start, a resume and a woken engine are one
    case; after the last step they go once more, for the last evaluation."""

    engine: Engine
    rollout: VllmRollout

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
            rollouts = self.engine.generate(prompts, version).result()
            self.engine.sleep().result()
        return rollouts, {**describe(rollouts), "rollout/weight_version": float(rollouts.version)}
