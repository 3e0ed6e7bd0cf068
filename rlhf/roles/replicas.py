"""One batch of prompts over several replicas of an engine, and their rollouts back in the order of the prompts.

Requests have seeds of their own, so the rollouts don't depend on how many replicas there are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlhf.types import Prompts, Rollouts, Sequences, offsets_of


def split(prompts: Prompts, replicas: int) -> list[Prompts]:
    """Consecutive shares that differ by at most one prompt; fewer than `replicas` if there are fewer prompts.

    Example: 5 prompts over 2 replicas: the first three and the last two.
    """
    shares = np.array_split(np.arange(len(prompts)), min(replicas, len(prompts)))
    return [_slice(prompts, int(share[0]), int(share[-1]) + 1) for share in shares]


def _slice(prompts: Prompts, start: int, stop: int) -> Prompts:
    offsets = prompts.offsets[start : stop + 1]
    return Prompts(
        sample_ids=prompts.sample_ids[start:stop],
        tokens=prompts.tokens[offsets[0] : offsets[-1]],
        offsets=offsets - offsets[0],
        seeds=prompts.seeds[start:stop],
    )


def merge(parts: Sequence[Rollouts]) -> Rollouts:
    """The rollouts of `split`'s shares, in its order, as one."""
    versions = {part.version for part in parts}
    assert len(versions) == 1, "an engine refuses to generate with another version than asked for"
    sequences = [part.sequences for part in parts]
    logprobs = [one.logprobs for one in sequences if one.logprobs is not None]
    return Rollouts(
        version=versions.pop(),
        sequences=Sequences(
            sample_ids=np.concatenate([one.sample_ids for one in sequences]),
            tokens=np.concatenate([one.tokens for one in sequences]),
            offsets=offsets_of(np.concatenate([one.lengths for one in sequences])),
            prompt_lengths=np.concatenate([one.prompt_lengths for one in sequences]),
            logprobs=np.concatenate(logprobs) if logprobs else None,
        ),
        finished=np.concatenate([part.finished for part in parts]),
    )


def in_order_of(prompts: Prompts, parts: Sequence[Rollouts]) -> Rollouts:
    """Parts that came as they were finished -> the rollouts of the prompts, in their order."""
    together = merge(parts)
    row_of = {int(sample_id): row for row, sample_id in enumerate(together.sequences.sample_ids)}
    return together.select(row_of[int(sample_id)] for sample_id in prompts.sample_ids)
