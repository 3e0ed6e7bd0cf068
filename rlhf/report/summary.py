"""What a person reads at the end of a run, and `summary.json`, which holds the same."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import rich.console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rlhf.errors import DataError, RlhfError, counted
from rlhf.types import Metrics

FILE = "summary.json"
FILES = {
    "metrics": "metrics.jsonl",
    "rollouts": "rollouts.jsonl",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "curves": "curves.svg",
}
"""What a run may have left beside it, as the summary lists it."""
JUDGED_BY = {"eval/forward_kl": "forward KL", "eval/reward": "reward"}
"""What a checkpoint may be the best by, and its name."""
SAMPLE_LINES = 6
"""A completion is shown up to here."""
PHASES = ("rollout", "reward", "score", "train", "sync")
"""In the order of a step."""


class Sample(TypedDict):
    """One held-out prompt, and what the student makes of it."""

    prompt: str
    before: str
    after: str


@dataclass(kw_only=True)
class RunSummary:
    """The outcome of one run."""

    name: str
    directory: Path | str
    steps: int
    seconds: float
    """Wall clock, from the first evaluation to the last."""
    start_seconds: float = 0.0
    """Before that: Ray and the roles were started, models loaded; 0: not known."""
    phases: Metrics = field(default_factory=dict)
    """Seconds by phase over all steps, as `MetricLog.seconds` has them: `step` is the sum, the others are its parts."""
    eval_before: Metrics = field(default_factory=dict)
    """`eval/forward_kl`, `eval/reverse_kl`; with rewards `eval/reward`; empty without evaluation."""
    eval_after: Metrics = field(default_factory=dict)
    rewards: Metrics = field(default_factory=dict)
    """`reward/mean` and the like, of the last step; empty without reward functions."""
    sample: Sample | None = None
    checkpoint: Path | str | None = None
    """The final Hugging Face checkpoint."""
    saved: list[Path] | list[str] = field(default_factory=list)
    """Checkpoints on the way, oldest first."""
    best: dict[str, Any] | None = None
    """`path`, `step` and `eval/forward_kl` (with rewards `eval/reward`) of the best one, if it is kept."""
    held_out_rows: int = 0
    """That the numbers of the evaluations are means over; 0: not known."""
    resumed_from: int | None = None
    """The step after which this part of the run began; what is above is of the whole run."""
    bad_rows: int = 0
    """Data rows that were left out."""
    roles: list[str] = field(default_factory=list)
    """What ran where, a line each: `trainer: 2 x cpu`."""
    versions: dict[str, str] = field(default_factory=dict)
    """Package -> version."""


def write(summary: RunSummary, run_dir: Path) -> Path:
    """Writes summary.json; a value that isn't finite becomes null."""
    path = run_dir / FILE
    path.write_text(json.dumps(_plain(asdict(summary)), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return path


def read(run_dir: Path) -> RunSummary:
    """What `write` wrote."""
    if not run_dir.is_dir():
        raise RlhfError(f"no folder {run_dir}; give the folder of a run, such as outputs/NAME")
    path = run_dir / FILE
    if not path.is_file():
        raise RlhfError(f"no {FILE} in {run_dir}: the run hasn't ended, or this isn't the folder of a run")
    try:
        return RunSummary(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} isn't a summary of this version of rlhf: {error}") from error


def line(summary: RunSummary) -> str:
    """The outcome in one line, for a job of a sweep."""
    parts = []
    for key, title in (("forward_kl", "forward KL"), ("accuracy", "accuracy")):
        values = [measured.get(f"eval/{key}") for measured in (summary.eval_before, summary.eval_after)]
        if values[1] is not None:
            parts.append(f"{title} {' -> '.join(_number(value) for value in values if value is not None)}")
    if (reward := summary.rewards.get("reward/mean")) is not None:
        parts.append(f"reward {_number(reward)}")
    took = f"{summary.steps} steps in {_duration(summary.seconds)}"
    return "; ".join([took, *parts, shown_path(Path(summary.directory))])


def show(summary: RunSummary, console: rich.console.Console) -> None:
    """Prints the summary: divergences, sample, seconds, files. Fits 80 columns, and reads the same in a pipe."""
    console.print()
    in_steps = summary.phases.get("step", summary.seconds)
    pace = f", {in_steps / summary.steps:.1f} s a step" if summary.steps else ""
    resumed = f", resumed from step {summary.resumed_from}" if summary.resumed_from is not None else ""
    start = f", after {_duration(summary.start_seconds)} to start" if summary.start_seconds else ""
    headline = f"Run {summary.name}: {summary.steps} steps in {_duration(summary.seconds)}{pace}{start}{resumed}"
    console.print(Text(headline, style="bold"), soft_wrap=True)
    if summary.eval_before or summary.eval_after:
        measured = {**summary.eval_before, **summary.eval_after}
        title = "Held-out divergence from the teacher" if "eval/forward_kl" in measured else "Held-out"
        rows = summary.held_out_rows
        of = f", {rows} row{'' if rows == 1 else 's'}" if rows else ""
        _section(console, title + of, _held_out(summary))
    if summary.sample:
        _section(console, "A held-out prompt, before and after", _sample(summary.sample, console))
    if summary.phases:
        _section(console, "Seconds by phase", _phases(summary))
    _lines(console, "Roles", ((role, "") for role in summary.roles))
    _lines(console, "Files", _files(summary))
    if summary.versions:
        versions = ", ".join(f"{name} {version}" for name, version in summary.versions.items())
        _section(console, "Versions", Text(versions))
    if summary.bad_rows:
        text = f"{counted(summary.bad_rows, 'bad row')} left out of the data."
        console.print(Text(f"\n{text}", style="yellow"))


def _held_out(summary: RunSummary) -> Table:
    table = _grid("", "before", "after", "ratio")
    for key, title in (("forward_kl", "forward KL"), ("reverse_kl", "reverse KL")):
        before, after = (values.get(f"eval/{key}") for values in (summary.eval_before, summary.eval_after))
        if before is None and after is None:
            continue
        ratio = after / before if before and after is not None else None
        style = "" if ratio is None else "green" if ratio < 1 else "yellow"
        table.add_row(title, _number(before), _number(after), Text(_number(ratio, 3), style=style))
    for key in ("reward", "accuracy"):
        shares = [values.get(f"eval/{key}") for values in (summary.eval_before, summary.eval_after)]
        if any(value is not None for value in shares):
            table.add_row(key, *(_number(value, 3) for value in shares), "")
    return table


def _sample(sample: Sample, console: rich.console.Console) -> Table:
    table = Table.grid(padding=(0, 2))
    width = console.width - 12  # the indent, the titles, the gap
    for title, text in (("prompt", sample["prompt"]), ("before", sample["before"]), ("after", sample["after"])):
        table.add_row(Text(title, style="dim"), _clipped(text, console, width))
    return table


def _clipped(text: str, console: rich.console.Console, width: int) -> Text:
    """At most SAMPLE_LINES lines. A model may write anything: what could steer the terminal is made visible."""
    visible = "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text.strip())
    lines = list(Text(visible or "(empty)").wrap(console, width))
    if len(lines) > SAMPLE_LINES:
        lines = lines[:SAMPLE_LINES]
        lines[-1].truncate(width - 4)
        lines[-1].rstrip()
        lines[-1].append(" ...")
    return Text("\n").join(lines)


def _phases(summary: RunSummary) -> Table:
    """Seconds of each phase, and what is left of the wall clock."""
    phases = summary.phases
    names = [*PHASES, *(name for name in phases if name not in (*PHASES, "step"))]
    parts = {name: phases[name] for name in names if name in phases}
    total = max(summary.seconds, sum(parts.values()))
    if total - sum(parts.values()) > 0.01 * total:
        parts["other"] = total - sum(parts.values())
    table = _grid("", "seconds", "share")
    for name, seconds in parts.items():
        table.add_row(name, f"{seconds:.1f}", f"{seconds / total:.0%}" if total else "-")
    return table


def _files(summary: RunSummary) -> Iterator[tuple[str, str]]:
    run_dir = Path(summary.directory)
    yield "run", shown_path(run_dir)
    yield from ((title, shown_path(run_dir / name)) for title, name in FILES.items() if (run_dir / name).exists())
    yield from (("checkpoint", shown_path(Path(path))) for path in summary.saved)
    if summary.best:
        noted = [f"step {summary.best['step']}"]
        noted += [f"{title} {_number(summary.best[key])}" for key, title in JUDGED_BY.items() if key in summary.best]
        yield "best", f"{shown_path(Path(summary.best['path']))} ({', '.join(noted)})"
    if summary.checkpoint:
        yield "final", shown_path(Path(summary.checkpoint))
        if (adapter := Path(summary.checkpoint) / "adapter").exists():
            yield "adapter", shown_path(adapter)


def _section(console: rich.console.Console, title: str, body: Table | Text) -> None:
    console.print(Text(f"\n{title}", style="bold cyan"))
    console.print(Padding(body, (0, 0, 0, 2), expand=False))


def _lines(console: rich.console.Console, title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Not a table: a path that is cut or wrapped can't be copied."""
    for number, (left, right) in enumerate(rows):
        if number == 0:
            console.print(Text(f"\n{title}", style="bold cyan"))
        console.print(Text.assemble("  ", f"{left:<13}{right}".rstrip()), soft_wrap=True)


def _grid(first: str, *others: str) -> Table:
    """Names on the left, numbers right-aligned; no frame, so that it looks the same in a log file."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(first, min_width=10)
    for title in others:
        table.add_column(title, justify="right", min_width=8)
    return table


def _number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def shown_path(path: Path) -> str:
    """Relative where it lies below the working directory."""
    absolute = path.resolve()
    return str(absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else absolute)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
