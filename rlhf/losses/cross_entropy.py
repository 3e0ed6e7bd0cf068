"""Cross entropy of given tokens under a student's head: the loss of supervised fine-tuning, a row at a time."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf.losses.divergence import CHUNK_ROWS, in_chunks, log_probs
from rlhf.losses.heads import VocabHead


def cross_entropy(
    student: VocabHead, targets: Int[Tensor, " rows"], chunk_rows: int = CHUNK_ROWS
) -> Float[Tensor, " rows"]:
    """-log p(target) a row, at temperature 1, with a gradient for the student's head; neither weighted nor averaged."""

    def chunk(rows: slice) -> Tensor:
        logprobs = log_probs(student.select(rows).logits(), shard=student.shard)
        return -student.shard.at(logprobs, targets[rows].long()[:, None])[:, 0]

    return torch.cat(in_chunks(chunk, len(student), chunk_rows))
