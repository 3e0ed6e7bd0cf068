"""Reward functions for runs on tiny models: dense, so that a few steps show whether anything is learned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def vowels(response: str, row: Mapping[str, Any]) -> float:
    """The share of characters that are lower-case vowels."""
    return sum(character in "aeiou" for character in response) / max(len(response), 1)
