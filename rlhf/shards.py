"""What a checkpoint's safetensors files hold, read from their headers alone: no torch, and no weight is touched.

A safetensors file is 8 bytes (the header's length N, little-endian), N bytes of JSON {name: {dtype, shape,
data_offsets}, "__metadata__": ...}, and the tensors' bytes (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.assets import weight_files
from rlhf.errors import ModelError

WIDTHS = {"F32": 4, "BF16": 2, "F16": 2}
"""Bytes of a number in the types that can be trained from: float32, bfloat16, float16."""
LARGEST_HEADER = 100_000_000
"""The format's own limit, in bytes."""
GIT_LFS = b"version https://git-lfs"
AGAIN = "download or save the checkpoint again"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in its file."""

    file: Path
    dtype: str
    """As safetensors names it, e.g. `BF16`."""
    shape: tuple[int, ...]
    start: int
    stop: int
    """Where its bytes are in the file."""


def read_shards(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint in `folder`, by name.

    Raises:
        ModelError: a file that is missing, cut off or no safetensors file, or a tensor that two files hold.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in weight_files(folder):
        for name, tensor in read_header(file).items():
            if name in tensors:
                raise ModelError(f"{folder}: both {tensors[name].file.name} and {file.name} hold the tensor {name}")
            tensors[name] = tensor
    return tensors


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Every tensor of one safetensors file, by name.

    Raises:
        ModelError: the file can't be read, is cut off, or isn't a safetensors file.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            first = stream.read(len(GIT_LFS))
            if first == GIT_LFS:
                raise ModelError(f"{file} is a Git LFS pointer, not the weights; run `git lfs pull` in its folder")
            length = int.from_bytes(first[:8], "little")
            if len(first) < 8 or length > LARGEST_HEADER:
                raise ModelError(f"{file} is no safetensors file; {AGAIN}")
            stream.seek(8)
            text = stream.read(length)
    except OSError as error:
        raise ModelError(f"{file} can't be read: {error.strerror}; {AGAIN}") from error
    try:
        header = json.loads(text.decode("utf-8"))
        header.pop("__metadata__", None)
        tensors = {name: _entry(file, entry, 8 + length) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{file} is no safetensors file, or is cut off; {AGAIN}") from error
    end = max((tensor.stop for tensor in tensors.values()), default=8 + length)
    if end != size:
        raise ModelError(f"{file} has {size} bytes, its header says {end}; {AGAIN}")
    return tensors


def same_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors are equal bit by bit."""
    return (one.dtype, one.shape) == (other.dtype, other.shape) and _bytes(one) == _bytes(other)


def _entry(file: Path, entry: dict[str, Any], base: int) -> StoredTensor:
    """Raises KeyError, TypeError or ValueError where the header isn't what the format says."""
    start, stop = entry["data_offsets"]
    shape = tuple(int(length) for length in entry["shape"])
    tensor = StoredTensor(file, str(entry["dtype"]), shape, base + int(start), base + int(stop))
    if tensor.dtype in WIDTHS and stop - start != math.prod(shape) * WIDTHS[tensor.dtype]:
        raise ValueError("the shape doesn't fit the bytes")
    return tensor


def _bytes(tensor: StoredTensor) -> bytes:
    with tensor.file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data[tensor.start : tensor.stop]
