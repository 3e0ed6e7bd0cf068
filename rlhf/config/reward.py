"""Group `reward`: verifiers, for algo=grpo."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class NoReward:
    """No reward: a teacher teaches."""


@dataclass(kw_only=True)
class FunctionReward:
    """Reward functions."""

    functions: list[str] = field(default_factory=lambda: ["reasoning_gym"])
    """What rewards a response."""
