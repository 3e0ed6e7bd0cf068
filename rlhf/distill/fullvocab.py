"""distill=fullvocab: the whole distribution, carried as the teacher's final hidden rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf.config.distill import FullVocab
from rlhf.distill.base import LOGITS_BYTES, TeacherHeadOf
from rlhf.distill.user_loss import UserLoss
from rlhf.losses import divergence
from rlhf.losses.fused.losses import full_divergence
from rlhf.losses.heads import VocabHead
from rlhf.losses.rows import RowLosses


@dataclass(frozen=True, eq=False)
class HiddenScores:
    """The teacher's final hidden rows, in its own dtype. Never rows x vocabulary: the loss puts the head on again."""

    hidden: Float[Tensor, "rows H"]

    def __len__(self) -> int:
        return self.hidden.shape[0]

    def __getitem__(self, rows: slice | Int[Tensor, " chosen"]) -> HiddenScores:
        # Cloned: a view keeps the whole batch alive, and pickles all of it.
        return HiddenScores(self.hidden[rows].clone())

    @classmethod
    def concat(cls, parts: Sequence[HiddenScores]) -> HiddenScores:
        return HiddenScores(torch.cat([part.hidden for part in parts]))


@dataclass(frozen=True)
class FullVocabDistill:
    """Scores are `[rows, H]` hidden states; the head they belong to must be the one they were made with."""

    needs_teacher_head: ClassVar[bool] = True

    temperature: float
    loss: UserLoss | None = None

    @classmethod
    def from_spec(cls, spec: FullVocab, plugins: Sequence[str] = ()) -> FullVocabDistill:
        return cls(spec.temperature, UserLoss.of(spec.loss, plugins))

    def score(self, teacher_head: VocabHead, logits_bytes: int = LOGITS_BYTES) -> HiddenScores:
        """The hidden rows alone, detached."""
        return HiddenScores(teacher_head.hidden.detach())

    def divergence(
        self,
        student_head: VocabHead,
        scores: HiddenScores,
        weights: Float[Tensor, " rows"],
        beta: float,
        targets: Int[Tensor, " rows"] | None = None,
        sampler_temperature: float = 1.0,
        teacher_head_of: TeacherHeadOf | None = None,
    ) -> tuple[Tensor, RowLosses]:
        """See `rlhf.distill.base.Distill`; errors are those of `rlhf.losses.fused.losses.full_divergence`."""
        assert teacher_head_of is not None, "distill=fullvocab keeps hidden rows only: it needs the teacher's head"
        teacher_head = teacher_head_of(scores.hidden)
        if self.loss is not None:  # a function of whole rows: a chunk of logits at a time, projected again in backward
            rows = divergence.full_divergence(
                student_head, teacher_head, beta, self.temperature, targets, sampler_temperature, terms_of=self.loss
            )
            return (weights.to(rows.loss.device) * rows.loss).sum(), replace(rows, loss=rows.loss.detach())
        return full_divergence(
            student_head,
            teacher_head,
            weights,
            beta,
            self.temperature,
            targets,
            sampler_temperature,
        )
