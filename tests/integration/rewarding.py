"""Reward functions for runs on tiny models: dense, so that a few steps show whether anything is learned."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any


def vowels(response: str, row: Mapping[str, Any]) -> float:
    """The share of characters that are lower-case vowels."""
    return sum(character in "aeiou" for character in response) / max(len(response), 1)


def has_vowel_pair(response: str, row: Mapping[str, Any]) -> float:
    """1 for a response with two lower-case vowels in a row: one of two values, so that groups may agree."""
    return float(any(one in "aeiou" and two in "aeiou" for one, two in itertools.pairwise(response)))
