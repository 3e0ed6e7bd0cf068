"""Group `reward`: verifiers, for algo=grpo."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.base import not_yet


@dataclass(kw_only=True)
class NoReward:
    """No reward: a teacher teaches."""


@dataclass(kw_only=True)
class FunctionReward:
    """Reward functions. Not available yet."""

    def __post_init__(self) -> None:
        raise not_yet("reward=functions", "reward=none with algo=gkd")
