"""What a trainer process is started with. Apart from the trainer, so that the driver needs no Megatron."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlhf.algos.objective import Objective
from rlhf.backends.megatron.adapters import Adapter
from rlhf.config.teacher import OwnTeacher
from rlhf.config.train import Train


@dataclass(frozen=True)
class TrainerSetup:
    """Plain data, so that it travels."""

    student: Path
    teacher: Path | None
    """The colocated teacher's checkpoint; None without one."""
    train: Train
    objective: Objective
    steps: int
    """Optimizer steps of the whole run, which the learning rate falls over."""
    seed: int
    offload_teacher: bool = False
    """Keep the colocated teacher's layers in host memory between uses."""
    self_teacher: OwnTeacher | None = None
    """The student is its own teacher."""
    teacher_head: Path | None = None
    """A standalone teacher of which only the LM head is here, for the hidden rows it sends; None if none come."""
    adapter: Adapter | None = None
    """The student is a frozen base with this adapter; None: every weight is trained."""
    base_teacher: bool = False
    """The student without its adapter is the teacher: a colocated one without weights of its own."""
