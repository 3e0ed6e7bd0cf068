"""What the specs share: range checks that name the key, and the refusal of what isn't built yet."""

from __future__ import annotations

from rlhf.errors import ConfigError


def require(condition: bool, message: str) -> None:
    """Raise `ConfigError(message)` unless `condition`. The message names the key and what to write instead."""
    if not condition:
        raise ConfigError(message)


def require_at_least(key: str, value: float, minimum: float) -> None:
    require(value >= minimum, f"{key} must be at least {minimum}, got {value}")


def require_positive(key: str, value: float) -> None:
    require(value > 0, f"{key} must be greater than 0, got {value}")


def require_between(key: str, value: float, low: float, high: float) -> None:
    require(low <= value <= high, f"{key} must be in [{low}, {high}], got {value}")


def not_yet(choice: str, works: str) -> ConfigError:
    """The refusal of a choice that has its name already but no implementation."""
    return ConfigError(f"{choice} is not available yet; what works today: {works}")
