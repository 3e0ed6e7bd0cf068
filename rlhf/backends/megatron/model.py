"""A GPTModel of a Hugging Face checkpoint, or this process's part of it, and the hidden rows and head it gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf.assets import read_config
from rlhf.backends.megatron import layers, lora, weights
from rlhf.backends.megatron.adapters import Adapter
from rlhf.backends.megatron.architecture import Architecture
from rlhf.backends.megatron.partition import Partition
from rlhf.backends.megatron.tensors import head_name
from rlhf.batching import MicroBatch
from rlhf.losses.fused.projection import compute_dtype
from rlhf.losses.heads import VocabHead


@dataclass
class Model:
    """A GPTModel with what its weights mean."""

    module: Any
    architecture: Architecture
    partition: Partition = weights.WHOLE
    adapter: Adapter | None = None
    """On a frozen base; None: every weight is trained."""

    def hidden_rows(self, micro: MicroBatch) -> Tensor:
        """Final hidden states [rows, hidden] of the positions that predict response tokens."""
        return select_rows(forward(self.module, micro), micro)

    def head(self, hidden: Tensor) -> VocabHead:
        return VocabHead(
            hidden=hidden,
            weight=layers.head_weight(self.module),
            tp_group=self.partition.group,
            vocab_size=self.architecture.vocab,
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) of every weight, an adapter merged into copies; all processes that share
        the model go through it."""
        return weights.export(self.module, self.architecture, self.partition)

    def adapter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(peft's name, whole tensor) of the adapter; likewise."""
        return lora.tensors(self.module, self.architecture, self.partition)


@dataclass
class LoneHead:
    """This process's part of a model's LM head, without the model."""

    weight: Tensor
    architecture: Architecture
    partition: Partition

    def head(self, hidden: Tensor) -> VocabHead:
        return VocabHead(hidden, self.weight, tp_group=self.partition.group, vocab_size=self.architecture.vocab)


def load_head(folder: Path, dtype: torch.dtype, partition: Partition = weights.WHOLE) -> LoneHead:
    """Of a Hugging Face folder: its output layer, or the embedding that it is tied to; in the format of the losses."""
    architecture = architecture_of(folder)
    whole = weights.Checkpoint(folder)[head_name(architecture)]
    part = weights.Vocabulary().part(architecture, whole, partition)
    weight = part.to(torch.cuda.current_device(), dtype, copy=True)
    return LoneHead(weight.to(compute_dtype(weight)), architecture, partition)


def forward(module: Any, micro: MicroBatch) -> Tensor:
    """Run a GPTModel (or its DDP wrapper) on a micro-batch -> final hidden states [b, s, hidden]."""
    device = torch.cuda.current_device()
    packed = None if micro.cu_seqlens is None else layers.PackedRows.of(torch.from_numpy(micro.cu_seqlens).to(device))
    tokens = torch.from_numpy(micro.tokens).to(device)
    return module(tokens, torch.from_numpy(micro.position_ids).to(device), None, packed_seq_params=packed)


def select_rows(hidden: Tensor, micro: MicroBatch) -> Tensor:
    """[b, s, hidden] -> [rows, hidden]: response rows only, before the head ever sees them."""
    return hidden.flatten(0, 1)[torch.from_numpy(micro.rows).to(hidden.device)]


def architecture_of(folder: Path) -> Architecture:
    return Architecture.from_config(read_config(folder), str(folder))


def load_model(
    folder: Path,
    dtype: torch.dtype,
    partition: Partition = weights.WHOLE,
    adapter: Adapter | None = None,
    seed: int = 0,
) -> Model:
    """Build the architecture of a Hugging Face folder, or this rank's part of it, and fill it with its weights.

    Args:
        seed: of a new adapter.
    """
    architecture = architecture_of(folder)
    module = layers.build_model(architecture, dtype, partition)
    weights.load(module, architecture, weights.Checkpoint(folder).__getitem__, partition)
    if adapter is not None:
        lora.attach(module, architecture, adapter, partition, seed)
    return Model(module, architecture, partition, adapter)
