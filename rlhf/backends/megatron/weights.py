"""Hugging Face <-> Megatron weights, tensor by tensor, by one declarative table.

A rule knows how several Hugging Face tensors make one Megatron tensor and back, and along which dimension each of them
is split over tensor-parallel ranks. Splitting comes first: a rank's parts make its tensor just as whole parts make the
whole one. A new dense family with the same parts needs no new rule, only a row where it has other names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as F

from rlhf.assets import weight_files
from rlhf.backends.megatron.architecture import Architecture
from rlhf.backends.megatron.partition import Partition
from rlhf.errors import ModelError

WHOLE = Partition()
ADAPTER = "adapter"
"""The attribute of a linear layer that holds its LoRA adapter."""


class Same:
    """One tensor, as it is.

    Args:
        split: dimension of the Hugging Face tensors that ranks divide; None: every rank has all of it.
    """

    def __init__(self, split: int | None = None) -> None:
        self.split = split

    def part(self, architecture: Architecture, whole: Tensor, partition: Partition) -> Tensor:
        """This rank's part of a Hugging Face tensor."""
        return whole if self.split is None else whole.chunk(partition.size, self.split)[partition.rank]

    def whole(self, architecture: Architecture, part: Tensor, partition: Partition) -> Tensor:
        """The Hugging Face tensor of every rank's parts. A collective: all ranks call it."""
        if self.split is None or partition.size == 1:
            return part
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(partition.size)]
        dist.all_gather(parts, part, group=partition.group)
        return torch.cat(parts, self.split)

    def to_megatron(self, architecture: Architecture, parts: list[Tensor]) -> Tensor:
        return parts[0]

    def to_hf(self, architecture: Architecture, tensor: Tensor) -> list[Tensor]:
        return [tensor]


class Vocabulary(Same):
    """One row a token, the last rank's with zeros below: ranks have as many rows each."""

    def __init__(self) -> None:
        super().__init__(split=0)

    def part(self, architecture: Architecture, whole: Tensor, partition: Partition) -> Tensor:
        if len(whole) != architecture.vocab:
            raise ModelError(
                f"the checkpoint's embedding or head has {len(whole)} rows, its config.json says vocab_size="
                f"{architecture.vocab}; they don't belong together"
            )
        padding = partition.padded_vocab(architecture) - len(whole)
        return super().part(architecture, F.pad(whole, (0, 0, 0, padding)), partition)

    def whole(self, architecture: Architecture, part: Tensor, partition: Partition) -> Tensor:
        return super().whole(architecture, part, partition)[: architecture.vocab]


class GroupedQKV(Same):
    """q, k, v -> for each key-value group (of this rank) its query heads, its key head, its value head."""

    def to_megatron(self, architecture: Architecture, parts: list[Tensor]) -> Tensor:
        groups = len(parts[1]) // architecture.head_dim
        grouped = [part.view(groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def to_hf(self, architecture: Architecture, tensor: Tensor) -> list[Tensor]:
        head = architecture.head_dim
        heads_of_group = architecture.heads // architecture.kv_groups + 2
        grouped = tensor.view(-1, heads_of_group * head, *tensor.shape[1:])
        return [part.flatten(0, 1) for part in grouped.split([grouped.shape[1] - 2 * head, head, head], dim=1)]


class Stacked(Same):
    """Gate and up projection, one above the other."""

    def to_megatron(self, architecture: Architecture, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts)

    def to_hf(self, architecture: Architecture, tensor: Tensor) -> list[Tensor]:
        return list(tensor.chunk(2))


_LAYER, _HF_LAYER = "decoder.layers.{layer}.", "model.layers.{layer}."
_ATTENTION, _MLP = _HF_LAYER + "self_attn.", _HF_LAYER + "mlp."

TABLE: dict[str, tuple[Same, list[str]]] = {
    "embedding.word_embeddings.weight": (Vocabulary(), ["model.embed_tokens.weight"]),
    "output_layer.weight": (Vocabulary(), ["lm_head.weight"]),
    "decoder.final_layernorm.weight": (Same(), ["model.norm.weight"]),
    _LAYER + "input_layernorm.weight": (Same(), [_HF_LAYER + "input_layernorm.weight"]),
    _LAYER + "pre_mlp_layernorm.weight": (Same(), [_HF_LAYER + "post_attention_layernorm.weight"]),
    _LAYER + "self_attention.linear_qkv.weight": (GroupedQKV(0), [_ATTENTION + f"{p}_proj.weight" for p in "qkv"]),
    _LAYER + "self_attention.linear_qkv.bias": (GroupedQKV(0), [_ATTENTION + f"{p}_proj.bias" for p in "qkv"]),
    _LAYER + "self_attention.linear_proj.weight": (Same(1), [_ATTENTION + "o_proj.weight"]),
    _LAYER + "self_attention.linear_proj.bias": (Same(), [_ATTENTION + "o_proj.bias"]),
    _LAYER + "self_attention.q_layernorm.weight": (Same(), [_ATTENTION + "q_norm.weight"]),
    _LAYER + "self_attention.k_layernorm.weight": (Same(), [_ATTENTION + "k_norm.weight"]),
    _LAYER + "mlp.linear_fc1.weight": (Stacked(0), [_MLP + "gate_proj.weight", _MLP + "up_proj.weight"]),
    _LAYER + "mlp.linear_fc1.bias": (Stacked(0), [_MLP + "gate_proj.bias", _MLP + "up_proj.bias"]),
    _LAYER + "mlp.linear_fc2.weight": (Same(1), [_MLP + "down_proj.weight"]),
    _LAYER + "mlp.linear_fc2.bias": (Same(), [_MLP + "down_proj.bias"]),
}


def rule_of(megatron_name: str) -> tuple[Same, list[str]]:
    """The rule and the Hugging Face names of one Megatron parameter."""
    layer = re.search(r"layers\.(\d+)\.", megatron_name)
    rule, names = TABLE[re.sub(r"layers\.\d+\.", "layers.{layer}.", megatron_name)]
    return rule, [name.format(layer=layer[1]) if layer else name for name in names]


class Checkpoint:
    """Reads single tensors of a Hugging Face folder (one safetensors file, or shards with an index)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of: dict[str, Any] = {}
        for path in weight_files(folder):
            file = safe_open(path, "pt")
            self._file_of |= dict.fromkeys(file.keys(), file)

    @property
    def names(self) -> set[str]:
        return set(self._file_of)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._file_of:
            raise ModelError(f"{self.folder}: the checkpoint has no tensor {name}")
        return self._file_of[name].get_tensor(name)


def base_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that the table knows: all but an adapter's (`lora.py`)."""
    return [(name, parameter) for name, parameter in model.named_parameters() if f".{ADAPTER}." not in name]


@torch.no_grad()
def load(
    model: nn.Module,
    architecture: Architecture,
    tensor_of: Callable[[str], Tensor],
    partition: Partition = WHOLE,
) -> None:
    """Fill `model`, or this rank's part of it, from Hugging Face tensors, asked for by name one at a time.

    Raises:
        ModelError: a tensor is missing or has another shape than the architecture says.
    """
    for name, parameter in base_parameters(model):
        rule, hf_names = rule_of(name)
        parts = [rule.part(architecture, tensor_of(hf_name), partition) for hf_name in hf_names]
        tensor = rule.to_megatron(architecture, parts)
        if tensor.shape != parameter.shape:
            raise ModelError(
                f"checkpoint tensors {', '.join(hf_names)} make a shape {tuple(tensor.shape)}, the model's {name} has "
                f"{tuple(parameter.shape)}; config.json and the weights don't belong together"
            )
        parameter.copy_(tensor)
        # Megatron leaves this mark when it initialises a weight, which loading stands in for. The gradient norm adds up
        # what is marked over the ranks, and counts the rest once.
        parameter.tensor_model_parallel = rule.split is not None  # type: ignore[attr-defined]


@torch.no_grad()
def export(model: nn.Module, architecture: Architecture, partition: Partition = WHOLE) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, tensor) of every weight, one Megatron tensor at a time; views where possible.

    Every rank of the model has to go through it, and gets the whole tensors. With LoRA they have the adapter in them,
    and are new.
    """
    for name, parameter in base_parameters(model):
        rule, hf_names = rule_of(name)
        parts = rule.to_hf(architecture, parameter.detach())
        adapter = getattr(model.get_submodule(name.rpartition(".")[0]), ADAPTER, None)
        if adapter is not None and name.endswith(".weight"):
            parts = adapter.merge(parts)
        wholes = (rule.whole(architecture, part, partition) for part in parts)
        yield from zip(hf_names, wholes, strict=True)


def in_parts(
    tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype, max_bytes: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """A few named tensors at a time, as `dtype`: about `max_bytes` of them, one at least."""
    part: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        tensor = tensor.to(dtype)
        if part and size + tensor.nbytes > max_bytes:
            yield part
            part, size = [], 0
        part.append((name, tensor))
        size += tensor.nbytes
    yield part
