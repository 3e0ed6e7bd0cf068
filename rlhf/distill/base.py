"""What every option of `distill` offers: scores from a teacher's head, a divergence from a student's head and scores.

Scores are kept a sample at a time (response rows only) and joined a micro-batch at a time:

    teacher_head ──score──► Scores ──scores[rows]──► stored by sample id ──concat──► Scores of a micro-batch
    student_head + Scores ──divergence──► weighted sum, RowLosses
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol, Self, TypeVar

from jaxtyping import Float, Int
from torch import Tensor

from rlhf.losses.fused.projection import ONE_MODEL
from rlhf.losses.heads import VocabHead
from rlhf.losses.rows import RowLosses

LOGITS_BYTES = ONE_MODEL.block

TeacherHeadOf = Callable[[Float[Tensor, "rows H"]], VocabHead]
"""Puts the teacher's LM head on stored hidden rows."""


class Scores(Protocol):
    """What a teacher says about some rows. Frozen; tensors only."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice | Int[Tensor, " chosen"]) -> Self: ...

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts, in order; at least one part."""
        ...


S = TypeVar("S", bound=Scores)


class Distill(Protocol[S]):
    """One option of the group `distill`, for the scores it makes."""

    needs_teacher_head: ClassVar[bool]
    """Whether `divergence` puts the teacher's head on the scores again."""

    def score(self, teacher_head: VocabHead, logits_bytes: int = LOGITS_BYTES) -> S:
        """What is kept of the teacher at each of its rows. No gradient.

        Args:
            logits_bytes: most logits made at a time, for an option that needs them.
        """
        ...

    def divergence(
        self,
        student_head: VocabHead,
        scores: S,
        weights: Float[Tensor, " rows"],
        beta: float,
        targets: Int[Tensor, " rows"] | None = None,
        sampler_temperature: float = 1.0,
        teacher_head_of: TeacherHeadOf | None = None,
    ) -> tuple[Tensor, RowLosses]:
        """The weighted sum of one loss a row of the student, with a gradient for the student's head only; and the rows.

        Args:
            weights: on the host.
            beta: 0 forward KL, 1 reverse KL, between: generalised Jensen-Shannon (`rlhf.losses.divergence`).
            targets: the sampled tokens, for `RowLosses.logprob` at `sampler_temperature`.
            teacher_head_of: needed by an option that keeps hidden rows (fullvocab), unused by others.
        """
        ...
