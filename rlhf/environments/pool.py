"""Users' environments in processes of their own: made, asked, and given up for lost when they take too long.

A conversation stays in the process it began in. One thread owns them all: a process ends with the thread that started
it (`rlhf.processes.die_with`), hence with the driver.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import wait
from typing import Any

from rlhf.config.environment import MultiTurn
from rlhf.environments.base import Turn
from rlhf.environments.worker import RESERVED, Begin, End, Failed, Respond, Setup, Signature
from rlhf.errors import ConfigError, EnvironmentFailed, nearest
from rlhf.processes import Ended, UserProcess
from rlhf.types import ROW
from rlhf.user_code import named

START_S = 120.0
"""How long importing the class may take."""

Call = Begin | Respond | End


def setup_of(spec: MultiTurn, plugins: list[str]) -> Setup:
    """What a process is told."""
    return Setup(list(sys.path), plugins, spec.name, dict(spec.options))


def check(spec: MultiTurn, column_names: Iterable[str], plugins: list[str]) -> None:
    """Load the class, in a process of its own, and compare what `reset` needs with the data's columns.

    Raises:
        ConfigError: a class that doesn't exist, can't be imported, doesn't take its options, or needs a column that no
            row has.
    """
    process = start(spec, plugins)
    try:
        signature = begun(process, spec)
    finally:
        process.kill()
    columns = sorted({*column_names} - {ROW})
    if taken := [column for column in columns if column in RESERVED]:
        raise ConfigError(
            f"the data's column '{taken[0]}' has the name of what every environment is given; rename it, e.g. with "
            "data.preprocessor"
        )
    for column in signature.required:
        if column not in columns:
            raise ConfigError(
                f"environment.name={spec.name}: reset needs a column '{column}', which the data doesn't have"
                f"{nearest(column, columns)}; there are {', '.join([*RESERVED, *columns])}"
            )


def start(spec: MultiTurn, plugins: list[str]) -> UserProcess:
    return UserProcess("rlhf.environments.worker", setup_of(spec, plugins))


def begun(process: UserProcess, spec: MultiTurn) -> Signature:
    """Wait until a process is ready.

    Raises:
        ConfigError: the class can't be loaded.
    """
    importing = f"environment.name={spec.name}: importing it"
    if not wait([process.connection], START_S):
        raise ConfigError(f"{importing} took more than {START_S:g} seconds")
    answer = process.received()
    if isinstance(answer, Ended):
        raise ConfigError(f"{importing} {answer.how}")
    if isinstance(answer, Failed):
        raise ConfigError(answer.reason)
    assert isinstance(answer, Signature)
    return answer


class EnvironmentPool:
    """See `roles.protocols.Environments`."""

    def __init__(self, spec: MultiTurn, plugins: list[str]) -> None:
        self.spec, self.plugins = spec, plugins
        self._thread = ThreadPoolExecutor(1, "environments")
        self._processes: list[UserProcess] = []
        self._signature: Signature | None = None
        self._rows: Sequence[Mapping[str, Any]] = ()
        """Of the conversations that go on."""
        self._closed = False

    def reset(self, rows: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> Future[None]:
        """See `Environments.reset`."""
        return self._thread.submit(self._reset, rows, seeds)

    def step(self, episodes: Sequence[int], responses: Sequence[str]) -> Future[list[Turn]]:
        """See `Environments.step`."""
        return self._thread.submit(self._run, list(map(Respond, episodes, responses)))

    def end(self, episodes: Sequence[int]) -> Future[list[None]]:
        """See `Environments.end`."""
        return self._thread.submit(self._run, list(map(End, episodes)))

    def close(self) -> None:
        """End the processes, whatever they are doing. Who waits for an answer gets an EnvironmentFailed. Safe to call
        again."""
        if self._closed:
            return
        self._closed = True
        for process in self._processes[:]:
            process.stop()  # `_answers`, which waits for its answer, reads that it has ended
        self._thread.submit(self._kill)
        self._thread.shutdown()

    def _kill(self) -> None:
        while self._processes:
            self._processes.pop().kill()

    def _reset(self, rows: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> None:
        signature = self._started()
        self._rows = rows
        calls = [Begin(episode, self._given(signature, rows[episode], seeds[episode])) for episode in range(len(rows))]
        self._run(calls)

    def _given(self, signature: Signature, row: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """The arguments of `reset`."""
        known = {**{str(name): value for name, value in row.items() if name != ROW}, "seed": seed}
        given = {name: value for name, value in known.items() if signature.everything or name in signature.parameters}
        return {**dict.fromkeys(signature.required), **given}

    def _started(self) -> Signature:
        """All processes, started the first time."""
        if self._signature is None:
            self._processes += [start(self.spec, self.plugins) for _ in range(self.spec.processes)]
            signatures = [begun(process, self.spec) for process in self._processes]
            self._signature = signatures[0]
        return self._signature

    def _run(self, calls: Sequence[Call]) -> list[Any]:
        """The answers, in the order of the calls. A process works on one call at a time.

        Raises:
            EnvironmentFailed: a call failed. All processes are ended, and so is the run.
        """
        try:
            return self._answers(calls)
        except BaseException:
            self._kill()
            raise

    def _answers(self, calls: Sequence[Call]) -> list[Any]:
        if self._closed or not self._processes:
            raise EnvironmentFailed("the environments were stopped")
        waiting: list[deque[int]] = [deque() for _ in self._processes]
        for number, call in enumerate(calls):
            waiting[call.episode % len(self._processes)].append(number)
        answers: dict[int, Any] = {}
        busy: dict[UserProcess, tuple[int, float]] = {}
        while len(answers) < len(calls):
            for process, queue in zip(self._processes, waiting, strict=True):
                if queue and process not in busy:
                    number = queue.popleft()
                    self._give(process, calls[number])
                    busy[process] = number, time.monotonic() + self.spec.timeout_s
            nearest = min(deadline for _, deadline in busy.values())
            ready = wait([process.connection for process in busy], max(0.0, nearest - time.monotonic()))
            for process, (number, deadline) in list(busy.items()):
                if process.connection in ready:
                    answers[number] = self._used(calls[number], process.received())
                    del busy[process]
                elif time.monotonic() >= deadline:
                    raise self._error(
                        calls[number], f"took more than environment.timeout_s={self.spec.timeout_s:g} seconds"
                    )
        return [answers[number] for number in range(len(calls))]

    def _give(self, process: UserProcess, call: Call) -> None:
        try:
            process.send(call)
        except Exception as error:  # whatever an object of a user's raises while it is pickled
            raise self._error(call, f"can't be given the row's columns: {named(error)}") from error

    def _used(self, call: Call, answer: Any) -> Any:
        if isinstance(answer, Ended) and self._closed:
            raise EnvironmentFailed("the environments were stopped")
        if isinstance(answer, Ended | Failed):
            raise self._error(call, answer.how if isinstance(answer, Ended) else answer.reason)
        return answer

    def _error(self, call: Call, reason: str) -> EnvironmentFailed:
        """With the row, so that a person finds it."""
        doing = {Begin: "reset", Respond: "step", End: "close"}[type(call)]
        where = self._rows[call.episode].get(ROW, f"conversation {call.episode} of the batch")
        return EnvironmentFailed(f"environment.name={self.spec.name}, {doing}: {reason}, on {where}")
