"""A summary of a run that has not ended, from what it has logged so far."""

from __future__ import annotations

from pathlib import Path

from rlhf.loggers.base import MetricLog
from rlhf.loggers.jsonl import read
from rlhf.report.summary import RunSummary
from rlhf.training_state import CHECKPOINTS, oldest_first
from rlhf.types import Metrics


def summarise(run_dir: Path) -> RunSummary:
    """Steps, seconds, divergences and checkpoints of an interrupted run, or of one still going on.

    Raises:
        RlhfError: no metrics.jsonl, or it can't be read.
    """
    steps = read(run_dir)
    log = MetricLog([])  # adds up the seconds, as it did while the run went on
    for step, metrics in steps.items():
        log.log(step, metrics)
    evals = [values for values in map(_evaluation, steps.values()) if values]
    return RunSummary(
        name=f"{run_dir.resolve().name} (not ended)",
        directory=run_dir,
        steps=max(steps, default=0),
        seconds=log.seconds.get("step", 0.0),
        phases=log.seconds,
        eval_before=evals[0] if evals else {},
        eval_after=evals[-1] if len(evals) > 1 else {},
        saved=oldest_first(run_dir / CHECKPOINTS),
    )


def _evaluation(metrics: Metrics) -> Metrics:
    return {name: value for name, value in metrics.items() if name.startswith("eval/")}
