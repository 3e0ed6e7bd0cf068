"""The dataset source: the rows' reference responses (off-policy distillation). No engine, so no sync.

(evaluate) ► reference responses ► score ► Experience
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.data.table import PromptTable
from rlhf.sources.requests import reference_sequences
from rlhf.sources.steps import Batch, StepSource, Timed, describe
from rlhf.types import Metrics, Rollouts


@dataclass(kw_only=True)
class DatasetSource(StepSource):
    """Every row must have a response, which is checked when the rows are read."""

    max_response_tokens: int
    """Longer responses are cut."""

    def weights(self, step: int, timed: Timed) -> int:
        """Nobody but the trainer has them."""
        return self.trainer.version

    def responses(self, batch: Batch, version: int, timed: Timed) -> tuple[Rollouts, Metrics]:
        return reference_rollouts(batch.draw.table, self.max_response_tokens, batch.step, version)


def reference_rollouts(
    table: PromptTable, max_response_tokens: int, step: int, version: int
) -> tuple[Rollouts, Metrics]:
    """The rows' own responses in the place of sampled ones. `finished` are those that weren't cut.

    Args:
        version: of the trainer's weights, which have no part in the responses.
    """
    sequences = reference_sequences(table, max_response_tokens, step)
    rollouts = Rollouts(version, sequences, table.response_lengths <= max_response_tokens)
    return rollouts, describe(rollouts)
