"""Group `reward`: verifiers, for algo=grpo."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from rlhf.config.base import require, require_at_least, require_seconds


@dataclass(kw_only=True)
class NoReward:
    """No reward: a teacher teaches."""


@dataclass(kw_only=True)
class FunctionReward:
    """Reward functions, called in processes of their own. Built in: `math_verify`, `reasoning_gym`, `format`, `length`,
    `code`. Your own: `def f(completions, **columns)`, which gives a number a completion. See docs/rewards.md."""

    functions: list[str] = field(default_factory=lambda: ["reasoning_gym"])
    """Built-in names, names of plugins, `package.module.function` or `file.py:function`."""
    weights: list[float] | None = None
    """Of the functions, in their order; 0 only logs one. null: 1 each."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options by function, e.g. `reward.options.length.target=64`: keyword arguments of your own ones."""
    timeout_s: float = 60.0
    """Longest call of a function in seconds. One of yours that takes longer ends the run; a built-in one gives 0 to the
    completion it was busy with, since a model wrote what it chokes on."""
    chunk_rows: int | None = None
    """Most completions a function of yours gets at once, so that several processes share a batch; it must not compare
    them then. null: the whole batch. Built-in ones judge each on its own."""
    processes: int = 2
    """Processes that functions run in."""

    def __post_init__(self) -> None:
        require(
            bool(self.functions), "reward=functions needs functions; write e.g. reward.functions=[math_verify,format]"
        )
        for name in self.functions:
            require(
                bool(name.strip()), "reward.functions names an empty one; write e.g. reward.functions=[math_verify]"
            )
            require(self.functions.count(name) == 1, f"reward.functions={self.functions} names {name} twice; keep one")
        if self.weights is not None:
            require(
                len(self.weights) == len(self.functions),
                f"reward.weights={self.weights} has {len(self.weights)} numbers for {len(self.functions)} "
                "reward.functions; write one each",
            )
            require(
                all(map(math.isfinite, self.weights)) and any(self.weights),
                f"reward.weights={self.weights} must be finite and not all 0",
            )
        for name, options in self.options.items():
            require(
                isinstance(options, dict),
                f"reward.options.{name}={options} must be a section: reward.options.{name}.OPTION=VALUE",
            )
        require_seconds("reward.timeout_s", self.timeout_s)
        if self.chunk_rows is not None:
            require_at_least("reward.chunk_rows", self.chunk_rows, 1)
        require_at_least("reward.processes", self.processes, 1)
