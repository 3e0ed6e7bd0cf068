"""Rollouts don't depend on the number of replicas; doubles stand for the engines."""

from __future__ import annotations

import numpy as np
import pytest

from rlhf.roles.doubles import DoubleEngine
from rlhf.roles.replicas import in_order_of, merge, split
from rlhf.types import Prompts, Rollouts, offsets_of


def some_prompts(count: int) -> Prompts:
    """Of different lengths, with ids that aren't positions; the first and the last are the same but for their seed."""
    lengths = [2 + i % 3 for i in range(count)]
    lengths[-1] = lengths[0]
    tokens = np.arange(sum(lengths), dtype=np.int32)
    tokens[-lengths[-1] :] = tokens[: lengths[0]]
    return Prompts(
        sample_ids=np.arange(50, 50 + count, dtype=np.int64),
        tokens=tokens,
        offsets=offsets_of(lengths),
        seeds=np.arange(count, dtype=np.int64) * 7,
    )


def generated(prompts: Prompts, replicas: int) -> Rollouts:
    engines = [DoubleEngine(version=3) for _ in range(replicas)]
    shares = split(prompts, replicas)
    rollouts = [engine.generate(share, 3).result() for engine, share in zip(engines, shares, strict=False)]
    assert sum(len(engine.events) for engine in engines) == len(shares)
    return merge(rollouts)


@pytest.mark.parametrize("count", [1, 2, 5, 8])
@pytest.mark.parametrize("replicas", [2, 3])
def test_rollouts_equal_those_of_one_engine(count: int, replicas: int):
    prompts = some_prompts(count)
    one, several = DoubleEngine(version=3).generate(prompts, 3).result(), generated(prompts, replicas)
    assert several.version == one.version
    np.testing.assert_array_equal(several.finished, one.finished)
    for name, expected in vars(one.sequences).items():
        found = getattr(several.sequences, name)
        np.testing.assert_array_equal(found, expected, err_msg=name)
        assert found.dtype == expected.dtype, name


@pytest.mark.parametrize(("count", "replicas", "shares"), [(5, 2, [3, 2]), (2, 4, [1, 1]), (7, 3, [3, 2, 2])])
def test_shares_are_even(count: int, replicas: int, shares: list[int]):
    assert [len(share) for share in split(some_prompts(count), replicas)] == shares


def test_replicas_of_different_versions_are_a_bug():
    rollouts = [
        DoubleEngine(version=version).generate(share, version).result()
        for version, share in zip((1, 2), split(some_prompts(4), 2), strict=True)
    ]
    with pytest.raises(AssertionError, match="another version"):
        merge(rollouts)


def test_a_reference_response_has_no_logprobs():
    part = DoubleEngine(version=1).generate(some_prompts(2), 1).result()
    without = Rollouts(1, type(part.sequences)(**{**vars(part.sequences), "logprobs": None}), part.finished)
    assert merge([without, without]).sequences.logprobs is None


def test_parts_that_finished_in_any_order_are_put_in_the_order_of_the_prompts() -> None:
    prompts = some_prompts(7)
    whole = generated(prompts, 1)
    together = in_order_of(prompts, [whole.select(rows) for rows in ([5, 0], [6], [3, 4, 1], [2])])
    for name in ("sample_ids", "tokens", "offsets", "prompt_lengths", "logprobs"):
        assert getattr(together.sequences, name).tolist() == getattr(whole.sequences, name).tolist(), name
    assert together.finished.tolist() == whole.finished.tolist() and together.version == 3
