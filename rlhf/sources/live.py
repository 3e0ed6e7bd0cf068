"""The live source: the student's own samples, made with the weights it has now.

sync weights ► (evaluate) ► generate ► score ► Experience
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.rollout import VllmRollout
from rlhf.data.cursor import Draw
from rlhf.roles.protocols import Engine
from rlhf.sources.requests import prompts_of
from rlhf.sources.steps import StepSource, describe
from rlhf.types import Metrics, Rollouts


@dataclass(kw_only=True)
class LiveSource(StepSource):
    """Weights go to the engine before every generation, so that a fresh start, a resume and a woken engine are one
    case; after the last step they go once more, for the last evaluation."""

    engine: Engine
    rollout: VllmRollout

    def weights(self, step: int, seconds: Metrics) -> int:
        """Give the engine the trainer's weights -> the trainer's version, so that one that missed them refuses."""
        with self.timed("sync", seconds):
            self.engine.update_weights(self.trainer.buckets(self.rollout.dtype.value)).result()
        return self.trainer.version

    def responses(self, step: int, draw: Draw, version: int, seconds: Metrics) -> tuple[Rollouts, Metrics]:
        """One sample a row."""
        with self.timed("rollout", seconds):
            prompts = prompts_of(draw.table, range(len(draw.table)), seed=self.seed, step=step, numbers=draw.numbers)
            rollouts = self.engine.generate(prompts, version).result()
            self.engine.sleep().result()
        return rollouts, {**describe(rollouts), "rollout/weight_version": float(rollouts.version)}
