"""Writes Hugging Face checkpoint folders."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf.assets import side_files
from rlhf.errors import CheckpointError, one_line


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


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what goes wrong while files are written into one line. A full disk is an OSError in Python, a RuntimeError
    in torch and an error of its own in safetensors.

    Raises:
        CheckpointError: in their place.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        parent = next(folder for folder in path.absolute().parents if folder.exists())
        free = shutil.disk_usage(parent).free / 2**30
        raise CheckpointError(
            f"the checkpoint {path} can't be written, {free:.1f} GiB are free there: {one_line(error)[:200]}"
        ) from error
