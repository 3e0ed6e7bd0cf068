"""Group `logger`: where metrics go."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rlhf.config.base import refuse_unused


class WandbMode(Enum):
    """How the W&B client runs."""

    online = "online"
    """Sends the run to the server as it goes."""
    offline = "offline"
    """Writes the run to disk; `wandb sync` uploads it later."""


@dataclass(kw_only=True)
class Logger:
    """Sinks; each may be switched on or off."""

    console: bool = True
    """Progress bars and one line of metrics a step."""
    rollouts: bool = False
    """Write every sample to `rollouts.jsonl` in the run's folder: step, text, token ids, log-probabilities."""
    jsonl: bool = True
    """metrics.jsonl in the run's folder: one object a step."""
    tensorboard: bool = True
    """tensorboard/ in the run's folder."""
    wandb: bool = False
    """Weights & Biases (logger=wandb)."""
    wandb_project: str = "rlhf"
    """W&B project."""
    wandb_entity: str | None = None
    """W&B team or user; null: your default."""
    wandb_group: str | None = None
    """W&B group; null: the jobs of a sweep (-m) are grouped by the name of its folder, other runs aren't."""
    wandb_mode: WandbMode = WandbMode.online
    """online | offline."""

    def __post_init__(self) -> None:
        if not self.wandb:
            keys = ("wandb_project", "wandb_entity", "wandb_group", "wandb_mode")
            refuse_unused(self, "logger", keys, "without Weights & Biases", "use logger=wandb")
