"""A tiny tokenizer and tiny random Llama checkpoints for tests: made in a second, the same on every machine."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{%- for m in messages -%}{{ '<|im_start|>' ~ m['role'] ~ '\n' ~ m['content'] ~ '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
}
"""The shape of SmolLM2-135M, as its config.json says it, but for the tied embedding."""
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>"]


@cache
def _trained(vocab_size: int, seed: int) -> str:
    """A byte-level BPE as JSON. Another seed gives other merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    rng = random.Random(seed)
    text = "what is the answer compute step by step number of apples and pears in a box sum how many left"
    corpus = [" ".join([*rng.choices(text.split(), k=8), str(rng.randint(0, 999))]) for _ in range(500)]
    tokenizer.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer.to_str()


def tiny_tokenizer(vocab_size: int = 512, seed: int = 0, chat_template: str | None = CHAT_TEMPLATE) -> Any:
    """A byte-level BPE with ChatML; every call gives a fresh object. EOS is `<|im_end|>`, as in chat models."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(vocab_size, seed)),
        eos_token="<|im_end|>",
        pad_token="<pad>",
        additional_special_tokens=["<|im_start|>", "<|endoftext|>"],
        chat_template=chat_template,
    )


def save_tiny_llama(
    folder: Path,
    *,
    tied: bool = False,
    layers: int = 4,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 128,
    vocab_size: int | None = None,
    max_positions: int = 512,
    dtype: str = "float32",
    seed: int = 0,
    tokenizer: Any = None,
    **config: Any,
) -> Path:
    """Write a random `LlamaForCausalLM` Hugging Face folder with its tokenizer and return the folder.

    Args:
        vocab_size: Rows of the embedding; None: as many as the tokenizer has tokens.
        tokenizer: None: `tiny_tokenizer()`.
        config: More fields of `LlamaConfig`, e.g. `rope_theta=1e4`.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tokenizer or tiny_tokenizer()
    fields = {
        "vocab_size": vocab_size or len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": tied,
        "initializer_range": 0.08,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**{**fields, **config})).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)
