"""`metrics.jsonl`: one object a line, `{"step": 3, "time": 1767225600.0, "train/loss": 0.71, ...}`.

JSON has no NaN or infinity. Such a value is written as null, and its name and kind are listed, so that nothing is lost:
`{"step": 3, "time": ..., "train/loss": null, "nonfinite": {"train/loss": "nan"}}`.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

from rlhf.errors import DataError, RlhfError
from rlhf.types import Metrics

FILE = "metrics.jsonl"


class Jsonl:
    """Appends, and flushes every step: the file is complete up to the last step whatever ends the run."""

    def __init__(self, run_dir: Path) -> None:
        self._file = (run_dir / FILE).open("a", encoding="utf-8")

    def log(self, step: int, metrics: Metrics) -> None:
        row: dict[str, object] = {"step": step, "time": round(time.time(), 3)}
        row |= {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        nonfinite = {name: str(value) for name, value in metrics.items() if not math.isfinite(value)}
        if nonfinite:
            row["nonfinite"] = nonfinite
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def summary(self, values: dict[str, object]) -> None:
        """Nothing: `rlhf.report.summary` writes summary.json beside this file."""

    def close(self) -> None:
        self._file.close()


def read(run_dir: Path) -> dict[int, Metrics]:
    """Step -> its metrics, NaN and infinities restored. Lines of one step are merged; the later one wins."""
    path = run_dir / FILE
    if not path.is_file():
        raise RlhfError(f"no {FILE} in {run_dir}: give the folder of a run with logger.jsonl=true")
    steps: dict[int, Metrics] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            row = json.loads(line)
            metrics = {name: float(value) for name, value in row.items() if "/" in name and value is not None}
            metrics |= {name: float(kind) for name, kind in row.get("nonfinite", {}).items()}
            steps.setdefault(row["step"], {}).update(metrics)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(f"{path}, line {number}: not a line of metrics ({error!r})") from error
    return dict(sorted(steps.items()))
