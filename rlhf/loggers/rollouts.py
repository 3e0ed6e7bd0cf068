"""`rollouts.jsonl`: what the student wrote and was trained on, one object a sample, to read or to train on again.

`{"step": 3, "sample_id": 17, "prompt": "...", "response": "...", "prompt_tokens": [...], "response_tokens": [...],
"logprobs": [...]}`; the log-probabilities are those of the sampler, one a response token; null where it
is a reference response. With rewards, `"reward": 0.5`. Of a conversation, `response` is all that follows the prompt,
`"turns": [{"model": "..."}, {"environment": "..."}, ...]` is the same turn by turn, `turn_tokens` counts each one's
tokens, and log-probabilities are those of the model's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from rlhf.types import Experience, Sequences, offsets_of, ragged

FILE = "rollouts.jsonl"
SPEAKERS = ("model", "environment")
"""In turn."""


def recorded(
    source: Iterable[Experience], run_dir: Path, tokenizer: Any, warn: Callable[[str], None]
) -> Iterator[Experience]:
    """The experiences of `source`, each written down before it is trained on."""
    writes = True
    for experience in source:
        if writes:
            rows = rows_of(experience.step, experience.sequences, tokenizer, experience.rewards)
            try:
                with (run_dir / FILE).open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(row) + "\n" for row in rows)
            except OSError as error:  # like other sinks: not worth hours of training
                writes = False
                warn(f"logger.rollouts failed and is off for the rest of the run: {error.strerror}")
        yield experience


def rows_of(
    step: int, sequences: Sequences, tokenizer: Any, rewards: Float32[np.ndarray, " n"] | None = None
) -> Iterator[dict[str, Any]]:
    """One object a sample."""
    logprobs = None
    if sequences.logprobs is not None:
        logprobs = list(ragged(sequences.response_offsets, sequences.logprobs))
    for index, (tokens, turns) in enumerate(zip(sequences.rows(), sequences.turns(), strict=True)):
        prompt, response = np.split(tokens, [sequences.prompt_lengths[index]])
        of_turns = {}
        if sequences.written is not None:
            texts = [{SPEAKERS[number % 2]: tokenizer.decode(turn)} for number, turn in enumerate(turns)]
            of_turns = {"turns": texts, "turn_tokens": list(map(len, turns))}
        yield {
            "step": step,
            "sample_id": int(sequences.sample_ids[index]),
            "prompt": tokenizer.decode(prompt),
            "response": tokenizer.decode(response),
            **of_turns,
            "prompt_tokens": prompt.tolist(),
            "response_tokens": response.tolist(),
            "logprobs": None if logprobs is None else [round(float(value), 6) for value in logprobs[index]],
            **({} if rewards is None else {"reward": float(rewards[index])}),
        }


def read(run_dir: Path) -> dict[int, Sequences]:
    """Step -> its samples, as they were."""
    steps: dict[int, list[dict[str, Any]]] = {}
    for line in (run_dir / FILE).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        steps.setdefault(row["step"], []).append(row)
    return {step: _sequences(rows) for step, rows in steps.items()}


def _sequences(rows: list[dict[str, Any]]) -> Sequences:
    samples = [row["prompt_tokens"] + row["response_tokens"] for row in rows]
    logprobs = [row["logprobs"] for row in rows]
    masks = [
        np.repeat(np.arange(len(row["turn_tokens"])) % 2 == 0, row["turn_tokens"])
        for row in rows
        if "turn_tokens" in row
    ]
    return Sequences(
        sample_ids=np.array([row["sample_id"] for row in rows], dtype=np.int64),
        tokens=np.concatenate(samples).astype(np.int32),
        offsets=offsets_of([len(sample) for sample in samples]),
        prompt_lengths=np.array([len(row["prompt_tokens"]) for row in rows], dtype=np.int32),
        logprobs=None if logprobs[0] is None else np.concatenate(logprobs).astype(np.float32),
        written=np.concatenate(masks) if masks else None,
    )
