"""Group `environment`: what the model talks with, where a sample is a conversation of several turns."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from rlhf.config.base import refuse_unused, require, require_at_least, require_seconds, require_text


@dataclass(kw_only=True)
class NoEnvironment:
    """None: a sample is a prompt and one response."""


@dataclass(kw_only=True)
class MultiTurn:
    """Conversations: an environment of yours answers each turn of the model, rewards it, and says when it is over. Only
    the model's tokens are trained on. See docs/environments.md."""

    name: str = "???"
    """A class with `reset` and `step`: a plugin's name, `package.module.Class` or `file.py:Class`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the class: `environment.options.OPTION=VALUE`."""
    max_turns: int = 4
    """Most turns of the model in a conversation; each has up to `rollout.max_new_tokens` tokens."""
    max_observation_tokens: int = 128
    """Longest answer of the environment in tokens, with the chat template's markup around it; a longer one loses its
    end."""
    reward_weight: float = 1.0
    """Of the environment's rewards (their sum over the turns) under algo=grpo, beside those of `reward.functions`;
    0 only logs them."""
    timeout_s: float = 60.0
    """Longest call of `reset` or `step` in seconds; a longer one ends the run."""
    processes: int = 2
    """Processes that conversations are spread over; each works on one at a time."""
    check_template: bool = True
    """Refuse a chat template that writes earlier turns otherwise than the model sees them here. false: append turns to
    what the model wrote, whatever the template makes of it (Qwen3's leaves out the thinking of earlier turns)."""

    def __post_init__(self) -> None:
        require_text("environment.name", self.name, "docs/examples/second_try.py:SecondTry")
        require_at_least("environment.max_turns", self.max_turns, 1)
        require_at_least("environment.max_observation_tokens", self.max_observation_tokens, 1)
        if self.max_turns == 1:
            why = "with environment.max_turns=1, where no answer is followed by another turn"
            refuse_unused(
                self, "environment", ("max_observation_tokens", "check_template"), why, "use environment.max_turns=2"
            )
        require(
            math.isfinite(self.reward_weight), f"environment.reward_weight must be finite, got {self.reward_weight}"
        )
        require_seconds("environment.timeout_s", self.timeout_s)
        require_at_least("environment.processes", self.processes, 1)

    def most_tokens(self, max_new_tokens: int) -> int:
        """Of a whole conversation, after its prompt."""
        return self.max_turns * max_new_tokens + (self.max_turns - 1) * self.max_observation_tokens

    def described(self, max_new_tokens: int) -> str:
        """`most_tokens` in keys."""
        turns = f"environment.max_turns={self.max_turns} x rollout.max_new_tokens={max_new_tokens}"
        if self.max_turns == 1:
            return turns
        observations = f"environment.max_observation_tokens={self.max_observation_tokens}"
        return f"{turns} + {self.max_turns - 1} x {observations}"
