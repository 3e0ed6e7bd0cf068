"""An environment for runs on tiny models: every turn of random text is answered, and rewarded densely."""

from __future__ import annotations

from typing import Any

from rlhf.environments import Environment, Turn


class Echo(Environment):
    """Says how long the turn was; over after `turns`. Rewards the share of vowels."""

    def __init__(self, turns: int = 2) -> None:
        self.turns, self.seen = turns, 0

    def reset(self, seed: int, **columns: Any) -> None:
        self.seed = seed

    def step(self, response: str) -> Turn:
        self.seen += 1
        vowels = sum(character in "aeiou" for character in response) / max(len(response), 1)
        return Turn(f"that was {len(response)} characters", vowels, self.seen == self.turns)
