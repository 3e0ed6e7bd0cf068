"""Runs megatron-core 0.16 without CUDA: on CPU and gloo. With CUDA nothing here changes anything.

Megatron names the CUDA device in three ways, and each needs its own answer while one of its calls runs:
  1. plain functions of `torch.cuda` (current_device, RNG states, streams, synchronize): replaced attributes;
  2. `device="cuda"` literals, `tensor.cuda()`, `pin_memory=True`: a TorchFunctionMode;
  3. `param.type() == "torch.cuda.FloatTensor"` in its optimizers: the same mode.
The mode is thread-local, so every method that calls Megatron enters `megatron_device()`, and everything is undone
when it leaves. Covered by tests/integration/test_megatron_parity.py, which trains through all of them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def _names_cuda(device: Any) -> bool:
    return device is not None and not isinstance(device, int) and torch.device(device).type == "cuda"


class _CudaMeansCpu(TorchFunctionMode):
    """Answers tensor functions that name the CUDA device with CPU tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


class _NoStream:
    """Streams order kernels of one device; CPU operations are in order already."""

    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...


def _current_device() -> torch.device:
    return CPU


def _cpu_answers() -> dict[str, Any]:
    """Attribute of torch.cuda -> its CPU stand-in."""
    return {
        "current_device": _current_device,
        "synchronize": lambda *args, **kwargs: None,
        "current_stream": lambda *args, **kwargs: _NoStream(),
        "default_stream": lambda *args, **kwargs: _NoStream(),
        "Stream": lambda *args, **kwargs: _NoStream(),
        "stream": lambda stream: contextlib.nullcontext(),
        # The RNG tracker forks "the CUDA generator"; on CPU that is the default one.
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
    }


@contextlib.contextmanager
def megatron_device() -> Iterator[torch.device]:
    """Wrap every Megatron call (build, forward, backward, optimizer, checkpoint) in this. Yields the device."""
    if torch.cuda.is_available():
        yield torch.device("cuda", torch.cuda.current_device())
        return
    if torch.cuda.current_device is _current_device:  # entered already, by a method that called this one
        yield CPU
        return
    from megatron.core.tensor_parallel import random as megatron_random

    with contextlib.ExitStack() as stack:
        for name, answer in _cpu_answers().items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(
            mock.patch.object(megatron_random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state())
        )
        stack.enter_context(
            mock.patch.object(
                megatron_random, "_set_cuda_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state)
            )
        )
        # It warns where forking the one generator moves the other; here they are one.
        stack.enter_context(mock.patch.object(logging.getLogger(megatron_random.__name__), "warning"))
        stack.enter_context(_CudaMeansCpu())
        yield CPU
