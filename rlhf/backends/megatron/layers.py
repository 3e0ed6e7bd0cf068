"""The native layer spec: a Llama-style GPTModel of plain torch operations (no Transformer Engine, no apex)."""

from __future__ import annotations

import inspect
import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from rlhf.backends.megatron.architecture import Architecture, Llama3Scaling
from rlhf.backends.megatron.partition import Partition


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm. Megatron's wrapper of torch's norm refuses sequence parallelism, which needs no more
    than this mark on the weight: its gradient is then summed over the tensor-parallel group."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


@dataclass
class PackedRows(PackedSeqParams):
    """Packed sequences, with their offsets on the host too."""

    offsets: tuple[int, ...] = ()

    @staticmethod
    def of(cu_seqlens: Tensor) -> PackedRows:
        offsets = tuple(cu_seqlens.tolist())
        longest = max(stop - start for start, stop in itertools.pairwise(offsets))
        return PackedRows(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            offsets=offsets,
        )


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Causal attention of whole sequences: [batch, heads, seq, dim] each; key and value may have fewer heads."""
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)


def one_by_one_attention(query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, scale: float | None) -> Tensor:
    """Causal attention of packed sequences, [tokens, heads, dim] each, one sequence after the other: any device."""
    pieces = []
    for start, stop in itertools.pairwise(rows.offsets):
        q, k, v = (x[start:stop].transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        pieces.append(causal_attention(q, k, v, scale).squeeze(0).transpose(0, 1))
    return torch.cat(pieces)


def flash_attention(query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, scale: float | None) -> Tensor:
    """The same by torch's variable-length flash attention (arXiv 2205.14135), in one call."""
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 takes fewer key than query heads as they are; later versions want to be told.
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    attended = varlen_attn(
        query,
        key,
        value,
        rows.cu_seqlens_q,
        rows.cu_seqlens_kv,
        rows.max_seqlen_q,
        rows.max_seqlen_kv,
        scale=scale,
        window_size=(-1, 0),  # causal
        **grouped,
    )
    assert isinstance(attended, Tensor), "no log-sum-exp was asked for"
    return attended


def can_use_flash(query: Tensor) -> bool:
    """Flash attention is for GPUs and two-byte numbers."""
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


class CoreAttention(MegatronModule):
    """Megatron's `core_attention` on torch's own attention: padded rows or packed sequences."""

    def __init__(self, config: TransformerConfig, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedRows | None = None,
    ) -> Tensor:
        """query [s, b, h, d] -> [s, b, h*d]; packed: query [t, h, d] -> [t, h*d]."""
        assert attention_bias is None
        if packed_seq_params is None:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            out = causal_attention(q, k, v, self.scale)
            return out.permute(2, 0, 1, 3).flatten(2)
        packed_attention = flash_attention if can_use_flash(query) else one_by_one_attention
        return packed_attention(query, key, value, packed_seq_params, self.scale).flatten(1)


class HiddenRows(tensor_parallel.ColumnParallelLinear):
    """Stands where GPTModel has its output layer: owns the LM head's weight, hands the final hidden rows on.

    Losses take the rows and the weight as a `VocabHead`, so logits of all tokens never exist at once. Under sequence
    parallelism the ranks' rows are put together here. Backward, each rank takes its own part of the gradient, which the
    head has summed over the ranks already (for the response rows only, which are fewer).
    """

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        if self.sequence_parallel:
            input_ = tensor_parallel.gather_from_sequence_parallel_region(
                input_, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return input_, None


def transformer_config(architecture: Architecture, dtype: torch.dtype, partition: Partition) -> Any:
    """Megatron's configuration of one model. Every fused kernel is off: they need apex, TE or a GPU."""
    return TransformerConfig(
        num_layers=architecture.layers,
        hidden_size=architecture.hidden,
        ffn_hidden_size=architecture.ffn_hidden,
        num_attention_heads=architecture.heads,
        num_query_groups=architecture.kv_groups,
        kv_channels=architecture.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_eps,
        qk_layernorm=architecture.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=architecture.proj_bias or architecture.mlp_bias,  # see drop_biases
        add_qkv_bias=architecture.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=partition.size,
        sequence_parallel=partition.sequence_parallel,
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=False,  # every weight is loaded from a checkpoint
        calculate_per_token_loss=True,  # token weights are normalised over the step already; see optimizer.py
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
    )


def stretched(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """RoPE frequencies [head_dim / 2] for a longer context: waves longer than the original context are stretched by
    `factor`, short ones stay, those between are blended (Llama 3.1, arXiv 2407.21783)."""
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)  # within the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def drop_biases(model: GPTModel, architecture: Architecture) -> None:
    """Take away the biases that the architecture lacks: Megatron's switch is one for attention and MLP together."""
    for layer in model.decoder.layers:
        attention, mlp = layer.self_attention, layer.mlp
        for linear, biased in [
            (attention.linear_qkv, architecture.qkv_bias),
            (attention.linear_proj, architecture.proj_bias),
            (mlp.linear_fc1, architecture.mlp_bias),
            (mlp.linear_fc2, architecture.mlp_bias),
        ]:
            if not biased:
                linear.register_parameter("bias", None)


def build_model(architecture: Architecture, dtype: torch.dtype, partition: Partition) -> GPTModel:
    """An uninitialised GPTModel, or a rank's part of it, whose output is its final hidden rows [batch, seq, hidden]."""
    config = transformer_config(architecture, dtype, partition)
    layer = get_gpt_layer_local_spec(qk_layernorm=architecture.qk_norm, normalization="RMSNorm")
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    parts.self_attention.submodules.core_attention = CoreAttention
    if architecture.qk_norm:
        parts.self_attention.submodules.q_layernorm = parts.self_attention.submodules.k_layernorm = RMSNorm
    block = TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RMSNorm)
    model = GPTModel(
        config,
        block,
        vocab_size=partition.padded_vocab(architecture),
        max_sequence_length=architecture.max_positions,
        position_embedding_type="rope",
        rotary_base=architecture.rope_theta,
        share_embeddings_and_output_weights=architecture.tied,
        parallel_output=True,
    )
    drop_biases(model, architecture)
    if architecture.rope_scaling is not None:
        # Megatron's own rope_scaling has Llama 3.1's numbers built in; a checkpoint may have others.
        model.rotary_pos_emb.inv_freq = stretched(model.rotary_pos_emb.inv_freq, architecture.rope_scaling)
    model.output_layer.__class__ = HiddenRows  # same parameters and sharding, other forward
    return model


def head_weight(model: GPTModel) -> Tensor:
    """The LM head's weight [vocabulary of this rank, hidden]; the embedding's when they are tied."""
    return (
        model.shared_embedding_or_output_weight()
        if model.share_embeddings_and_output_weights
        else (model.output_layer.weight)
    )
