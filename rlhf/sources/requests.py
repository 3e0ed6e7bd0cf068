"""Rows of a prompt table -> requests to the engine, and reference responses -> sequences."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

from rlhf.data.table import PromptTable
from rlhf.types import Prompts, Sequences, offsets_of


def request_seed(seed: int, step: int, row: int, sample: int) -> int:
    """A sampler seed that depends on nothing but these four: not on request order, batch or replica."""
    digest = hashlib.blake2b(struct.pack("<4q", seed, step, row, sample), digest_size=8).digest()
    return int.from_bytes(digest, "little") & 0x7FFF_FFFF


def prompts_of(
    table: PromptTable,
    rows: Sequence[int] | np.ndarray,
    *,
    seed: int,
    step: int,
    numbers: Sequence[int] | np.ndarray | None = None,
    occurrences: dict[int, int] | None = None,
    of_teacher: bool = False,
) -> Prompts:
    """One request a row. Rows may repeat; each occurrence gets a seed of its own.

    Args:
        rows: of the table.
        numbers: what the sampler's seeds know the rows by; None: by their place in the table.
        occurrences: number -> requests that the step has made of it already; counted up here.
        of_teacher: a row's prompt for the teacher alone, where it has one.
    """
    prompts = [table.prompt(int(row)) for row in rows]
    if of_teacher:
        owns = [table.teacher_prompt(int(row)) for row in rows]
        prompts = [prompt if own is None else own for prompt, own in zip(prompts, owns, strict=True)]
    occurrence = {} if occurrences is None else occurrences
    seeds = []
    for row in map(int, rows if numbers is None else numbers):
        sample = occurrence.get(row, 0)
        occurrence[row] = sample + 1
        seeds.append(request_seed(seed, step, row, sample))
    return Prompts(
        sample_ids=sample_ids(len(prompts), step),
        tokens=np.concatenate(prompts),
        offsets=offsets_of([len(prompt) for prompt in prompts]),
        seeds=np.array(seeds, dtype=np.int64),
    )


def reference_sequences(table: PromptTable, max_response_tokens: int, step: int = 0) -> Sequences:
    """Every row with its reference response, cut to `max_response_tokens`. Every row must have one."""
    responses = []
    for row in range(len(table)):
        response = table.response(row)
        assert response is not None, "checked when the data was loaded"
        responses.append(response[:max_response_tokens])
    prompts = [table.prompt(row) for row in range(len(table))]
    return Sequences.join(sample_ids(len(table), step), prompts, responses)


def sample_ids(count: int, step: int) -> Int64[np.ndarray, " n"]:
    """Unique within a run whose steps all take as many samples."""
    return np.arange(count, dtype=np.int64) + step * count
