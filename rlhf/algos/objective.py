"""What the trainer asks of an algorithm: rows of a head and teacher scores in, a weighted loss and totals out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxtyping import Float, Int
from torch import Tensor

from rlhf.distill.base import Distill
from rlhf.losses.heads import VocabHead


@dataclass(frozen=True)
class RowBatch:
    """What belongs to the response rows of one micro-batch."""

    weights: Float[Tensor, " rows"]
    """Normalised over the optimizer step: the loss is sum(weight * row loss), and nothing divides later. On the host,
    so that what depends on them is known without waiting for a GPU; so are `target_weights`."""
    targets: Int[Tensor, " rows"]
    """The response tokens."""
    behaviour_logprobs: Float[Tensor, " rows"] | None
    """Their log-probabilities under the sampler; None for off-policy responses, the dataset's and a teacher's."""
    target_weights: Float[Tensor, " rows"] | None = None
    """Of the cross entropy of the targets, normalised as `weights` are; None: it is no part of the loss."""
    advantages: Float[Tensor, " rows"] | None = None
    """See `MiniBatch`, as of the next two."""
    teacher_logprobs: Float[Tensor, " rows"] | None = None
    old_logprobs: Float[Tensor, " rows"] | None = None
    row_counts: tuple[int, ...] = ()
    """Rows of each sample, in order."""


@dataclass
class Totals:
    """Sums over rows, and maxima, that add up over micro-batches and ranks."""

    rows: int = 0
    weighted: dict[str, float] = field(default_factory=dict)
    """Sums that are normalised already (by the token weights)."""
    sums: dict[str, float] = field(default_factory=dict)
    """Sums over rows; `means` divides them."""
    maxima: dict[str, float] = field(default_factory=dict)

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            rows=self.rows + other.rows,
            weighted=_merged(self.weighted, other.weighted, lambda a, b: a + b),
            sums=_merged(self.sums, other.sums, lambda a, b: a + b),
            maxima=_merged(self.maxima, other.maxima, max),
        )

    def means(self, optimizer_steps: int = 1) -> dict[str, float]:
        """Metric name -> mean over rows (sums), mean over optimizer steps (weighted), or the largest (maxima)."""
        rows = max(self.rows, 1)  # none where every sample was masked
        weighted = {name: total / optimizer_steps for name, total in self.weighted.items()}
        return {**weighted, **{name: total / rows for name, total in self.sums.items()}, **self.maxima}


def _merged(a: dict[str, float], b: dict[str, float], combine: Callable[[float, float], float]) -> dict[str, float]:
    """Both, combined where they share a name."""
    shared = {name: combine(a[name], b[name]) for name in a if name in b}
    return {**a, **b, **shared}


class Objective(Protocol):
    """Pure: holds numbers and a distillation strategy, no model."""

    @property
    def distill(self) -> Distill[Any] | None:
        """What is asked of the teacher and kept for the loss; None: nothing."""
        ...

    @property
    def old_logprobs_at(self) -> float | None:
        """The temperature at which the trainer takes the targets' log-probabilities before the first optimizer step of
        an experience, for `RowBatch.old_logprobs` of all its steps; None: the loss doesn't need them. Where there is
        one step, its own forward pass has them, and none is made for it."""
        ...

    def loss(
        self,
        student: VocabHead,
        scores: Any,
        batch: RowBatch,
        teacher_head: Callable[[Tensor], VocabHead] | None,
    ) -> tuple[Tensor, Totals]:
        """The micro-batch's share of the step's loss (scalar), and what to report.

        Args:
            student: head over the response rows.
            scores: what `distill.score` returned for these rows, in the same order.
            batch: weights and targets of the rows.
            teacher_head: teacher hidden rows -> head, for strategies that keep hidden states.
        """
        ...
