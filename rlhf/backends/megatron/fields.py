"""Typed reading of a JSON object that somebody else wrote: every wrong type is one line that names the field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf.errors import ModelError

MISSING = object()
"""The field has no default: it must be there."""


@dataclass(frozen=True)
class Fields:
    """A checkpoint's `config.json`.

    Every method raises ModelError for a missing field without a default, and for a value of another type.
    """

    values: Mapping[str, Any]
    where: str
    """The checkpoint as the user wrote it, for messages."""
    file: str = "config.json"
    """Its name, for messages."""

    def wrong(self, name: str, expected: str) -> ModelError:
        """The error for a field that isn't what was expected."""
        return ModelError(f"{self.where}: {self.file} has {name}={shown(self.values.get(name))}, expected {expected}")

    def count(self, name: str, default: Any = MISSING) -> int:
        """A whole number of at least 1."""
        value = self._get(name, default)
        if type(value) is not int or value < 1:
            raise self.wrong(name, "a whole number of at least 1")
        return value

    def positive(self, name: str, default: Any = MISSING) -> float:
        """A finite number above 0."""
        value = self._get(name, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.wrong(name, "a number above 0")
        return float(value)

    def flag(self, name: str, default: Any = MISSING) -> bool:
        """true or false."""
        value = self._get(name, default)
        if type(value) is not bool:
            raise self.wrong(name, "true or false")
        return value

    def table(self, name: str) -> dict[str, Any]:
        """An object; none, or null, is an empty one."""
        value = self.values.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return value

    def _get(self, name: str, default: Any) -> Any:
        """The value; the default where the field is absent or null."""
        value = self.values.get(name)
        if value is not None:
            return value
        if default is MISSING and name in self.values:
            raise self.wrong(name, "a value")
        if default is MISSING:
            raise ModelError(f"{self.where}: {self.file} has no {name}")
        return default


def shown(value: Any) -> str:
    """A value as it stands in the file, shortened."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 80 else f"{text[:77]}..."
