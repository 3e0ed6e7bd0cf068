"""Rewards -> advantages, against formulas written out a group at a time."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from rlhf.algos.advantages import (
    describe_functions,
    describe_rewards,
    group_advantages,
    join_rewards,
    kl_penalty,
    overlong_penalty,
    select_rewards,
    uniform_groups,
)
from rlhf.config.algo import Advantage, KLEstimator, ScaleRewards
from rlhf.types import Rewards

REWARDS = [0.0, 1.0, 0.5, 0.25, 0.1, 0.1, 0.1, 0.1, -3.0, 2.0, 2.0, 7.0]
"""Three groups of four; the second has nothing to say."""


@pytest.mark.parametrize("scale", ScaleRewards)
@pytest.mark.parametrize("estimator", Advantage)
def test_advantages_are_the_formulas(estimator: Advantage, scale: ScaleRewards) -> None:
    expected = []
    for start in (0, 4, 8):
        group = REWARDS[start : start + 4]
        divisor = {
            ScaleRewards.group: statistics.stdev(group) + 1e-4,
            ScaleRewards.batch: statistics.stdev(REWARDS) + 1e-4,
            ScaleRewards.none: 1.0,
        }[scale]
        for index, reward in enumerate(group):
            others = [other for place, other in enumerate(group) if place != index]
            compared = group if estimator is Advantage.grpo else others  # leave one out
            expected.append((reward - statistics.fmean(compared)) / divisor)
    found = group_advantages(np.array(REWARDS, dtype=np.float32), 4, estimator, scale)
    assert found.dtype == np.float32
    assert found.tolist() == pytest.approx(expected, abs=1e-6)
    assert found[4:8].tolist() == [0.0] * 4, "exactly, although 0.1 has a rounded mean"


def test_a_group_of_equal_rewards_is_exactly_zero_whatever_its_mean_rounds_to() -> None:
    for size in (3, 7, 11):
        rewards = np.full(2 * size, 0.1, dtype=np.float64)
        assert not group_advantages(rewards, size, Advantage.grpo, ScaleRewards.group).any()
        assert uniform_groups(rewards, size).tolist() == [True, True]


def test_the_soft_punishment_of_long_responses() -> None:
    lengths = np.array([1, 12, 13, 14, 15, 16])
    assert overlong_penalty(lengths, limit=16, buffer=4).tolist() == [0, 0, -0.25, -0.5, -0.75, -1]
    assert overlong_penalty(lengths, limit=16, buffer=0).tolist() == [0] * 6
    assert overlong_penalty(lengths, limit=16, buffer=16).tolist() == pytest.approx([-n / 16 for n in lengths])


@pytest.mark.parametrize("estimator", KLEstimator)
def test_the_penalty_of_a_response_is_the_sum_over_its_tokens(estimator: KLEstimator) -> None:
    student, teacher = np.array([-1.0, -2.0, -0.5], np.float32), np.array([-1.5, -0.25, -0.5], np.float32)
    d = teacher.astype(float) - student
    rows = {"k1": -d, "k2": d**2 / 2, "k3": np.exp(d) - 1 - d}[estimator.name]
    found = kl_penalty(student, teacher, np.array([2, 1]), estimator)
    assert found.tolist() == pytest.approx([rows[0] + rows[1], rows[2]])


def test_what_is_said_about_rewards() -> None:
    rewards = Rewards(
        np.array(REWARDS, np.float32), {"a": np.array(REWARDS, np.float32), "b": np.zeros(12, np.float32)}
    )
    metrics = describe_rewards(rewards, 4)
    assert metrics == {
        "reward/mean": pytest.approx(statistics.fmean(REWARDS)),
        "reward/std": pytest.approx(statistics.stdev(REWARDS)),
        "reward/zero_variance_share": pytest.approx(1 / 3),
        "reward/a/mean": pytest.approx(statistics.fmean(REWARDS)),
        "reward/a/std": pytest.approx(statistics.stdev(REWARDS)),
        "reward/b/mean": 0.0,
        "reward/b/std": 0.0,
    }


def test_means_of_a_function_are_over_the_responses_it_applies_to() -> None:
    nan = float("nan")
    parts = {"some": [1.0, nan, 4.0, nan], "one": [nan, nan, nan, 3.0], "none": [nan] * 4, "all": [1.0, 0.0, 0.0, 1.0]}
    rewards = Rewards(
        np.array([2, 0, 4, 4], np.float32), {name: np.array(part, np.float32) for name, part in parts.items()}
    )
    applies = {"some_applies": 0.5, "one_applies": 0.25, "none_applies": 0.0}
    assert describe_rewards(rewards, 2) == {
        "reward/mean": 2.5,
        "reward/std": pytest.approx(statistics.stdev([2, 0, 4, 4])),
        "reward/zero_variance_share": 0.5,
        "reward/some/mean": 2.5,
        "reward/some/std": pytest.approx(statistics.stdev([1, 4])),
        "reward/one/mean": 3.0,
        "reward/all/mean": 0.5,
        "reward/all/std": pytest.approx(statistics.stdev([1, 0, 0, 1])),
        **{f"reward/{name}": share for name, share in applies.items()},
    }
    assert describe_functions(rewards, "eval/reward/{}") == {
        "eval/reward/some": 2.5,
        "eval/reward/one": 3.0,
        "eval/reward/all": 0.5,
        **{f"eval/reward/{name}": share for name, share in applies.items()},
    }


def test_rewards_are_taken_apart_and_joined() -> None:
    rewards = Rewards(np.arange(4, dtype=np.float32), {"a": np.arange(4, dtype=np.float32) * 2})
    joined = join_rewards([select_rewards(rewards, [2, 3]), select_rewards(rewards, [0])])
    assert (joined.total.tolist(), joined.parts["a"].tolist()) == ([2, 3, 0], [4, 6, 0])
