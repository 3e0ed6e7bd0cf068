"""From `reward=functions` to what scores responses."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from rlhf.config.reward import FunctionReward
from rlhf.config.run import Run
from rlhf.errors import ConfigError, RewardError, nearest, one_line
from rlhf.rewards.functions import RESERVED, Signature, function_name
from rlhf.rewards.pool import Failure, Task, WorkerPool, stopped
from rlhf.rewards.worker import Call, Setup
from rlhf.types import ROW, Metrics, Rewards, Sequences

SHOWN = 60
"""Characters of a prompt in a message."""


class HasTokenizer(Protocol):
    """The part of `preflight.Inputs` that is used."""

    @property
    def tokenizer(self) -> Any: ...


def rewarder_of(run: Run, inputs: HasTokenizer) -> FunctionRewarder:
    """The reward functions of a checked configuration. Close it at the end of the run."""
    return FunctionRewarder(run.reward, inputs.tokenizer, run.plugins)


def names_of(spec: FunctionReward) -> list[str]:
    """What the functions are called in metrics: short, unless two would be called the same."""
    short = [function_name(name) for name in spec.functions]
    return [name if short.count(brief) > 1 else brief for name, brief in zip(spec.functions, short, strict=True)]


def setup_of(spec: FunctionReward, plugins: list[str]) -> Setup:
    """What a worker is told.

    Raises:
        ConfigError: options of a function that isn't there.
    """
    names = names_of(spec)
    for name in spec.options:
        if name not in names:
            raise ConfigError(
                f"reward.options.{name} is for a function that reward.functions={spec.functions} doesn't name"
                f"{nearest(str(name), names)}"
            )
    options = [dict(spec.options.get(name, {})) for name in names]
    return Setup(list(sys.path), plugins, list(zip(spec.functions, options, strict=True)))


def check(
    spec: FunctionReward,
    names: Collection[str],
    plugins: list[str],
    held_out: Collection[str] | None = None,
    are_all: bool = True,
) -> list[str]:
    """Load the functions, in a process of their own, and compare what they need with the data's columns.

    No function is called: a call may cost something, or leave traces.

    Args:
        names: columns of the rows to train on.
        held_out: columns of the held-out rows; None: there are no such rows.
        are_all: whether no row to train on has other columns than `names`.

    Returns:
        Warnings: columns that rows to train on may have or not.

    Raises:
        ConfigError: a function that doesn't exist, can't be imported, doesn't take its options, has an option of the
            name of a column that it would be given, has a limit of its own that is never reached, or needs a column
            that no row has.
    """
    pool = WorkerPool(setup_of(spec, plugins), 1, spec.timeout_s)
    try:
        signatures = pool.signatures()
    finally:
        pool.close()
    if spec.chunk_rows is not None and all(signature.rowwise for signature in signatures):
        raise ConfigError(
            f"reward.chunk_rows={spec.chunk_rows} has no effect on built-in functions, which judge each completion "
            "alone; leave reward.chunk_rows=null"
        )
    for name, signature in zip(names_of(spec), signatures, strict=True):
        if signature.timeout_s is not None and signature.timeout_s >= spec.timeout_s:
            raise ConfigError(
                f"reward.options.{name}.timeout_s={signature.timeout_s:g} must be below reward.timeout_s="
                f"{spec.timeout_s:g}, which ends the process first; lower the former or raise the latter"
            )
    columns = {*names, *(held_out or ())} - {ROW}
    if taken := sorted(columns & set(RESERVED)):
        raise ConfigError(
            f"the data's column '{taken[0]}' has the name of what every reward function is given; rename it, e.g. with "
            "data.preprocessor"
        )
    for name, signature in zip(names_of(spec), signatures, strict=True):
        both = sorted(columns & set(spec.options.get(name, {})))
        if both and signature.everything and not signature.rowwise:
            raise ConfigError(
                f"reward.options.{name}.{both[0]} has the name of a column of the data, which {name} gets by its "
                "**columns, too; rename one of them"
            )
    warnings = []
    for name, signature in zip(spec.functions, signatures, strict=True):
        for column in signature.required:
            if column not in names:
                lacking = _lacking(name, column, set(names) - {ROW}, "the data doesn't have" if are_all else READ_FIRST)
                if are_all:
                    raise ConfigError(lacking)
                warnings.append(lacking)
            if held_out is not None and column not in held_out:
                raise ConfigError(_lacking(name, column, set(held_out) - {ROW}, "no held-out row has"))
    return warnings


READ_FIRST = "none of the stream's first rows has; rows without it give None"


def _lacking(function: str, column: str, columns: Collection[str], which: str) -> str:
    there = sorted(columns)
    return (
        f"reward.functions={function} needs a column '{column}', which {which}{nearest(column, there)}; "
        f"there are {', '.join([*RESERVED, *there])}"
    )


class FunctionRewarder:
    """Decodes responses and has them scored, in processes beside the driver. See `roles.protocols.Rewarder`."""

    def __init__(self, spec: FunctionReward, tokenizer: Any, plugins: list[str]) -> None:
        self.spec, self.tokenizer = spec, tokenizer
        self.names = names_of(spec)
        self.weights = spec.weights or [1.0] * len(self.names)
        self.pool = WorkerPool(setup_of(spec, plugins), spec.processes, spec.timeout_s)
        self._closed = False
        self._lock = threading.Lock()
        self._told = 0
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="rewards", daemon=True)
        self._thread.start()

    def score(self, sequences: Sequences, rows: Sequence[Mapping[str, Any]]) -> Future[Rewards]:
        """See `Rewarder.score`. After `close` the future raises RewardError."""
        assert len(rows) == len(sequences), "a row for each response"
        future: Future[Rewards] = Future()
        with self._lock:  # otherwise a job might come after the None of `close`, and nobody would do it
            if self._closed:
                future.set_exception(stopped())
            else:
                self._jobs.put((future, sequences, rows))
        return future

    def metrics(self) -> Metrics:
        """Calls of built-in functions that took too long or ended their process, and so gave 0."""
        since, self._told = self.pool.choked - self._told, self.pool.choked
        return {"reward/choked": float(since)}

    def close(self) -> None:
        """End the processes, whatever they are doing. Who waits for a result gets a RewardError. Safe to call again."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self.pool.stop()
                self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                future, sequences, rows = job
                try:
                    future.set_result(self._score(sequences, rows))
                except BaseException as error:  # for whoever waits for the result
                    future.set_exception(error)
        finally:
            with self._lock:
                self._closed = True
            while not self._jobs.empty():
                if (job := self._jobs.get()) is not None:
                    job[0].set_exception(stopped())
            self.pool.close()

    def _score(self, sequences: Sequences, rows: Sequence[Mapping[str, Any]]) -> Rewards:
        signatures = self.pool.signatures()
        columns = self._columns(sequences, rows)
        tasks = [
            task for number, signature in enumerate(signatures) for task in self._tasks(number, signature, columns)
        ]
        try:
            answers = self.pool.run(tasks)
        except Failure as failure:
            raise self._error(failure, columns, rows) from None
        parts = np.full((len(signatures), len(rows)), np.nan, dtype=np.float32)
        for task, answer in zip(tasks, answers, strict=True):
            values = [np.nan if value is None else value for value in answer]
            parts[task.call.function, task.start : task.start + task.call.count] = values
        return self._rewards(parts, columns, rows)

    def _columns(self, sequences: Sequences, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
        """What functions may ask for, one list each. The completion of a conversation is the model's last turn."""
        prompts = [tokens[:length] for tokens, length in zip(sequences.rows(), sequences.prompt_lengths, strict=True)]
        responses = [turns[-1] for turns in sequences.turns()]
        decode = self.tokenizer.decode
        names = dict.fromkeys(name for row in rows for name in row if name != ROW)
        return {
            "prompts": [decode(prompt, skip_special_tokens=True) for prompt in prompts],
            "completions": [decode(response, skip_special_tokens=True) for response in responses],
            "completion_ids": [response.tolist() for response in responses],
            **{str(name): [row.get(name) for row in rows] for name in names},
        }

    def _tasks(self, number: int, signature: Signature, columns: dict[str, list[Any]]) -> list[Task]:
        """The calls of one function."""
        options = self.spec.options.get(self.names[number], {}) if not signature.rowwise else {}
        wanted = {
            name: values
            for name, values in columns.items()
            if name in signature.parameters or (signature.everything and name not in options)
        }
        count = len(columns["completions"])
        for name in signature.required:  # that no row of this batch has
            wanted.setdefault(name, [None] * count)
        size = 1 if signature.rowwise else self.spec.chunk_rows or count
        return [
            Task(
                Call(
                    number,
                    min(size, count - start),
                    {name: values[start : start + size] for name, values in wanted.items()},
                ),
                signature.rowwise,
                start,
            )
            for start in range(0, count, size)
        ]

    def _rewards(self, parts: np.ndarray, columns: dict[str, list[Any]], rows: Sequence[Mapping[str, Any]]) -> Rewards:
        applies = np.isfinite(parts)
        if not applies.any(axis=0).all():
            index = int(np.argmin(applies.any(axis=0)))
            raise RewardError(
                f"no function of reward.functions={self.spec.functions} applies to {self._row(index, columns, rows)}: "
                "all gave None; one must give a number"
            )
        weighted = np.where(applies, parts, 0).astype(np.float64) * np.asarray(self.weights)[:, None]
        total = weighted.sum(axis=0).astype(np.float32)
        return Rewards(total, dict(zip(self.names, parts, strict=True)))

    def _error(self, failure: Failure, columns: dict[str, list[Any]], rows: Sequence[Mapping[str, Any]]) -> RewardError:
        task = failure.task
        index = task.start + (failure.index or 0)
        where = self._row(index, columns, rows)
        if failure.index is None and task.call.count > 1:
            where = f"{task.call.count} completions, the first of {where} (reward.chunk_rows=1 tells which)"
        return RewardError(f"reward.functions={self.spec.functions[task.call.function]} {failure.reason}, on {where}")

    def _row(self, index: int, columns: dict[str, list[Any]], rows: Sequence[Mapping[str, Any]]) -> str:
        """How a person finds the row."""
        prompt = one_line(columns["prompts"][index])
        prompt = prompt if len(prompt) <= SHOWN else f"{prompt[:SHOWN]} ..."
        return f"{rows[index].get(ROW, f'response {index} of the batch')} ({prompt!r})"
