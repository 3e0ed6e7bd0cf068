"""When checkpoints are written, and where."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rlhf.roles.protocols import Trainer


@dataclass
class Checkpoints:
    """Hugging Face folders under `RUN/checkpoints`: `step_N` every `save_every` steps, `final` after the last."""

    trainer: Trainer
    folder: Path
    save_every: int
    saved: list[Path] = field(default_factory=list)

    def after_step(self, step: int) -> None:
        if self.save_every and step % self.save_every == 0:
            self._save(f"step_{step}")

    def finish(self) -> Path:
        """The weights after the last step."""
        return self._save("final")

    def _save(self, name: str) -> Path:
        path = self.folder / name
        self.trainer.save(path).result()
        self.saved.append(path)
        return path
