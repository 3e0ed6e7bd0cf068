"""A Hugging Face `config.json` -> the numbers a Megatron model is built from, or a refusal that names the field.

Pure JSON work, so that the driver can refuse a checkpoint before any process starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf.errors import ModelError


@dataclass(frozen=True)
class Family:
    """What a dense decoder family has beyond Llama's layout."""

    qkv_bias: bool = False
    qk_norm: bool = False


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(qkv_bias=True),
    "Qwen3ForCausalLM": Family(qk_norm=True),
}

# Fields that change what a model computes, with the only value the layer spec implements.
IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1, 1.0, None),
    "attention_multiplier": (1.0, None),
    "logits_scaling": (1.0, None),
    "final_logit_softcapping": (None,),
    "quantization_config": (None,),
}


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's stretched RoPE (arXiv 2407.21783, section 3.4.2; the numbers are in the checkpoint's config.json)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    @staticmethod
    def from_config(rope: Mapping[str, Any]) -> Llama3Scaling:
        """Raises KeyError for a missing number."""
        return Llama3Scaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_positions=int(rope["original_max_position_embeddings"]),
        )


@dataclass(frozen=True)
class Architecture:
    """Everything the layer spec and the weight table need to know of a checkpoint."""

    name: str
    layers: int
    hidden: int
    ffn_hidden: int
    heads: int
    kv_groups: int
    head_dim: int
    vocab: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    max_positions: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool

    @property
    def split_numbers(self) -> dict[str, int]:
        """What tensor-parallel ranks must divide, by its name in config.json. The vocabulary is padded instead."""
        return {
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_groups,
            "intermediate_size": self.ffn_hidden,
        }

    @staticmethod
    def from_config(config: Mapping[str, Any], where: str) -> Architecture:
        """Read a checkpoint's `config.json`.

        Args:
            config: the parsed file.
            where: the checkpoint as the user wrote it, for messages.

        Raises:
            ModelError: unknown architecture, a missing field, or a field whose value isn't implemented.
        """
        names = config.get("architectures") or ["(none)"]
        family = FAMILIES.get(names[0])
        if family is None:
            raise ModelError(f"{where}: architecture {names[0]} is not supported; supported: {', '.join(FAMILIES)}")
        for field, values in IMPLEMENTED.items():
            if field in config and config[field] not in values:
                raise ModelError(f"{where}: config.json has {field}={config[field]!r}, implemented: {values[0]!r}")
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type not in ("default", "llama3"):
            raise ModelError(f"{where}: config.json has rope_type={rope_type!r}, implemented: 'default', 'llama3'")
        try:
            heads = int(config["num_attention_heads"])
            return Architecture(
                name=names[0],
                layers=int(config["num_hidden_layers"]),
                hidden=int(config["hidden_size"]),
                ffn_hidden=int(config["intermediate_size"]),
                heads=heads,
                kv_groups=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
                vocab=int(config["vocab_size"]),
                norm_eps=float(config["rms_norm_eps"]),
                rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
                rope_scaling=Llama3Scaling.from_config(rope) if rope_type == "llama3" else None,
                max_positions=int(config["max_position_embeddings"]),
                tied=bool(config.get("tie_word_embeddings", False)),
                qkv_bias=family.qkv_bias,
                qk_norm=family.qk_norm,
            )
        except KeyError as missing:
            raise ModelError(f"{where}: config.json has no {missing.args[0]}") from None
