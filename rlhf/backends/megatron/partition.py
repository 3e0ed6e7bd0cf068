"""How a model is split over the processes that share it."""

from __future__ import annotations

from collections.abc import Sequence
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


def indivisible(architecture: Architecture, tensor_parallel: int) -> str | None:
    """What of a model can't be divided by so many ranks, as `name=number`; None if all can."""
    numbers: Sequence[tuple[str, int]] = (
        ("num_attention_heads", architecture.heads),
        ("num_key_value_heads", architecture.kv_groups),
        ("intermediate_size", architecture.ffn_hidden),
    )
    return next((f"{name}={number}" for name, number in numbers if number % tensor_parallel), None)
