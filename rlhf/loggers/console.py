"""The terminal: a progress bar with the current phase, and one line of metrics a step above it.

Away from a terminal (CI, pipes) there is no bar, and each line names its values, since other lines come between.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from rlhf.errors import one_line
from rlhf.types import Metrics

HEADER_EVERY = 20
"""Rows between two header lines."""


@dataclass(frozen=True)
class Column:
    """One value of a line: a name, how wide, and from which metrics (several are joined by a slash)."""

    title: str
    width: int
    format: str
    metrics: tuple[str, ...]

    def cell(self, metrics: Metrics) -> str:
        """The value, with as many decimals as fit, or `-`."""
        if not any(name in metrics for name in self.metrics):
            return "-"
        width = (self.width - len(self.metrics) + 1) // len(self.metrics)
        return "/".join(_fit(metrics[name], self.format, width) if name in metrics else "-" for name in self.metrics)


def _fit(value: float, spec: str, width: int) -> str:
    text = format(value, spec)
    if value and not float(text):  # 0.0000 would hide what there is
        return format(value, ".0e")
    return text[:width].rstrip(".") if "." in text[: width + 1] and "e" not in text else text


COLUMNS = (
    Column("reward", 6, ".4f", ("reward/mean",)),
    Column("loss", 6, ".4f", ("train/loss",)),
    Column("div", 6, ".4f", ("train/divergence",)),
    Column("entropy", 7, ".3f", ("train/entropy",)),
    Column("mass t/s", 9, ".2f", ("distill/teacher_mass", "distill/student_mass")),
    Column("gnorm", 5, ".4f", ("train/grad_norm",)),
    Column("lr", 7, ".1e", ("train/lr",)),
    Column("len", 5, ".0f", ("rollout/response_tokens_mean",)),
    Column("tok/s", 6, ".0f", ("perf/tokens_per_second",)),
    Column("seconds", 7, ".1f", ("time/step",)),
    Column("gap", 6, ".4f", ("rollout/logprob_gap_mean",)),
)
"""Of an algorithm those that it has. With one space between, a row fits 80 columns."""

EVAL = (
    Column("reward", 6, ".4f", ("eval/reward",)),
    Column("forward KL", 6, ".4f", ("eval/forward_kl",)),
    Column("reverse KL", 6, ".4f", ("eval/reverse_kl",)),
    Column("accuracy", 5, ".3f", ("eval/accuracy",)),
)
"""Rare, so on a line of their own rather than an empty column."""


class _RichConsole(rich.console.Console):
    """Rich ends the process when its reader goes away (`... | head`); a training run goes on, in silence."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Console:
    """The sink. `first`: steps that an earlier part of the run has done. `brief`: no lines but warnings, for the jobs
    of a sweep. `console` is for tests and for callers that print on the same one."""

    def __init__(
        self, total_steps: int, console: rich.console.Console | None = None, first: int = 0, brief: bool = False
    ) -> None:
        self._brief = brief
        self.console = console or _RichConsole(highlight=False)
        self._live = self.console.is_terminal and not self.console.is_dumb_terminal
        self._total = total_steps
        self._shown: tuple[Column, ...] = ()
        self._rows = 0
        self._progress = Progress(
            TextColumn("{task.fields[phase]:<8}", style="cyan"),
            BarColumn(bar_width=None),
            TextColumn("step"),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left", style="dim"),
            TimeRemainingColumn(),
            console=self.console,
            expand=True,
            transient=True,  # the lines above and the summary below say it all
            refresh_per_second=4,
            speed_estimate_period=3600,  # the default, 30 seconds, forgets steps that take minutes
            disable=not self._live,
        )
        self._task = self._progress.add_task("run", total=total_steps, completed=first, phase="start")
        self._progress.start()

    def phase(self, name: str) -> None:
        """What the run is doing now: rollout, score, train, sync, eval."""
        self._progress.update(self._task, phase=name)

    def warn(self, text: str) -> None:
        """One line, above the bar."""
        self._print(f"warning: {one_line(text)}", style="yellow")

    def log(self, step: int, metrics: Metrics) -> None:
        if self._brief:
            if any(name.startswith("train/") for name in metrics):
                self._progress.update(self._task, completed=step)
            return
        # Columns appear with their first value and stay, so that an algorithm shows only what it has.
        shown = tuple(column for column in COLUMNS if column in self._shown or column.cell(metrics) != "-")
        if any(column.cell(metrics) != "-" for column in shown):
            self._row(step, metrics, shown)
            self._progress.update(self._task, completed=step)
        evals = [f"{column.title} {column.cell(metrics)}" for column in EVAL if column.cell(metrics) != "-"]
        if evals:
            self._print(f"held out, step {step}: {', '.join(evals)}", style="green")

    def summary(self, values: dict[str, object]) -> None:
        """Nothing: `rlhf.report.summary.show` prints it, once the bar is gone."""

    def close(self) -> None:
        self._progress.stop()

    def _row(self, step: int, metrics: Metrics, shown: tuple[Column, ...]) -> None:
        grown, self._shown = shown != self._shown, shown
        if not self._live:
            cells = [f"{column.title} {column.cell(metrics):>{column.width}}" for column in shown]
            self._print("  ".join([f"step {step:>{len(str(self._total))}}/{self._total}", *cells]))
            return
        gap = "  " if self.console.width >= 90 else " "
        if grown or self._rows % HEADER_EVERY == 0:
            self._rows = 0
            titles = [f"{column.title:>{column.width}}" for column in shown]
            self._print(gap.join(["step", *titles]), style="bold")
        cells = [f"{column.cell(metrics):>{column.width}}" for column in shown]
        self._print(gap.join([f"{step:>4}", *cells]))
        self._rows += 1

    def _print(self, line: str, style: str = "") -> None:
        self.console.print(Text(line, style=style), soft_wrap=True)
