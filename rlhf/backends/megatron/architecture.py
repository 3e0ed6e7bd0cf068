"""A Hugging Face `config.json` -> the numbers a Megatron model is built from, or a refusal that names the field.

Pure JSON work, so that the driver can refuse a checkpoint before any process starts. Every field of the file is one
of four things: read here; a field with one implemented value; one that says nothing of the computation; or one that
transformers' configuration class of this family doesn't have, which therefore can't change what the model computes.
Any other field is refused (`refuse_unknown_fields`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf.backends.megatron.fields import Fields, shown
from rlhf.backends.megatron.rope import OBJECTS, TOP_LEVEL, Llama3Scaling, read_rope
from rlhf.errors import ModelError, one_line


@dataclass(frozen=True)
class Family:
    """What a dense decoder family has beyond Llama's layout. A new one is a row of FAMILIES."""

    model_type: str
    qkv_bias: bool = False
    """Query, key and value always have a bias, and the output projection never."""
    optional_biases: bool = False
    """A checkpoint may turn on attention_bias and mlp_bias. (vLLM's Qwen3 would lose the output projection's.)"""
    qk_norm: bool = False
    window_switch: bool = False
    """`sliding_window` counts only where `use_sliding_window` is true."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What transformers takes where the file lacks the field, if it isn't Llama's."""


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", optional_biases=True),
    "MistralForCausalLM": Family("mistral", defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, window_switch=True, defaults={"num_key_value_heads": 32}),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        qk_norm=True,
        window_switch=True,
        defaults={"num_key_value_heads": 32, "head_dim": 128},
    ),
}

OPTIONAL_BIASES = ("attention_bias", "mlp_bias")

READ = {
    "architectures",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "pad_token_id",
    "rms_norm_eps",
    "sliding_window",
    "tie_word_embeddings",
    "vocab_size",
    *TOP_LEVEL,
    *OBJECTS,
}
"""Fields that `Architecture.from_config` reads, beside those of IMPLEMENTED."""

IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "attention_dropout": (0,),
    "attention_multiplier": (1,),
    "final_logit_softcapping": (),
    "hidden_act": ("silu",),
    "logits_scaling": (1,),
    "mlp_bias": (False,),
    "pretraining_tp": (1, 0),
    "quantization_config": (),
    "use_sliding_window": (False,),
    # transformers' classes of these families don't have the following; its shared code or vLLM acts on them anyway
    "ada_rms_norm_t_cond": (False,),
    "attention_chunk_size": (),
    "bias": (False,),
    "compression_config": (),
    "dual_chunk_attention_config": (),
    "is_causal": (True,),
    "logit_scale": (1,),
    "qk_norm": (False,),
    "qkv_bias": (False,),
}
"""Fields that change what a model computes, with the values the layer spec implements; null always is."""

HARMLESS = {"bos_token_id", "eos_token_id", "initializer_range", "max_window_layers", "use_cache"}
"""Fields of these families that say nothing of the computation: how weights begin, special tokens, the cache
of generation, and which layers would have the sliding window that is refused anyway."""


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
    proj_bias: bool
    """The attention's output projection has a bias."""
    mlp_bias: bool

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
            ModelError: unknown architecture; a missing field, or one of a wrong type; a value that isn't implemented.
        """
        name, family = _family(config, where)
        fields = Fields({**family.defaults, **config}, where)
        _refuse_other_values(fields, family)
        layers = fields.count("num_hidden_layers")
        _refuse_sliding_windows(fields, family, layers)
        hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
        kv_groups = fields.count("num_key_value_heads", heads)
        if heads % kv_groups:
            raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads={heads}")
        if fields.values.get("head_dim") is None and hidden % heads:
            raise fields.wrong("num_attention_heads", f"a divisor of hidden_size={hidden}, as there is no head_dim")
        head_dim = fields.count("head_dim", hidden // heads)
        if head_dim % 2:
            raise ModelError(f"{where}: config.json gives heads of {head_dim} dimensions; RoPE needs an even number")
        vocab, padding = fields.count("vocab_size"), fields.values.get("pad_token_id")
        if type(padding) is int and padding >= vocab:
            raise fields.wrong("pad_token_id", f"less than vocab_size={vocab}: transformers can't load such a model")
        rope = read_rope(fields)
        attention_bias = fields.flag("attention_bias", False)
        return Architecture(
            name=name,
            layers=layers,
            hidden=hidden,
            ffn_hidden=fields.count("intermediate_size"),
            heads=heads,
            kv_groups=kv_groups,
            head_dim=head_dim,
            vocab=vocab,
            norm_eps=fields.positive("rms_norm_eps"),
            rope_theta=rope.theta,
            rope_scaling=rope.scaling,
            max_positions=fields.count("max_position_embeddings"),
            tied=fields.flag("tie_word_embeddings", False),
            qkv_bias=family.qkv_bias or attention_bias,
            qk_norm=family.qk_norm,
            proj_bias=attention_bias,
            mlp_bias=fields.flag("mlp_bias", False),
        )


def refuse_unknown_fields(config: Mapping[str, Any], where: str) -> None:
    """A field that transformers' class of this family has, but that nobody here has thought about.

    Called after `Architecture.from_config`, on the driver: it imports transformers.

    Raises:
        ModelError: there is one and its value isn't transformers' default; or transformers itself refuses the file.
    """
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    _, family = _family(config, where)
    kind = CONFIG_MAPPING[family.model_type]
    of_family, of_every_model = kind().to_dict(), PreTrainedConfig().to_dict()
    thought_about = READ | IMPLEMENTED.keys() | HARMLESS | of_every_model.keys()
    for name in (of_family.keys() - thought_about) & config.keys():
        if config[name] != of_family[name]:
            raise ModelError(
                f"{where}: config.json has {name}={shown(config[name])}, which isn't implemented; "
                f"a model without it ({name}={shown(of_family[name])}) would be"
            )
    try:
        kind.from_dict(copy.deepcopy(dict(config)))
    except Exception as error:  # its validators raise types of three libraries
        raise ModelError(f"{where}: transformers refuses config.json: {one_line(error)[:300]}") from error


def _family(config: Mapping[str, Any], where: str) -> tuple[str, Family]:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        given = f"architectures={shown(names)}" if "architectures" in config else "no architectures"
        raise ModelError(f'{where}: config.json has {given}, expected a list of one name, e.g. ["LlamaForCausalLM"]')
    family = FAMILIES.get(names[0])
    if family is None:
        raise ModelError(f"{where}: architecture {names[0]} is not supported; supported: {', '.join(FAMILIES)}")
    if config.get("model_type") != family.model_type:
        given = f"model_type={shown(config['model_type'])}" if "model_type" in config else "no model_type"
        raise ModelError(f"{where}: config.json has {given}; a {names[0]} has {shown(family.model_type)}")
    return names[0], family


def _refuse_other_values(fields: Fields, family: Family) -> None:
    for name, values in IMPLEMENTED.items():
        value = fields.values.get(name)
        # 1 == True in Python, but not in JSON
        same = any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in values)
        optional = name in OPTIONAL_BIASES and family.optional_biases and value is True
        if value is not None and not same and not optional:
            allowed = f"implemented: {shown(values[0])}" if values else "which isn't implemented"
            raise ModelError(f"{fields.where}: config.json has {name}={shown(value)}, {allowed}")


def _refuse_sliding_windows(fields: Fields, family: Family, layers: int) -> None:
    if fields.values.get("sliding_window") is not None and not family.window_switch:
        raise ModelError(
            f"{fields.where}: sliding_window={shown(fields.values['sliding_window'])} (config.json, or what "
            "transformers takes where it has none); implemented: null"
        )
    kinds = fields.values.get("layer_types")
    if kinds is not None and kinds != ["full_attention"] * layers:
        raise fields.wrong("layer_types", f'null, or "full_attention" for each of the {layers} layers')
