"""The root of the configuration: sections that are no group, and the whole."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rlhf.config.base import not_yet, require, require_at_least


class EvalResponses(Enum):
    """Which responses the held-out divergence is measured on."""

    dataset = "dataset"
    """The reference responses of the held-out rows: the same text before and after."""
    student = "student"
    """The student's own samples at that moment."""


@dataclass(kw_only=True)
class RunSection:
    """Section `run`."""

    name: str = "run"
    """Names the run and its folder. The command's default is the time it started."""
    dir: str = "outputs/${run.name}"
    """Folder of the run: configuration, metrics, checkpoints, summary; from where the command is started.
    Jobs of a sweep (-m) get folders of their own under multirun/ instead."""
    overwrite: bool = False
    """Delete what an earlier run of the same name left in the folder; false refuses to start there."""
    steps: int = 16
    """Optimizer steps."""
    seed: int = 0
    """Seeds data order, sampling and initialisation."""
    save_every: int = 0
    """Write a Hugging Face checkpoint every so many steps; 0: only the final one."""

    def __post_init__(self) -> None:
        require(
            re.fullmatch(r"[A-Za-z0-9_.=,+-]+", self.name) is not None,
            f"run.name may hold letters, digits and _ . - + = , only, got {self.name!r}",
        )
        require_at_least("run.steps", self.steps, 1)
        require_at_least("run.seed", self.seed, 0)
        require_at_least("run.save_every", self.save_every, 0)


@dataclass(kw_only=True)
class Eval:
    """Section `eval`: held-out full-vocabulary divergences at temperature 1, before the first and after the last."""

    samples: int = 16
    """Held-out rows; 0 turns evaluation off."""
    every: int = 0
    """Also every so many steps; 0: only before the first and after the last."""
    responses: EvalResponses = EvalResponses.dataset
    """dataset | student: whose responses to the held-out prompts are scored."""
    max_response_tokens: int = 128
    """Reference responses are cut to this many tokens."""

    def __post_init__(self) -> None:
        require_at_least("eval.samples", self.samples, 0)
        require_at_least("eval.every", self.every, 0)
        require_at_least("eval.max_response_tokens", self.max_response_tokens, 1)


@dataclass(kw_only=True)
class Run:
    """One run: every group and section, checked together on construction."""

    run: RunSection
    eval: Eval
    resume: str
    model: Any
    train: Any
    rollout: Any
    data: Any
    reward: Any
    distill: Any
    teacher: Any
    placement: Any
    logger: Any
    cluster: Any
    algo: Any

    def __post_init__(self) -> None:
        from rlhf.config.checks import check

        if self.resume != "never":
            raise not_yet(f"resume={self.resume}", "resume=never")
        check(self)
