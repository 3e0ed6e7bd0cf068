"""distill=topk: the teacher's k most likely tokens and their log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf.config.distill import Tail, TopK
from rlhf.distill.base import LOGITS_BYTES, TeacherHeadOf
from rlhf.distill.user_loss import UserLoss
from rlhf.errors import ConfigError
from rlhf.losses.fused.losses import topk_divergence
from rlhf.losses.fused.scores import topk_scores
from rlhf.losses.heads import VocabHead
from rlhf.losses.rows import RowLosses, TopKScores


@dataclass(frozen=True)
class TopKDistill:
    """Scores are `[rows, k]`: 8 bytes a token kept (int32 id, fp32 log-probability)."""

    needs_teacher_head: ClassVar[bool] = False

    k: int
    tail: Tail
    temperature: float
    loss: UserLoss | None = None

    @classmethod
    def from_spec(cls, spec: TopK, plugins: Sequence[str] = ()) -> TopKDistill:
        return cls(spec.k, spec.tail, spec.temperature, UserLoss.of(spec.loss, plugins))

    @torch.no_grad()
    def score(self, teacher_head: VocabHead, logits_bytes: int = LOGITS_BYTES) -> TopKScores:
        """The top k of each row, most likely first, with the normaliser at `temperature` unless that is 1.

        Raises:
            ConfigError: k exceeds the teacher's vocabulary.
        """
        vocabulary = teacher_head.vocabulary
        if self.k > vocabulary:
            raise ConfigError(
                f"distill.k={self.k} exceeds the vocabulary of {vocabulary} tokens; "
                f"write distill.k={vocabulary} or less"
            )
        return topk_scores(teacher_head, self.k, self.temperature, logits_bytes)

    def divergence(
        self,
        student_head: VocabHead,
        scores: TopKScores,
        weights: Float[Tensor, " rows"],
        beta: float,
        targets: Int[Tensor, " rows"] | None = None,
        sampler_temperature: float = 1.0,
        teacher_head_of: TeacherHeadOf | None = None,
    ) -> tuple[Tensor, RowLosses]:
        """See `rlhf.distill.base.Distill`; errors are those of `rlhf.losses.fused.losses.topk_divergence`."""
        return topk_divergence(
            student_head, scores, weights, beta, self.temperature, self.tail, targets, sampler_temperature, self.loss
        )
