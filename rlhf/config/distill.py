"""Group `distill`: what is asked of a teacher at every response token."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rlhf.config.base import require_at_least, require_between


class Tail(Enum):
    """What becomes of the probability outside the teacher's top k."""

    bucket = "bucket"
    """One more outcome holds the rest of the mass on both sides: a true divergence, never negative."""
    renormalise = "renormalise"
    """Both sides are normalised over the k tokens; the student's mass outside them goes unpunished."""
    drop = "drop"
    """The k terms as they are, without the rest."""


@dataclass(kw_only=True)
class TopK:
    """The teacher's k most likely tokens and their log-probabilities."""

    k: int = 64
    """Tokens kept a position, at most the vocabulary; memory and transport grow with it."""
    tail: Tail = Tail.bucket
    """bucket | renormalise | drop: the mass outside the k tokens."""
    temperature: float = 1.0
    """Divides the logits of both sides before the divergence. `rollout.temperature` is the sampler's."""
    loss: str | None = None
    """A loss of yours in the place of the divergence that `algo.beta` chooses: a name that one of `plugins` registers
    (`@register_loss`), `package.module.function` or `file.py:function`. See docs/plugins.md."""

    def __post_init__(self) -> None:
        require_at_least("distill.k", self.k, 1)
        require_between("distill.temperature", self.temperature, 0.01, 100)


@dataclass(kw_only=True)
class FullVocab:
    """The whole distribution, carried as the teacher's final hidden states and its LM head."""

    temperature: float = 1.0
    """Divides the logits of both sides before the divergence. `rollout.temperature` is the sampler's."""
    loss: str | None = None
    """A loss of yours in the place of the divergence that `algo.beta` chooses: a name that one of `plugins` registers
    (`@register_loss`), `package.module.function` or `file.py:function`. See docs/plugins.md."""

    def __post_init__(self) -> None:
        require_between("distill.temperature", self.temperature, 0.01, 100)


@dataclass(kw_only=True)
class Sampled:
    """The log-probability of each sampled token, at `rollout.temperature`: for `algo.kl_coef` and
    `algo.teacher_kl_coef` of algo=grpo."""


@dataclass(kw_only=True)
class NoDistill:
    """Nothing is asked of a teacher: algo=grpo without one."""
