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
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from rlhf.sources.live import Batch, LiveSource
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


@dataclass
class AheadSource(LiveSource):
    """Yields the same batches as `LiveSource`; from the second on, responses are one step older.

    Seconds of what goes on while a step trains are `ahead/NAME`: they are no part of the step, whose own `time/wait` is
    how long it had to wait for them. `timeline/NAME_start` and `_end` are seconds since the first step began.
    """

    background: Background = field(kw_only=True)

    def __iter__(self) -> Iterator[Experience]:
        self._began = time.perf_counter()
        measured: Metrics = {}
        version = self._sync_and_evaluate(0, measured)
        made = self._make(self._draw(1), version, partial(self._timed, measured))
        for step in range(1, self.steps):
            ahead = self.background.start(partial(self._make_ahead, self._draw(step + 1), version))
            yield self._handed_over(made, measured)
            measured = {}
            with self._timed(measured, "wait"):
                made = ahead.result()
            version = self._sync_and_evaluate(step, measured)
        yield self._handed_over(made, measured)
        if self.evaluator.due(self.steps):
            self._sync_and_evaluate(self.steps, {})

    def _make_ahead(self, batch: Batch, version: int) -> Experience:
        timeline: Metrics = {}
        made = self._make(batch, version, partial(self._in_background, timeline))
        return replace(made, metrics={**timeline, **made.metrics})

    def _handed_over(self, made: Experience, measured: Metrics) -> Experience:
        return super()._handed_over(made, {**measured, "timeline/train_start": time.perf_counter() - self._began})

    @contextmanager
    def _in_background(self, timeline: Metrics, name: str) -> Iterator[None]:
        start = time.perf_counter() - self._began
        yield
        end = time.perf_counter() - self._began
        timeline |= {f"ahead/{name}": end - start, f"timeline/{name}_start": start, f"timeline/{name}_end": end}
