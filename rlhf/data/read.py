"""Raw rows -> tokenised rows and bad rows, a chunk at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rlhf.config.data import DataCommon, RowsData
from rlhf.data.preprocess import load_preprocessor
from rlhf.data.rows import NOTHING_MORE, BadRow, Needs, Row, parse_row
from rlhf.data.table import PromptTable
from rlhf.data.tokenise import tokenise_rows

CHUNK = 1024
"""Rows tokenised together."""

Numbered = tuple[int, str, Any]
"""Number of the row in its source, where it stands, the row itself."""


@dataclass(frozen=True)
class Chunk:
    """A few rows of a source, read."""

    table: PromptTable
    """The usable ones."""
    numbers: tuple[int, ...]
    """Which rows of the source they are."""
    bad: list[BadRow]
    """The others, in the order of the source."""
    refused: list[BadRow]
    """Those among them that only the tokenizer refused."""


def read_rows(rows: Iterable[Numbered], tokenizer: Any, spec: DataCommon, needs: Needs = NOTHING_MORE) -> Chunk:
    """Check and tokenise these rows, in their order. One that lacks what is needed is a bad one."""
    columns: tuple[str | None, str | None] = (None, None)
    if isinstance(spec, RowsData):
        columns = (spec.prompt_column, spec.response_column)
    preprocess = None if spec.preprocessor is None else load_preprocessor(spec.preprocessor)
    good: list[Row] = []
    bad: list[BadRow] = []
    numbers: dict[str, int] = {}
    for number, where, raw in rows:
        numbers[where] = number
        row = raw if isinstance(raw, BadRow) else parse_row(raw, where, number, *columns, preprocess)
        if isinstance(row, Row) and (reason := needs.lacking(row)):
            row = BadRow(where, reason)
        if isinstance(row, BadRow):
            bad.append(row)
        else:
            good.append(needs.complete(row))
    table, refused = tokenise_rows(good, tokenizer, spec)
    position = {where: place for place, where in enumerate(numbers)}
    bad = sorted([*bad, *refused], key=lambda row: position[row.where])
    return Chunk(table, tuple(numbers[where] for where in table.wheres), bad, refused)


def read_chunks(
    rows: Iterable[tuple[str, Any]], tokenizer: Any, spec: DataCommon, needs: Needs = NOTHING_MORE
) -> Iterator[Chunk]:
    """All rows of a source, CHUNK at a time."""
    numbered = ((number, where, raw) for number, (where, raw) in enumerate(rows))
    while chunk := list(itertools.islice(numbered, CHUNK)):
        yield read_rows(chunk, tokenizer, spec, needs)
