"""One call a step, fanned out to every sink that the configuration switches on.

log = build(spec, run_dir, run_name, config, total_steps)
log.phase("rollout")            # what the progress bar says
log.log(1, {"train/loss": 0.7}) # steps count from 1; step 0 is the evaluation before the first
log.summary({"steps": 16})
log.close()
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rlhf.config.logger import Logger
from rlhf.errors import one_line
from rlhf.types import Metrics

if TYPE_CHECKING:
    from rlhf.loggers.console import Console


@dataclass(frozen=True)
class Continued:
    """The part of a run that sinks hold already."""

    step: int
    """The last one of it; what a sink has of later steps counts no more."""
    wandb_id: str | None = None
    """The W&B run to go on with."""


class Sink(Protocol):
    """Where metrics go. The class's name, in lower case, is its key in group `logger`."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Takes the metrics of one step; may be called twice for a step (training, then evaluation)."""

    def summary(self, values: dict[str, object]) -> None:
        """Takes what describes the whole run, once, at its end."""

    def close(self) -> None:
        """Writes what is buffered; nothing is called afterwards."""


class MetricLog:
    """Every sink behind one object, plus the progress bar's phase, warnings, and the seconds spent so far."""

    def __init__(self, sinks: Iterable[Sink], console: Console | None = None) -> None:
        self.console = console
        """The progress bar, if it is on; a sink like the others otherwise."""
        self.sinks = [*sinks, *([console] if console else [])]
        self.seconds: dict[str, float] = {}
        """Sums of all `time/NAME` metrics by NAME, for the summary."""
        self.latest: Metrics = {}
        """The last value of each metric."""
        self.wandb_id: str | None = None
        """Of the W&B run, if there is one."""

    def log(self, step: int, metrics: Metrics) -> None:
        values = {name: float(value) for name, value in metrics.items()}
        self.latest |= values
        for name, value in values.items():
            if name.startswith("time/"):
                phase = name.removeprefix("time/")
                self.seconds[phase] = self.seconds.get(phase, 0.0) + value
        self._each(lambda sink: sink.log(step, values))

    def summary(self, values: dict[str, object]) -> None:
        self._each(lambda sink: sink.summary(values))

    def close(self) -> None:
        self._each(lambda sink: sink.close())
        self.sinks = []

    def phase(self, name: str) -> None:
        """Says on the progress bar what the run is doing now."""
        if self.console in self.sinks:
            self._call(self.console, lambda console: console.phase(name))

    def warn(self, text: str) -> None:
        """One line for the person watching: above the progress bar, or on stderr where the console is off."""
        if self.console in self.sinks:
            self._call(self.console, lambda console: console.warn(text))
        else:
            print(f"warning: {one_line(text)}", file=sys.stderr)

    def _each(self, call: Callable[[Sink], None]) -> None:
        for sink in list(self.sinks):
            self._call(sink, call)

    def _call(self, sink: Any, call: Callable[[Any], None]) -> None:
        """A sink that fails (a full disk, a lost server) is dropped: metrics aren't worth hours of training."""
        try:
            call(sink)
        except Exception as error:
            self.sinks.remove(sink)
            key = f"logger.{type(sink).__name__.lower()}"
            reason = one_line(f"{type(error).__name__}: {error}")
            print(f"warning: {key} failed and is off for the rest of the run: {reason}", file=sys.stderr)


def build(
    spec: Logger,
    run_dir: Path,
    run_name: str,
    config: dict[str, Any],
    total_steps: int,
    continued: Continued | None = None,
    brief: bool = False,
) -> MetricLog:
    """The sinks that `spec` switches on. Raises ConfigError where one can't be used at all, before the run starts.

    `brief`: on the terminal the progress bar alone."""
    run_dir.mkdir(parents=True, exist_ok=True)
    sinks: list[Sink] = []
    wandb_id = None
    if spec.wandb:  # first: the one that may refuse, so that nothing else is open yet
        from rlhf.loggers.wandb import Wandb

        wandb = Wandb(spec, run_dir, run_name, config, continued.wandb_id if continued else None)
        wandb_id = wandb.id
        sinks.append(wandb)
    if spec.tensorboard:
        from rlhf.loggers.tensorboard import Tensorboard

        sinks.append(Tensorboard(run_dir, config, continued.step if continued else None))
    if spec.jsonl:
        from rlhf.loggers.jsonl import Jsonl

        sinks.append(Jsonl(run_dir))
    console = None
    if spec.console:
        from rlhf.loggers.console import Console

        console = Console(total_steps, first=continued.step if continued else 0, brief=brief)
    log = MetricLog(sinks, console)
    log.wandb_id = wandb_id
    return log
