"""Row order: every row once an epoch, a new order each epoch, exact resume."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rlhf.data.cursor import EpochCursor
from rlhf.errors import DataError


def test_in_order_across_epochs() -> None:
    cursor = EpochCursor(3, seed=0, shuffle=False)
    assert [cursor.take(2).tolist() for _ in range(3)] == [[0, 1], [2, 0], [1, 2]]
    assert cursor.take(7).tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert cursor.take(0).tolist() == [] and cursor.take(1).dtype == np.int64


def test_every_epoch_has_every_row_in_another_order() -> None:
    epochs = EpochCursor(50, seed=3, shuffle=True).take(150).reshape(3, 50)
    for epoch in epochs:
        assert sorted(epoch) == list(range(50))
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_order_depends_on_the_seed_alone() -> None:
    whole = EpochCursor(10, seed=1, shuffle=True).take(25)
    cursor = EpochCursor(10, seed=1, shuffle=True)
    assert np.concatenate([cursor.take(4), cursor.take(6), cursor.take(15)]).tolist() == whole.tolist()
    assert EpochCursor(10, seed=2, shuffle=True).take(25).tolist() != whole.tolist()


@pytest.mark.parametrize("taken", [0, 3, 10, 17, 20])
def test_resume_continues_exactly(taken: int) -> None:
    cursor = EpochCursor(10, seed=1, shuffle=True)
    cursor.take(taken)
    resumed = EpochCursor(10, seed=1, shuffle=True)
    resumed.load_state_dict(json.loads(json.dumps(cursor.state_dict())))
    assert resumed.take(23).tolist() == cursor.take(23).tolist()


def test_resume_with_other_data_is_refused() -> None:
    state = EpochCursor(10, seed=1, shuffle=True).state_dict()
    with pytest.raises(DataError, match="number of training rows was 10 and is 11 now"):
        EpochCursor(11, seed=1, shuffle=True).load_state_dict(state)
    with pytest.raises(DataError, match=r"run\.seed was 1 and is 2 now"):
        EpochCursor(10, seed=2, shuffle=True).load_state_dict(state)
    with pytest.raises(DataError, match=r"data\.shuffle was True and is False now"):
        EpochCursor(10, seed=1, shuffle=False).load_state_dict(state)
