"""Worker processes for reward functions: started when needed, killed when they take too long, replaced when they die.

One thread owns them all. A worker ends with the thread that started it (`processes.die_with`), hence with the driver.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from rlhf.errors import ConfigError, RewardError
from rlhf.processes import Ended, UserProcess
from rlhf.rewards.functions import Signature
from rlhf.rewards.worker import Call, Failed, Setup
from rlhf.user_code import named

START_S = 120.0
"""How long importing the functions may take."""


@dataclass(frozen=True)
class Task:
    """One call."""

    call: Call
    rowwise: bool
    """Of a built-in function: a completion it chokes on gets 0."""
    start: int = 0
    """Where its completions begin in the batch."""


@dataclass(eq=False)
class Failure(Exception):
    """A task that failed."""

    task: Task
    reason: str
    index: int | None


def stopped() -> RewardError:
    """For who waits for a result that won't come, since the run ends."""
    return RewardError("the reward functions were stopped")


class Worker(UserProcess):
    """One process and what it is busy with."""

    def __init__(self, setup: Setup) -> None:
        super().__init__("rlhf.rewards.worker", setup)
        self.task: Task | None = None
        self.deadline = time.monotonic() + START_S
        self.failed: Failed | None = None
        """How its task failed; it is looking for the completion."""
        self.signatures: list[Signature] | None = None

    def give(self, task: Task, timeout_s: float) -> None:
        """Raises Failure for columns that can't be sent."""
        self.task, self.deadline, self.failed = task, time.monotonic() + timeout_s, None
        try:
            self.send(task.call)
        except Exception as error:  # whatever an object of a user's raises while it is pickled
            raise Failure(task, f"can't be given the row's columns: {named(error)}", None) from error

    def receive(self) -> Any:
        """Its answer; how it ended, where it did."""
        answer = self.received()
        return Failed(answer.how, killed=True) if isinstance(answer, Ended) else answer


class WorkerPool:
    """Calls of reward functions, several at a time. To be used by one thread, but for `stop`."""

    def __init__(self, setup: Setup, processes: int, timeout_s: float) -> None:
        self.setup, self.processes, self.timeout_s = setup, processes, timeout_s
        self.workers: list[Worker] = []
        self.choked = 0
        """Completions that a built-in function gave 0 because it was ended over them."""
        self._wake, self._woken = os.pipe()[::-1]
        self._stopped = False

    def signatures(self) -> list[Signature]:
        """What the functions have to be given.

        Raises:
            ConfigError: one can't be loaded.
        """
        self._drop_the_dead()
        if not self.workers:
            self._start()
        worker = self.workers[0]
        while worker.signatures is None:
            self._await([worker])
        return worker.signatures

    def run(self, tasks: Sequence[Task]) -> list[list[float | None]]:
        """The answers, in the order of the tasks.

        Raises:
            Failure: one failed; what the others were doing is dropped.
        """
        self._drop_the_dead()
        waiting = deque(range(len(tasks)))
        answers: dict[int, list[float | None]] = {}
        busy: dict[Worker, int] = {}
        try:
            while len(answers) < len(tasks):
                while waiting and (worker := self._free(busy)) is not None:
                    busy[worker] = waiting.popleft()
                    worker.give(tasks[busy[worker]], self.timeout_s)
                while waiting and len(self.workers) < min(self.processes, len(busy) + len(waiting)):
                    self._start()
                for worker, answer in self._await(self.workers):
                    number = busy.pop(worker)
                    answers[number] = self._used(tasks[number], answer)
        except BaseException:
            for worker in list(busy):
                self._end(worker)
            raise
        return [answers[number] for number in range(len(tasks))]

    def stop(self) -> None:
        """Make `run` raise, from another thread."""
        self._stopped = True
        with contextlib.suppress(OSError):
            os.write(self._wake, b"x")

    def close(self) -> None:
        """End all processes."""
        while self.workers:
            self._end(self.workers[0])
        for descriptor in (self._wake, self._woken):
            os.close(descriptor)

    def _free(self, busy: dict[Worker, int]) -> Worker | None:
        return next((worker for worker in self.workers if worker.signatures is not None and worker not in busy), None)

    def _start(self) -> None:
        self.workers.append(Worker(self.setup))

    def _drop_the_dead(self) -> None:
        """Workers that ended while nothing was asked of them."""
        for worker in self.workers[:]:
            if worker.process.poll() is not None:
                self._end(worker)

    def _end(self, worker: Worker) -> None:
        if worker in self.workers:  # `_await` has ended those that died, of which `run` may tell only the first
            self.workers.remove(worker)
            worker.kill()

    def _used(self, task: Task, answer: list[float | None] | Failed) -> list[float | None]:
        if not isinstance(answer, Failed):
            return answer
        if task.rowwise and answer.killed:
            self.choked += 1
            return [0.0]
        raise Failure(task, answer.reason, answer.index)

    def _await(self, workers: list[Worker]) -> list[tuple[Worker, list[float | None] | Failed]]:
        """Wait until something happens; the answers to calls that are there."""
        nearest = min(worker.deadline for worker in workers if worker.task is not None or worker.signatures is None)
        sources = {worker.connection: worker for worker in workers}
        ready = wait([*sources, self._woken], max(0.0, nearest - time.monotonic()))
        if self._stopped:
            raise stopped()
        answers = []
        for worker in workers[:]:
            if worker.connection in ready:
                answer = worker.receive()
            elif time.monotonic() >= worker.deadline:
                seconds = START_S if worker.signatures is None else self.timeout_s
                key = "" if worker.signatures is None else "reward.timeout_s="
                answer = Failed(f"took more than {key}{seconds:g} seconds", killed=True)
            else:
                continue
            if worker.signatures is None:
                self._begin(worker, answer)
                continue
            if isinstance(answer, Failed) and answer.searched:
                worker.failed = answer
                worker.deadline = min(worker.deadline, time.monotonic() + self.timeout_s / 2)
                continue
            if isinstance(answer, Failed) and answer.killed:
                self._end(worker)
                answer = worker.failed or answer
            if worker.task is not None:  # otherwise it died of something else between two calls
                worker.task, worker.deadline = None, float("inf")
                answers.append((worker, answer))
        return answers

    def _begin(self, worker: Worker, answer: list[Signature] | Failed) -> None:
        """A worker that says it is ready, or why it isn't."""
        if isinstance(answer, Failed):
            self._end(worker)
            named = f"reward.functions={[name for name, _ in self.setup.functions]}: importing them "
            raise ConfigError(f"{named if answer.killed else ''}{answer.reason}")
        worker.signatures, worker.deadline = answer, float("inf")
