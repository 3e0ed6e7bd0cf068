"""The off-policy source: the rows' reference responses, or what the teacher writes. No engine, so no sync.

(evaluate) ► responses ► score ► Experience
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.sources.offpolicy import OffPolicy
from rlhf.sources.steps import Batch, StepSource, Timed
from rlhf.types import Metrics, Rollouts


@dataclass(kw_only=True)
class DatasetSource(StepSource):
    """No response depends on the student."""

    off_policy: OffPolicy

    def weights(self, step: int, timed: Timed) -> int:
        """Nobody but the trainer has them."""
        return self.trainer.version

    def responses(self, batch: Batch, version: int, timed: Timed) -> tuple[Rollouts, Metrics]:
        return self.off_policy.responses(batch, version, timed)
