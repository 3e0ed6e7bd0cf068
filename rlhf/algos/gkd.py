"""Generalised knowledge distillation (arXiv 2306.13649): match the teacher's distribution at every response token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlhf.algos.objective import RowBatch, Totals
from rlhf.batching import plan_batch, token_mean_weights
from rlhf.config.train import Train
from rlhf.distill.base import Distill
from rlhf.losses.fused.losses import token_loss
from rlhf.losses.heads import VocabHead
from rlhf.types import MiniBatch, Sequences


@dataclass(frozen=True)
class GKDObjective:
    """Loss = sum over response tokens of weight * divergence(teacher, student), and of target weight * cross entropy
    where the batch has target weights."""

    beta: float
    distill: Distill[Any]
    sampler_temperature: float | None
    """Temperature to compare log-probabilities with the sampler's at; None when they can't be compared, because the
    sampler cut its distribution (top_p, top_k, min_p) or took no sample (greedy)."""

    @property
    def old_logprobs_at(self) -> None:
        """Divergences compare with the teacher, not with the past."""
        return None

    def loss(
        self,
        student: VocabHead,
        scores: Any,
        batch: RowBatch,
        teacher_head: Callable[[Tensor], VocabHead] | None,
    ) -> tuple[Tensor, Totals]:
        """See `Objective.loss`."""
        loss, rows = self.distill.divergence(
            student,
            scores,
            batch.weights,
            self.beta,
            batch.targets,
            sampler_temperature=self.sampler_temperature or 1.0,
            teacher_head_of=teacher_head,
        )
        sums = {}
        if batch.target_weights is not None:
            cross_entropy, target_rows = token_loss(
                student, batch.targets, batch.target_weights, lambda rows, logprobs: -logprobs
            )
            loss = loss + cross_entropy
            sums["train/cross_entropy"] = float(target_rows.loss.double().sum())
        totals = Totals(
            rows=len(rows.loss),
            weighted={"train/loss": float(loss.detach())},
            sums=sums
            | {
                "train/divergence": float(rows.loss.double().sum()),
                "train/entropy": float(rows.entropy.double().sum()),
                "distill/teacher_mass": float(rows.teacher_mass.double().sum()),
                "distill/student_mass": float(rows.student_mass.double().sum()),
            },
        )
        if batch.behaviour_logprobs is not None and self.sampler_temperature is not None and rows.logprob is not None:
            gap = (rows.logprob - batch.behaviour_logprobs).abs()
            totals.sums["rollout/logprob_gap_mean"] = float(gap.double().sum())
            totals.maxima["rollout/logprob_gap_max"] = float(gap.max()) if len(gap) else 0.0
        return loss, totals


def make_minibatches(
    sequences: Sequences, train: Train, data_parallel: int, sft_alpha: float = 0.0
) -> tuple[MiniBatch, ...]:
    """One optimizer step on all responses; every token weighs the same.

    Args:
        sft_alpha: weight of the cross entropy beside the divergence; for off-policy responses only (the
            dataset's, or those a teacher writes), which are those without log-probabilities: on its own samples a
            student would learn to repeat itself.
    """
    plan = plan_batch(
        sequences.lengths,
        data_parallel=data_parallel,
        micro_batch_tokens=train.micro_batch_tokens,
        padding_free=train.padding_free,
        pad_multiple=train.pad_multiple,
    )
    weights = token_mean_weights(sequences)
    supervised = sft_alpha > 0 and sequences.logprobs is None
    return (MiniBatch(plan=plan, weights=weights, target_weights=sft_alpha * weights if supervised else None),)
