"""What the driver asks of processes on Ray: futures whose failures are said plainly, and who is no more."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from rlhf.errors import ClusterError, RlhfError, RoleDied, RoleFailed, one_line

T = TypeVar("T")

STUCK_S = 30.0
"""After so long without a bucket of weights, look whether every process is still there."""

NOTICE_S = 5.0
"""How long Ray may take to notice that a process ended. The others notice by a broken connection, which says less."""


@dataclass(eq=False)
class Process:
    """One process of a role."""

    name: str
    """For messages: `trainer`, or `trainer rank 1` of several."""
    actor: Any
    peers: list[Process]
    """All processes of the run, this one included."""

    def call(self, method: str, *args: Any) -> Call:
        return Call(self, getattr(self.actor, method).remote(*args))


@dataclass(frozen=True, eq=False)
class Call:
    """What a process is doing, and the reference of what will come of it."""

    process: Process
    reference: Any


@dataclass
class RayFuture(Generic[T]):
    """Calls that belong together; `combine` makes one result of theirs, in their order."""

    calls: list[Call]
    combine: Callable[[list[Any]], T]

    def result(self) -> T:
        return self.combine(wait_for(self.calls))


def wait_for(calls: list[Call], timeout_s: float | None = None) -> list[Any]:
    """The results of all calls, or the first failure: the others may wait for the failed one in a collective, for good.

    Raises:
        RoleDied: a process ended.
        RlhfError: raised by a role itself, as it was.
        RoleFailed: a role raised anything else.
        ClusterError: not there within `timeout_s` seconds, or Ray itself failed.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    waiting = {call.reference: call.process for call in calls}
    results = {}
    while waiting:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, _ = ray.wait(list(waiting), timeout=left)
        if not ready:
            name = next(iter(waiting.values())).name
            raise ClusterError(f"the {name} process was not ready within cluster.start_timeout_s={timeout_s:g} seconds")
        with plain_failures(waiting.pop(ready[0])):
            results[ready[0]] = ray.get(ready[0])
    return [results[call.reference] for call in calls]


def iterate(streams: list[Call], others: Sequence[Call] = ()) -> Iterator[tuple[Any, ...]]:
    """The references of streaming calls, one of each at a time, while other processes do their part.

    A failure of any of them ends it: those that share a collective with it may wait for good.

    Args:
        streams: equally long.
    """
    going, found = list(streams), dict[Call, Any]()
    while going:
        late = [stream for stream in going if stream not in found]
        waiting = [call.reference for call in (*late, *others)]
        ready, _ = ray.wait(waiting, timeout=STUCK_S, fetch_local=False)
        if not ready:  # a collective with a process that is gone may never return
            refuse_ended(streams[0].process.peers)
        done = [call for call in others if call.reference in ready]
        wait_for(done)
        others = [call for call in others if call not in done]
        for stream in late:
            if stream.reference in ready:
                with plain_failures(stream.process):
                    try:
                        found[stream] = next(stream.reference)
                    except StopIteration:
                        going.remove(stream)
        if len(found) == len(streams):
            yield tuple(found.pop(stream) for stream in streams)
    wait_for(list(others))


def arrivals(streams: list[Call]) -> Iterator[Any]:
    """What streaming calls give, whichever has something; the first failure ends it."""
    process_of = {stream.reference: stream.process for stream in streams}
    while process_of:
        ready, _ = ray.wait(list(process_of), fetch_local=False)
        for reference in ready:
            with plain_failures(process_of[reference]):
                try:
                    value = ray.get(next(reference))
                except StopIteration:
                    del process_of[reference]
                    continue
            yield value


@contextmanager
def plain_failures(process: Process) -> Iterator[None]:
    """Ray's exceptions of a call of `process` -> ours; see `wait_for`."""
    try:
        yield
    except RayError as error:
        reason: Any = error
        while isinstance(reason, RayTaskError):  # also of the call whose result this one needed
            reason = reason.cause
        if isinstance(reason, RlhfError):
            raise reason from None
        refuse_ended(process.peers, error)
        if isinstance(reason, RayError):
            raise ClusterError(f"Ray failed while the {process.name} was at work: {last_words(reason)}") from error
        raise RoleFailed(f"the {process.name} failed with {type(reason).__name__}: {last_words(reason)}") from error


def refuse_ended(processes: list[Process], error: BaseException | None = None) -> None:
    """Raise RoleDied, because of `error`, if one of them is no more."""
    for died, words in ended(processes):
        raise RoleDied(f"the {died.name} process ended unexpectedly: {words}") from error


def ended(processes: list[Process]) -> Iterator[tuple[Process, str]]:
    """Those that are no more, and Ray's words about it, as they are noticed within `NOTICE_S`.

    A process that ends takes others with it: whoever shares a collective with it fails, too, and often sooner.
    """
    deadline = time.monotonic() + NOTICE_S
    waiting = {process.actor.__ray_ready__.remote(): process for process in processes}
    while waiting:
        ready, _ = ray.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:  # the rest are at work
            return
        process = waiting.pop(ready[0])
        try:
            ray.get(ready[0])
        except RayActorError as error:
            yield process, last_words(error)


def last_words(error: BaseException | None) -> str:
    """One line of at most 300 characters: the end, where Ray and most libraries put the reason, of what Ray says before
    it goes on with advice about memory."""
    text = one_line(error).partition(" If the process was killed by the kernel OOM killer")[0]
    return text if len(text) <= 300 else f"... {text[-300:].partition(' ')[2]}"
