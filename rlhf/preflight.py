"""Everything that can be found wrong before a process or a GPU is taken: checkpoints, tokenizers, rows, lengths."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf import assets, tokenizers
from rlhf.backends.megatron.architecture import Architecture
from rlhf.config.distill import TopK
from rlhf.config.run import EvalResponses, Run
from rlhf.config.teacher import ColocatedTeacher
from rlhf.data.dataset import Dataset, load
from rlhf.errors import ConfigError, ModelError


@dataclass(frozen=True)
class Inputs:
    """What the run works with, checked."""

    student: Path
    teacher: Path | None
    architecture: Architecture
    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    dataset: Dataset


def check_inputs(run: Run) -> Inputs:
    """Resolve and check everything the run names.

    Raises:
        ModelError, DataError, ConfigError: in one line, with the key and the remedy.
    """
    student = assets.resolve(run.model.path, run.model.drop_layers)
    architecture = Architecture.from_config(assets.read_config(student), f"model.path={run.model.path}")
    teacher = _check_teacher(run, student) if isinstance(run.teacher, ColocatedTeacher) else None
    _check_lengths(run, architecture)
    if isinstance(run.distill, TopK) and run.distill.k > architecture.vocab:
        raise ConfigError(
            f"distill.k={run.distill.k} exceeds the vocabulary of {architecture.vocab} tokens; "
            f"use distill.k={architecture.vocab} or less, or distill=fullvocab"
        )
    tokenizer = tokenizers.load_tokenizer(student)
    stop_token_ids = tokenizers.stop_token_ids(student, tokenizer)
    if not stop_token_ids:
        raise ModelError(f"model.path={run.model.path} names no end-of-sequence token; add eos_token_id to its config")
    dataset = load(
        run.data,
        tokenizer,
        seed=run.run.seed,
        eval_samples=run.eval.samples,
        eval_needs_response=run.eval.samples > 0 and run.eval.responses is EvalResponses.dataset,
    )
    return Inputs(student, teacher, architecture, tokenizer, stop_token_ids, dataset)


def _check_teacher(run: Run, student: Path) -> Path:
    """The teacher's folder, once it is known to fit the student."""
    teacher = assets.resolve(run.teacher.model, key="teacher.model")
    Architecture.from_config(assets.read_config(teacher), f"teacher.model={run.teacher.model}")
    try:
        tokenizers.check_same_tokens(student, teacher)
    except ModelError as error:
        raise ModelError(f"model.path={run.model.path}, teacher.model={run.teacher.model}: {error}") from error
    return teacher


def _check_lengths(run: Run, architecture: Architecture) -> None:
    longest = run.data.max_length + run.rollout.max_new_tokens
    if longest > architecture.max_positions:
        raise ConfigError(
            f"data.max_length={run.data.max_length} + rollout.max_new_tokens={run.rollout.max_new_tokens} is more than "
            f"the {architecture.max_positions} positions of model.path={run.model.path}; lower one of them"
        )
