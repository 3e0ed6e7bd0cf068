"""A teacher's top k without keeping its logits: a block of rows at a time."""

from __future__ import annotations

import torch

from rlhf.losses.fused.kernels_torch import EXCLUDED, GROUP, Transform
from rlhf.losses.fused.projection import ONE_MODEL, Budget, RowBlocks, converted, kernels_for, project
from rlhf.losses.heads import VocabHead
from rlhf.losses.rows import TopKScores


@torch.no_grad()
def topk_scores(head: VocabHead, k: int, temperature: float, logits_bytes: int = ONE_MODEL.block) -> TopKScores:
    """The top k of each row, most likely first, with the normaliser at `temperature` unless that is 1.

    Args:
        head: in `projection.compute_dtype`, or it is converted for this call.
        k: at most the vocabulary.
        logits_bytes: most logits made at a time.
    """
    head = converted(head)
    shard, transform, kernels, device = (
        head.shard,
        Transform.of(head),
        kernels_for(head.hidden.device),
        head.hidden.device,
    )
    held = head.weight.shape[0]
    columns = shard.columns(held)
    plan = RowBlocks.of(len(head), held, head.weight.dtype, device, Budget(logits_bytes, logits_bytes))
    buffer = head.weight.new_full((plan.block, -(-held // GROUP) * GROUP), EXCLUDED)
    exact = torch.promote_types(head.weight.dtype, torch.float32)
    ids = torch.empty(len(head), k, dtype=torch.int32, device=device)
    logprobs = torch.empty(len(head), k, dtype=torch.float32, device=device)
    normaliser = torch.empty(len(head), dtype=torch.float32, device=device) if temperature != 1 else None
    for rows in plan.blocks():
        raw = buffer[: rows.stop - rows.start, :held]
        project(raw, head.hidden[rows], head.weight)
        raw[:, columns:] = EXCLUDED  # padding of the head
        log_z = kernels.statistics(raw, transform, columns)[0].joined(shard.group).log_z
        own, tokens = kernels.top(raw, transform, columns, min(k, columns))
        if (lacking := min(k, held) - own.shape[1]) > 0:  # this rank has fewer tokens than the others
            own, tokens = (
                torch.nn.functional.pad(own, (0, lacking), value=-torch.inf),
                torch.nn.functional.pad(tokens, (0, lacking)),
            )
        logits, tokens = shard.largest(own, tokens, k)
        ids[rows], logprobs[rows] = tokens.int(), (logits.to(exact) - log_z[:, None]).float()
        if normaliser is not None:
            at_temperature = kernels.statistics(raw, transform, columns, temperature)[0].joined(shard.group)
            normaliser[rows] = (at_temperature.log_z - log_z / temperature).float()
    return TopKScores(ids, logprobs, normaliser)
