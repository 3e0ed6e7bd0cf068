"""Everything that can be found wrong before a process or a GPU is taken: checkpoints, tokenizers, rows, lengths."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf import assets, tokenizers
from rlhf.backends.megatron.architecture import Architecture
from rlhf.batching import steps_of
from rlhf.config.checks import check_schedule
from rlhf.config.cluster import Device
from rlhf.config.distill import TopK
from rlhf.config.run import MOST_STEPS, EvalResponses, Run
from rlhf.config.teacher import ColocatedTeacher
from rlhf.data.dataset import Dataset, load
from rlhf.errors import ConfigError, ModelError
from rlhf.memory import check_memory

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Of vLLM's CPU attention (0.32); the driver can't ask it without importing vLLM."""


@dataclass(frozen=True)
class Inputs:
    """What the run works with, checked."""

    student: Path
    teacher: Path | None
    architecture: Architecture
    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    dataset: Dataset
    steps: int
    """Optimizer steps of the run, whether `run.steps` or `run.epochs` says so."""


def check_inputs(run: Run) -> Inputs:
    """Resolve and check everything the run names.

    Raises:
        ModelError, DataError, ConfigError: in one line, with the key and the remedy.
    """
    student = assets.resolve(run.model.path, run.model.drop_layers)
    architecture = Architecture.from_config(assets.read_config(student), f"model.path={run.model.path}")
    _check_lengths(run, architecture, f"model.path={run.model.path}")
    if run.cluster.device is Device.cpu and architecture.head_dim not in CPU_HEAD_DIMS:
        raise ModelError(
            f"model.path={run.model.path} has head_dim={architecture.head_dim}; vLLM on CPU attends with "
            f"{', '.join(map(str, CPU_HEAD_DIMS))} only"
        )
    check_memory(run, architecture)
    teacher = _check_teacher(run, student, architecture) if isinstance(run.teacher, ColocatedTeacher) else None
    tokenizer = tokenizers.load_tokenizer(student)
    stop_token_ids = tokenizers.stop_token_ids(student, tokenizer)
    if not stop_token_ids:
        raise ModelError(f"model.path={run.model.path} names no end-of-sequence token; add eos_token_id to its config")
    extra = tokenizers.extra_stop_token_ids(tokenizer, run.rollout.stop_token_ids, run.rollout.stop_tokens)
    stop_token_ids = tuple(sorted({*stop_token_ids, *extra}))
    dataset = load(
        run.data,
        tokenizer,
        seed=run.run.seed,
        eval_samples=run.eval.samples,
        eval_needs_response=run.eval.samples > 0 and run.eval.responses is EvalResponses.dataset,
    )
    return Inputs(student, teacher, architecture, tokenizer, stop_token_ids, dataset, _steps(run, dataset))


def _steps(run: Run, dataset: Dataset) -> int:
    """The length of the run in optimizer steps, once the rows are counted."""
    if run.run.steps is not None:
        return run.run.steps
    assert run.run.epochs is not None and dataset.train_rows is not None, "checked when the run was composed"
    steps = steps_of(run.run.epochs, dataset.train_rows, run.train.global_batch_samples)
    said = f"run.epochs={run.run.epochs}, which is {steps} steps over {dataset.train_rows} rows"
    if steps > MOST_STEPS:
        raise ConfigError(f"{said}: more than {MOST_STEPS}; lower run.epochs")
    check_schedule(run.train, steps, said)
    return steps


def _check_teacher(run: Run, student: Path, architecture: Architecture) -> Path:
    """The teacher's folder, once it is known to fit the student."""
    name = f"teacher.model={run.teacher.model}"
    folder = assets.resolve(run.teacher.model, key="teacher.model")
    teacher = Architecture.from_config(assets.read_config(folder), name)
    _check_lengths(run, teacher, name)
    try:
        tokenizers.check_same_tokens(student, folder)
    except ModelError as error:
        raise ModelError(f"model.path={run.model.path}, {name}: {error}") from error
    shared = min(architecture.vocab, teacher.vocab)
    if isinstance(run.distill, TopK) and run.distill.k > shared:
        raise ConfigError(
            f"distill.k={run.distill.k} exceeds the vocabulary of {shared} tokens; use distill.k={shared} or less, or "
            "distill=fullvocab"
        )
    return folder


def _check_lengths(run: Run, architecture: Architecture, name: str) -> None:
    """Every sequence the run may make has a position for each token."""
    budgets = {"rollout.max_new_tokens": run.rollout.max_new_tokens}
    if run.eval.samples > 0 and run.eval.responses is EvalResponses.dataset:
        budgets["eval.max_response_tokens"] = run.eval.max_response_tokens
    for key, tokens in budgets.items():
        if run.data.max_length + tokens > architecture.max_positions:
            raise ConfigError(
                f"data.max_length={run.data.max_length} + {key}={tokens} is more than the "
                f"{architecture.max_positions} positions of {name}; lower one of them"
            )
