"""Hidden rows meet their LM head a block at a time: logits, loss and gradients, and no logits are kept.

for each block of rows, whose gradients by the logits are kept together:
    logits = hidden @ weight.T                     # once: nothing is projected again in backward
    for each part of it, for which a teacher's logits are made, too:
        RowLoss: losses of these rows; logits become d loss / d logits, in place
    d hidden = d logits @ weight
    d weight += d logits.T @ hidden                # in fp32, straight into Megatron's main_grad where there is one

On a GPU, logits and their gradients are float16 for models in bfloat16: the same bytes and speed, and three more bits.
bfloat16 converts to it exactly but for numbers beyond 65,504, which make the loss NaN, or below 6e-8, which vanish. So
that gradients don't vanish, they are scaled up, by `GRADIENT_SCALE` over the largest weight, until after the matmuls.
That takes a bound on them, which divergences have; losses without one keep gradients in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rlhf.losses.fused import kernels_torch
from rlhf.losses.heads import VocabHead

GRADIENT_SCALE = 512.0
"""A row's loss changes with a logit by at most 1 for forward KL and a few dozen for reverse KL: below 2^16 with it."""

MIB = 2**20


@dataclass(frozen=True)
class Budget:
    """Bytes of logits at a time on a GPU. Fewer rows mean more passes over d weight."""

    block: int
    """The student's, whose gradients are kept for one matmul that makes d weight."""
    part: int
    """A teacher's."""


TWO_MODELS = Budget(640 * MIB, 320 * MIB)
"""2,048 and 1,024 rows of 151,936 in float16."""
ONE_MODEL = Budget(1280 * MIB, 1280 * MIB)
CPU_BLOCK_BYTES = 256 * MIB
TILE = 128
"""Rows of a tile of the GPU's matmul. Rows of logits that begin at a multiple of it are read and written faster."""


class RowLoss(Protocol):
    """Turns the raw logits of some rows into their losses, and into gradients."""

    steepness: float
    """How much more, at least 1, a loss changes with a raw logit than with a logit at temperature 1."""
    bounded: bool
    """With a logit at temperature 1 a loss changes by a few dozen at most."""

    def __call__(self, rows: slice, raw: Float[Tensor, "part n"], weights: Float[Tensor, " part"] | None) -> None:
        """One part after another.

        Args:
            raw: what the matmul gave, without bias, scale and soft cap; `[:, :V_local]` of a buffer that is wider.
                Overwritten by d(weights . losses)/d raw, in `gradient_dtype`.
            weights: None: no gradient is asked for.
        """
        ...

    def losses(self) -> Float[Tensor, " rows"]:
        """Of all parts, fp32, not weighted."""
        ...


@dataclass(frozen=True)
class Weights:
    """One weight a row, and what the host knows of them without waiting for the GPU."""

    values: Float[Tensor, " rows"]
    """On the device of the hidden rows."""
    largest: float
    """Of their magnitudes."""

    @classmethod
    def of(cls, weights: Float[Tensor, " rows"], device: torch.device) -> Weights:
        """From a tensor of the host, without synchronisation; one of the GPU has to be waited for."""
        weights = weights.detach()
        largest = float(np.abs(weights.cpu().numpy()).max(initial=0.0))  # numpy: less to do for the CPU than torch
        return cls(weights.to(device, non_blocking=True), largest)


def kernels_for(device: torch.device) -> ModuleType:
    """Triton's on a GPU."""
    if device.type == "cuda":
        from rlhf.losses.fused import kernels_triton

        return kernels_triton
    return kernels_torch


def compute_dtype(weight: Tensor) -> torch.dtype:
    """Of logits and their gradients."""
    return torch.float16 if weight.is_cuda and weight.dtype == torch.bfloat16 else weight.dtype


def gradient_dtype(logits: torch.dtype, bounded: bool) -> torch.dtype:
    """Of the gradients that take the place of logits."""
    return torch.bfloat16 if logits == torch.float16 and not bounded else logits


def ready(weight: Float[Tensor, "V_local H"]) -> Float[Tensor, "V_local H"]:
    """A head's weight in `compute_dtype`, without gradient."""
    return kernels_for(weight.device).cast(weight.detach(), compute_dtype(weight))


def converted(head: VocabHead) -> VocabHead:
    """A head in `compute_dtype`. One that comes in it, as a frozen teacher's does, costs nothing."""
    return replace(head, weight=ready(head.weight))


def project(
    raw: Float[Tensor, "rows V_local"], hidden: Float[Tensor, "rows H"], weight: Float[Tensor, "V_local H"]
) -> Float[Tensor, "rows H"]:
    """raw = hidden @ weight.T, in the weight's format; returns the hidden rows in it, too."""
    hidden = kernels_for(hidden.device).cast(hidden, weight.dtype)
    torch.mm(hidden, weight.t(), out=raw)
    return hidden


@dataclass(frozen=True)
class Begun:
    """A head whose first block of logits is being made. Who begins before all else gives a GPU something to do while
    the rest is prepared."""

    weight: Float[Tensor, "V_local H"]
    """In `compute_dtype`, without gradient."""
    plan: RowBlocks
    buffer: Float[Tensor, "block n"]
    """For a block of logits; wider than the vocabulary, for a column where a row loss puts what belongs to no token."""
    first: Float[Tensor, "block H"]
    """The first block's hidden rows, in `compute_dtype`."""

    @classmethod
    def of(cls, head: VocabHead, weight: Float[Tensor, "V_local H"], budget: Budget) -> Begun:
        """Begin. The weight is the head's, `ready`."""
        device = head.hidden.device
        columns = weight.shape[0]
        plan = RowBlocks.of(len(head), columns, weight.dtype, device, budget)
        buffer = torch.empty(plan.block, in_tiles(columns + 1), dtype=weight.dtype, device=device)
        if device.type != "cuda":
            # torch's bfloat16 matmul on CPUs multiplies what lies beyond a row with zero (2.13): it must be finite.
            buffer[:, columns:] = 0
        begun = cls(weight, plan, buffer, weight[:0])
        if len(head) == 0:
            return begun
        return replace(begun, first=begun.project(head.hidden.detach(), slice(0, min(plan.block, len(head)))))

    def project(self, hidden: Float[Tensor, "rows H"], block: slice) -> Float[Tensor, "block H"]:
        """Puts the raw logits of a block in the buffer; returns its hidden rows in `compute_dtype`."""
        return project(self.raw(block), hidden[block], self.weight)

    def raw(self, block: slice) -> Float[Tensor, "block V_local"]:
        """Where the raw logits of a block are."""
        return self.buffer[: block.stop - block.start, : self.weight.shape[0]]


def weighted_loss(
    head: VocabHead, begun: Begun, weights: Weights, row_loss: RowLoss
) -> tuple[Tensor, Float[Tensor, " rows"]]:
    """sum(weights * losses), with gradients for the head's hidden rows, weight and bias; and the losses, without.

    Under tensor parallelism each rank passes its part of the head and the same hidden rows, whose gradients are summed.
    """
    hidden = head.shard.spread(head.hidden)
    wanted = torch.is_grad_enabled()  # inside, it never is
    total, losses = _WeightedLoss.apply(hidden, head.weight, head.bias, begun, weights, row_loss, wanted)
    return total, losses


class _WeightedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        begun: Begun,
        weights: Weights,
        row_loss: RowLoss,
        wanted: bool,
    ) -> tuple[Tensor, Tensor]:
        wants_hidden, wants_weight, wants_bias = (needed and wanted for needed in ctx.needs_input_grad[:3])
        wants_any = wants_hidden or wants_weight or wants_bias
        hidden, plan, dtype = hidden.detach(), begun.plan, begun.weight.dtype
        of_gradients = gradient_dtype(dtype, row_loss.bounded)
        backward_weight = weight.detach() if weight.dtype == of_gradients else begun.weight.to(of_gradients)
        scale = 1.0
        if of_gradients == torch.float16 and weights.largest > 0:
            scale = GRADIENT_SCALE / (weights.largest * row_loss.steepness)
        exact = torch.promote_types(dtype, torch.float32)
        d_hidden = torch.empty_like(hidden) if wants_hidden else None
        d_weight = _main_grad(weight, exact) if wants_weight else None
        ctx.in_main_grad = d_weight is not None
        if wants_weight and d_weight is None:
            d_weight = torch.zeros_like(weight, dtype=exact)
        d_bias = torch.zeros_like(bias, dtype=exact) if bias is not None and wants_bias else None
        scaled = weights.values.to(exact) * scale
        for block in plan.blocks():
            inputs = begun.first if block.start == 0 else begun.project(hidden, block)
            raw = begun.raw(block)
            for part in plan.parts(block):
                raw_part = raw[part.start - block.start : part.stop - block.start]
                row_loss(part, raw_part, scaled[part] if wants_any else None)
            gradients = raw.view(of_gradients)
            if d_hidden is not None:
                torch.mul(_mm(gradients, backward_weight), 1 / scale, out=d_hidden[block])
            if d_weight is not None:
                _add_mm_(d_weight, gradients, inputs.to(of_gradients), 1 / scale)
            if d_bias is not None:
                d_bias += gradients.sum(0, dtype=exact) / scale
        ctx.weight_dtype = weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.gradients = d_hidden, None if ctx.in_main_grad else d_weight, d_bias
        losses = row_loss.losses()
        ctx.mark_non_differentiable(losses)
        return (weights.values.to(exact) * losses).sum(), losses

    @staticmethod
    def backward(ctx: Any, d_total: Tensor, _: Any) -> tuple[Any, ...]:
        assert ctx.gradients is not None, "backward once: the gradients of the forward pass are handed out"
        (d_hidden, d_weight, d_bias), ctx.gradients = ctx.gradients, None
        if ctx.in_main_grad:
            # It was added already, as d total / d total = 1: this loss is a term of the step's, whose weights hold all.
            _require_one(d_total)
        elif d_hidden is not None:
            d_hidden.mul_(d_total.to(d_hidden.dtype))
        return (
            d_hidden,
            None if d_weight is None else d_weight.mul_(d_total).to(ctx.weight_dtype),
            None if d_bias is None else d_bias.mul_(d_total).to(ctx.bias_dtype),
            None,
            None,
            None,
            None,
        )


@dataclass(frozen=True)
class RowBlocks:
    """How rows are cut: into blocks, and these into parts."""

    rows: int
    block: int
    part: int

    @classmethod
    def of(cls, rows: int, columns: int, dtype: torch.dtype, device: torch.device, budget: Budget) -> RowBlocks:
        """As few blocks as the budget allows, of about the same size."""
        row_bytes = max(columns, 1) * dtype.itemsize
        if device.type != "cuda":
            budget = Budget(min(budget.block, CPU_BLOCK_BYTES), min(budget.part, CPU_BLOCK_BYTES))
        block = _even(rows, budget.block // row_bytes)
        return cls(rows, block, _even(block, budget.part // row_bytes))

    def blocks(self) -> Iterator[slice]:
        for start in range(0, self.rows, self.block):
            yield slice(start, min(start + self.block, self.rows))

    def parts(self, block: slice) -> Iterator[slice]:
        for start in range(block.start, block.stop, self.part):
            yield slice(start, min(start + self.part, block.stop))


def in_tiles(n: int) -> int:
    """Rounded up."""
    return -(-n // TILE) * TILE


def _even(rows: int, most: int) -> int:
    """Rows of each of the fewest pieces of at most `most`, rounded up to a tile."""
    if rows <= max(most, 1):
        return max(rows, 1)
    most = most // TILE * TILE if most >= TILE else max(most, 1)
    pieces = -(-rows // most)
    return min(in_tiles(-(-rows // pieces)), most)


def _main_grad(weight: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Where Megatron adds up the gradients of an optimizer step. Its hook adds what autograd brings, so that the other
    part of a tied weight's gradient, the embedding's, comes on top.

    With overlapped reduction this would have to tell the hook, which waits for every gradient; `optimizer.wrap` reduces
    when all of them are there.
    """
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    return main_grad.view_as(weight) if main_grad is not None and main_grad.dtype == dtype else None


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, accumulated and kept in fp32 on a GPU."""
    if a.is_cuda and a.dtype != torch.float32 and a.dtype != torch.float64:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b)


def _add_mm_(total: Tensor, gradients: Tensor, hidden: Tensor, alpha: float) -> None:
    """total += alpha * gradients.T @ hidden, in the total's precision."""
    if total.dtype == gradients.dtype:
        torch.addmm(total, gradients.t(), hidden, alpha=alpha, out=total)
    elif total.is_cuda:
        torch.addmm(total, gradients.t(), hidden, alpha=alpha, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, gradients.t().to(total.dtype), hidden.to(total.dtype), alpha=alpha, out=total)


def _require_one(d_total: Tensor) -> None:
    """A bug of ours otherwise. On a GPU it is found out later, without waiting for it here."""
    if d_total.is_cuda:
        torch._assert_async(d_total == 1)
    else:
        assert d_total == 1, "the gradient of the total loss is 1"
