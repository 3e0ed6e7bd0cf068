"""A summary of a run that has not ended, from what it has logged so far."""

from __future__ import annotations

from pathlib import Path

from rlhf.loggers.jsonl import read
from rlhf.report.summary import RunSummary
from rlhf.types import Metrics


def summarise(run_dir: Path) -> RunSummary:
    """Steps, seconds, divergences and checkpoints of an interrupted run, or of one still going on.

    Raises:
        RlhfError: no metrics.jsonl, or it can't be read.
    """
    steps = read(run_dir)
    phases: Metrics = {}
    for metrics in steps.values():
        for name, value in metrics.items():
            if name.startswith("time/"):
                phase = name.removeprefix("time/")
                phases[phase] = phases.get(phase, 0.0) + value
    evals = [values for values in map(_evaluation, steps.values()) if values]
    checkpoints = sorted((run_dir / "checkpoints").glob("[!.]*"), key=lambda path: path.stat().st_mtime_ns)
    return RunSummary(
        name=f"{run_dir.resolve().name} (not ended)",
        directory=run_dir,
        steps=max(steps, default=0),
        seconds=phases.get("step", 0.0),
        phases=phases,
        eval_before=evals[0] if evals else {},
        eval_after=evals[-1] if len(evals) > 1 else {},
        saved=checkpoints,
    )


def _evaluation(metrics: Metrics) -> Metrics:
    return {name: value for name, value in metrics.items() if name.startswith("eval/")}
