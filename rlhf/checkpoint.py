"""When checkpoints are written, and where."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from rlhf.roles.protocols import Trainer
from rlhf.types import Metrics


@dataclass
class Checkpoints:
    """Hugging Face folders under `RUN/checkpoints`: `step_N` every `save_every` steps, `final` after the last."""

    trainer: Trainer
    folder: Path
    save_every: int
    saved: list[Path] = field(default_factory=list)

    def after_step(self, step: int) -> Metrics:
        """Save if it is due. Returns the seconds it took."""
        if not self.save_every or step % self.save_every != 0:
            return {}
        started = time.perf_counter()
        self._save(f"step_{step}")
        return {"time/save": time.perf_counter() - started}

    def finish(self) -> Path:
        """The weights after the last step."""
        return self._save("final")

    def on_disk(self) -> list[Path]:
        """The complete ones, oldest first. More than `saved` knows of, if a save was interrupted at its very end."""
        folders = self.folder.glob("[!.]*") if self.folder.exists() else ()
        return sorted(folders, key=lambda path: path.stat().st_mtime_ns)

    def remove_unfinished(self) -> None:
        """Delete what a process that died was writing. Only after every role has ended."""
        for path in self.folder.glob(".*.unfinished-*"):
            shutil.rmtree(path, ignore_errors=True)

    def _save(self, name: str) -> Path:
        path = self.folder / name
        self.trainer.save(path).result()
        self.saved.append(path)
        return path
