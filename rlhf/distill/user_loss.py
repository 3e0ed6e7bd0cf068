"""A loss of the user's: a function of log-probabilities, which travels to the trainers by its name."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf import plugins
from rlhf.errors import ConfigError
from rlhf.user_code import imported, line_of, named


@dataclass(frozen=True)
class UserLoss:
    """`f(student_logprobs, teacher_logprobs) -> terms`, all [rows, outcomes]; a row's loss is the sum of its terms.

    Outcomes are the tokens of the vocabulary (of this rank's part of it), or the teacher's top k and the rest. An
    impossible one has a log-probability of -1e6.
    """

    name: str
    plugins: tuple[str, ...]
    path: tuple[str, ...]
    """`sys.path` of the process that named it."""

    @classmethod
    def of(cls, name: str | None, entries: Sequence[str]) -> UserLoss | None:
        """Files by their whole paths, so that every process finds them."""
        if name is None:
            return None
        file, colon, function = name.rpartition(":")
        whole = f"{_absolute(file)}:{function}" if colon else name
        return cls(whole, tuple(map(_absolute, entries)), tuple(sys.path))

    def __call__(self, student_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
        terms: Tensor = _function_of(self)(student_logprobs, teacher_logprobs)
        return terms

    def check(self) -> None:
        """Call it once.

        Raises:
            ConfigError: it doesn't exist, fails, gives another shape or numbers that aren't finite, or has no gradient.
        """
        key = f"distill.loss={self.name}"
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(2, 3, 5, generator=generator)
        logits[:, 0, 0] = -1e6
        student, teacher = logits.log_softmax(-1)
        student = student.requires_grad_()
        function = _function_of(self)
        gradient = None
        try:
            terms = function(student, teacher)
            right = isinstance(terms, Tensor) and terms.shape == student.shape and terms.is_floating_point()
            if right and terms.requires_grad:
                (gradient,) = torch.autograd.grad(terms.sum(), student, allow_unused=True)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a user's function may even call sys.exit
            raise ConfigError(f"{key} fails: {named(error)}{line_of(error)}") from error
        if not right:
            got = f"{tuple(terms.shape)} of {terms.dtype}" if isinstance(terms, Tensor) else type(terms).__name__
            raise ConfigError(f"{key} must give one number for each of the (3, 5) log-probabilities, got {got}")
        if gradient is None:
            raise ConfigError(f"{key} has no gradient for the student's log-probabilities; compute it with torch")
        if not bool(terms.isfinite().all() and gradient.isfinite().all()):
            raise ConfigError(
                f"{key} or its gradient isn't finite where an outcome is impossible (a log-probability of -1e6)"
            )


@functools.lru_cache
def _function_of(loss: UserLoss) -> Any:
    """Once a process."""
    sys.path.extend(folder for folder in loss.path if folder not in sys.path)
    known = plugins.find("loss", loss.name)
    if known is None and loss.plugins and not plugins.names("loss"):
        plugins.load_plugins(loss.plugins)
        known = plugins.find("loss", loss.name)
    return known or imported(loss.name, "distill.loss", plugins.names("loss"))


def _absolute(entry: str) -> str:
    return str(Path(entry).expanduser().resolve()) if entry.endswith(".py") or "/" in entry else entry
