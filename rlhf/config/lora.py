"""Section `model.lora`: low-rank adapters on a frozen base (LoRA, arXiv 2106.09685)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from rlhf.config.base import refuse_unused, require, require_at_least, require_below, require_positive, require_text

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ALL_LINEAR = ATTENTION + MLP
WORDS = {"all-linear": ALL_LINEAR, "attention": ATTENTION, "mlp": MLP}
NEVER = ("lm_head", "embed_tokens")

Targets = Any
"""A word or a list of names: of types like this OmegaConf knows no better."""


class LoraSave(Enum):
    """What a checkpoint holds."""

    adapter = "adapter"
    """`adapter/`, a folder of peft's: a few megabytes, for use with the base."""
    merged = "merged"
    """The whole model with the adapter merged in, as a Hugging Face folder."""
    both = "both"
    """Both: the Hugging Face folder with `adapter/` in it."""


@dataclass(kw_only=True)
class Lora:
    """Section `model.lora`: adapters of a low rank are trained, the checkpoint's own weights are not. On with
    `rank` > 0 or with a `path`."""

    rank: int = 0
    """Rank of the adapters, e.g. 16; 0: no adapters, every weight is trained."""
    alpha: float = 32.0
    """An adapter's part of the output is multiplied by alpha / rank."""
    dropout: float = 0.0
    """Dropout on what the adapters read, while training."""
    target: Targets = "all-linear"
    """all-linear | attention | mlp, or a list of Hugging Face module names such as `[q_proj,v_proj]`. Embedding and LM
    head are never adapted."""
    save: LoraSave = LoraSave.both
    """adapter | merged | both: what checkpoints hold; `adapter` is peft's folder `adapter/`, `merged` a whole Hugging
    Face model. Training goes on from either, if `run.save_every` is set."""
    path: str | None = None
    """Start from an adapter: a folder that peft (or an earlier run) wrote. It brings rank, alpha and target."""

    def __post_init__(self) -> None:
        require_at_least("model.lora.rank", self.rank, 0)
        require_positive("model.lora.alpha", self.alpha)
        require_below("model.lora.dropout", self.dropout, 0, 1)
        modules_of(self.target)
        if self.path is not None:
            require_text("model.lora.path", self.path, "FOLDER")
            why = "with model.lora.path, whose adapter brings its own"
            refuse_unused(self, "model.lora", ("rank", "alpha", "target"), why, "leave out model.lora.path")
        elif self.rank == 0:
            why = "with model.lora.rank=0 (no adapters)"
            unused = ("alpha", "dropout", "target", "save")
            refuse_unused(self, "model.lora", unused, why, "use model.lora.rank=16")

    @property
    def enabled(self) -> bool:
        """Whether there are adapters."""
        return self.rank > 0 or self.path is not None


def modules_of(target: Targets) -> tuple[str, ...]:
    """The Hugging Face modules that `target` names, in the order of a layer.

    Raises:
        ConfigError: a name that isn't one.
    """
    names = [target] if isinstance(target, str) else target
    possible = f"{', '.join(WORDS)} or a list of {', '.join(ALL_LINEAR)}"
    key = f"model.lora.target={_shown(target)}"
    require(isinstance(names, list) and len(names) > 0, f"{key} names nothing; use {possible}")
    for name in names:
        require(
            name not in NEVER,
            f"{key}: embedding and LM head are never adapted; use {possible}",
        )
        known = name in ALL_LINEAR or (len(names) == 1 and name in tuple(WORDS))
        require(known, f"{key}: {name} is no module that can be adapted; use {possible}")
    require(len(set(names)) == len(names), f"{key} names a module twice")
    chosen = WORDS.get(names[0], tuple(names))
    return tuple(module for module in ALL_LINEAR if module in chosen)


def _shown(target: Targets) -> str:
    return f"[{','.join(map(str, target))}]" if isinstance(target, list) else str(target)
