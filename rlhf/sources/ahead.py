"""The source of `placement.max_staleness=1`: the next responses are made while this step trains.

    main thread   sync v0, rollout 1 | train 1 -> v1 | sync v1 | train 2 -> v2 | sync v2 | ...
    background                       | rollout 2, v0 |         | rollout 3, v1 |

Weights go to the engine between two trainings, so that they are those of one version.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from rlhf.sources.groups import GroupSource
from rlhf.sources.live import LiveSource
from rlhf.sources.steps import Batch
from rlhf.types import Experience, Metrics

T = TypeVar("T")


class Background:
    """One job at a time, in a thread of its own."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def start(self, job: Callable[[], T]) -> Future[T]:
        """The future gives the job's result, or raises what it raised."""
        self.join()
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(job())
            except BaseException as error:  # for whoever waits for the result
                future.set_exception(error)

        self._thread = threading.Thread(target=work, name="rollouts ahead", daemon=True)
        self._thread.start()
        return future

    def join(self) -> None:
        """Wait for the end of the job. It ends by itself soon after the roles it calls are gone."""
        if self._thread is not None:
            self._thread.join()


@dataclass(kw_only=True)
class AheadSource(LiveSource):
    """Yields the same batches as `LiveSource`; from the second on, responses are one step older.

    Seconds of what goes on while a step trains are `ahead/NAME`: they are no part of the step, whose own `time/wait` is
    how long it had to wait for them. `timeline/NAME_start` and `_end` are seconds since the first step began.
    """

    background: Background

    def __iter__(self) -> Iterator[Experience]:
        if self.done >= self.steps:
            yield from super().__iter__()
            return
        self._began = time.perf_counter()
        measured: Metrics = {}
        timed = partial(self.timed, measured)
        version = self.prepare(self.done + 1, timed)
        made = self.make(self.draw(self.done + 1), version, timed)
        for step in range(self.done + 1, self.steps):
            following = self.draw(step + 1)
            ahead = self.background.start(partial(self._make_ahead, following, version))
            yield self.handed_over(*made, measured)
            measured = {}
            with self.timed(measured, "wait"):
                made = ahead.result()
            version = self.prepare(step + 1, partial(self.timed, measured))
        yield self.handed_over(*made, measured)
        if self.evaluator.due(self.steps):
            self.prepare(self.steps + 1, partial(self.timed, {}))

    def _make_ahead(self, batch: Batch, version: int) -> tuple[Batch, Experience]:
        timeline: Metrics = {}
        batch, made = self.make(batch, version, partial(self._in_background, timeline))
        return batch, replace(made, metrics={**timeline, **made.metrics})

    def handed_over(self, batch: Batch, made: Experience, measured: Metrics) -> Experience:
        start = {"timeline/train_start": time.perf_counter() - self._began}
        return super().handed_over(batch, made, {**measured, **start})

    @contextmanager
    def _in_background(self, timeline: Metrics, name: str) -> Iterator[None]:
        start = time.perf_counter() - self._began
        yield
        end = time.perf_counter() - self._began
        before = timeline.get(f"ahead/{name}", 0.0)  # a phase may come several times
        timeline.setdefault(f"timeline/{name}_start", start)
        timeline |= {f"ahead/{name}": before + end - start, f"timeline/{name}_end": end}


@dataclass(kw_only=True)
class AheadGroupSource(AheadSource, GroupSource):
    """Groups of responses, one step ahead: the order of `AheadSource`, the responses and rewards of `GroupSource`."""
