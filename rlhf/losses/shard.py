"""A vocabulary split over tensor-parallel ranks: which tokens are here, and statistics of a row over all of them.

Each rank holds the logits of its own tokens, `[rows, V_local]`, and all of them compute the same loss. They exchange a
few numbers a row (a maximum, a sum of exponentials, the values of k tokens), never logits. So there are two kinds of
tensors, and gradients are right as long as one becomes the other only here:

    own columns (differ between ranks) ──sum, logsumexp, at──► row values (the same on every rank)
                                       ◄───────spread────────

Forward, the upper way adds over the ranks; backward it is the identity, since every rank has the whole gradient of a
value that all share. The lower way is the identity; backward it adds what the ranks' columns ask of the value.

On one rank all of it is the plain operation, and columns beyond the vocabulary are sliced off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

PADDING = -1e30
"""Logit of a row of the head that stands for no token. Finite, and impossible at any temperature."""


class _AddOverRanks(torch.autograd.Function):
    """Forward: the sum over the ranks. Backward: identity."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _SpreadToRanks(torch.autograd.Function):
    """Forward: identity. Backward: the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


@dataclass(frozen=True)
class Shard:
    """The tokens that the columns of this rank's logits stand for: `start`, `start + 1`, ...

    Example: a vocabulary of 5 on two ranks, padded to 6: the second has `Shard(5, start=3, group)` and three columns,
    for tokens 3 and 4 and for padding.
    """

    vocabulary: int
    """Tokens over all ranks, without padding."""
    start: int = 0
    group: Any | None = None
    """The ranks that share the vocabulary; None: this one has all of it."""

    def add(self, values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Own values -> their sum over the ranks."""
        return values if self.group is None else _AddOverRanks.apply(values, self.group)

    def spread(self, values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Values that all ranks share, for use with own columns."""
        return values if self.group is None else _SpreadToRanks.apply(values, self.group)

    def restrict(self, logits: Float[Tensor, "rows n"]) -> Float[Tensor, "rows m"]:
        """Logits without padding: sliced off on one rank; impossible on several, so that all have as many columns."""
        if self.group is None:
            return logits[:, : self.vocabulary]
        padding = logits.shape[1] - (self.vocabulary - self.start)
        if padding <= 0:
            return logits
        column = torch.arange(logits.shape[1], device=logits.device)
        return logits.masked_fill(column >= self.vocabulary - self.start, PADDING)

    def columns(self, held: int) -> int:
        """Of `held` columns, those that stand for tokens; the rest is padding."""
        return max(0, min(held, self.vocabulary - self.start))

    def max(self, values: Float[Tensor, "rows n"]) -> Float[Tensor, "rows 1"]:
        """The largest of each row; no gradient."""
        largest = values.detach().amax(-1, keepdim=True)
        if self.group is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        return largest

    def logsumexp(self, values: Float[Tensor, "rows n"]) -> Float[Tensor, " rows"]:
        """Over the whole vocabulary."""
        if self.group is None:
            return values.logsumexp(-1)
        largest = self.max(values)
        return self.add((values - largest).exp().sum(-1)).log() + largest[:, 0]

    def at(self, values: Float[Tensor, "rows n"], ids: Int[Tensor, "rows k"]) -> Float[Tensor, "rows k"]:
        """The values of tokens, from whichever rank has them."""
        if self.group is None:
            return values.gather(1, ids)
        column, here = self._columns(ids, values.shape[1])
        return self.add(values.gather(1, column).masked_fill(~here, 0.0))

    def contains(
        self, ids: Int[Tensor, "rows k"], counted: Bool[Tensor, "rows k"], columns: int
    ) -> Bool[Tensor, "rows n"]:
        """Which own columns are among the `counted` tokens. Added up, as an uncounted id may repeat a counted one."""
        column, here = self._columns(ids, columns)
        counts = torch.zeros(ids.shape[0], columns, dtype=torch.uint8, device=ids.device)
        return counts.scatter_add_(1, column, (counted & here).to(torch.uint8)).bool()

    @torch.no_grad()
    def largest(
        self, own: Float[Tensor, "rows m"], columns: Int[Tensor, "rows m"], k: int
    ) -> tuple[Float[Tensor, "rows k"], Int[Tensor, "rows k"]]:
        """The k largest values of each row over the whole vocabulary, largest first, and their tokens.

        Args:
            own: the largest of the own columns, as many on every rank: k, or as many as a rank has at most.
        """
        ids = columns + self.start
        if self.group is None:
            return own, ids
        values, ids = self._gathered(own), self._gathered(ids)
        values, order = values.topk(k, dim=-1)
        return values, ids.gather(1, order)

    def _gathered(self, values: Tensor) -> Tensor:
        """Every rank's columns, side by side."""
        assert self.group is not None
        parts = [torch.empty_like(values) for _ in range(self.group.size())]
        dist.all_gather(parts, values.contiguous(), group=self.group)
        return torch.cat(parts, dim=1)

    def _columns(self, ids: Tensor, columns: int) -> tuple[Tensor, Tensor]:
        """Own columns of tokens (any column for one that is elsewhere), and which are here."""
        column = ids - self.start
        here = (column >= 0) & (column < columns)
        return column.masked_fill(~here, 0), here
