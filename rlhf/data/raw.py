"""What every reader gives: rows as they are, with where each stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

RawRows = Iterator[tuple[str, Any]]
"""(where, raw row or BadRow)."""


@dataclass(frozen=True)
class RowSource:
    """Rows that can be read again and again, each time from the first."""

    name: str
    """As the configuration names it: `data.path=rows.jsonl`."""
    read: Callable[[], RawRows]

    def __iter__(self) -> RawRows:
        return self.read()
