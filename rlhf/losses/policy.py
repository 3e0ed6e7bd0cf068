"""Policy-gradient losses on log-probabilities of the sampled tokens, one value a row. Pure.

    head + targets ──fused.losses.token_loss──► log p(target), its gradient, entropy
    log p - log p_old ──log_ratios──► ratios ──clipped_surrogate(advantages)──► losses
    log p, log p_teacher ──kl_estimate──► penalties

Log-ratios are held in [-20, 20] before they are exponentiated: all stays finite, and beyond there is no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf.config.algo import KLEstimator
from rlhf.losses.divergence import CHUNK_ROWS, IMPOSSIBLE, in_chunks, log_probs
from rlhf.losses.heads import VocabHead

LARGEST_LOG_RATIO = 20.0
"""exp(20) = 4.9e8."""


@torch.no_grad()
def sampled_logprobs(
    head: VocabHead, targets: Int[Tensor, " rows"], temperature: float, chunk_rows: int = CHUNK_ROWS
) -> Float[Tensor, " rows"]:
    """log softmax(logits / temperature) at each row's target (distill=sampled). fp32, no gradient.

    A token that the head doesn't have (checkpoints of one tokenizer are padded differently) gets `IMPOSSIBLE`.
    """
    known = targets < head.vocabulary
    ids = targets.masked_fill(~known, 0)

    def chunk(rows: slice) -> Tensor:
        logprobs = log_probs(head.select(rows).logits(), temperature, head.shard)
        return head.shard.at(logprobs, ids[rows].long()[:, None])[:, 0]

    found = torch.cat(in_chunks(chunk, len(head), chunk_rows))
    return found.masked_fill(~known, IMPOSSIBLE).float()


def log_ratios(logprobs: Float[Tensor, " rows"], old: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
    """log of each row's importance ratio."""
    return (logprobs - old).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def mean_log_ratios(
    logprobs: Float[Tensor, " rows"], old: Float[Tensor, " rows"], row_counts: Sequence[int]
) -> Float[Tensor, " rows"]:
    """log of the importance ratio of each row's response to the power of 1/length (GSPO, arXiv 2507.18071, equation 7).

    The loss hands the gradient to each row's own log-probability (GSPO-token, equation 14), which allows advantages
    that differ between rows and is GSPO's gradient where they and the weights don't.

    Args:
        row_counts: rows of each response, in order.
    """
    counts = torch.tensor(row_counts, dtype=torch.long, device=logprobs.device)
    response = torch.repeat_interleave(torch.arange(len(counts), device=logprobs.device), counts)
    sums = torch.zeros(len(counts), dtype=logprobs.dtype, device=logprobs.device)
    means = sums.index_add(0, response, logprobs - old) / counts.clamp(min=1)
    return means.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)[response]


def clipped_surrogate(
    ratios: Float[Tensor, " rows"],
    advantages: Float[Tensor, " rows"],
    low: float,
    high: float,
    dual: float | None = None,
) -> Float[Tensor, " rows"]:
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A) (PPO, arXiv 1707.06347, equation 7; clip-higher: DAPO).

    Args:
        dual: where A < 0 the ratio counts as at most this (dual clip, arXiv 1912.09729, equation 5); None: any.
    """
    losses = torch.maximum(-ratios * advantages, -ratios.clamp(1 - low, 1 + high) * advantages)
    if dual is None:
        return losses
    return torch.where(advantages < 0, torch.minimum(losses, -dual * advantages), losses)


def kl_estimate(
    logprobs: Float[Tensor, " rows"], teacher: Float[Tensor, " rows"], estimator: KLEstimator
) -> Float[Tensor, " rows"]:
    """KL(student || teacher) from one sample a row (J. Schulman, "Approximating KL divergence", 2020)."""
    d = (teacher - logprobs).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    if estimator is KLEstimator.k1:
        return -d
    if estimator is KLEstimator.k2:
        return d.square() / 2
    return torch.expm1(d) - d
