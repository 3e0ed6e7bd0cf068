"""The training state in a checkpoint folder: what the driver writes of it, and which checkpoints can be continued from.

checkpoints/step_2/        a Hugging Face folder
  training_state/
    rank_0.pt ...          written by the trainer's processes
    driver.json            written last, with the sizes of the others

The whole of it is written into `.step_2.unfinished-PID` and renamed, so a folder with a plain name is complete.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from rlhf.errors import CheckpointError
from rlhf.types import Metrics

FOLDER = "training_state"
FILE = "driver.json"
FORMAT = 1
"""Raised with every change that older code can't read."""
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """What the driver knows at a step. The trainer's processes write the rest."""

    step: int
    version: int
    """Of the weights."""
    cursor: dict[str, Any]
    """Where the run stands in its rows."""
    data: dict[str, Any]
    """Which rows they are; see `rlhf.resume.mark_of`."""
    evaluations: dict[int, Metrics]
    """Step -> held-out divergences; the first one is the summary's "before"."""
    samples: dict[int, list[int]]
    """Step -> token ids of the sample completion."""
    phases: Metrics
    """Seconds by phase so far."""
    seconds: float
    """Wall clock so far."""
    bad_rows: int
    """Rows listed in bad_rows.txt."""
    wandb_id: str | None
    config: dict[str, Any]
    versions: dict[str, str]
    """Package -> version."""


def write(state: TrainingState, checkpoint: Path) -> None:
    """Complete the training state of a checkpoint whose other files are there, or replace what was written before."""
    folder = checkpoint / FOLDER
    sizes = {path.name: path.stat().st_size for path in sorted(folder.glob("*.pt"))}
    content = {"format": FORMAT, "files": sizes, **dataclasses.asdict(state)}
    unfinished = folder / f".{FILE}.unfinished-{os.getpid()}"
    unfinished.write_text(json.dumps(content, default=_plain) + "\n", encoding="utf-8")
    unfinished.replace(folder / FILE)


def read(checkpoint: Path) -> TrainingState:
    """What `write` wrote, once every file is known to be whole.

    Raises:
        CheckpointError: no training state, of another format, damaged, or with a file missing or cut off.
    """
    path = checkpoint / FOLDER / FILE
    if not path.is_file():
        raise CheckpointError(
            f"{checkpoint} has no training state: run.save_every writes it, from the step after which it is set"
        )
    remedy = "continue from another checkpoint: resume=FOLDER"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {content['format']}, this version of rlhf reads format {FORMAT}; it was written "
                f"with rlhf {content.get('versions', {}).get('rlhf', '(unknown)')}: use that one, or start anew"
            )
        files = {str(name): int(size) for name, size in content["files"].items()}
        content = {name: value for name, value in content.items() if name not in ("format", "files")}
        for name in ("evaluations", "samples"):
            content[name] = {int(step): value for step, value in content[name].items()}
        state = TrainingState(**content)
        _check_types(state)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}); {remedy}") from error
    for name, size in files.items():
        found = (path.parent / name).stat().st_size if (path.parent / name).is_file() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise CheckpointError(f"{path.parent / name} {what}; {remedy}")
    return state


def _check_types(state: TrainingState) -> None:
    """Raise TypeError or ValueError for what `write` can't have written."""
    for name in ("step", "version", "bad_rows"):
        value = getattr(state, name)
        if type(value) is not int or value < (1 if name == "step" else 0):
            raise ValueError(name)
    for name in ("cursor", "data", "config", "phases", "versions"):
        if not isinstance(getattr(state, name), dict):
            raise TypeError(name)
    measured = [
        *state.phases.values(),
        state.seconds,
        *(v for values in state.evaluations.values() for v in values.values()),
    ]
    if not all(isinstance(value, int | float) for value in measured):
        raise TypeError("numbers")
    if not all(type(token) is int for tokens in state.samples.values() for token in tokens):
        raise TypeError("samples")


def step_of(checkpoint: Path) -> int | None:
    """The step a checkpoint is of; None without training state. Nothing else in it is looked at.

    Raises:
        CheckpointError: it can't be read.
    """
    path = checkpoint / FOLDER / FILE
    if not path.is_file():
        return None
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["step"])
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}); delete its checkpoint to go on") from error


def newest(run_dir: Path) -> Path | None:
    """The checkpoint of a run with the highest step that can be continued from. Of two at one step, the final one: it
    knows the evaluation after it.

    Raises:
        CheckpointError: of one of them the step can't be read.
    """
    steps = {path: step for path in complete(run_dir) if (step := step_of(path)) is not None}
    return max(steps, key=lambda path: (steps[path], path.name == "final"), default=None)


def complete(run_dir: Path) -> list[Path]:
    """The checkpoints of a run, whatever is in them; unfinished ones begin with a dot."""
    return sorted(_named_folders(run_dir / CHECKPOINTS))


def oldest_first(checkpoints: Path) -> list[Path]:
    """The complete ones in a folder of checkpoints, by the time they were written."""
    return sorted(_named_folders(checkpoints), key=lambda path: path.stat().st_mtime_ns)


def _named_folders(checkpoints: Path) -> list[Path]:
    return [path for path in checkpoints.glob("[!.]*") if path.is_dir()]


def plain(config: Any) -> Any:
    """A configuration as it looks once it has been written and read again."""
    return json.loads(json.dumps(config, default=_plain))


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    raise TypeError(f"not for a state: {value!r}")
