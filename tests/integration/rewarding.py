"""Reward functions for runs on tiny models: dense, so that a few steps show whether anything is learned."""

from __future__ import annotations

import itertools
from typing import Any


def vowels(completions: list[str], **columns: list[Any]) -> list[float]:
    """The share of characters that are lower-case vowels."""
    return [sum(character in "aeiou" for character in text) / max(len(text), 1) for text in completions]


def has_vowel_pair(completions: list[str], **columns: list[Any]) -> list[float]:
    """1 for a response with two lower-case vowels in a row: one of two values, so that groups may agree."""
    return [float(any(a in "aeiou" and b in "aeiou" for a, b in itertools.pairwise(text))) for text in completions]
