"""Memory that the configuration asks for by name, held against the machine and the model before anything starts."""

from __future__ import annotations

import math

import psutil

from rlhf.backends.megatron.adapters import Adapter, parameters
from rlhf.backends.megatron.architecture import Architecture
from rlhf.config.cluster import Device
from rlhf.config.run import Run
from rlhf.config.teacher import StandaloneTeacher
from rlhf.config.train import DType, Train
from rlhf.errors import ConfigError

GIB = 2**30
BLOCK_TOKENS = 128
"""vLLM hands the cache out in blocks of so many tokens at most (CPU: 128, GPU: 16), and keeps one for itself."""


def check_memory(run: Run, architecture: Architecture) -> None:
    """Refuse a key-value cache that can't hold one sample, and shared memory and caches that the machine hasn't got.

    Raises:
        ConfigError: naming the key and a value that works.
    """
    engine = run.engine
    if engine is not None:
        longest = run.data.max_length + run.longest_continuation
        check_cache("rollout.kv_cache_gb", engine.kv_cache_gb, longest, architecture, engine.dtype)
    if run.cluster.device is not Device.cpu or run.cluster.address is not None:
        return  # other memory, or another machine's
    asked, keys = run.cluster.object_store_gb, [f"cluster.object_store_gb={run.cluster.object_store_gb:g}"]
    if engine is not None:
        asked += engine.kv_cache_gb * engine.gpus / engine.tensor_parallel
        keys.insert(0, f"rollout.kv_cache_gb={engine.kv_cache_gb:g}")
    if isinstance(run.teacher, StandaloneTeacher):
        replicas = run.teacher.gpus / run.teacher.tensor_parallel
        asked += run.teacher.engine.kv_cache_gb * replicas
        keys.insert(0, f"teacher.engine.kv_cache_gb={run.teacher.engine.kv_cache_gb:g}")
        if run.writer is not None:
            asked += run.writer.kv_cache_gb * replicas
            keys.insert(0, f"teacher.generation.kv_cache_gb={run.writer.kv_cache_gb:g}")
    available = psutil.virtual_memory().available / GIB
    if asked > available:
        raise ConfigError(
            f"{' and '.join(keys)} need more than the {available:.1f} GiB of free memory here; lower them"
        )


def check_cache(key: str, size_gb: float, longest: int, architecture: Architecture, dtype: DType) -> None:
    """Refuse a key-value cache that can't hold one sample of `longest` tokens.

    Raises:
        ConfigError: naming the key and a value that works.
    """
    blocks = math.ceil(longest / BLOCK_TOKENS) + 1
    least = blocks * BLOCK_TOKENS * cache_bytes_per_token(architecture, dtype) / GIB
    if size_gb < least:
        raise ConfigError(
            f"{key}={size_gb:g} can't hold one sample of {longest} tokens; use at least "
            f"{math.ceil(least * 1000) / 1000:g}"
        )


def training_bytes(architecture: Architecture, adapter: Adapter | None, train: Train) -> int:
    """Bytes of a device's weights, gradients and optimizer states, without activations and without a teacher's weights.

    A frozen base (LoRA) is weights alone. Trained parameters have float32 gradients and two float32 moments, and in
    bfloat16 a float32 main copy. Tensor-parallel devices split all of it (but the few numbers of norms and of copied
    factors, which are left out here); the distributed optimizer splits moments and main copies over the model's copies.
    """
    trained, every = parameters(architecture, adapter)
    in_bfloat16 = train.dtype is DType.bfloat16
    weights, states = (2, 12) if in_bfloat16 else (4, 8)
    shares = train.data_parallel if train.distributed_optimizer else 1
    return (weights * every + 4 * trained + states * trained // shares) // train.tensor_parallel


def longest_sample(run: Run) -> int:
    """Tokens of the longest sequence that a teacher is asked about."""
    responses = list(run.response_limits.values())
    if run.reads_reference_responses:
        responses.append(run.eval.max_response_tokens)
    return max(run.data.max_length, run.data.teacher_length) + max(responses)


def cache_bytes_per_token(architecture: Architecture, dtype: DType) -> int:
    """Bytes of the keys and values of one token, over all layers."""
    numbers = 2 * architecture.layers * architecture.kv_groups * architecture.head_dim
    return numbers * (2 if dtype is DType.bfloat16 else 4)
