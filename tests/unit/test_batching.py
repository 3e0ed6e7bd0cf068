"""The batch plan, packing, and the alignment: row t scores token t + 1."""

from __future__ import annotations

import numpy as np
import pytest

from rlhf.batching import (
    MicroBatch,
    describe_plans,
    pack,
    plan_batch,
    plan_on_ranks,
    response_rows,
    round_up,
    steps_of,
    token_mean_weights,
)
from rlhf.data.cursor import EpochCursor
from rlhf.errors import ConfigError
from rlhf.types import BatchPlan, MicroBatchPlan, Sequences, offsets_of

# ---- alignment and packing ------------------------------------------------------------------------------------------


def small() -> Sequences:
    """Prompts [5, 6], [7], [1, 2, 3] with responses [8, 9], [4], [10, 11]."""
    return Sequences(
        sample_ids=np.array([20, 21, 22]),
        tokens=np.array([5, 6, 8, 9, 7, 4, 1, 2, 3, 10, 11], dtype=np.int32),
        offsets=np.array([0, 4, 6, 11]),
        prompt_lengths=np.array([2, 1, 3], dtype=np.int32),
    )


def lists(micro: MicroBatch) -> dict[str, list | None]:
    return {
        name: None if value is None else np.asarray(value).tolist()
        for name, value in vars(micro).items()
        if name in ("tokens", "position_ids", "cu_seqlens", "rows", "targets")
    }


def test_row_t_scores_token_t_plus_1() -> None:
    assert response_rows(length=5, prompt_length=2).tolist() == [1, 2, 3]  # they score tokens 2, 3, 4
    assert response_rows(length=2, prompt_length=1).tolist() == [0]
    assert response_rows(length=4, prompt_length=4).tolist() == []


def test_packed() -> None:
    micro = pack(small(), MicroBatchPlan((2, 0), 9), padding_free=True)
    assert lists(micro) == {
        "tokens": [[1, 2, 3, 10, 11, 5, 6, 8, 9]],
        "position_ids": [[0, 1, 2, 3, 4, 0, 1, 2, 3]],
        "cu_seqlens": [0, 5, 9],
        "rows": [2, 3, 6, 7],
        "targets": [10, 11, 8, 9],
    }
    assert micro.response_index.tolist() == [3, 4, 0, 1]
    assert (micro.sample_ids, micro.row_counts) == ((22, 20), (2, 2))
    assert micro.cu_seqlens is not None and micro.cu_seqlens.dtype == np.int32


def test_packed_with_a_pad_multiple() -> None:
    micro = pack(small(), MicroBatchPlan((2, 0, 1), 16), padding_free=True, pad_multiple=4)
    assert lists(micro) == {
        "tokens": [[1, 2, 3, 10, 11, 0, 0, 0, 5, 6, 8, 9, 7, 4, 0, 0]],
        "position_ids": [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 0, 1, 2, 3]],
        "cu_seqlens": [0, 8, 12, 16],
        "rows": [2, 3, 9, 10, 12],
        "targets": [10, 11, 8, 9, 4],
    }
    assert micro.response_index.tolist() == [3, 4, 0, 1, 2]
    assert micro.row_counts == (2, 2, 1)


def test_padded() -> None:
    micro = pack(small(), MicroBatchPlan((1, 2), 10), padding_free=False)
    assert lists(micro) == {
        "tokens": [[7, 4, 0, 0, 0], [1, 2, 3, 10, 11]],
        "position_ids": [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]],
        "cu_seqlens": None,
        "rows": [0, 7, 8],
        "targets": [4, 10, 11],
    }
    assert micro.response_index.tolist() == [2, 3, 4]
    assert (micro.sample_ids, micro.row_counts) == ((21, 22), (1, 2))
    assert pack(small(), MicroBatchPlan((1, 2), 16), padding_free=False, pad_multiple=4).tokens.shape == (2, 8)


def test_a_sample_without_a_response_has_no_rows() -> None:
    sequences = Sequences(
        sample_ids=np.array([0, 1]),
        tokens=np.array([5, 6, 7, 8], dtype=np.int32),
        offsets=np.array([0, 2, 4]),
        prompt_lengths=np.array([2, 1], dtype=np.int32),
    )
    micro = pack(sequences, MicroBatchPlan((0, 1), 4), padding_free=True)
    assert (micro.rows.tolist(), micro.targets.tolist(), micro.row_counts) == ([2], [8], (0, 1))


# ---- the plan -------------------------------------------------------------------------------------------------------


def test_the_longest_go_first_each_to_the_emptiest_rank() -> None:
    plan = plan_batch([3, 9, 4, 5, 1], data_parallel=2, micro_batch_tokens=20)
    # 9 | 5 4, then 3: as many tokens on both, the first has fewer samples, then 1
    assert plan.ranks == ((MicroBatchPlan((0, 1), 12),), (MicroBatchPlan((2, 3, 4), 10),))
    assert (plan.padding_free, plan.pad_multiple) == (True, 1)


def test_a_plan_for_some_of_the_samples() -> None:
    """As if there were no others: the longest sample here doesn't fit, and isn't asked for."""
    plan = plan_batch([90, 3, 9, 4, 5, 1], data_parallel=2, micro_batch_tokens=20, rows=[1, 2, 3, 4, 5])
    whole = plan_batch([3, 9, 4, 5, 1], data_parallel=2, micro_batch_tokens=20)
    moved = [[tuple(row + 1 for row in micro.rows) for micro in rank] for rank in whole.ranks]
    assert [[micro.rows for micro in rank] for rank in plan.ranks] == moved
    teacher = plan_on_ranks(plan, [90, 6, 9, 4, 5, 1], micro_batch_tokens=20)
    assert sorted(teacher.samples) == [1, 2, 3, 4, 5]


def test_ranks_of_as_many_tokens_take_the_next_sample_in_turn() -> None:
    plan = plan_batch([4, 3, 3, 1, 1, 1], data_parallel=2, micro_batch_tokens=20)
    # 4 | 3 3, then 1 1: six tokens on both, but the first has more samples
    assert [rank[0].rows for rank in plan.ranks] == [(0, 3, 4), (1, 2, 5)]


def test_each_rank_cuts_its_share_as_its_own_samples_need() -> None:
    plan = plan_batch([3, 9, 4, 5, 1], data_parallel=2, micro_batch_tokens=10)
    assert plan.ranks == ((MicroBatchPlan((1,), 9), MicroBatchPlan((0,), 3)), (MicroBatchPlan((2, 3, 4), 10),))


def test_padding_counts_against_the_budget() -> None:
    lengths = [8, 1, 1, 1]
    assert len(plan_batch(lengths, data_parallel=1, micro_batch_tokens=11).ranks[0]) == 1
    padded = plan_batch(lengths, data_parallel=1, micro_batch_tokens=11, padding_free=False)
    assert [(micro.rows, micro.tokens) for micro in padded.ranks[0]] == [((0,), 8), ((1, 2, 3), 3)]
    rounded = plan_batch(lengths, data_parallel=1, micro_batch_tokens=11, pad_multiple=4)
    assert [(micro.rows, micro.tokens) for micro in rounded.ranks[0]] == [((0,), 8), ((1, 3), 8), ((2,), 4)]


def test_every_plan_is_whole_within_budget_balanced_and_repeatable() -> None:
    rng = np.random.default_rng(0)
    several = 0
    for _ in range(400):
        data_parallel, multiple = int(rng.choice([1, 1, 2, 3, 4])), int(rng.choice([1, 1, 2, 8]))
        n = data_parallel * int(rng.integers(4, 12))
        lengths = rng.integers(2, int(rng.choice([6, 60, 600])), n)
        padded = -(-lengths // multiple) * multiple
        budget = int(padded.max() * rng.uniform(1, 5))
        arguments = dict(
            data_parallel=data_parallel,
            micro_batch_tokens=budget,
            padding_free=bool(rng.random() < 0.5),
            pad_multiple=multiple,
        )
        plan = plan_batch(lengths, **arguments)
        several += len(plan.ranks[0]) > 1

        assert sorted(plan.samples) == list(range(n)), "every sample exactly once"
        assert len(plan.ranks) == data_parallel
        for micro in (micro for rank in plan.ranks for micro in rank):
            assert micro.rows, "no forward pass without samples"
            laid_out = pack(
                sequences_of(lengths), micro, padding_free=plan.padding_free, pad_multiple=plan.pad_multiple
            )
            assert laid_out.tokens.size == micro.tokens <= budget
        tokens = [[int(padded[row]) for micro in rank for row in micro.rows] for rank in plan.ranks]
        emptiest = min(map(sum, tokens))
        for rank_tokens in tokens:  # without its smallest sample no rank has more than the emptiest
            assert sum(rank_tokens) - min(rank_tokens) <= emptiest
        assert plan_batch(lengths.tolist(), **arguments) == plan
    assert several > 100, "the sweep must reach plans of several micro-batches"


def sequences_of(lengths: np.ndarray) -> Sequences:
    return Sequences(
        sample_ids=np.arange(len(lengths)),
        tokens=np.ones(lengths.sum(), dtype=np.int32),
        offsets=offsets_of(lengths),
        prompt_lengths=np.ones(len(lengths), dtype=np.int32),
    )


def test_all_rows_of_a_plan_cover_all_response_tokens_once() -> None:
    rng = np.random.default_rng(1)
    prompts, responses = rng.integers(1, 20, 30), rng.integers(1, 40, 30)
    sequences = Sequences(
        sample_ids=np.arange(30),
        tokens=rng.integers(0, 1000, (prompts + responses).sum()).astype(np.int32),
        offsets=offsets_of(prompts + responses),
        prompt_lengths=prompts.astype(np.int32),
    )
    every_response = np.concatenate([row[length:] for row, length in zip(sequences.rows(), prompts, strict=True)])
    for padding_free in (True, False):
        plan = plan_batch(sequences.lengths, data_parallel=2, micro_batch_tokens=200, padding_free=padding_free)
        micros = [pack(sequences, micro, padding_free=padding_free) for rank in plan.ranks for micro in rank]
        index = np.concatenate([micro.response_index for micro in micros])
        assert sorted(index) == list(range(responses.sum()))
        for micro in micros:
            assert micro.targets.tolist() == every_response[micro.response_index].tolist()
            # the target of a row is the next token in the layout
            assert micro.tokens.reshape(-1)[micro.rows + 1].tolist() == micro.targets.tolist()


def test_what_cannot_be_planned_names_the_keys() -> None:
    with pytest.raises(ConfigError, match=r"a sample of 30 tokens doesn't fit train\.micro_batch_tokens=29; raise it"):
        plan_batch([3, 30], data_parallel=1, micro_batch_tokens=29)
    with pytest.raises(ConfigError, match=r"a sample of 16 tokens doesn't fit train\.micro_batch_tokens=12"):
        plan_batch([3, 10], data_parallel=1, micro_batch_tokens=12, pad_multiple=8)
    with pytest.raises(ConfigError, match=r"2 samples can't feed 4 .* raise train\.global_batch_samples"):
        plan_batch([3, 4], data_parallel=4, micro_batch_tokens=29)


def test_round_up() -> None:
    assert [round_up(length, 8) for length in (0, 1, 8, 9)] == [0, 8, 8, 16]


def test_every_response_token_weighs_the_same_and_together_one() -> None:
    assert token_mean_weights(small()).tolist() == pytest.approx([0.2] * 5)
    long = sequences_of(np.full(7, 3001))
    weights = token_mean_weights(long)
    assert (weights.shape, weights.dtype) == ((21000,), np.float32)
    assert weights.sum(dtype=np.float64) == pytest.approx(1.0, abs=1e-6)


def test_plans_are_described_over_their_steps() -> None:
    """Two ranks of one step: 50 + 40 tokens, and 30 padded to 32 + 28: counted by hand."""
    micro = MicroBatchPlan
    first = BatchPlan(((micro((0,), 50), micro((1,), 40)), (micro((2, 3), 60),)), True, 1)
    lengths = np.array([50, 40, 30, 26, 10])
    assert describe_plans([first], lengths) == {
        "batch/tokens": 146.0,
        "batch/padding_share": pytest.approx(4 / 150),
        "batch/micro_batches": 3.0,
        "batch/rank_imbalance": pytest.approx(90 / 75),
    }
    second = BatchPlan(((micro((4,), 10),), (micro((4,), 10),)), True, 1)
    both = describe_plans([first, second], lengths)
    assert both["batch/rank_imbalance"] == pytest.approx((90 + 10) / (75 + 10))
    assert both["batch/tokens"] == 166 and both["batch/micro_batches"] == 5


@pytest.mark.parametrize("padding_free", [True, False])
def test_described_padding_is_what_pack_pads(padding_free: bool) -> None:
    lengths = [9, 5, 3, 7, 2]
    ids, two = np.arange(5), np.zeros(1, dtype=np.int32)
    sequences = Sequences.join(ids, [two] * 5, [np.zeros(length - 1, dtype=np.int32) for length in lengths])
    plan = plan_batch(lengths, data_parallel=2, micro_batch_tokens=20, padding_free=padding_free, pad_multiple=4)
    packed = [
        pack(sequences, micro, padding_free=padding_free, pad_multiple=4) for rank in plan.ranks for micro in rank
    ]
    size = sum(batch.tokens.size for batch in packed)
    described = describe_plans([plan], np.array(lengths))
    assert described["batch/padding_share"] == pytest.approx(1 - sum(lengths) / size) and size > sum(lengths)
    assert described["batch/micro_batches"] == len(packed)


@pytest.mark.parametrize(
    ("epochs", "rows", "batch", "steps"), [(2, 10, 4, 5), (1, 10, 4, 3), (1, 3, 8, 1), (3, 8, 8, 3)]
)
def test_epochs_are_as_many_steps_as_take_every_row(epochs: int, rows: int, batch: int, steps: int) -> None:
    assert steps_of(epochs, rows, batch) == steps
    cursor = EpochCursor(rows, seed=0, shuffle=True)
    taken = np.concatenate([cursor.take(batch) for _ in range(steps)])
    assert np.bincount(taken, minlength=rows).min() >= epochs
    assert np.bincount(taken[:-batch], minlength=rows).min() < epochs


@pytest.mark.parametrize(("padding_free", "multiple"), [(True, 1), (False, 1), (True, 4)])
def test_rows_of_observations_are_left_out(padding_free: bool, multiple: int) -> None:
    """Every token is its own position in the batch, so a row's target says which token it predicts."""
    rng, masks = np.random.default_rng(0), []
    prompts, after = rng.integers(1, 5, 7), rng.integers(1, 12, 7)
    for length in after:
        masks.append(rng.random(length) < 0.6)
    tokens = iter(np.split(np.arange(1, 1 + (prompts + after).sum()).astype(np.int32), np.cumsum(prompts + after)[:-1]))
    cuts = [np.split(one, [prompt]) for one, prompt in zip(tokens, prompts, strict=True)]
    sequences = Sequences.join(np.arange(7), [cut[0] for cut in cuts], [cut[1] for cut in cuts], written=masks)
    own = [cut[1][mask] for cut, mask in zip(cuts, masks, strict=True)]
    values = np.concatenate(own)  # what a packed array of R rows would hold
    plan = plan_batch(
        sequences.lengths, data_parallel=2, micro_batch_tokens=40, padding_free=padding_free, pad_multiple=multiple
    )
    for micro_plan in (micro for rank in plan.ranks for micro in rank):
        micro = pack(sequences, micro_plan, padding_free=padding_free, pad_multiple=multiple)
        flat = micro.tokens.reshape(-1)
        assert micro.targets.tolist() == [token for row in micro_plan.rows for token in own[row]]
        assert flat[micro.rows + 1].tolist() == micro.targets.tolist(), "each row is the one before its target"
        assert values[micro.response_index].tolist() == micro.targets.tolist()
        assert micro.row_counts == tuple(len(own[row]) for row in micro_plan.rows)
    assert len(token_mean_weights(sequences)) == len(values)
