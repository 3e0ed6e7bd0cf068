"""TensorBoard event files under `RUN_DIR/tensorboard`; `tensorboard --logdir RUN_DIR` shows them.

Names go through as they are: TensorBoard makes one group of charts of what stands before the slash.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlhf.errors import ConfigError
from rlhf.types import Metrics


class Tensorboard:
    """Scalars a step; the configuration and the summary as texts.

    A run that goes on after step n writes a file of its own, which begins by taking back what others hold of later
    steps.
    """

    def __init__(self, run_dir: Path, config: dict[str, Any], continued: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "logger.tensorboard=true needs the package tensorboard: pip install tensorboard, "
                "or write logger.tensorboard=false"
            ) from error
        purge = None if continued is None else continued + 1
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge)
        self._text("config", config, continued or 0)

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a step takes seconds at least, and people watch

    def summary(self, values: dict[str, object]) -> None:
        self._text("summary", values)

    def close(self) -> None:
        self._writer.close()

    def _text(self, tag: str, values: dict[str, Any], step: int = 0) -> None:
        """As indented lines, which Markdown shows as code."""
        lines = json.dumps(values, indent=2, default=str).splitlines()
        self._writer.add_text(tag, "\n".join(f"    {line}" for line in lines), step)
