"""Bad rows, grouped by reason, in constant memory."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from rlhf.data.rows import BadRow, printable

SHOWN_GROUPS = 20


@dataclass
class BadRows:
    """Counts rows by reason and keeps the first few of each. Reasons that differ in numbers alone are one."""

    shown: int = 5
    """Rows named in each group."""
    count: int = 0
    first: BadRow | None = None
    groups: dict[str, tuple[int, list[BadRow]]] = field(default_factory=dict)
    """Reason without its numbers -> rows, and the first of them."""

    def add(self, rows: Iterable[BadRow]) -> BadRows:
        for row in rows:
            self.first = self.first or row
            self.count += 1
            key = re.sub(r"\d+", "N", row.reason)
            count, shown = self.groups.get(key, (0, []))
            self.groups[key] = (count + 1, [*shown, row][: self.shown])
        return self

    def lines(self) -> list[str]:
        """A line a group, the largest first: `3 x empty prompt: rows.jsonl:2,5,9`."""
        ordered = sorted(self.groups.values(), key=lambda group: -group[0])
        lines = [
            printable(f"{count} x {shown[0].reason}: {_places(shown)}{' ...' if count > len(shown) else ''}")
            for count, shown in ordered[:SHOWN_GROUPS]
        ]
        left = ordered[SHOWN_GROUPS:]
        return lines + ([f"{sum(count for count, _ in left)} x {len(left)} other reasons"] if left else [])


def _places(rows: list[BadRow]) -> str:
    """`a.jsonl:1,5 b.parquet[3]`: each file is named once."""
    places: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        match = re.fullmatch(r"(.*)([:\[])(\d+)(\]?)", row.where, re.DOTALL)
        assert match is not None, "readers say FILE:LINE or NAME[ROW]"
        places.setdefault((match[1], match[2], match[4]), []).append(match[3])
    return " ".join(f"{name}{left}{','.join(numbers)}{right}" for (name, left, right), numbers in places.items())
