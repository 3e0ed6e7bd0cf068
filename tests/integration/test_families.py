"""Every supported family against Hugging Face transformers: logits, gradients, weights there and back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf import assets
from rlhf.backends.megatron import layers, weights
from rlhf.backends.megatron.architecture import FAMILIES, Architecture
from rlhf.backends.megatron.device import megatron_device
from rlhf.backends.megatron.model import Model, load_model
from rlhf.backends.megatron.tensors import expected_shapes
from rlhf.backends.megatron.weights import Checkpoint, export, rule_of
from rlhf.batching import pack
from rlhf.preflight import check_checkpoint
from rlhf.types import MicroBatchPlan, Sequences
from tests.integration.megatron import random_sequences

pytestmark = pytest.mark.usefixtures("megatron_groups")

LENGTHS = [(5, 11), (3, 20), (9, 2)]
"""Prompt and response tokens of each sequence."""
LLAMA3 = dict(rope_type="llama3", rope_theta=500.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=3.0)
LLAMA3["original_max_position_embeddings"] = 8  # the sequences are longer
WIDE = dict(head_dim=32)
"""Heads that are together wider than the hidden size: 4 x 32 > 64."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", dict(tie_word_embeddings=True)),
    "llama-wide-heads": ("llama", WIDE),
    "llama-without-groups": ("llama", dict(num_key_value_heads=4)),
    "llama-one-group": ("llama", dict(num_key_value_heads=1)),
    "llama3-scaling": ("llama", dict(rope_parameters=LLAMA3)),
    "llama-attention-bias": ("llama", dict(attention_bias=True)),
    "llama-mlp-bias": ("llama", dict(mlp_bias=True)),
    "llama-all-biases": ("llama", dict(attention_bias=True, mlp_bias=True)),
    "mistral": ("mistral", dict(sliding_window=None)),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("qwen3", WIDE),
    "qwen3-tied": ("qwen3", {**WIDE, "tie_word_embeddings": True}),
}
"""Name -> `model_type`, and what differs from SHAPE."""
SHAPE = dict(
    vocab_size=250,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    rope_parameters=dict(rope_type="default", rope_theta=700.0),
    rms_norm_eps=1e-3,
)


def save_variant(name: str, folder: Path) -> Path:
    """A random checkpoint. Norms and biases are away from ones and zeros, so that a lost one shows."""
    model_type, fields = VARIANTS[name]
    config = AutoConfig.for_model(model_type, **{**SHAPE, **fields})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or name.endswith("bias"):
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                elif name.endswith("_proj.weight"):
                    parameter.mul_(5)  # the initial 0.02 would leave attention nearly uniform and RoPE without effect
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[*VARIANTS, "smollm2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each variant, random and tiny, and the real SmolLM2."""
    if request.param == "smollm2":
        return assets.resolve(assets.BUILT_IN)
    return save_variant(request.param, tmp_path_factory.mktemp("family") / request.param)


def logits_of(model: Model, sequences: Sequences) -> Tensor:
    """Ours, of the rows that score response tokens: [response tokens, vocabulary]."""
    micro = pack(sequences, MicroBatchPlan(tuple(range(len(LENGTHS))), 50), padding_free=True)
    return model.head(model.hidden_rows(micro)).logits()


def reference_logits(reference: Any, sequences: Sequences) -> Tensor:
    """The same rows by transformers, one sequence at a time."""
    rows = []
    for index, tokens in enumerate(sequences.rows()):
        out = reference(torch.from_numpy(tokens).long()[None]).logits[0]
        rows.append(out[sequences.prompt_lengths[index] - 1 : -1])
    return torch.cat(rows)


def test_every_family_is_tested() -> None:
    assert {family.model_type for family in FAMILIES.values()} == {model_type for model_type, _ in VARIANTS.values()}


def test_the_driver_accepts_what_transformers_saves(folder: Path) -> None:
    architecture = check_checkpoint(folder, "it")
    stored = Checkpoint(folder)
    assert expected_shapes(architecture) == {name: tuple(stored[name].shape) for name in stored.names}


def test_logits_and_gradients_equal_transformers(folder: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with megatron_device():
        model = load_model(folder, torch.float32)
        sequences = random_sequences(model.architecture.vocab, LENGTHS)
        logits = logits_of(model, sequences)
        # sum(logit * fixed noise) reaches every weight; a mean would leave most gradients near zero
        noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
        (logits * noise).sum().backward()

    expected = reference_logits(reference, sequences)
    (expected * noise).sum().backward()
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()

    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    compared = set()
    for name, parameter in model.module.named_parameters():
        rule, hf_names = rule_of(name)
        for hf_name, gradient in zip(hf_names, rule.to_hf(model.architecture, parameter.grad), strict=True):
            error = (gradient - gradients[hf_name]).norm() / gradients[hf_name].norm()
            assert error < 1e-4, f"{hf_name}: {error:.1e}"
            compared.add(hf_name)
    assert compared == gradients.keys()


def test_export_is_bit_exact(folder: Path) -> None:
    with megatron_device():
        model = load_model(folder, torch.float32)
        exported = {name: tensor.clone() for name, tensor in export(model.module, model.architecture)}
    stored = Checkpoint(folder)
    assert set(exported) == stored.names
    for name, tensor in exported.items():
        assert torch.equal(tensor.to(stored[name].dtype), stored[name]), name


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("llama3-scaling", "rope_scaling", None),
        ("llama", "rope_theta", 10_000.0),
        ("llama", "norm_eps", 1e-6),
        ("llama-mlp-bias", "mlp_bias", False),
        ("llama-attention-bias", "proj_bias", False),
        ("qwen2", "qkv_bias", False),
        ("qwen3", "qk_norm", False),
    ],
)
def test_a_lost_property_would_show(name: str, field: str, value: Any, tmp_path: Path) -> None:
    """The comparison above can fail: each property that a family may have moves the logits far beyond its bound."""
    folder = save_variant(name, tmp_path / name)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    architecture = Architecture.from_config(assets.read_config(folder), name)
    assert getattr(architecture, field) != value
    other = dataclasses.replace(architecture, **{field: value})
    sequences = random_sequences(other.vocab, LENGTHS)
    with megatron_device(), torch.no_grad():
        module = layers.build_model(other, torch.float32, weights.WHOLE)
        weights.load(module, other, Checkpoint(folder).__getitem__)
        logits = logits_of(Model(module, other), sequences)
        expected = reference_logits(reference, sequences)
    assert (logits - expected).abs().max() > 1e-3 * expected.abs().max()
