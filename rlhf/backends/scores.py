"""Teacher scores on their way from a standalone teacher to a trainer rank: packed arrays, response rows only."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from jaxtyping import Int32, Int64

from rlhf.backends.weight_sync import as_array, received
from rlhf.errors import MisalignedScores
from rlhf.types import Sequences, offsets_of


@dataclass(frozen=True)
class PackedScores:
    """What a teacher says about some samples: their rows end to end, as numpy arrays, which Ray hands over uncopied."""

    kind: type
    """Of the scores: `TopKScores`, `HiddenScores`."""
    arrays: dict[str, tuple[Any, str] | None]
    """The fields of the scores, each with its true number format."""
    sample_ids: Int64[np.ndarray, " n"]
    row_counts: Int64[np.ndarray, " n"]
    targets: Int32[np.ndarray, " rows"]
    """The token that each row is about, as the teacher saw it."""

    @staticmethod
    def pack(scores: Any, sample_ids: Sequence[int], row_counts: Sequence[int], targets: np.ndarray) -> PackedScores:
        """Scores of all rows of some samples, in host memory."""
        assert len(scores) == sum(row_counts) == len(targets)
        tensors = {field.name: getattr(scores, field.name) for field in fields(scores)}
        return PackedScores(
            kind=type(scores),
            arrays={
                name: None if tensor is None else (as_array(tensor), str(tensor.dtype).removeprefix("torch."))
                for name, tensor in tensors.items()
            },
            sample_ids=np.array(sample_ids, dtype=np.int64),
            row_counts=np.array(row_counts, dtype=np.int64),
            targets=targets.astype(np.int32),
        )

    def only(self, wanted: Container[int]) -> PackedScores:
        """Of these samples: a part that was scored before the plan was made holds several ranks'."""
        kept = np.array([int(sample_id) in wanted for sample_id in self.sample_ids])
        if kept.all():
            return self
        rows = np.repeat(kept, self.row_counts)
        return PackedScores(
            kind=self.kind,
            arrays={
                name: None if packed is None else (packed[0][rows], packed[1]) for name, packed in self.arrays.items()
            },
            sample_ids=self.sample_ids[kept],
            row_counts=self.row_counts[kept],
            targets=self.targets[rows],
        )

    def by_sample(self, sequences: Sequences, device: torch.device | int) -> Iterator[tuple[int, Any]]:
        """(sample id, its scores) of every sample, once it is known that they are about these sequences.

        Raises:
            MisalignedScores: a sample that isn't among them, or rows that are about other tokens than its response.
        """
        self._check(sequences)
        tensors = {
            name: None if packed is None else received(*packed).to(device) for name, packed in self.arrays.items()
        }
        scores = self.kind(**tensors)
        starts = offsets_of(self.row_counts)
        for sample_id, start, stop in zip(self.sample_ids, starts[:-1], starts[1:], strict=True):
            yield int(sample_id), scores[int(start) : int(stop)]

    def _check(self, sequences: Sequences) -> None:
        index_of = {int(sample_id): index for index, sample_id in enumerate(sequences.sample_ids)}
        starts, masks, continuations = offsets_of(self.row_counts), sequences.masks(), list(sequences.continuations())
        for sample_id, start, stop in zip(self.sample_ids, starts[:-1], starts[1:], strict=True):
            index = index_of.get(int(sample_id))
            if index is None:
                raise MisalignedScores(f"teacher scores of sample {sample_id}, which isn't in the batch")
            mask = masks[index]
            response = continuations[index] if mask is None else continuations[index][mask]
            if not np.array_equal(self.targets[start:stop], response):
                raise MisalignedScores(
                    f"the teacher's {stop - start} rows of sample {sample_id} are about other tokens than the "
                    f"{len(response)} of its response"
                )
