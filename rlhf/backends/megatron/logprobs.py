"""Log-probabilities of the response tokens, one number each, of whatever model the head rows come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float32

from rlhf.batching import MicroBatch
from rlhf.errors import TrainingDiverged
from rlhf.losses.heads import VocabHead
from rlhf.losses.policy import sampled_logprobs


@torch.no_grad()
def own_logprobs(
    micro_batches: Iterable[MicroBatch], rows: int, head_of: Callable[[MicroBatch], VocabHead], temperature: float
) -> Float32[np.ndarray, " R"]:
    """Of the response rows of this rank's micro-batches; 0 at those of other ranks. NaN is what a broken model gives.

    Args:
        rows: response tokens of the whole batch, R.
        head_of: the model's head over the response rows of a micro-batch.
    """
    found = np.zeros(rows, dtype=np.float32)
    for micro in micro_batches:
        head = head_of(micro)
        targets = torch.from_numpy(micro.targets).to(head.hidden.device)
        found[micro.response_index] = sampled_logprobs(head, targets, temperature).cpu().numpy()
    return found


def over_data_parallel(own: Float32[np.ndarray, " R"]) -> Float32[np.ndarray, " R"]:
    """What all data-parallel ranks have, on each of them. A row is one rank's; the others add zero.

    Raises:
        TrainingDiverged: one of them is not a number, on every rank.
    """
    from megatron.core import parallel_state

    total = torch.from_numpy(own.copy())
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group_gloo())
    if broken := int(total.isnan().sum()):
        raise TrainingDiverged(
            f"the teacher's log-probability of {broken} of {len(total)} response tokens is not a number; check "
            "teacher.model, and with teacher=self the student that it follows: lower train.lr"
        )
    return total.numpy()
