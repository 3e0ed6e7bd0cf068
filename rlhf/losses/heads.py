"""`VocabHead`: hidden rows with the LM head that would turn them into logits. Losses take heads, never logits.

Why: at 8,192 tokens and a vocabulary of 151,936 the fp32 logits alone are 5 GB a copy. With the head in hand a loss
decides itself how many rows it projects at a time, and a fused or vocabulary-parallel form can replace the dense one
behind the same interface.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf.errors import ModelError
from rlhf.losses.shard import Shard


def at_least_float32(values: Float[Tensor, "rows n"]) -> Float[Tensor, "rows n"]:
    """Loss arithmetic is fp32; float64 stays float64, so that gradients can be checked numerically."""
    return values if values.dtype == torch.float64 else values.float()


@dataclass(frozen=True, eq=False)
class VocabHead:
    """Hidden rows and their LM head: `logits = softcap(scale * (hidden @ weight.T + bias))`.

    Example: one micro-batch of 3 response rows, hidden size 4, a weight padded from 10 to 16 tokens:
    `VocabHead(hidden=[3, 4], weight=[16, 4], vocab_size=10).logits()` is `[3, 10]`.
    """

    hidden: Float[Tensor, "rows H"]
    weight: Float[Tensor, "V_local H"]
    """This rank's part of the head; the whole head without tensor parallelism. May be the (tied) embedding itself."""
    bias: Float[Tensor, " V_local"] | None = None
    scale: float = 1.0
    """Multiplies the logits, before the soft cap."""
    softcap: float | None = None
    """Logits become `softcap * tanh(logits / softcap)` (Gemma 2, arXiv 2408.00118, section 2)."""
    tp_group: Any | None = None
    """The ranks that share the vocabulary, each with as many rows of the weight; all of them have the same hidden rows.
    The hidden rows' gradient is summed over them."""
    vocab_size: int | None = None
    """The true vocabulary: rows of the weight from here on are padding and get no probability. None: no padding."""

    def __post_init__(self) -> None:
        """
        Raises:
            ModelError: the weight has fewer rows than the vocabulary.
        """
        rows = self.weight.shape[0] * _ranks(self.tp_group)
        if self.vocab_size is not None and self.vocab_size > rows:
            raise ModelError(
                f"the vocabulary has {self.vocab_size} tokens but the LM head only {rows} rows; "
                "check that tokenizer and checkpoint belong together"
            )

    def __len__(self) -> int:
        return self.hidden.shape[0]

    @property
    def vocabulary(self) -> int:
        """Outcomes of the distribution: the true vocabulary, over all ranks."""
        if self.vocab_size is not None:
            return self.vocab_size
        return self.weight.shape[0] * _ranks(self.tp_group)

    def select(self, rows: slice | Int[Tensor, " chosen"]) -> VocabHead:
        """The same head over some of the rows."""
        if isinstance(rows, slice) and rows == slice(None):
            return self  # autograd would copy the gradient of a slice
        return replace(self, hidden=self.hidden[rows])

    @property
    def shard(self) -> Shard:
        """Which tokens the columns of `logits` are."""
        if _ranks(self.tp_group) == 1:
            return Shard(self.vocabulary)
        assert self.tp_group is not None
        return Shard(self.vocabulary, self.tp_group.rank() * self.weight.shape[0], self.tp_group)

    def logits(self) -> Float[Tensor, "rows n"]:
        """The dense reference: fp32 logits (float64 of a float64 head) over this rank's tokens, see `shard`.

        The matmul runs in the weight's dtype; everything after it in fp32.
        """
        shard = self.shard
        held = self.weight.shape[0] if shard.group is not None else self.vocabulary
        weight = self.weight[:held]
        bias = None if self.bias is None else self.bias[:held].to(weight.dtype)
        hidden = shard.spread(self.hidden).to(weight.dtype)
        logits = at_least_float32(torch.nn.functional.linear(hidden, weight, bias))
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return shard.restrict(logits)


def shared_shard(student: VocabHead, teacher: VocabHead) -> Shard:
    """The tokens that both have: 151,936 and 152,064 rows of one tokenizer share 151,936.

    Split over ranks, both heads must be padded to the same number of rows, so that a column is one token in both.
    """
    a, b = student.shard, teacher.shard
    assert a.group is b.group, "both heads are split over the same ranks"
    assert a.group is None or student.weight.shape[0] == teacher.weight.shape[0], "both heads are padded alike"
    return replace(a, vocabulary=min(a.vocabulary, b.vocabulary))


def _ranks(tp_group: Any | None) -> int:
    return 1 if tp_group is None else tp_group.size()
