"""Packed rows: offsets, and where each sample's response rows are."""

from __future__ import annotations

import dataclasses
import typing

import numpy as np
import pytest

from rlhf import batching, types
from rlhf.types import BatchPlan, MicroBatchPlan, Prompts, Rollouts, Sequences, offsets_of


def sequences() -> Sequences:
    """The docstring's example, and a sample without a response at the end."""
    return Sequences(
        sample_ids=np.array([20, 21, 22]),
        tokens=np.array([5, 6, 8, 9, 7, 4, 3, 3], dtype=np.int32),
        offsets=np.array([0, 4, 6, 8]),
        prompt_lengths=np.array([2, 1, 2], dtype=np.int32),
    )


def test_offsets() -> None:
    assert offsets_of([2, 0, 3]).tolist() == [0, 2, 2, 5]
    assert offsets_of([]).tolist() == [0] and offsets_of([]).dtype == np.int64
    assert offsets_of(np.array([2**31 - 1, 1], dtype=np.int32)).tolist() == [0, 2**31 - 1, 2**31]


def test_sequences() -> None:
    packed = sequences()
    assert len(packed) == 3
    assert [row.tolist() for row in packed.rows()] == [[5, 6, 8, 9], [7, 4], [3, 3]]
    assert packed.lengths.tolist() == [4, 2, 2]
    assert packed.response_lengths.tolist() == [2, 1, 0]
    assert packed.response_offsets.tolist() == [0, 2, 3, 3]


def test_rows_are_views_without_a_copy() -> None:
    packed = sequences()
    assert all(np.shares_memory(row, packed.tokens) for row in packed.rows())


def test_prompts() -> None:
    prompts = Prompts(np.array([0, 1]), np.array([5, 6, 7], dtype=np.int32), np.array([0, 2, 3]), np.array([1, 2]))
    assert len(prompts) == 2
    assert [row.tolist() for row in prompts.rows()] == [[5, 6], [7]]


def test_samples_of_a_plan_are_those_of_all_ranks_and_micro_batches() -> None:
    ranks = ((MicroBatchPlan((3, 0), 9), MicroBatchPlan((4,), 5)), (MicroBatchPlan((1,), 2), MicroBatchPlan((2,), 2)))
    assert BatchPlan(ranks, padding_free=True, pad_multiple=1).samples == (3, 0, 4, 1, 2)


@pytest.mark.parametrize(
    "cls",
    [cls for module in (types, batching) for cls in vars(module).values() if dataclasses.is_dataclass(cls)],
    ids=lambda cls: cls.__name__,
)
def test_annotations_are_real_and_instances_frozen(cls: type) -> None:
    assert set(typing.get_type_hints(cls)) == {field.name for field in dataclasses.fields(cls)}
    assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]


def test_sequences_are_joined_from_prompts_and_responses() -> None:
    """The example of the class."""
    prompts = [np.array(row, dtype=np.int32) for row in ([5, 6], [7])]
    responses = [np.array(row, dtype=np.int32) for row in ([8, 9], [4])]
    logprobs = [np.array(row, dtype=np.float32) for row in ([-1, -2], [-3])]
    ids = np.array([3, 4])
    sequences = Sequences.join(ids, iter(prompts), responses, logprobs)
    assert sequences.tokens.tolist() == [5, 6, 8, 9, 7, 4] and sequences.tokens.dtype == np.int32
    assert sequences.offsets.tolist() == [0, 4, 6] and sequences.prompt_lengths.tolist() == [2, 1]
    assert sequences.logprobs is not None and sequences.logprobs.tolist() == [-1, -2, -3]
    assert sequences.sample_ids is ids and Sequences.join(ids, prompts, responses).logprobs is None


def test_samples_are_selected_with_what_belongs_to_them() -> None:
    whole = dataclasses.replace(sequences(), logprobs=np.array([-1, -2, -3], dtype=np.float32))
    chosen = Rollouts(7, whole, np.array([True, False, True])).select([1, 0])
    assert chosen.version == 7 and chosen.finished.tolist() == [False, True]
    assert chosen.sequences.sample_ids.tolist() == [21, 20]
    assert [row.tolist() for row in chosen.sequences.rows()] == [[7, 4], [5, 6, 8, 9]]
    assert chosen.sequences.prompt_lengths.tolist() == [1, 2]
    assert chosen.sequences.logprobs is not None and chosen.sequences.logprobs.tolist() == [-3, -1, -2]
    assert sequences().select([2]).logprobs is None


def test_a_conversation_knows_its_turns() -> None:
    """Prompt 1; model 2 3, observation 4, model 5. Prompt 6 7; model 8."""
    sequences = Sequences.join(
        np.array([10, 11]),
        [np.array([1], dtype=np.int32), np.array([6, 7], dtype=np.int32)],
        [np.array([2, 3, 4, 5], dtype=np.int32), np.array([8], dtype=np.int32)],
        [np.array([-2, -3, -5], dtype=np.float32), np.array([-8], dtype=np.float32)],
        [np.array([True, True, False, True]), np.array([True])],
    )
    assert sequences.continuation_lengths.tolist() == [4, 1] and sequences.response_lengths.tolist() == [3, 1]
    assert sequences.response_offsets.tolist() == [0, 3, 4]
    assert [[turn.tolist() for turn in turns] for turns in sequences.turns()] == [[[2, 3], [4], [5]], [[8]]]
    turned = sequences.select([1, 0, 1])
    assert turned.written is not None and turned.written.tolist() == [True, True, True, False, True, True]
    assert turned.logprobs is not None and turned.logprobs.tolist() == [-8, -2, -3, -5, -8]
    assert turned.response_lengths.tolist() == [1, 3, 1]
    plain = Sequences.join(np.arange(1), [sequences.tokens[:1]], [sequences.tokens[1:5]])
    assert plain.written is None and plain.masks() == [None] and len(next(plain.turns())) == 1
