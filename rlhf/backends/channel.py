"""Weights pushed from a trainer to engines on other devices: one broadcast a bucket, past Ray and the driver.

A process group of its own beside Megatron's and vLLM's, which it neither needs nor disturbs: rank 0 is the trainer's
rank 0, the others are the devices of the engines. Names and shapes go ahead through Ray (`Bucket`), so that every
engine knows what to receive.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TRAINER = 0
"""The rank that sends."""
TIMEOUT = timedelta(minutes=10)
"""For all others to come, and for one bucket. An engine comes once it has loaded the bucket before."""


@dataclass(frozen=True)
class Pushed:
    """Stands in a bucket for a tensor that comes through the channel."""

    shape: tuple[int, ...]


class WeightChannel:
    """One end of it; all ends are made at the same time, and each bucket is sent and received at the same time."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        """
        Args:
            store: where the ends find each other.
            rank: `TRAINER`, or the number of an engine's device + 1.
            size: devices of engines + 1.
        """
        store = dist.PrefixStore("weights", store)
        if torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())
            options: Any = dist.ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            options.global_ranks_in_group = list(range(size))
            options.group_name = "weights"
            self.group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self.device = torch.device("cpu")
            self.group = dist.ProcessGroupGloo(store, rank, size, TIMEOUT)

    def send(self, tensors: Sequence[Tensor]) -> None:
        """To every engine; all tensors are of one dtype. Returns when their memory may change again."""
        self._broadcast(torch.cat([tensor.detach().reshape(-1) for tensor in tensors]))

    def receive(self, announced: Sequence[Pushed], dtype: str) -> list[Tensor]:
        """What the trainer sends. Views of one buffer."""
        sizes = [math.prod(one.shape) for one in announced]
        buffer = torch.empty(sum(sizes), dtype=getattr(torch, dtype), device=self.device)
        self._broadcast(buffer)
        return [part.view(one.shape) for part, one in zip(buffer.split(sizes), announced, strict=True)]

    def _broadcast(self, buffer: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = TRAINER
        self.group.broadcast([buffer.view(torch.uint8)], options).wait()  # as bytes: gloo doesn't know every dtype
        if buffer.is_cuda:
            torch.cuda.current_stream().synchronize()
