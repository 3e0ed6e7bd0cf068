"""How weights travel from a trainer to an engine: as host copies through Ray's object store, or, on a GPU that both
share, as handles of the trainer's own memory (CUDA IPC). Between devices of their own: `channel.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

DEVICE_ARGUMENT = 6
"""Where `rebuild_cuda_tensor` takes the device number. Ray shows each process its own GPUs only, counted from 0."""


@dataclass(frozen=True)
class SharedTensor:
    """A tensor in GPU memory of another process on the same GPU. Valid as long as that process keeps the memory."""

    rebuild: Callable[..., Tensor]
    arguments: tuple[Any, ...]

    @staticmethod
    def of(tensor: Tensor) -> SharedTensor:
        from torch.multiprocessing.reductions import reduce_tensor

        rebuild, arguments = reduce_tensor(tensor)
        return SharedTensor(rebuild, tuple(arguments))

    def open(self) -> Tensor:
        """The tensor, without a copy."""
        arguments = list(self.arguments)
        arguments[DEVICE_ARGUMENT] = torch.cuda.current_device()
        return self.rebuild(*arguments)


def to_send(tensor: Tensor) -> np.ndarray | SharedTensor:
    """A weight as a bucket carries it. What is shared must be kept until it has been loaded."""
    if tensor.is_cuda:
        return SharedTensor.of(tensor)
    return as_array(tensor.detach().to("cpu", copy=True).contiguous())


def as_array(tensor: Tensor) -> np.ndarray:
    """A tensor of the host without a copy; bfloat16, which numpy hasn't, as its bits."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()


def received(array: np.ndarray | SharedTensor, dtype: str) -> Tensor:
    """The weight. Arrays are copied: those out of the object store are read-only."""
    if isinstance(array, SharedTensor):
        return array.open()
    tensor = torch.from_numpy(array.copy())
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
