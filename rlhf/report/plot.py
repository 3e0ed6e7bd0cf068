"""`curves.svg`: loss, divergence and seconds by phase over the steps, for a look in a browser."""

from __future__ import annotations

from pathlib import Path

from rlhf.errors import RlhfError
from rlhf.loggers.jsonl import read
from rlhf.report.summary import PHASES

FILE = "curves.svg"
CURVES = ("train/loss", "train/divergence", "reward/mean", "eval/forward_kl", "eval/reverse_kl", "eval/reward")


def plot_run(run_dir: Path) -> Path:
    """Draws `RUN_DIR/curves.svg` from metrics.jsonl; text stays text, so the file is small."""
    steps = {step: metrics for step, metrics in read(run_dir).items() if metrics}
    if not steps:
        raise RlhfError(f"nothing to plot in {run_dir}: its metrics.jsonl holds no step yet")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RlhfError("the plot needs the package matplotlib: pip install matplotlib") from error

    figure = Figure(figsize=(8, 6), layout="constrained")  # no pyplot: no display, no state to clean up
    curves, bars = figure.subplots(2, sharex=True)
    drawn: list[dict[int, float]] = []
    for name in CURVES:
        points = {step: metrics[name] for step, metrics in steps.items() if name in metrics}
        if points and points not in drawn:  # loss and divergence are often the same
            drawn.append(points)
            rare = name.startswith("eval/")
            line = "--" if rare else "-"
            curves.plot(list(points), list(points.values()), line, marker="o", markersize=6 if rare else 3, label=name)
    curves.set_ylabel("loss, divergence, reward")
    base = [0.0] * len(steps)
    for phase in PHASES:
        seconds = [metrics.get(f"time/{phase}", 0.0) for metrics in steps.values()]
        if any(seconds):
            bars.bar(list(steps), seconds, bottom=base, label=phase)
            base = [low + height for low, height in zip(base, seconds, strict=True)]
    bars.set_ylabel("seconds")
    bars.set_xlabel("step")
    bars.xaxis.get_major_locator().set_params(integer=True)
    for axes in (curves, bars):
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    path = run_dir / FILE
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "rlhf"}):
        figure.savefig(path, metadata={"Date": None})
    return path
