"""The protocol that a user's environment follows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Turn:
    """What an environment says to a turn of the model."""

    observation: str = ""
    """The user's next message. Needed unless `done`; not used where the conversation is over."""
    reward: float = 0.0
    """Of this turn. A conversation's reward is the sum."""
    done: bool = False
    """The conversation is over."""


class Environment(ABC):
    """One conversation. An object is made for each of them (`environment.options` are its arguments), lives in one
    process, and may keep what it likes between turns. Another class with these methods will do.

        class Echo(Environment):
            def reset(self, word: str, **columns) -> None:
                self.word = word

            def step(self, response: str) -> Turn:
                right = self.word in response
                return Turn(f"Say {self.word}.", reward=float(right), done=right)
    """

    @abstractmethod
    def reset(self, **columns: Any) -> None:
        """The conversation begins with the row's prompt.

        Args:
            columns: of the data's row, by name; those that the signature doesn't take aren't given. `response` is the
                reference response, if there is one. `seed` is a number to draw from where anything is random: the same
                for the same row, sample and step of the run.
        """

    @abstractmethod
    def step(self, response: str) -> Turn:
        """Answer the model's turn, whose text comes without special tokens. Also called for a turn that was cut at the
        length limit, and for the last one there may be; both end the conversation, whatever is answered."""

    def close(self) -> None:
        """The conversation has ended. Needn't exist."""
        return
