"""Continuing a run: from which checkpoint, whether its configuration allows it, and what has to be cut off before.

find (configuration) ► check_data, finished (rows are known) ► prepare (the folder is ours) ► `Progress.restore`
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlhf import training_state
from rlhf.checkpoint import BEST, best_of
from rlhf.config.base import written
from rlhf.config.defaults import defaults_of
from rlhf.config.run import Run
from rlhf.data.dataset import Dataset
from rlhf.data.table import PromptTable
from rlhf.errors import CheckpointError, ConfigError
from rlhf.loggers import jsonl, rollouts
from rlhf.loggers.cut import cut_lines, cut_rows
from rlhf.report import plot
from rlhf.report import summary as report
from rlhf.run_folder import Content
from rlhf.training_state import TrainingState

BAD_ROWS = "bad_rows.txt"

DECIDES = (
    "plugins",
    "model._target_",
    "model.path",
    "model.drop_layers",
    "model.provider",
    "model.lora.rank",
    "model.lora.alpha",
    "model.lora.target",
    "model.lora.path",
    "teacher.*",
    "data.*",
    "algo._target_",
    "algo.num_generations",
    "algo.steps_per_generation",
    "distill._target_",
    "reward._target_",
    "environment._target_",
    "run.seed",
    "eval.samples",
    "train._target_",
    "train.global_batch_samples",
    "train.gpus",
    "train.tensor_parallel",
    "train.distributed_optimizer",
    "train.dtype",
    "cluster.device",
)
"""Keys that may not change: what is trained on what (eval.samples decides which rows are held out), in which order, and
how the state is laid out. All others may; the run says which ones did."""
FREE_IN_A_SWEEP = ("run.*", "eval.every", "eval.keep_best", "logger.*", "cluster.*")
"""Under resume=auto a job of a sweep finds its folder by its number. Were other values swept now, it would go on with,
or report as its own, what was another job: all keys but these decide there, too."""
OF_NO_INTEREST = ("resume", "run.name", "run.dir", "run.overwrite")
"""They change with every continuation."""


@dataclass(frozen=True)
class Resume:
    """Where a run goes on."""

    checkpoint: Path
    state: TrainingState
    in_place: bool
    """In the folder of the run it continues; otherwise in a new one."""
    changed: list[str]
    """`KEY=VALUE (was VALUE)` of the keys that may change and did."""
    newer: list[Path]
    """In place, with run.overwrite=true: checkpoints of a later step, which it takes the place of."""


# ---- before anything is read but JSON -------------------------------------------------------------------------------


def find(run: Run, config: Any, sweep: bool) -> Resume | None:
    """The checkpoint that `resume` means, checked against the configuration; None: start at the beginning.

    Args:
        config: the run's, as containers.
        sweep: it is a job of a sweep.

    Raises:
        ConfigError: nothing to continue from where one was named, or keys that have changed and may not.
        CheckpointError: no training state, or a damaged one.
    """
    if run.resume == "never":
        return None
    run_dir = Path(run.run.dir).expanduser().resolve()
    checkpoint = _newest(run_dir) if run.resume == "auto" else _named(run.resume)
    if checkpoint is None:
        return None
    state = training_state.read(checkpoint)
    changed = compare(state.config, training_state.plain(config), checkpoint, sweep and run.resume == "auto")
    in_place = checkpoint.is_relative_to(run_dir)
    newer = [path for path in training_state.complete(run_dir) if _later(path, state.step)] if in_place else []
    if newer and not run.run.overwrite:
        raise ConfigError(
            f"resume={run.resume} is step {state.step} of a run that has later checkpoints ({newer[-1].name}), which "
            "it would replace; use another run.name, or run.overwrite=true to delete them"
        )
    return Resume(checkpoint, state, in_place, changed, newer)


def content_of(run: Run, resume: Resume | None) -> Content:
    """What may happen to what is in the run's folder."""
    if resume is not None and resume.in_place:
        return Content.keep
    return Content.delete_if_nothing_saved if run.resume == "auto" else Content.delete_if_told


def compare(before: dict[str, Any], now: dict[str, Any], checkpoint: Path, in_a_sweep: bool = False) -> list[str]:
    """Keys that differ -> `KEY=VALUE (was VALUE)`. A key that the earlier run didn't have yet was at its default.

    Raises:
        ConfigError: one of them decides what the run is.
    """
    old, new = ({"plugins": [], **dict(_flat(section))} for section in (before, now))  # older runs have none
    old = {key: value for key, value in _defaults(now).items() if key in new} | old
    changed = [key for key in dict.fromkeys([*new, *old]) if old.get(key) != new.get(key)]
    refused = [
        key
        for key in changed
        if _matches(key, DECIDES) or (in_a_sweep and key not in OF_NO_INTEREST and not _matches(key, FREE_IN_A_SWEEP))
    ]
    if refused:
        another = "hydra.sweep.dir" if in_a_sweep else "run.name"
        named = ", ".join(f"{_key(key)}={_value(key, new)} (was {_value(key, old)})" for key in refused)
        raise ConfigError(
            f"can't continue from {report.shown_path(checkpoint)} with {named}: that would be another run; write the "
            f"former values, or start anew with resume=never and another {another}"
        )
    return [f"{_key(key)}={_value(key, new)} (was {_value(key, old)})" for key in changed if key not in OF_NO_INTEREST]


def _newest(run_dir: Path) -> Path | None:
    found = training_state.newest(run_dir)
    others = [path.name for path in training_state.complete(run_dir) if path.name != "best"]
    if found is None and others:
        raise ConfigError(
            f"resume=auto: the checkpoints of run.dir={run_dir} ({', '.join(others)}) have no training state, which "
            "run.save_every writes; use another run.name, or resume=never run.overwrite=true to start anew"
        )
    return found


def _named(text: str) -> Path:
    path = Path(text).expanduser().resolve()
    if not path.is_dir():
        raise ConfigError(f"resume={text}: no such folder; write never, auto, or the folder of a run or a checkpoint")
    if (path / training_state.FOLDER).is_dir():
        return path
    found = training_state.newest(path)
    if found is None:
        raise ConfigError(
            f"resume={text} holds no training state; write the folder of a run with run.save_every, or one of its "
            "checkpoints/step_N"
        )
    return found


def _later(checkpoint: Path, step: int) -> bool:
    found = training_state.step_of(checkpoint)
    return found is not None and found > step


def _flat(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Full key -> what it is where nobody sets it."""
    sections = {name: section for name, section in config.items() if isinstance(section, dict)}
    found = {
        f"{name}.{key}": value
        for name, section in sections.items()
        for key, value in defaults_of(str(section.get("_target_"))).items()
    }
    return dict(training_state.plain(found))


def _matches(key: str, table: tuple[str, ...]) -> bool:
    return any(key == entry or (entry.endswith(".*") and key.startswith(entry[:-1])) for entry in table)


def _key(key: str) -> str:
    """As one writes it: a group's class is the group."""
    return key.removesuffix("._target_")


def _value(key: str, values: dict[str, Any]) -> str:
    if key not in values:
        return "(none)"
    return written(values[key]).rpartition(".")[2] if key.endswith("._target_") else written(values[key])


# ---- once the rows are known ----------------------------------------------------------------------------------------


def mark_of(dataset: Dataset) -> dict[str, Any]:
    """Tells rows from others: how many, and a hash of their tokens (of a stream, of the held-out ones)."""
    digest = hashlib.sha256()
    for table in (dataset.train, dataset.held_out):
        if isinstance(table, PromptTable):
            responses, privileged = (
                (table.response_tokens, table.response_offsets),
                (
                    table.teacher_tokens,
                    table.teacher_offsets,
                ),
            )
            for array in (table.tokens, table.offsets, *responses, *privileged):
                digest.update(np.ascontiguousarray(array).data)
    return {"train_rows": dataset.train_rows, "hash": digest.hexdigest()[:16]}


def check_data(resume: Resume, dataset: Dataset) -> None:
    """The rows are those of the run that is continued.

    Raises:
        CheckpointError: they aren't.
    """
    before, now = resume.state.data, mark_of(dataset)
    if before != now:
        what = (
            f"there were {before['train_rows']} rows to train on, and are {now['train_rows']} now"
            if before["train_rows"] != now["train_rows"]
            else "the rows, or the tokens they give, have changed"
        )
        raise CheckpointError(
            f"can't continue from {report.shown_path(resume.checkpoint)}: {what}; use the data it was started with"
        )


def finished(resume: Resume, run: Run, run_dir: Path, steps: int) -> bool:
    """Whether nothing is left to do, which is no error under resume=auto: a command may be repeated until it is so.

    A run that was killed between its last checkpoint and its summary is not finished.

    Raises:
        ConfigError: the checkpoint is past the run's length; or it is all done, and a continuation was asked for.
    """
    step = resume.state.step
    remedy = f"nothing to continue; use run.steps={step + 1} or more"
    if step > steps:
        raise ConfigError(f"{report.shown_path(resume.checkpoint)} is at step {step}, past run.steps={steps}: {remedy}")
    if step < steps or (resume.in_place and not (run_dir / report.FILE).is_file()):
        return False
    if run.resume == "auto":
        return True
    raise ConfigError(f"{report.shown_path(resume.checkpoint)} is at step {step}, the last of the run: {remedy}")


# ---- once the folder is ours ----------------------------------------------------------------------------------------


def prepare(resume: Resume, run_dir: Path) -> None:
    """Cut off what came after the step that is resumed from, in place only."""
    if not resume.in_place:
        return
    state = resume.state
    noted = best_of(run_dir / training_state.CHECKPOINTS)
    for path in resume.newer:
        shutil.rmtree(path)
    if noted is not None and noted["step"] > state.step:  # of steps that are taken again, perhaps with other settings
        shutil.rmtree(run_dir / training_state.CHECKPOINTS / BEST)
    for name in (report.FILE, plot.FILE):  # of a run that is longer now
        (run_dir / name).unlink(missing_ok=True)

    def before_the_cut(row: dict[str, Any]) -> bool:
        evaluation = any(name.startswith("eval/") for name in row)
        return row["step"] < state.step or (
            row["step"] == state.step and (not evaluation or state.step in state.evaluations)
        )

    cut_rows(run_dir / jsonl.FILE, before_the_cut)
    cut_rows(run_dir / rollouts.FILE, before_the_cut)
    cut_lines(run_dir / BAD_ROWS, state.bad_rows)


def described(resume: Resume | None) -> str:
    """One or two lines for the person watching."""
    if resume is None:
        return "resume=auto: no checkpoint to continue from; starting at the beginning"
    line = f"continuing from step {resume.state.step}, {report.shown_path(resume.checkpoint)}"
    if resume.state.config.get("placement", {}).get("max_staleness"):
        line += "\nplacement.max_staleness: the first responses are made again, with the weights of that step"
    return line + (f"\nchanged since: {', '.join(resume.changed)}" if resume.changed else "")


def still_as_found(resume: Resume | None, run: Run, config: Any, sweep: bool) -> None:
    """Once the folder is ours: nobody has saved into it since `find` looked.

    Raises:
        ConfigError: another process has.
    """
    again = find(run, config, sweep)
    seen, now = (None if one is None else (one.checkpoint, one.state.step, one.newer) for one in (resume, again))
    if seen != now:
        raise ConfigError(f"run.dir={run.run.dir} was used by another process just now; start the command again")


def described_as_done(resume: Resume, run_dir: Path) -> str:
    """The same for a run in which nothing is left to do."""
    line = f"{report.shown_path(run_dir)} is done: {resume.state.step} steps; use a higher run.steps to go on"
    return line + (f"\nchanged since, without effect: {', '.join(resume.changed)}" if resume.changed else "")
