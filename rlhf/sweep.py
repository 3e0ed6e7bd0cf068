"""A sweep: one Ray for all its jobs, and at the end one line a job, on the terminal and in `summary.csv`."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rich.console
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.table import Table
from rich.text import Text

from rlhf.backends.keep import end_kept_ray, keep_ray
from rlhf.stopping import unstoppable

FILE = "summary.csv"
SUMMARY = "summary.json"
"""What a finished run leaves in its folder (`rlhf.report.summary`)."""
RESULTS = {"eval/reward": -1, "eval/forward_kl": 1, "eval/reverse_kl": 1, "eval/accuracy": -1, "reward/mean": -1}
"""Held out, after the last step, or of the last step. 1: lower is better, -1: higher. The first one that any job has
orders the table, the best job first."""


class SweepCallback(Callback):
    """Hydra's: whoever starts Ray must outlive the jobs. See `hydra.callbacks` in conf/config.yaml."""

    def on_multirun_start(self, config: DictConfig, **more: Any) -> None:
        """The first job that needs Ray starts it, or attaches to the one at cluster.address; the others use it."""
        keep_ray()

    def on_multirun_end(self, config: DictConfig, **more: Any) -> None:
        """What was started is ended, what runs elsewhere is left as it is."""
        with unstoppable():
            end_kept_ray()


@dataclass
class Job:
    """One job of a sweep."""

    number: int
    overrides: Sequence[str]
    """`KEY=VALUE`, as Hydra made them of the command line."""
    folder: Path
    error: str | None = None
    finished: bool = False
    results: dict[str, float] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, str]:
        return {key.lstrip("+~"): value for key, _, value in (text.partition("=") for text in self.overrides)}

    @property
    def status(self) -> str:
        return "failed" if self.error is not None else "done" if self.finished else "interrupted"

    def ended(self) -> None:
        """Take over what the finished run has left."""
        self.finished = True
        path = self.folder / SUMMARY
        if not path.is_file():
            return
        summary = json.loads(path.read_text(encoding="utf-8"))
        measured = summary.get("rewards", {}) | summary["eval_after"]
        self.results = {name: measured[name] for name in RESULTS if name in measured}
        self.results |= {"steps": summary["steps"], "seconds": round(summary["seconds"], 1)}


def write(jobs: Sequence[Job], sweep_dir: Path) -> Path:
    """`summary.csv`: job, folder, status, every key that was given, every result."""
    keys = list(dict.fromkeys(key for job in jobs for key in job.values))
    results = list(dict.fromkeys(name for job in jobs for name in job.results))
    path = sweep_dir / FILE
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.DictWriter(file, ["job", "status", *keys, *results, "folder", "error"])
        rows.writeheader()
        for job in jobs:
            fixed = {"job": job.number, "status": job.status, "folder": job.folder, "error": job.error}
            rows.writerow({**fixed, **job.values, **job.results})
    return path


def show(jobs: Sequence[Job], path: Path, console: rich.console.Console) -> None:
    """The keys that differ between the jobs, and the results, the best first."""
    keys = dict.fromkeys(key for job in jobs for key in job.values)
    varied = [key for key in keys if len({job.values.get(key) for job in jobs}) > 1]
    results = [name for name in (*RESULTS, "seconds") if any(name in job.results for job in jobs)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("job", *varied, *(_title(name) for name in results)):
        table.add_column(title, justify="left" if title in varied else "right")
    for job in sorted(jobs, key=_order(jobs)):
        values = [Text(job.values.get(key, "")) for key in varied]  # not markup: [format] is a value
        if not job.finished:
            table.add_row(str(job.number), *values, Text(job.status, style="red"))
        else:
            table.add_row(str(job.number), *values, *(_number(job.results.get(name)) for name in results))
    unfinished = sum(not job.finished for job in jobs)
    said = f", {unfinished} of them without a result" if unfinished else ""
    console.print(Text(f"\nSweep: {len(jobs)} jobs{said}; {path}", style="bold"), soft_wrap=True)
    console.print(table)


def failures(jobs: Sequence[Job]) -> str | None:
    """One line that names the jobs that failed; None if none has."""
    failed = [job for job in jobs if job.error is not None]
    if not failed:
        return None
    named = ", ".join(f"job {job.number} ({' '.join(job.overrides)})" for job in failed)
    return f"{len(failed)} of {len(jobs)} jobs failed: {named}"


def _order(jobs: Sequence[Job]) -> Callable[[Job], tuple[bool, float, int]]:
    """Failed ones last, those without a result before them."""
    first = next((name for name in RESULTS if any(name in job.results for job in jobs)), None)

    def key(job: Job) -> tuple[bool, float, int]:
        value = None if first is None else job.results.get(first)
        return not job.finished, math.inf if first is None or value is None else value * RESULTS[first], job.number

    return key


def _title(name: str) -> str:
    return "train reward" if name == "reward/mean" else name.removeprefix("eval/")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
