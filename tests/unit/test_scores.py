"""Teacher scores on their way: what arrives is what was sent, and scores of other tokens are refused."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlhf.backends.scores import PackedScores
from rlhf.distill.fullvocab import HiddenScores
from rlhf.errors import MisalignedScores
from rlhf.losses.rows import TopKScores
from rlhf.types import Sequences

SEQUENCES = Sequences.join(
    np.array([7, 8, 9], dtype=np.int64),
    [np.array([1, 2], dtype=np.int32), np.array([3], dtype=np.int32), np.array([4, 5], dtype=np.int32)],
    [np.array([10, 11, 12], dtype=np.int32), np.array([13], dtype=np.int32), np.array([14, 15], dtype=np.int32)],
)
TARGETS = np.array([14, 15, 10, 11, 12], dtype=np.int32)
"""Of samples 9 and 7, in this order."""


def packed(scores: object, targets: np.ndarray = TARGETS) -> PackedScores:
    return pickle.loads(pickle.dumps(PackedScores.pack(scores, [9, 7], [2, 3], targets)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_rows_arrive_by_sample(dtype: torch.dtype) -> None:
    hidden = torch.randn(5, 4).to(dtype)
    arrived = dict(packed(HiddenScores(hidden)).by_sample(SEQUENCES, "cpu"))
    assert list(arrived) == [9, 7]
    assert torch.equal(arrived[9].hidden, hidden[:2]) and torch.equal(arrived[7].hidden, hidden[2:])
    assert arrived[7].hidden.dtype is dtype


@pytest.mark.parametrize("normaliser", [True, False])
def test_the_top_k_arrive_by_sample(normaliser: bool) -> None:
    scores = TopKScores(
        torch.arange(10, dtype=torch.int32).view(5, 2), torch.randn(5, 2), torch.randn(5) if normaliser else None
    )
    arrived = dict(packed(scores).by_sample(SEQUENCES, "cpu"))
    joined = TopKScores.concat([arrived[9], arrived[7]])
    for name, expected in vars(scores).items():
        found = getattr(joined, name)
        assert found is expected is None or torch.equal(found, expected), name


def test_a_rank_takes_its_own_samples_out_of_a_part() -> None:
    """Sample 7 is the second of the part."""
    scores = TopKScores(torch.arange(10, dtype=torch.int32).view(5, 2), torch.randn(5, 2), None)
    part = packed(scores)
    assert part.only({7, 9, 1}) is part
    mine = part.only({7})
    ((sample_id, found),) = mine.by_sample(SEQUENCES, "cpu")
    assert sample_id == 7 and mine.targets.tolist() == [10, 11, 12]
    assert torch.equal(found.ids, scores.ids[2:]) and torch.equal(found.logprobs, scores.logprobs[2:])
    assert list(part.only(set()).by_sample(SEQUENCES, "cpu")) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: replace(one, targets=np.roll(TARGETS, 1)), "2 rows of sample 9 are about other tokens than the 2"),
        (lambda one: replace(one, row_counts=np.array([1, 4])), "1 rows of sample 9 are about other tokens than the 2"),
        (lambda one: replace(one, sample_ids=np.array([7, 9])), "2 rows of sample 7 are about other tokens than the 3"),
        (lambda one: replace(one, sample_ids=np.array([9, 6])), "scores of sample 6, which isn't in the batch"),
    ],
)
def test_scores_of_other_tokens_are_refused(change, message: str) -> None:
    """Shifted by one, cut elsewhere, swapped, of another batch."""
    broken = change(packed(HiddenScores(torch.randn(5, 4))))
    with pytest.raises(MisalignedScores, match=message):
        list(broken.by_sample(SEQUENCES, "cpu"))


def test_rows_of_observations_are_not_scored() -> None:
    """Of sample 7 the model wrote 10 and 12."""
    written = np.array([True, False, True, True, True, True])
    conversations = replace(SEQUENCES, written=written)
    hidden = torch.randn(4, 4)
    part = PackedScores.pack(HiddenScores(hidden), [9, 7], [2, 2], np.array([14, 15, 10, 12]))
    arrived = dict(part.by_sample(conversations, "cpu"))
    assert torch.equal(arrived[9].hidden, hidden[:2]) and torch.equal(arrived[7].hidden, hidden[2:])
    with pytest.raises(MisalignedScores, match="3 rows of sample 7 are about other tokens than the 2"):
        list(packed(HiddenScores(torch.randn(5, 4))).by_sample(conversations, "cpu"))
