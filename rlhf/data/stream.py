"""Rows that are read while training (`data.streaming=true`), and what can be found out about them before."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rlhf.config.data import DataCommon, RowsData
from rlhf.data.bad_rows import BadRows
from rlhf.data.raw import RowSource
from rlhf.data.read import CHUNK, Chunk, Numbered, read_chunks, read_rows
from rlhf.data.rows import NOTHING_MORE, BadRow, Needs
from rlhf.data.table import PromptTable, concatenate
from rlhf.data.tokenise import check_refusals
from rlhf.errors import DataError, counted

NO_RESPONSE = "held out without the reference response that eval.responses=dataset needs"


@dataclass(frozen=True)
class RowStream:
    """The rows to train on, none of which is held."""

    source: RowSource
    tokenizer: Any
    spec: RowsData
    skip: int
    """Rows at the start that aren't trained on: the held-out ones are among them."""
    rows: int | None
    """How many usable ones there are; None where they weren't counted."""
    needs: Needs = NOTHING_MORE
    column_names: frozenset[str] | None = None
    """Of the usable rows; None where they weren't all read."""

    def numbered(self) -> Iterator[Numbered]:
        """One pass."""
        rows = ((number, where, raw) for number, (where, raw) in enumerate(self.source))
        return itertools.islice(rows, self.skip, None)

    def read(self, rows: list[Numbered]) -> Chunk:
        """Check and tokenise some of them."""
        return read_rows(rows, self.tokenizer, self.spec, self.needs)

    def first_column_names(self) -> frozenset[str]:
        """Those of the first chunk of rows: later ones may have others."""
        return self.read(list(itertools.islice(self.numbered(), CHUNK))).table.column_names


def require_usable(stream: RowStream) -> None:
    """Read up to the first usable row, so that a stream without any is found out before the run.

    Raises:
        DataError: there is none; says what is wrong with the rows.
    """
    bad = BadRows()
    refused: list[BadRow] = []
    for row in stream.numbered():
        chunk = stream.read([row])
        if chunk.numbers:
            return
        bad.add(chunk.bad)
        refused += chunk.refused
    if bad.count == len(refused):
        check_refusals(0, refused, stream.tokenizer)
    left_out = f" after {counted(bad.count, 'bad row')} left out ({bad.lines()[0]})" if bad.count else ""
    besides = f" besides the first {stream.skip}, which are held out" if stream.skip else ""
    raise DataError(f"{stream.source.name} has no rows to train on{besides}{left_out}")


@dataclass
class Survey:
    """What one pass over a source finds out. Holds two numbers a row, whatever the rows' size."""

    bad: BadRows
    prompt_lengths: array[int] = field(default_factory=lambda: array("i"))
    response_lengths: array[int] = field(default_factory=lambda: array("i"))
    """0: no response."""
    truncated: int = 0
    teacher_prompts: int = 0
    """Rows that have one."""
    rows: int = 0
    """Bad ones included."""
    column_names: set[str] = field(default_factory=set)
    """Of the usable rows, see `PromptTable.columns`; without those of the first `skip` rows."""


def survey(
    source: RowSource, tokenizer: Any, spec: DataCommon, bad: BadRows, needs: Needs = NOTHING_MORE, skip: int = 0
) -> Survey:
    """Read, check and tokenise every row, and keep none. The bad ones are added to `bad`.

    Raises:
        DataError: a source that can't be read, or a chat template that refuses every row.
    """
    found = Survey(bad)
    refused: list[BadRow] = []
    for chunk in read_chunks(source, tokenizer, spec, needs):
        found.prompt_lengths.extend(chunk.table.lengths.tolist())
        found.response_lengths.extend(chunk.table.response_lengths.tolist())
        found.truncated += int(chunk.table.truncated.sum())
        found.teacher_prompts += int((chunk.table.teacher_lengths > 0).sum())
        for number, columns in zip(chunk.numbers, chunk.table.columns, strict=True):
            if number >= skip:
                found.column_names.update(map(str, columns))
        found.bad.add(chunk.bad)
        found.rows += len(chunk.numbers) + len(chunk.bad)
        if not found.prompt_lengths:
            refused += chunk.refused
    check_refusals(len(found.prompt_lengths), refused, tokenizer)
    return found


def first_rows(
    source: RowSource,
    count: int,
    tokenizer: Any,
    spec: DataCommon,
    need_response: bool,
    needs: Needs = NOTHING_MORE,
) -> tuple[PromptTable, list[BadRow], int]:
    """The first `count` usable rows (fewer where there aren't so many), the bad ones before the last of them, and how
    many rows were read. With `need_response`, a row without a reference response is a bad one.

    Raises:
        DataError: a source that can't be read, or a chat template that refuses every row.
    """
    tables: list[PromptTable] = []
    bad: list[BadRow] = []
    refused: list[BadRow] = []
    read = 0
    for number, (where, raw) in enumerate(source if count else ()):
        chunk = read_rows([(number, where, raw)], tokenizer, spec, needs)
        bad += chunk.bad
        refused += chunk.refused
        if need_response and len(chunk.table) and chunk.table.response(0) is None:
            bad.append(BadRow(where, NO_RESPONSE))
        elif len(chunk.table):
            tables.append(chunk.table)
        read = number + 1
        if len(tables) == count:
            break
    if len(bad) == len(refused) == read:
        check_refusals(0, refused, tokenizer)
    return concatenate(tables), bad, read
