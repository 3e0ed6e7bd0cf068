"""The end of a sweep: one line a job, on the terminal and in `summary.csv` beside the jobs' folders."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import rich.console
from rich.table import Table
from rich.text import Text

FILE = "summary.csv"
SUMMARY = "summary.json"
"""What a finished run leaves in its folder (`rlhf.report.summary`)."""
RESULTS = ("eval/reward", "eval/forward_kl", "eval/reverse_kl")
"""Held out, after the last step. The table has the best job first: the highest reward, or the lowest forward KL."""


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
        self.results = {name: summary["eval_after"][name] for name in RESULTS if name in summary["eval_after"]}
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
    for title in ("job", *varied, *(name.removeprefix("eval/") for name in results)):
        table.add_column(title, justify="left" if title in varied else "right")
    for job in sorted(jobs, key=_order):
        values = [job.values.get(key, "") for key in varied]
        if not job.finished:
            table.add_row(str(job.number), *values, Text(job.status, style="red"))
        else:
            table.add_row(str(job.number), *values, *(_number(job.results.get(name)) for name in results))
    unfinished = sum(not job.finished for job in jobs)
    said = f", {unfinished} of them without a result" if unfinished else ""
    console.print(Text(f"\nSweep: {len(jobs)} jobs{said}; {path}", style="bold"), soft_wrap=True)
    console.print(table)


def _order(job: Job) -> tuple[bool, float, int]:
    """Failed ones last, those without a result before them."""
    best_first = -job.results["eval/reward"] if "eval/reward" in job.results else job.results.get("eval/forward_kl")
    return not job.finished, float("inf") if best_first is None else best_first, job.number


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
