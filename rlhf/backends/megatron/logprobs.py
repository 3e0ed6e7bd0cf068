"""Log-probabilities of the response tokens, one number each, of whatever model the head rows come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float32

from rlhf.batching import MicroBatch
from rlhf.losses.heads import VocabHead
from rlhf.losses.policy import sampled_logprobs


@torch.no_grad()
def own_logprobs(
    micro_batches: Iterable[MicroBatch], rows: int, head_of: Callable[[MicroBatch], VocabHead], temperature: float
) -> Float32[np.ndarray, " R"]:
    """Of the response rows of this rank's micro-batches; NaN at those of other ranks.

    Args:
        rows: response tokens of the whole batch, R.
        head_of: the model's head over the response rows of a micro-batch.
    """
    found = np.full(rows, np.nan, dtype=np.float32)
    for micro in micro_batches:
        head = head_of(micro)
        targets = torch.from_numpy(micro.targets).to(head.hidden.device)
        found[micro.response_index] = sampled_logprobs(head, targets, temperature).cpu().numpy()
    return found


def over_data_parallel(own: Float32[np.ndarray, " R"]) -> Float32[np.ndarray, " R"]:
    """What all data-parallel ranks have, on each of them. A row is one rank's; the others add zero."""
    from megatron.core import parallel_state

    total = torch.from_numpy(np.nan_to_num(own, nan=0.0))
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group_gloo())
    return total.numpy()
