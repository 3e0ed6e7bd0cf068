"""Builders for tests that train a real Megatron model in the test's own process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf.algos.gkd import GKDObjective
from rlhf.backends.megatron import lora
from rlhf.backends.megatron.adapters import Adapter, factor_shapes
from rlhf.backends.megatron.architecture import Architecture
from rlhf.backends.megatron.device import megatron_device
from rlhf.backends.megatron.setup import TrainerSetup
from rlhf.backends.megatron.teachers import AverageAdapterTeacher
from rlhf.backends.megatron.trainer import MegatronTrainer
from rlhf.batching import plan_batch, token_mean_weights
from rlhf.config.distill import Tail
from rlhf.config.lora import ALL_LINEAR
from rlhf.config.teacher import SelfTeacher
from rlhf.config.train import Train
from rlhf.data.table import PromptTable, pack
from rlhf.distill.fullvocab import FullVocabDistill
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


def table_of(sequences: Sequences, teacher_prompts: list[np.ndarray | None]) -> PromptTable:
    """The rows that the sequences were made of."""
    n = len(sequences)
    return pack(
        [row[:length] for row, length in zip(sequences.rows(), sequences.prompt_lengths, strict=True)],
        [None] * n,
        truncated=[False] * n,
        wheres=[""] * n,
        columns=[{}] * n,
        teacher_prompts=teacher_prompts,
    )


def privileged_prompts(rows: int, seed: int = 7) -> list[np.ndarray | None]:
    """Random prompts of ragged lengths for the teacher alone; every third row or so has none."""
    rng = np.random.default_rng(seed)
    lengths = [(9, None, 17, 2, 30, None, 14)[row % 7] for row in range(rows)]
    return [None if length is None else rng.integers(0, 250, length).astype(np.int32) for length in lengths]


def save_tiny_model(folder: Path, family: str, seed: int = 1, **shape: object) -> Path:
    """Write a random Hugging Face folder of a model type (qwen2, qwen3, ...); `shape` overrides its configuration."""
    torch.manual_seed(seed)
    tiny: dict[str, object] = dict(
        vocab_size=250,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    if family == "qwen3":
        tiny["head_dim"] = 32
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **tiny | shape))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):  # away from ones and zeros, so that a lost one shows
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def experience_of(
    sequences: Sequences,
    *,
    micro_batch_tokens: int = 4096,
    padding_free: bool = True,
    step: int = 1,
    data_parallel: int = 1,
    pad_multiple: int = 1,
) -> Experience:
    """One optimizer step on these sequences."""
    plan = plan_batch(
        sequences.lengths,
        data_parallel=data_parallel,
        micro_batch_tokens=micro_batch_tokens,
        padding_free=padding_free,
        pad_multiple=pad_multiple,
    )
    return Experience(
        step=step,
        version=step - 1,
        sequences=sequences,
        minibatches=(MiniBatch(plan, token_mean_weights(sequences)),),
    )


def objective(k: int | None = 8, beta: float = 0.5, tail: Tail = Tail.bucket) -> GKDObjective:
    """`k`: the teacher's top k; None: its whole vocabulary."""
    distill = FullVocabDistill(1.0) if k is None else TopKDistill(k=k, tail=tail, temperature=1.0)
    return GKDObjective(beta=beta, distill=distill, sampler_temperature=1.0)


def trainer_setup(
    student: Path,
    teacher: Path | None,
    train: Train | None = None,
    steps: int = 100,
    offload_teacher: bool = False,
    self_teacher: SelfTeacher | None = None,
    adapter: Adapter | None = None,
    base_teacher: bool = False,
    **kwargs: object,
) -> TrainerSetup:
    return TrainerSetup(
        student=student,
        teacher=teacher,
        train=train or Train(lr=1e-3),
        objective=objective(**kwargs),  # type: ignore[arg-type]
        steps=steps,
        seed=0,
        offload_teacher=offload_teacher,
        self_teacher=self_teacher,
        adapter=adapter,
        base_teacher=base_teacher,
    )


def adapter_of(**values: object) -> Adapter:
    """LoRA of rank 4 on all linear modules, unless told otherwise."""
    defaults: dict[str, object] = dict(rank=4, alpha=8.0, dropout=0.0, modules=ALL_LINEAR, base="base")
    return Adapter(**defaults | values)  # type: ignore[arg-type]


def random_factors(architecture: Architecture, adapter: Adapter, seed: int = 5) -> dict[str, Tensor]:
    """An adapter that has moved: a new one's B is zero, and so is the gradient of its A."""
    generator = torch.Generator().manual_seed(seed)
    shapes = factor_shapes(architecture, adapter)
    return {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def set_factors(trainer: MegatronTrainer, factors: dict[str, Tensor]) -> None:
    """Put an adapter, by peft's names, on a trainer that hasn't taken a step, as if it had begun there."""
    with megatron_device():
        model = trainer.student
        lora.fill(model.module, model.architecture, factors.__getitem__, model.partition)
        trainer.optimizer.reload_model_params()
        if isinstance(trainer.teacher, AverageAdapterTeacher):
            trainer.teacher = AverageAdapterTeacher(model, trainer.teacher.decay)
