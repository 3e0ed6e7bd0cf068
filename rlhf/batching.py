"""The batch plan, packing, and the one alignment between hidden rows and response tokens.

Everything here works on lengths and token ids with numpy; no model is involved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64

from rlhf.errors import ConfigError
from rlhf.types import BatchPlan, Metrics, MicroBatchPlan, Sequences, offsets_of


def round_up(length: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that holds `length`."""
    return -(-length // multiple) * multiple


def response_rows(
    length: int, prompt_length: int, written: Bool[np.ndarray, " c"] | None = None
) -> Int64[np.ndarray, " r"]:
    """Positions whose hidden state predicts a response token: row t scores token t + 1.

    The only place that knows this shift; student, teacher and log-prob comparisons all go through it.

    Example: 7 tokens, 3 of them the prompt, then one of the model, two of an observation and one of the model:
    `response_rows(7, 3, [True, False, False, True])` is `[2, 5]`.

    Args:
        written: which of the tokens after the prompt the model wrote; None: all.
    """
    assert prompt_length >= 1, "the first response token is predicted by the prompt's last row"
    rows = np.arange(prompt_length - 1, length - 1, dtype=np.int64)
    return rows if written is None else rows[written]


# ---- planning -------------------------------------------------------------------------------------------------------


def spread(lengths: Sequence[int], rows: Sequence[int], bins: int) -> list[list[int]]:
    """Longest first, each into the bin with the fewest tokens, then the fewest rows: balanced, deterministic."""
    filled: list[list[int]] = [[] for _ in range(bins)]
    tokens = [0] * bins
    for row in sorted(rows, key=lambda r: (-lengths[r], r)):
        target = min(range(bins), key=lambda b: (tokens[b], len(filled[b]), b))
        filled[target].append(row)
        tokens[target] += lengths[row]
    return [sorted(rows) for rows in filled]


def _micro_tokens(lengths: Sequence[int], rows: Sequence[int], padding_free: bool) -> int:
    """Tokens of one forward pass, padding included."""
    row_lengths = [lengths[r] for r in rows]
    return sum(row_lengths) if padding_free else max(row_lengths, default=0) * len(row_lengths)


def plan_batch(
    lengths: Sequence[int] | np.ndarray,
    *,
    data_parallel: int,
    micro_batch_tokens: int,
    padding_free: bool = True,
    pad_multiple: int = 1,
    rows: Sequence[int] | None = None,
) -> BatchPlan:
    """Spread samples over data-parallel ranks and micro-batches so that every rank has about the same tokens.

    Args:
        lengths: tokens of each sample (prompt + response, and observations).
        data_parallel: ranks that share the batch.
        micro_batch_tokens: most tokens, padding included, in one forward pass.
        padding_free: pack a micro-batch into one sequence; otherwise rows are padded to the longest.
        pad_multiple: each sample's length is rounded up to this (tensor parallelism, twice context parallelism).
        rows: the samples to plan for; None: all of them.

    Raises:
        ConfigError: a sample is longer than `micro_batch_tokens`, or there are fewer samples than ranks.
    """
    padded = [round_up(int(length), pad_multiple) for length in lengths]
    rows = range(len(padded)) if rows is None else rows
    if len(rows) < data_parallel:
        raise ConfigError(
            f"a batch of {len(rows)} samples can't feed {data_parallel} data-parallel ranks; "
            "raise train.global_batch_samples (eval.samples, if it is the held-out batch) or lower train.gpus"
        )
    longest = max(padded[row] for row in rows)
    if longest > micro_batch_tokens:
        raise ConfigError(
            f"a sample of {longest} tokens doesn't fit train.micro_batch_tokens={micro_batch_tokens}; raise it, or "
            "lower data.max_length or rollout.max_new_tokens"
        )
    ranks = tuple(
        _cut(padded, share, micro_batch_tokens, padding_free) for share in spread(padded, rows, data_parallel)
    )
    return BatchPlan(ranks=ranks, padding_free=padding_free, pad_multiple=pad_multiple)


def _cut(
    padded: Sequence[int], rows: Sequence[int], micro_batch_tokens: int, padding_free: bool
) -> tuple[MicroBatchPlan, ...]:
    """One rank's rows in as few micro-batches as the budget allows; one row each always fits."""
    for count in range(1, len(rows) + 1):
        parts = spread(padded, rows, count)
        tokens = [_micro_tokens(padded, part, padding_free) for part in parts]
        if max(tokens) <= micro_batch_tokens:
            return tuple(MicroBatchPlan(tuple(part), size) for part, size in zip(parts, tokens, strict=True))
    raise AssertionError("a single row fits the budget")


def plan_on_ranks(plan: BatchPlan, lengths: Sequence[int] | np.ndarray, micro_batch_tokens: int) -> BatchPlan:
    """The same samples on the same ranks, in micro-batches of their own: for a teacher that reads other prompts.

    Args:
        lengths: tokens of each sample, as the teacher reads it.

    Raises:
        ConfigError: a sample is longer than `micro_batch_tokens`.
    """
    padded = [round_up(int(length), plan.pad_multiple) for length in lengths]
    longest = max(padded[row] for row in plan.samples)
    if longest > micro_batch_tokens:
        raise ConfigError(
            f"a sample of {longest} tokens, as the teacher reads it, doesn't fit train.micro_batch_tokens="
            f"{micro_batch_tokens}; raise it, or lower data.max_teacher_length"
        )
    ranks = tuple(
        _cut(padded, sorted(row for micro in rank for row in micro.rows), micro_batch_tokens, plan.padding_free)
        for rank in plan.ranks
    )
    return BatchPlan(ranks=ranks, padding_free=plan.padding_free, pad_multiple=plan.pad_multiple)


def describe_plans(plans: Sequence[BatchPlan], lengths: Int64[np.ndarray, " n"]) -> Metrics:
    """How well the samples fill the forward passes of one or several optimizer steps.

    Example: one plan whose two ranks hold 90 and 60 tokens, padding included, has a rank_imbalance of 90 / 75 = 1.2.

    Args:
        plans: one an optimizer step.
        lengths: tokens of each sample, as the plans were made for.

    Returns:
        batch/tokens: without padding. batch/padding_share: padding / all tokens of the forward passes.
        batch/micro_batches: forward passes of all ranks together. batch/rank_imbalance: tokens of the fullest rank /
        mean of the ranks, over the steps: how much longer the step takes than if they were even.
    """
    tokens = sum(int(lengths[row]) for plan in plans for row in plan.samples)
    by_rank = [[sum(micro.tokens for micro in rank) for rank in plan.ranks] for plan in plans]
    padded = sum(sum(ranks) for ranks in by_rank)
    even = sum(sum(ranks) / len(ranks) for ranks in by_rank)
    return {
        "batch/tokens": float(tokens),
        "batch/padding_share": 1 - tokens / padded,
        "batch/micro_batches": float(sum(len(rank) for plan in plans for rank in plan.ranks)),
        "batch/rank_imbalance": sum(max(ranks) for ranks in by_rank) / even,
    }


def steps_of(epochs: int, rows: int, batch_samples: int) -> int:
    """Steps that take every row at least `epochs` times. Batches cross the borders of epochs, and the last
    one is filled up with the first rows of one more epoch."""
    return -(-epochs * rows // batch_samples)


# ---- packing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass, as numpy arrays. `b x s` is `1 x T` when packed.

    Example: packed samples of 4 and 2 tokens have cu_seqlens `[0, 4, 6]` and position_ids `[[0, 1, 2, 3, 0, 1]]`.
    """

    tokens: Int64[np.ndarray, "b s"]
    position_ids: Int64[np.ndarray, "b s"]
    cu_seqlens: Int32[np.ndarray, " m+1"] | None
    """Where packed samples start (with padding); None when rows are padded instead."""
    rows: Int64[np.ndarray, " r"]
    """Flat indices (b*s + position) of the hidden rows that predict response tokens, sample by sample."""
    targets: Int64[np.ndarray, " r"]
    """The response token each of these rows predicts."""
    response_index: Int64[np.ndarray, " r"]
    """Where each row stands in packed per-response-token arrays of the whole batch (weights, log-probs)."""
    sample_ids: tuple[int, ...]
    row_counts: tuple[int, ...]
    """Response rows of each sample, in the order of `sample_ids`."""


def pack(sequences: Sequences, micro: MicroBatchPlan, *, padding_free: bool, pad_multiple: int = 1) -> MicroBatch:
    """Lay the samples of one micro-batch out for a forward pass. The one place that pads and picks response rows."""
    all_lengths, response_offsets, masks = sequences.lengths, sequences.response_offsets, sequences.masks()
    lengths = [int(all_lengths[row]) for row in micro.rows]
    padded = [round_up(length, pad_multiple) for length in lengths]
    if not padding_free:
        padded = [max(padded)] * len(padded)
    starts = offsets_of(padded)
    tokens = np.zeros(starts[-1], dtype=np.int64)  # padding is token 0: causal attention never lets it be seen
    position_ids = np.concatenate([np.arange(length, dtype=np.int64) for length in padded])
    rows, targets, response_index, row_counts = [], [], [], []
    for row, length, start in zip(micro.rows, lengths, starts[:-1], strict=True):
        sample = sequences.tokens[sequences.offsets[row] : sequences.offsets[row + 1]]
        tokens[start : start + length] = sample
        scoring = response_rows(length, int(sequences.prompt_lengths[row]), masks[row])
        rows.append(start + scoring)
        targets.append(sample[scoring + 1].astype(np.int64))
        response_index.append(np.arange(response_offsets[row], response_offsets[row + 1]))
        row_counts.append(len(scoring))
    shape = (1, -1) if padding_free else (len(padded), -1)
    return MicroBatch(
        tokens=tokens.reshape(shape),
        position_ids=position_ids.reshape(shape),
        cu_seqlens=starts.astype(np.int32) if padding_free else None,
        rows=np.concatenate(rows),
        targets=np.concatenate(targets),
        response_index=np.concatenate(response_index),
        sample_ids=tuple(int(sequences.sample_ids[row]) for row in micro.rows),
        row_counts=tuple(row_counts),
    )


def token_mean_weights(sequences: Sequences) -> Float32[np.ndarray, " R"]:
    """Every response token of the optimizer step counts the same: 1 / (number of response tokens)."""
    count = int(sequences.response_lengths.sum())
    return np.full(count, 1.0 / count, dtype=np.float32)
