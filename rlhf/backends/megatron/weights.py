"""Hugging Face <-> Megatron weights, tensor by tensor, by one declarative table.

A rule knows how several Hugging Face tensors make one Megatron tensor and back. A new dense family with the same
parts needs no new rule, only a row where it has other names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from rlhf.assets import weight_files
from rlhf.backends.megatron.architecture import Architecture
from rlhf.errors import ModelError


class Same:
    """One tensor, as it is."""

    def to_megatron(self, architecture: Architecture, parts: list[Tensor]) -> Tensor:
        return parts[0]

    def to_hf(self, architecture: Architecture, tensor: Tensor) -> list[Tensor]:
        return [tensor]


class GroupedQKV(Same):
    """q, k, v -> for each key-value group its query heads, its key head, its value head."""

    def to_megatron(self, architecture: Architecture, parts: list[Tensor]) -> Tensor:
        grouped = [part.view(architecture.kv_groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def to_hf(self, architecture: Architecture, tensor: Tensor) -> list[Tensor]:
        grouped = tensor.view(architecture.kv_groups, -1, *tensor.shape[1:])
        head = architecture.head_dim
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
    "embedding.word_embeddings.weight": (Same(), ["model.embed_tokens.weight"]),
    "output_layer.weight": (Same(), ["lm_head.weight"]),
    "decoder.final_layernorm.weight": (Same(), ["model.norm.weight"]),
    _LAYER + "input_layernorm.weight": (Same(), [_HF_LAYER + "input_layernorm.weight"]),
    _LAYER + "pre_mlp_layernorm.weight": (Same(), [_HF_LAYER + "post_attention_layernorm.weight"]),
    _LAYER + "self_attention.linear_qkv.weight": (GroupedQKV(), [_ATTENTION + f"{p}_proj.weight" for p in "qkv"]),
    _LAYER + "self_attention.linear_qkv.bias": (GroupedQKV(), [_ATTENTION + f"{p}_proj.bias" for p in "qkv"]),
    _LAYER + "self_attention.linear_proj.weight": (Same(), [_ATTENTION + "o_proj.weight"]),
    _LAYER + "self_attention.linear_proj.bias": (Same(), [_ATTENTION + "o_proj.bias"]),
    _LAYER + "self_attention.q_layernorm.weight": (Same(), [_ATTENTION + "q_norm.weight"]),
    _LAYER + "self_attention.k_layernorm.weight": (Same(), [_ATTENTION + "k_norm.weight"]),
    _LAYER + "mlp.linear_fc1.weight": (Stacked(), [_MLP + "gate_proj.weight", _MLP + "up_proj.weight"]),
    _LAYER + "mlp.linear_fc1.bias": (Stacked(), [_MLP + "gate_proj.bias", _MLP + "up_proj.bias"]),
    _LAYER + "mlp.linear_fc2.weight": (Same(), [_MLP + "down_proj.weight"]),
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


@torch.no_grad()
def load(model: nn.Module, architecture: Architecture, tensor_of: Callable[[str], Tensor]) -> None:
    """Fill `model` from Hugging Face tensors, asked for by name one at a time.

    Raises:
        ModelError: a tensor is missing or has another shape than the architecture says.
    """
    for name, parameter in model.named_parameters():
        rule, hf_names = rule_of(name)
        tensor = rule.to_megatron(architecture, [tensor_of(hf_name) for hf_name in hf_names])
        if tensor.shape != parameter.shape:
            raise ModelError(
                f"checkpoint tensors {', '.join(hf_names)} make a shape {tuple(tensor.shape)}, the model's {name} has "
                f"{tuple(parameter.shape)}; config.json and the weights don't belong together"
            )
        parameter.copy_(tensor)


@torch.no_grad()
def export(model: nn.Module, architecture: Architecture) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, tensor) of every weight, one Megatron tensor at a time; views where possible."""
    for name, parameter in model.named_parameters():
        rule, hf_names = rule_of(name)
        yield from zip(hf_names, rule.to_hf(architecture, parameter.detach()), strict=True)
