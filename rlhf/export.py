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

ADAPTER = "adapter"
"""The folder of a LoRA adapter in a checkpoint."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files in it, which are peft's."""


def save_hf(
    folder: Path,
    tensors: Iterable[tuple[str, Any]] | None,
    source: Path,
    dtype: str,
    adapter: tuple[dict[str, Any], Iterable[tuple[str, Any]]] | None = None,
) -> None:
    """Write weights, configuration and tokenizer into `folder`, in shards of at most 5 GB.

    Args:
        folder: replaced if it exists; complete or absent, never half written.
        tensors: (Hugging Face name, tensor); None: no whole model, only the adapter.
        source: the checkpoint training started from: its configuration and tokenizer are taken over.
        dtype: what `tensors` are, noted in config.json.
        adapter: peft's configuration and tensors, for the folder `adapter` in it.
    """
    unfinished = folder.with_name(f".{folder.name}.unfinished-{os.getpid()}")
    unfinished.mkdir(parents=True)
    try:
        if tensors is not None:
            _write_model(unfinished, tensors, source, dtype)
        if adapter is not None:
            _write_adapter(unfinished / ADAPTER, *adapter)
        if folder.exists():
            shutil.rmtree(folder)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_model(folder: Path, tensors: Iterable[tuple[str, Any]], source: Path, dtype: str) -> None:
    from huggingface_hub import save_torch_state_dict

    # Copies: exported tensors may be views of a fused weight, and safetensors writes whole storages only.
    state = {name: tensor.cpu().clone() for name, tensor in tensors}
    save_torch_state_dict(state, folder, max_shard_size="5GB", metadata={"format": "pt"})
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors writes for its owner only
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for file in side_files(source, config=False):
        shutil.copy2(file, folder / file.name)


def _write_adapter(folder: Path, config: dict[str, Any], tensors: Iterable[tuple[str, Any]]) -> None:
    """As peft's save_pretrained does."""
    from safetensors.torch import save_file

    folder.mkdir()
    state = {name: tensor.cpu().contiguous().clone() for name, tensor in tensors}
    save_file(state, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    (folder / ADAPTER_WEIGHTS).chmod(0o644)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


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
