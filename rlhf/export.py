"""Writes Hugging Face checkpoint folders."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlhf.assets import side_files


def save_hf(folder: Path, tensors: Iterable[tuple[str, Any]], source: Path, dtype: str) -> None:
    """Write weights, configuration and tokenizer into `folder`, in shards of at most 5 GB.

    Args:
        folder: replaced if it exists; complete or absent, never half written.
        tensors: (Hugging Face name, tensor).
        source: the checkpoint training started from: its configuration and tokenizer are taken over.
        dtype: what `tensors` are, noted in config.json.
    """
    from huggingface_hub import save_torch_state_dict

    unfinished = folder.with_name(f".{folder.name}.unfinished-{os.getpid()}")
    unfinished.mkdir(parents=True)
    try:
        # Copies: exported tensors may be views of a fused weight, and safetensors writes whole storages only.
        state = {name: tensor.cpu().clone() for name, tensor in tensors}
        save_torch_state_dict(state, unfinished, max_shard_size="5GB", metadata={"format": "pt"})
        for file in unfinished.iterdir():
            file.chmod(0o644)  # safetensors writes for its owner only
        config = json.loads((source / "config.json").read_text())
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
        (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for file in side_files(source, config=False):
            shutil.copy2(file, unfinished / file.name)
        if folder.exists():
            shutil.rmtree(folder)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
