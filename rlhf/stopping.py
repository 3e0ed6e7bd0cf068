"""Ctrl-C, SIGTERM and a closed terminal: one exception, one way out of a run."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AGAIN_S = 0.05
_watched: list[signal.Signals] = []
_received: list[int] = []


class Stopped(KeyboardInterrupt):
    """The person wants the run to end. Its text, if any, says what became of the run."""


def watch() -> None:
    """Turn the signals into `Stopped` in the main thread.

    A signal that is ignored stays ignored: `nohup` and background jobs count on it. Call it again where a library has
    put a handler of its own in place.
    """
    if not _watched:
        _watched.extend(number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN)
    for number in _watched:
        signal.signal(number, _stop)


@contextmanager
def unstoppable() -> Iterator[None]:
    """For the time of a shutdown: a second Ctrl-C must not leave processes behind."""
    before = {number: signal.signal(number, _wait) for number in _watched}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_code() -> int:
    """What shells expect of a program that a signal ended: 128 + its number."""
    return 128 + (_received[0] if _received else signal.SIGINT)


def _stop(number: int, frame: FrameType | None) -> None:
    if _in_a_finaliser(frame):  # Python would print the exception, and go on
        threading.Timer(AGAIN_S, os.kill, (os.getpid(), number)).start()
        return
    _received.append(number)
    raise Stopped


def _in_a_finaliser(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def _wait(number: int, frame: FrameType | None) -> None:
    print("shutting down, a moment ...", file=sys.stderr, flush=True)
