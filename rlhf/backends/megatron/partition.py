"""How a model is split over the processes that share it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhf.backends.megatron.architecture import Architecture
from rlhf.batching import round_up


@dataclass(frozen=True)
class Partition:
    """One process's part of a model under tensor parallelism."""

    rank: int = 0
    size: int = 1
    group: Any | None = None
    """The processes that share the model; None for one process."""
    sequence_parallel: bool = False
    """Activations between the split layers are split along the sequence."""
    least_vocab: int = 0
    """Rows that embedding and head have at least. Student and teacher must have as many, so that a rank has the same
    tokens in both."""

    def padded_vocab(self, architecture: Architecture) -> int:
        """Rows of embedding and head over all ranks."""
        return round_up(max(architecture.vocab, self.least_vocab), self.size)
