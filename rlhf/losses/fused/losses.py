"""The divergences and log-probabilities of `rlhf.losses.divergence` without logits: one projection, and gradients in
the forward pass.

Each returns the weighted sum, which carries the gradient, and `RowLosses` without one. Dense and fused are compared in
tests/unit/test_fused.py, and split over ranks in tests/integration/test_parallel_losses.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf.config.distill import Tail
from rlhf.losses.divergence import TermsOf, mass, require_rows, topk_outcomes, topk_slots
from rlhf.losses.fused.kernels_torch import Transform
from rlhf.losses.fused.projection import (
    ONE_MODEL,
    TWO_MODELS,
    Begun,
    Budget,
    RowBlocks,
    Weights,
    converted,
    kernels_for,
    project,
    ready,
    weighted_loss,
)
from rlhf.losses.fused.row_losses import FullRows, Measured, SelectedRows, joined, steepness
from rlhf.losses.heads import VocabHead, shared_shard
from rlhf.losses.rows import RowLosses, TopKScores


def full_divergence(
    student: VocabHead,
    teacher: VocabHead,
    weights: Float[Tensor, " rows"],
    beta: float,
    temperature: float,
    targets: Int[Tensor, " rows"] | None = None,
    sampler_temperature: float = 1.0,
) -> tuple[Tensor, RowLosses]:
    """The fused `rlhf.losses.divergence.full_divergence`, weighted.

    Args:
        weights: of each row's loss; on the host, so that nothing waits for the GPU. Rows of weight zero aren't
            projected, and what is said of them is zero.

    Raises:
        MisalignedScores: the heads have different numbers of rows.
    """
    require_rows(student, len(teacher))

    def of_rows(rows: Tensor | slice, head: VocabHead, begun: Begun, some: Weights) -> tuple[Tensor, RowLosses]:
        measured = Measured(None if targets is None else targets[rows], sampler_temperature)
        loss = FullRows(head, converted(teacher.select(rows)), beta, temperature, measured)
        total, losses = weighted_loss(head, begun, some, loss)
        ones = torch.ones_like(losses)
        return total, loss.measured.rows(losses, ones, ones)

    return _of_weighted_rows(student, weights, TWO_MODELS, of_rows)


def topk_divergence(
    student: VocabHead,
    teacher: TopKScores,
    weights: Float[Tensor, " rows"],
    beta: float,
    temperature: float,
    tail: Tail,
    targets: Int[Tensor, " rows"] | None = None,
    sampler_temperature: float = 1.0,
    terms_of: TermsOf | None = None,
) -> tuple[Tensor, RowLosses]:
    """The fused `rlhf.losses.divergence.topk_divergence`, weighted; see `full_divergence`.

    Args:
        terms_of: another loss than the divergence that beta chooses.

    Raises:
        ConfigError: see `rlhf.losses.divergence.topk_rows`.
        MisalignedScores: the scores don't have one row for each of the student's.
    """
    require_rows(student, len(teacher))

    def of_rows(rows: Tensor | slice, head: VocabHead, begun: Begun, some: Weights) -> tuple[Tensor, RowLosses]:
        scores = teacher[rows]
        slots = topk_slots(scores, student.vocabulary)

        def outcomes(part: slice, logprobs: Tensor, rest: Tensor) -> Tensor:
            return topk_outcomes(logprobs, rest, scores[part], slots[part], beta, temperature, tail, terms_of)

        measured = Measured(None if targets is None else targets[rows], sampler_temperature)
        loss = SelectedRows(
            head,
            slots.ids,
            slots.kept,
            outcomes,
            temperature,
            measured,
            bounded=terms_of is None,
            steepness=steepness(head, temperature, beta),
        )
        total, losses = weighted_loss(head, begun, some, loss)
        teacher_mass = mass(scores.logprobs.to(losses.dtype), slots.alive)
        return total, measured.rows(losses, teacher_mass, mass(loss.logprobs_at_1, slots.alive))

    return _of_weighted_rows(student, weights, ONE_MODEL, of_rows)


def token_loss(
    student: VocabHead,
    targets: Int[Tensor, " rows"],
    weights: Float[Tensor, " rows"],
    loss_of: Callable[[Tensor | slice, Float[Tensor, " part"]], Float[Tensor, " part"]],
    temperature: float = 1.0,
) -> tuple[Tensor, RowLosses]:
    """Of losses that depend on the log-probability of each row's token: cross entropy, policy gradients.

    Args:
        loss_of: (indices of rows, their tokens' log-probabilities at `temperature`) -> their losses.

    Returns:
        `RowLosses.logprob` is at `temperature`, too.
    """

    def of_rows(rows: Tensor | slice, head: VocabHead, begun: Begun, some: Weights) -> tuple[Tensor, RowLosses]:
        seen: list[Tensor] = []

        def of_part(part: slice, logprobs: Tensor, rest: Tensor) -> Tensor:
            seen.append(logprobs.detach()[:, 0])
            index = part if isinstance(rows, slice) else rows[part]
            return loss_of(index, logprobs[:, 0])

        ids = targets[rows].long()[:, None]
        measured = Measured(None, temperature)
        every = torch.ones_like(ids, dtype=torch.bool)
        loss = SelectedRows(head, ids, every, of_part, temperature, measured, bounded=False)
        total, losses = weighted_loss(head, begun, some, loss)
        ones = torch.ones_like(losses)
        return total, replace(measured.rows(losses, ones, ones), logprob=joined(seen, losses))

    return _of_weighted_rows(student, weights, ONE_MODEL, of_rows)


OfRows = Callable[[Tensor | slice, VocabHead, Begun, Weights], tuple[Tensor, RowLosses]]
"""(rows, the student's head over them, begun, their weights) -> their weighted loss."""


def _of_weighted_rows(
    student: VocabHead, weights: Float[Tensor, " rows"], budget: Budget, of_rows: OfRows
) -> tuple[Tensor, RowLosses]:
    """`of_rows` of the rows that have a weight; zeros for the others."""
    ready_weight = ready(student.weight)  # the first thing a GPU has to do, while the host goes on
    device = student.hidden.device
    counted = weights.detach().cpu().numpy() != 0
    if counted.all():
        begun = Begun.of(student, ready_weight, budget)
        return of_rows(slice(None), student, begun, Weights.of(weights, device))
    chosen = torch.from_numpy(counted.nonzero()[0])
    rows = chosen.to(device)
    head = student.select(rows)
    begun = Begun.of(head, ready_weight, budget)
    total, losses = of_rows(rows, head, begun, Weights.of(weights[chosen], device))
    return total, losses.spread_out(rows, len(student))


@torch.no_grad()
def forward_and_reverse_kl(
    student: VocabHead, teacher: VocabHead
) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
    """The fused `rlhf.losses.divergence.forward_and_reverse_kl`.

    Raises:
        MisalignedScores: the heads have different numbers of rows.
    """
    require_rows(student, len(teacher))
    shard, kernels = shared_shard(student, teacher), kernels_for(student.hidden.device)
    student, teacher = converted(student), converted(teacher)
    columns, dtype = student.weight.shape[0], student.weight.dtype
    plan = RowBlocks.of(len(student), columns, dtype, student.hidden.device, TWO_MODELS)
    of_student = student.weight.new_empty(plan.part, columns)
    of_teacher = student.weight.new_empty(plan.part, teacher.weight.shape[0])
    forward, reverse = [student.hidden.new_zeros(0)], [student.hidden.new_zeros(0)]
    for block in plan.blocks():
        for part in plan.parts(block):
            x, y = of_student[: part.stop - part.start], of_teacher[: part.stop - part.start]
            project(x, student.hidden[part], student.weight)
            project(y, teacher.hidden[part], teacher.weight)
            of_x, of_y = kernels.statistics(
                x, Transform.of(student), shard.columns(columns), 1.0, y, Transform.of(teacher), gaps=True
            )
            of_x, of_y = of_x.joined(shard.group), of_y.joined(shard.group)
            forward.append(of_y.mean_gap - of_y.log_z + of_x.log_z)
            reverse.append(of_x.mean_gap - of_x.log_z + of_y.log_z)
    return torch.cat(forward), torch.cat(reverse)
