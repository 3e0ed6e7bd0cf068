"""Checkpoints with random weights, in the shapes of known models. They are as fast as trained ones."""

from __future__ import annotations

from pathlib import Path

SHAPES = {
    "0p6b": dict(
        hidden_size=1024, num_hidden_layers=28, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8
    ),
    "4b": dict(
        hidden_size=2560, num_hidden_layers=36, intermediate_size=9728, num_attention_heads=32, num_key_value_heads=8
    ),
    "tiny": dict(
        hidden_size=64, num_hidden_layers=2, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2
    ),
}
"""Of Qwen3-0.6B and Qwen3-4B, as far as they differ; and one for tests."""


def make_model(folder: Path, shape: str, seed: int, eos: int | None = None) -> Path:
    """Save a Qwen3 in bfloat16, without a tokenizer (151,936 tokens; the tiny one has 512)."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        **SHAPES[shape],
        vocab_size=512 if shape == "tiny" else 151_936,
        head_dim=32 if shape == "tiny" else 128,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        dtype="bfloat16",
    )
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return folder
