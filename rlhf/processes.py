"""Processes for users' code beside the driver, and what Linux does for processes whose parent dies."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def die_with(parent: int) -> None:
    """SIGKILL for this process when the thread that started it ends, so that not even a killed driver leaves it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has died already
        os._exit(1)


def adopt_orphans() -> None:
    """Grandchildren whose parents end become this process's children, which can be found and killed."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def run(serve: Callable[[Connection], None]) -> None:
    """What a `UserProcess` does, until its driver hangs up. argv: the connection's descriptor, the driver's process."""
    connection = Connection(int(sys.argv[1]))
    die_with(int(sys.argv[2]))
    adopt_orphans()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        serve(connection)


@dataclass(frozen=True)
class Ended:
    """Received from a process that is gone."""

    how: str
    """`ended its process with exit code 3`."""


class UserProcess:
    """One process, in a session of its own: Ctrl-C in the terminal reaches the driver alone."""

    def __init__(self, module: str, setup: Any) -> None:
        """
        Args:
            module: whose `serve` runs there.
            setup: the first message; its `path` is the process's `sys.path`.
        """
        # Not `python -m`: its classes would be those of __main__.
        start = f"from rlhf.processes import run; from {module} import serve; run(serve)"
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", start, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr if _is_a_file(sys.stderr) else subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, setup.path))},
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())
        self.send(setup)

    def send(self, message: Any) -> None:
        """Where the process is gone, `received` says so. Raises whatever an object of a user's raises while it is
        pickled."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(message)

    def received(self) -> Any:
        """Its answer, or `Ended`."""
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError, pickle.UnpicklingError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            code = self.process.poll()
            how = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
            return Ended(f"ended its process {how}")

    def kill(self) -> None:
        """With all that it has started and that is in its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()


def _is_a_file(stream: Any) -> bool:
    """Whether a process can write there; not so where tests capture what is printed."""
    try:
        return stream.fileno() >= 0
    except (OSError, ValueError, AttributeError):
        return False
