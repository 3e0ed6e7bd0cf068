"""Rows of a prompt table -> requests to the engine, and reference responses -> sequences."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np

from rlhf.data.table import PromptTable
from rlhf.types import Prompts, Sequences, offsets_of


def request_seed(seed: int, step: int, row: int, sample: int) -> int:
    """A sampler seed that depends on nothing but these four: not on request order, batch or replica."""
    digest = hashlib.blake2b(struct.pack("<4q", seed, step, row, sample), digest_size=8).digest()
    return int.from_bytes(digest, "little") & 0x7FFF_FFFF


def prompts_of(table: PromptTable, rows: Sequence[int] | np.ndarray, *, seed: int, step: int) -> Prompts:
    """One request a row. Rows may repeat; each occurrence gets a seed of its own."""
    prompts = [table.prompt(int(row)) for row in rows]
    occurrence: dict[int, int] = {}
    seeds = []
    for row in map(int, rows):
        sample = occurrence.get(row, 0)
        occurrence[row] = sample + 1
        seeds.append(request_seed(seed, step, row, sample))
    return Prompts(
        sample_ids=np.arange(len(prompts), dtype=np.int64) + step * len(prompts),
        tokens=np.concatenate(prompts),
        offsets=offsets_of([len(prompt) for prompt in prompts]),
        seeds=np.array(seeds, dtype=np.int64),
    )


def reference_sequences(table: PromptTable, max_response_tokens: int) -> Sequences:
    """Every row with its reference response, cut to `max_response_tokens`. Every row must have one."""
    pairs = []
    for row in range(len(table)):
        response = table.response(row)
        assert response is not None, "checked when the data was loaded"
        pairs.append((table.prompt(row), response[:max_response_tokens]))
    return Sequences(
        sample_ids=np.arange(len(pairs), dtype=np.int64),
        tokens=np.concatenate([part for pair in pairs for part in pair]),
        offsets=offsets_of([len(prompt) + len(response) for prompt, response in pairs]),
        prompt_lengths=np.array([len(prompt) for prompt, _ in pairs], dtype=np.int32),
    )
