"""The Hugging Face tensors that an architecture consists of, name by name and shape by shape, without torch.

The other side of the weight table (`weights.py`), which knows how these become Megatron's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from rlhf.backends.megatron.architecture import Architecture
from rlhf.errors import ModelError
from rlhf.shards import WIDTHS, StoredTensor, read_shards, same_bytes

Shape = tuple[int, ...]
Row = tuple[Callable[[Architecture], bool], Callable[[Architecture], Shape]]

_LAYER = "model.layers.{layer}."
_ATTENTION, _MLP = _LAYER + "self_attn.", _LAYER + "mlp."
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LISTED = 3
"""Tensors named in an error."""
RECOMPUTED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
"""Tensors that old versions of transformers wrote and nobody reads."""


def _always(a: Architecture) -> bool:
    return True


def _hidden(a: Architecture) -> Shape:
    return (a.hidden,)


def _queries(a: Architecture) -> int:
    return a.heads * a.head_dim


def _keys(a: Architecture) -> int:
    return a.kv_groups * a.head_dim


SHAPES: dict[str, Row] = {
    EMBEDDING: (_always, lambda a: (a.vocab, a.hidden)),
    HEAD: (lambda a: not a.tied, lambda a: (a.vocab, a.hidden)),
    "model.norm.weight": (_always, _hidden),
    _LAYER + "input_layernorm.weight": (_always, _hidden),
    _LAYER + "post_attention_layernorm.weight": (_always, _hidden),
    _ATTENTION + "q_proj.weight": (_always, lambda a: (_queries(a), a.hidden)),
    _ATTENTION + "k_proj.weight": (_always, lambda a: (_keys(a), a.hidden)),
    _ATTENTION + "v_proj.weight": (_always, lambda a: (_keys(a), a.hidden)),
    _ATTENTION + "q_proj.bias": (lambda a: a.qkv_bias, lambda a: (_queries(a),)),
    _ATTENTION + "k_proj.bias": (lambda a: a.qkv_bias, lambda a: (_keys(a),)),
    _ATTENTION + "v_proj.bias": (lambda a: a.qkv_bias, lambda a: (_keys(a),)),
    _ATTENTION + "o_proj.weight": (_always, lambda a: (a.hidden, _queries(a))),
    _ATTENTION + "o_proj.bias": (lambda a: a.proj_bias, _hidden),
    _ATTENTION + "q_norm.weight": (lambda a: a.qk_norm, lambda a: (a.head_dim,)),
    _ATTENTION + "k_norm.weight": (lambda a: a.qk_norm, lambda a: (a.head_dim,)),
    _MLP + "gate_proj.weight": (_always, lambda a: (a.ffn_hidden, a.hidden)),
    _MLP + "up_proj.weight": (_always, lambda a: (a.ffn_hidden, a.hidden)),
    _MLP + "down_proj.weight": (_always, lambda a: (a.hidden, a.ffn_hidden)),
    _MLP + "gate_proj.bias": (lambda a: a.mlp_bias, lambda a: (a.ffn_hidden,)),
    _MLP + "up_proj.bias": (lambda a: a.mlp_bias, lambda a: (a.ffn_hidden,)),
    _MLP + "down_proj.bias": (lambda a: a.mlp_bias, _hidden),
}
"""Tensor (`{layer}`: one a layer) -> who has it, and its shape."""


def expected_shapes(architecture: Architecture) -> dict[str, Shape]:
    """Every tensor of a checkpoint of this architecture."""
    shapes: dict[str, Shape] = {}
    for pattern, (has, shape) in SHAPES.items():
        if has(architecture):
            layers = range(architecture.layers if "{layer}" in pattern else 1)
            shapes |= {pattern.format(layer=layer): shape(architecture) for layer in layers}
    return shapes


def head_name(architecture: Architecture) -> str:
    """The tensor that is the LM head."""
    return EMBEDDING if architecture.tied else HEAD


def check_weights(folder: Path, architecture: Architecture, where: str) -> None:
    """The weights in `folder` are those of `architecture`, all of them and no others.

    Args:
        folder: the checkpoint's folder.
        architecture: what its config.json says.
        where: the checkpoint as the user wrote it, for messages.

    Raises:
        ModelError: a file that can't be read, or a tensor that is missing, too many, of another shape, of a type that
            can't be trained from, or a stored output layer that isn't the embedding it is tied to.
    """
    stored, expected = read_shards(folder), expected_shapes(architecture)
    for name, tensor in stored.items():
        if tensor.dtype not in WIDTHS:
            raise ModelError(
                f"{where}: {tensor.file.name} holds {name} as {tensor.dtype}; usable are float32, bfloat16 and "
                "float16: take the model's unquantised checkpoint"
            )
    apart = "config.json and the weights don't belong together"
    if missing := [name for name in expected if name not in stored]:
        raise ModelError(f"{where}: the weights lack {_listed(missing)}; {apart}")
    for name, shape in expected.items():
        if stored[name].shape != shape:
            raise ModelError(
                f"{where}: {name} has the shape {list(stored[name].shape)}, config.json says {list(shape)}; {apart}"
            )
    if more := [name for name in stored if name not in expected and not _harmless(name, architecture)]:
        raise ModelError(
            f"{where}: the weights hold {_listed(more)}, which a {architecture.name} of {architecture.layers} layers "
            f"as in config.json doesn't have; {apart}"
        )
    _check_tied_head(stored, architecture, where)


def _harmless(name: str, architecture: Architecture) -> bool:
    return RECOMPUTED.fullmatch(name) is not None or (name == HEAD and architecture.tied)


def _check_tied_head(stored: Mapping[str, StoredTensor], architecture: Architecture, where: str) -> None:
    if architecture.tied and HEAD in stored and not same_bytes(stored[HEAD], stored[EMBEDDING]):
        raise ModelError(
            f"{where}: config.json has tie_word_embeddings=true, but the weights hold a {HEAD} that differs from "
            f"{EMBEDDING}; set tie_word_embeddings to false, or remove {HEAD}"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more tensors" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
