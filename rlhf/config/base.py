"""What the specs share: range checks that name the key, and refusals of what isn't built yet or would be ignored."""

from __future__ import annotations

import dataclasses
import math
from enum import Enum
from typing import Any

from rlhf.errors import ConfigError

MOST_SECONDS = 1e6


def require(condition: bool, message: str) -> None:
    """Raise `ConfigError(message)` unless `condition`. The message names the key and what to write instead."""
    if not condition:
        raise ConfigError(message)


def require_at_least(key: str, value: float, minimum: float) -> None:
    require(math.isfinite(value) and value >= minimum, f"{key} must be at least {minimum}, got {value}")


def require_positive(key: str, value: float) -> None:
    require(math.isfinite(value) and value > 0, f"{key} must be greater than 0, got {value}")


def require_seconds(key: str, value: float) -> None:
    """A limit that waiting for it takes: the kernel's has 31 bits of milliseconds, which is 24 days."""
    require_positive(key, value)
    require(value <= MOST_SECONDS, f"{key}={value:g} is more than {MOST_SECONDS:g} seconds; use {MOST_SECONDS:g}")


def require_temperature(key: str, value: float) -> None:
    """0, or one that vLLM doesn't raise without a word to anybody who computes with the same number."""
    require(value == 0 or 0.01 <= value <= 100, f"{key} must be 0 (greedy) or in [0.01, 100], got {value}")


def require_between(key: str, value: float, low: float, high: float) -> None:
    require(low <= value <= high, f"{key} must be in [{low}, {high}], got {value}")


def require_below(key: str, value: float, low: float, high: float) -> None:
    """`low` is allowed, `high` isn't."""
    require(low <= value < high, f"{key} must be in [{low}, {high}), got {value}")


def require_text(key: str, value: str, example: str) -> None:
    require(bool(value.strip()), f"{key} is empty; write e.g. {key}={example}")


def refuse_unused(spec: Any, group: str, names: tuple[str, ...], why: str, remedy: str) -> None:
    """Refuse keys that were set (differ from their default) although nothing would read them.

    Args:
        spec: the spec they are fields of, as group `group`.
        why: completes "KEY=VALUE has no effect ...".
        remedy: what to write instead; `leave KEY at its default` is added.
    """
    for given, default in changed_keys(spec, group, names).items():
        raise ConfigError(f"{given} has no effect {why}; {remedy}, or leave {default}")


def changed_keys(spec: Any, group: str, names: tuple[str, ...]) -> dict[str, str]:
    """Those of the keys that were set (differ from their default), as `KEY=VALUE` -> `KEY=DEFAULT`."""
    changed = {}
    for field in dataclasses.fields(spec):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        value = getattr(spec, field.name)
        if field.name in names and value != default:
            key = f"{group}.{field.name}"
            changed[f"{key}={written(value)}"] = f"{key}={written(default)}"
    return changed


def written(value: Any) -> str:
    """`value` as one writes it on the command line."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def not_yet(choice: str, works: str) -> ConfigError:
    """The refusal of a choice that has its name already but no implementation."""
    return ConfigError(f"{choice} is not available yet; what works today: {works}")
