"""Exercises of the package reasoning-gym: made on the spot, with reference solutions."""

from __future__ import annotations

import contextlib
import difflib
import io
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from rlhf.config.data import ReasoningGymData
from rlhf.data.raw import RowSource
from rlhf.errors import DataError, one_line


def read_reasoning_gym(spec: ReasoningGymData, count: int, seed: int) -> RowSource:
    """`count` rows of a reasoning-gym task, the same ones for the same seed.

    The reference response is the task's worked solution (`answer_cot`) where it has one, else its answer. The columns
    `task` and `entry` are what a verifier needs: `reasoning_gym.get_score_answer_fn(task)(answer, entry)`.

    Raises:
        DataError: the task doesn't exist, doesn't take the options, or fails.
    """
    reserved = sorted({"size", "seed"} & set(spec.options))
    if reserved:
        raise DataError(f"data.options can't set {' or '.join(reserved)}; use data.size and run.seed")
    # Entry i is drawn from seed + i: neighbouring run seeds would share almost all rows, so spread them out.
    task_seed = int(np.random.SeedSequence(seed).generate_state(1)[0] >> 1)
    with _contained(task_seed):
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise DataError("data=reasoning_gym needs the package reasoning-gym: pip install reasoning-gym") from error
        if spec.task not in DATASETS:
            close = difflib.get_close_matches(spec.task, DATASETS, n=5, cutoff=0.5)
            hint = f"close matches: {', '.join(close)}" if close else f"there are {', '.join(sorted(DATASETS))}"
            raise DataError(f"data.task={spec.task} is no task of reasoning-gym; {hint}")
        try:
            task = reasoning_gym.create_dataset(spec.task, size=count, seed=task_seed, **spec.options)
        except Exception as error:
            raise DataError(
                f"data.task={spec.task} doesn't take data.options={dict(spec.options)}: {one_line(error)}"
            ) from error
        entries = []
        for index in range(count):
            try:
                entries.append(task[index])
            except Exception as error:
                raise DataError(f"data.task={spec.task} failed to make row {index}: {one_line(error)}") from error
    rows = [(f"{spec.task}[{i}]", _exercise(spec.task, entry)) for i, entry in enumerate(entries)]
    return RowSource(f"data.task={spec.task}", lambda: iter(rows))


def _exercise(task: str, entry: dict[str, Any]) -> dict[str, Any]:
    solution = entry["metadata"].get("answer_cot") or entry["answer"]
    response = None if solution is None else str(solution)
    return {"prompt": entry["question"], "response": response, "task": task, "entry": entry}


@contextlib.contextmanager
def _contained(seed: int) -> Iterator[None]:
    """Keep a task's habits to itself: warnings on import, dots on stdout, and draws from the global generators."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
