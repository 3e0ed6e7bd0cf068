"""Tokenised rows, packed: a few arrays instead of an object a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32, Int64

from rlhf.types import offsets_of

EMPTY = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True)
class PromptTable:
    """Prompts and their reference responses as token ids. n rows, T prompt tokens and R response tokens together.

    Example: prompts `[5, 6]` and `[7]`, where only the second has a response `[8, 2]`: tokens `[5, 6, 7]`,
    offsets `[0, 2, 3]`, response_tokens `[8, 2]`, response_offsets `[0, 0, 2]`.
    """

    tokens: Int32[np.ndarray, " T"]
    offsets: Int64[np.ndarray, " n+1"]
    response_tokens: Int32[np.ndarray, " R"]
    """Each response ends with EOS, so a row of no tokens is a row without a response."""
    response_offsets: Int64[np.ndarray, " n+1"]
    truncated: Bool[np.ndarray, " n"]
    """The prompt was longer than data.max_length and has been cut."""
    wheres: tuple[str, ...]
    columns: tuple[dict[str, Any], ...]
    """The row's other columns, for verifiers and reports."""
    teacher_tokens: Int32[np.ndarray, " P"]
    """What the teacher reads instead of the prompt; a row of no tokens is a row where it reads the same."""
    teacher_offsets: Int64[np.ndarray, " n+1"]

    def __len__(self) -> int:
        return len(self.wheres)

    @property
    def lengths(self) -> Int64[np.ndarray, " n"]:
        return np.diff(self.offsets)

    @property
    def response_lengths(self) -> Int64[np.ndarray, " n"]:
        return np.diff(self.response_offsets)

    @property
    def teacher_lengths(self) -> Int64[np.ndarray, " n"]:
        """0: no prompt of the teacher's own."""
        return np.diff(self.teacher_offsets)

    @property
    def column_names(self) -> frozenset[str]:
        """Of `columns`, over all rows."""
        return frozenset(str(name) for row in self.columns for name in row)

    def prompt(self, row: int) -> Int32[np.ndarray, " t"]:
        """The tokens of one prompt, as a view."""
        return self.tokens[self.offsets[row] : self.offsets[row + 1]]

    def response(self, row: int) -> Int32[np.ndarray, " r"] | None:
        """The tokens of one reference response, EOS included, as a view; None where the row has none."""
        start, stop = self.response_offsets[row], self.response_offsets[row + 1]
        return self.response_tokens[start:stop] if stop > start else None

    def teacher_prompt(self, row: int) -> Int32[np.ndarray, " t"] | None:
        """The tokens of the teacher's own prompt, as a view; None where the row has none."""
        start, stop = self.teacher_offsets[row], self.teacher_offsets[row + 1]
        return self.teacher_tokens[start:stop] if stop > start else None

    def select(self, rows: Sequence[int] | range | np.ndarray) -> PromptTable:
        """A table of these rows, in this order."""
        return pack(
            [self.prompt(row) for row in rows],
            [self.response(row) for row in rows],
            truncated=[bool(self.truncated[row]) for row in rows],
            wheres=[self.wheres[row] for row in rows],
            columns=[self.columns[row] for row in rows],
            teacher_prompts=[self.teacher_prompt(row) for row in rows],
        )


def pack(
    prompts: Sequence[Int32[np.ndarray, " t"]],
    responses: Sequence[Int32[np.ndarray, " r"] | None],
    *,
    truncated: Sequence[bool],
    wheres: Sequence[str],
    columns: Sequence[dict[str, Any]],
    teacher_prompts: Sequence[Int32[np.ndarray, " t"] | None] | None = None,
) -> PromptTable:
    """One array a row -> one table. Without `teacher_prompts` no row has one."""
    answers = [EMPTY if response is None else response for response in responses]
    privileged = [EMPTY if prompt is None else prompt for prompt in teacher_prompts or [None] * len(prompts)]
    return PromptTable(
        tokens=np.concatenate([EMPTY, *prompts]),
        offsets=offsets_of([len(prompt) for prompt in prompts]),
        response_tokens=np.concatenate([EMPTY, *answers]),
        response_offsets=offsets_of([len(answer) for answer in answers]),
        truncated=np.asarray(truncated, dtype=bool),
        wheres=tuple(wheres),
        columns=tuple(columns),
        teacher_tokens=np.concatenate([EMPTY, *privileged]),
        teacher_offsets=offsets_of([len(prompt) for prompt in privileged]),
    )


def concatenate(tables: Sequence[PromptTable]) -> PromptTable:
    """The rows of all tables, in order."""
    lengths = [table.lengths for table in tables]
    response_lengths = [table.response_lengths for table in tables]
    return PromptTable(
        tokens=np.concatenate([EMPTY, *(table.tokens for table in tables)]),
        offsets=offsets_of(np.concatenate([EMPTY, *lengths])),
        response_tokens=np.concatenate([EMPTY, *(table.response_tokens for table in tables)]),
        response_offsets=offsets_of(np.concatenate([EMPTY, *response_lengths])),
        truncated=np.concatenate([np.zeros(0, dtype=bool), *(table.truncated for table in tables)]),
        wheres=tuple(where for table in tables for where in table.wheres),
        columns=tuple(columns for table in tables for columns in table.columns),
        teacher_tokens=np.concatenate([EMPTY, *(table.teacher_tokens for table in tables)]),
        teacher_offsets=offsets_of(np.concatenate([EMPTY, *(table.teacher_lengths for table in tables)])),
    )
