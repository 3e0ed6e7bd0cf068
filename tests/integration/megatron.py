"""Builders for tests that train a real Megatron model in the test's own process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from megatron.core import parallel_state

from rlhf.algos.gkd import GKDObjective
from rlhf.backends.megatron.setup import TrainerSetup
from rlhf.batching import plan_batch, token_mean_weights
from rlhf.config.distill import Tail
from rlhf.config.train import Train
from rlhf.distill.topk import TopKDistill
from rlhf.types import Experience, MiniBatch, Sequences, offsets_of


def end_groups() -> None:
    """End the process groups that a trainer made in the test's process, if there are any."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        parallel_state.destroy_model_parallel()


def random_sequences(vocab: int, lengths: list[tuple[int, int]], seed: int = 0) -> Sequences:
    """Random token ids: (prompt length, response length) a sample."""
    rng = np.random.default_rng(seed)
    total = [prompt + response for prompt, response in lengths]
    return Sequences(
        sample_ids=np.arange(100, 100 + len(lengths), dtype=np.int64),
        tokens=rng.integers(0, vocab, sum(total)).astype(np.int32),
        offsets=offsets_of(total),
        prompt_lengths=np.array([prompt for prompt, _ in lengths], dtype=np.int32),
    )


def experience_of(
    sequences: Sequences, *, micro_batch_tokens: int = 4096, padding_free: bool = True, step: int = 1
) -> Experience:
    """One optimizer step on these sequences."""
    plan = plan_batch(
        sequences.lengths, data_parallel=1, micro_batch_tokens=micro_batch_tokens, padding_free=padding_free
    )
    return Experience(
        step=step,
        version=step - 1,
        sequences=sequences,
        minibatches=(MiniBatch(plan, token_mean_weights(sequences)),),
    )


def objective(k: int = 8, beta: float = 0.5, tail: Tail = Tail.bucket) -> GKDObjective:
    return GKDObjective(beta=beta, distill=TopKDistill(k=k, tail=tail, temperature=1.0), sampler_temperature=1.0)


def trainer_setup(
    student: Path, teacher: Path, train: Train | None = None, steps: int = 100, **kwargs: object
) -> TrainerSetup:
    return TrainerSetup(
        student=student,
        teacher=teacher,
        train=train or Train(lr=1e-3),
        objective=objective(**kwargs),  # type: ignore[arg-type]
        steps=steps,
        seed=0,
    )
