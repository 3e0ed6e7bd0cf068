"""Cuts a file that grew with the steps back to an earlier step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf.errors import DataError


def cut_rows(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Cut a file of JSON lines at the first one that isn't kept, or that a killed process left unfinished.

    Raises:
        DataError: a line on the way that can't be read.
    """
    if not path.exists():
        return
    size = 0
    with path.open("rb+") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                if not keep(json.loads(line)):
                    break
            except (ValueError, TypeError, KeyError) as error:
                raise DataError(f"{path}, line {number}: can't be read ({error!r}); delete it to go on") from error
            size += len(line)
        file.truncate(size)


def cut_lines(path: Path, count: int) -> None:
    """Keep the first `count` lines."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        lines = [line for _, line in zip(range(count), file, strict=False)]
        file.truncate(sum(map(len, lines)))
