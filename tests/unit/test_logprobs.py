"""A response row's log-probability from the one rank that has it to all of them; NaN stays what it is."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf.backends.megatron import logprobs
from rlhf.backends.megatron.logprobs import over_data_parallel, own_logprobs
from rlhf.losses.heads import VocabHead

TEMPERATURE = 0.7
TARGETS = np.array([3, 0, 6, 2, 5], dtype=np.int32)
INDEX = {0: np.array([0, 3]), 1: np.array([1, 2, 4])}
"""Which response rows are whose."""


def rows_and_weight() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(5, 4, generator=generator), torch.randn(7, 4, generator=generator)


def of_rank(rank: int, hidden: Tensor, weight: Tensor) -> np.ndarray:
    micro: Any = SimpleNamespace(response_index=INDEX[rank], targets=TARGETS[INDEX[rank]])
    head = VocabHead(hidden[torch.from_numpy(INDEX[rank])], weight, vocab_size=7)
    return own_logprobs([micro], 5, lambda micro: head, TEMPERATURE)


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """What the other ranks bring to the sum."""
    brought: list[np.ndarray] = []

    def all_reduce(total: Tensor, group: object) -> None:
        for part in brought:
            total += torch.from_numpy(part)

    parallel_state = SimpleNamespace(get_data_parallel_group_gloo=lambda: None)
    monkeypatch.setitem(sys.modules, "megatron.core", SimpleNamespace(parallel_state=parallel_state))
    monkeypatch.setattr(logprobs.dist, "all_reduce", all_reduce)
    return brought


def test_ranks_have_all_rows_together(others: list[np.ndarray]) -> None:
    hidden, weight = rows_and_weight()
    others.append(of_rank(1, hidden, weight))
    dense = torch.log_softmax(hidden @ weight.T / TEMPERATURE, dim=-1)[
        torch.arange(5), torch.from_numpy(TARGETS).long()
    ]
    np.testing.assert_allclose(over_data_parallel(of_rank(0, hidden, weight)), dense.numpy(), rtol=1e-5)


@pytest.mark.parametrize("row", [0, 2], ids=["of this rank", "of another"])
def test_what_is_not_a_number_ends_the_run(row: int, others: list[np.ndarray]) -> None:
    """Not 0, which would be certainty."""
    hidden, weight = rows_and_weight()
    hidden[row] = torch.nan
    others.append(of_rank(1, hidden, weight))
    with pytest.raises(
        logprobs.TrainingDiverged, match=r"^the teacher's log-probability of 1 of 5 response tokens is not"
    ):
        over_data_parallel(of_rank(0, hidden, weight))
