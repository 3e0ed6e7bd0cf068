"""When checkpoints are written, where, and which of them are kept.

Each is written beside its place and renamed into it, so that what has its name is complete whatever ends the run.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf import training_state
from rlhf.errors import CheckpointError, one_line
from rlhf.roles.protocols import Trainer
from rlhf.training_state import TrainingState
from rlhf.types import Metrics

BEST = "best"
BEST_FILE = "best.json"
"""In the best checkpoint: `{"step": 12, "eval/forward_kl": 0.25}`; with rewards `eval/reward`."""


@dataclass(frozen=True)
class Better:
    """What held-out metric the best checkpoint is chosen by."""

    key: str = "eval/forward_kl"
    highest: bool = False

    def than(self, value: float, other: float) -> bool:
        """Whether `value` is better."""
        return value > other if self.highest else value < other


@dataclass
class Checkpoints:
    """Hugging Face folders under `RUN/checkpoints`: `step_N` every `save_every` steps, `final` after the last, `best`.

    With `describe`, `step_N` and `final` hold the training state, too.
    """

    trainer: Trainer
    folder: Path
    save_every: int
    keep_last: int = 0
    """Older `step_N` are deleted; 0 keeps all."""
    keep_best: bool = False
    better: Better = field(default_factory=Better)
    describe: Callable[[int], TrainingState] | None = None
    """What the driver knows after a step. None: no training state is written."""
    saved: list[Path] = field(default_factory=list)
    """`step_N` and `final`, oldest first, as far as they are kept."""

    def after_step(self, step: int) -> Metrics:
        """Save if it is due. Returns the seconds it took."""
        if not self.save_every or step % self.save_every != 0:
            return {}
        started = time.perf_counter()
        self._save(f"step_{step}", step)
        self._delete_old()
        return {"time/save": time.perf_counter() - started}

    def after_evaluation(self, step: int, metrics: Metrics) -> None:
        """Keep the weights if no evaluation on the way was better, and note the evaluation in the step's checkpoint."""
        path = self._of(step)
        if path is not None and self.describe is not None:
            training_state.write(self.describe(step), path)
        key = self.better.key
        value, best = metrics.get(key, math.nan), self.best()
        new = best is None or key not in best or self.better.than(value, best[key])
        if self.keep_best and step > 0 and new and not math.isnan(value):
            with self._writing(BEST) as unfinished:
                self._weights(unfinished, path)
                (unfinished / BEST_FILE).write_text(json.dumps({"step": step, key: value}) + "\n", encoding="utf-8")

    def finish(self, step: int | None = None) -> Path:
        """The weights after the last step, which is `step`."""
        return self._save("final", step)

    def go_on(self) -> None:
        """Take over what an earlier part of the run, which has ended, left in the folder."""
        self.remove_unfinished()
        self.saved = [path for _, path in sorted(self._steps().items())]

    def best(self) -> dict[str, Any] | None:
        """What is noted in the best checkpoint; None while there is none."""
        return best_of(self.folder)

    def on_disk(self) -> list[Path]:
        """The complete ones, oldest first. More than `saved` knows of, if a save was interrupted at its very end."""
        return training_state.oldest_first(self.folder)

    def remove_unfinished(self) -> None:
        """Delete what a process that died was writing. Only after every role has ended."""
        for old in self.folder.glob(".*.replaced"):  # the new one may not have come into its place
            place = self.folder / old.name.removeprefix(".").removesuffix(".replaced")
            if place.exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.rename(place)
        for path in self.folder.glob(".*.unfinished-*"):
            shutil.rmtree(path, ignore_errors=True)

    def _save(self, name: str, step: int | None) -> Path:
        path = self.folder / name
        if self.describe is None:
            self.trainer.save(path).result()
        else:
            assert step is not None
            same = self._of(step)
            with self._writing(name) as unfinished:
                self._weights(unfinished, same)
                if same is None:
                    self._save_state(unfinished / training_state.FOLDER)
                else:
                    shutil.copytree(
                        same / training_state.FOLDER, unfinished / training_state.FOLDER, copy_function=link
                    )
                training_state.write(self.describe(step), unfinished)
        self.saved = [*(other for other in self.saved if other != path), path]
        return path

    def _save_state(self, folder: Path) -> None:
        """The trainer's part of the training state."""
        written = self.trainer.save_state(folder).result()
        found = len(list(folder.glob("*.pt")))
        if found != written:
            raise CheckpointError(
                f"of {written} files of training state {found} are in {folder.parent.parent}: the trainer's machines "
                "don't share this folder; use a run.dir that they do"
            )

    def _weights(self, unfinished: Path, same: Path | None) -> None:
        """The Hugging Face folder; linked to the same weights where they have been written already."""
        if same is None:
            self.trainer.save(unfinished).result()
        else:
            leave_out = shutil.ignore_patterns(training_state.FOLDER)
            shutil.copytree(same, unfinished, ignore=leave_out, copy_function=link)

    def _of(self, step: int) -> Path | None:
        """The checkpoint of a step, if this run has just written or resumed from it."""
        path = self.folder / f"step_{step}"
        return path if path in self.saved and (path / training_state.FOLDER).exists() else None

    @contextmanager
    def _writing(self, name: str) -> Iterator[Path]:
        """A folder to fill, which then takes its place."""
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = self.folder / f".{name}.unfinished-{os.getpid()}"
        try:
            yield unfinished
            put(unfinished, self.folder / name)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint {self.folder / name} can't be written: {error.strerror or one_line(error)}"
            ) from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def _steps(self) -> dict[int, Path]:
        """The complete `step_N` on disk."""
        return {int(match[1]): path for path in self.on_disk() if (match := re.fullmatch(r"step_(\d+)", path.name))}

    def _delete_old(self) -> None:
        """All but the newest `keep_last`, also of those that an earlier part of this run wrote."""
        if not self.keep_last:
            return
        steps = self._steps()
        for step in sorted(steps)[: -self.keep_last]:
            # Renamed first: a deletion that is cut short must not leave something that looks complete.
            unfinished = self.folder / f".{steps[step].name}.unfinished-{os.getpid()}"
            steps[step].rename(unfinished)
            shutil.rmtree(unfinished)
            self.saved = [path for path in self.saved if path != steps[step]]


def best_of(checkpoints: Path) -> dict[str, Any] | None:
    """What is noted in the best checkpoint; None while there is none.

    Raises:
        CheckpointError: it can't be read.
    """
    path = checkpoints / BEST / BEST_FILE
    if not path.is_file():
        return None
    try:
        noted = json.loads(path.read_text(encoding="utf-8"))
        return {**noted, "step": int(noted["step"])}
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}); delete its checkpoint to go on") from error


def put(folder: Path, place: Path) -> None:
    """Rename a folder into its place. What was there before goes only then; see `Checkpoints.remove_unfinished`."""
    old = place.with_name(f".{place.name}.replaced")
    if place.exists():
        place.rename(old)
    folder.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def link(source: str, target: str) -> None:
    """One file under two names, or a copy where the file system has no links. driver.json is replaced, never changed,
    so the other name keeps what it had."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
