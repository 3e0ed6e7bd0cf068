"""What an engine process is started with. Apart from the engine, so that the driver needs no vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.config.rollout import VllmRollout
from rlhf.config.teacher import TeacherEngine
from rlhf.distill.base import Distill


@dataclass(frozen=True)
class EngineSetup:
    """Plain data, so that it travels."""

    model: Path
    """The checkpoint it starts from; unless `fixed`, the trainer's weights replace its own before it generates."""
    rollout: VllmRollout
    max_model_len: int
    """Longest prompt + response in tokens."""
    stop_token_ids: tuple[int, ...]
    seed: int
    shares_device: bool
    """The trainer is on the same device: the engine sleeps while it trains."""
    fixed: bool = False
    """It keeps the checkpoint's weights, as version 0: a teacher that writes."""
    vocab: int | None = None
    """Tokens it may write: 0 to this; None: all it has."""


@dataclass(frozen=True)
class ScorerSetup:
    """Plain data, so that it travels."""

    model: Path
    engine: TeacherEngine
    max_model_len: int
    """Longest prompt + response in tokens."""
    distill: Distill[Any] | None
    """What is kept of the teacher at each row; None: nothing but log-probabilities of the sampled tokens."""
    head: str | None
    """The tensor of the checkpoint that is its LM head; None if hidden rows are kept, to which others put it."""
    vocab: int
    """The teacher's vocabulary."""
    seed: int
    tensor_parallel: int = 1
    """Devices of the replica."""
    evaluates: bool = False
    """Final hidden rows are asked for, too, whatever `distill` keeps: held-out divergences are measured."""
