"""Processes for users' code beside the driver, and what Linux does for processes whose parent dies."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import os
import pickle
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from rlhf.user_code import named

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
WATCHED = (signal.SIGTERM, signal.SIGCHLD)
"""What wakes a process that watches over another one: its driver's wish, its driver's end, and the other one's end."""
KILL_S = 10.0
"""How long a process may take to kill what it has started."""
STUCK_S = 30
"""How long a message that has begun may stand still: it has stopped, or its code has broken the connection."""


def die_with(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """A signal for this process when the thread that started it ends, so that not even a killed driver leaves it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:  # it has died already
        os._exit(1)


def adopt_orphans() -> None:
    """Grandchildren whose parents end become this process's children, which can be found and killed."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_children(others: Collection[Any] = ()) -> None:
    """SIGKILL for all descendants of this process, in any group or session, until none is left. Needs `adopt_orphans`.

    Args:
        others: psutil's processes that are left alone.
    """
    import psutil

    while left := [child for child in psutil.Process().children(recursive=True) if child not in others]:
        for child in left:  # orphans became ours
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(left, timeout=5)


def scratch_of(process: int) -> str:
    """How the names of a process's temporary folders begin, so that whoever watches over it deletes what it leaves."""
    return f"rlhf_{os.uname().nodename}_{process}_"


def run(module: str) -> None:
    """What a `UserProcess` does, until its driver hangs up. argv: the connection's descriptor, the driver's process.

    There are two: the one that the driver knows runs nobody's code and outlives the other one, which serves. So what
    users' code has started is killed however that one ends.
    """
    descriptor, driver = map(int, sys.argv[1:])
    die_with(driver, signal.SIGTERM)
    adopt_orphans()
    # All: users' code may send a signal to its whole process group.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    watcher = os.getpid()
    if server := os.fork():
        os.close(descriptor)  # the driver reads an end when the other one has gone
        _watch(server)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    die_with(watcher)
    adopt_orphans()
    _serve(module, Connection(descriptor))


def _serve(module: str, connection: Connection) -> None:
    """Until the driver hangs up. A fork of users' code that comes back from it, which would answer too, ends here."""
    server = os.getpid()
    os.register_at_fork(after_in_child=connection.close)
    try:
        importlib.import_module(module).serve(connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except OSError as error:
        if os.getpid() != server:
            os._exit(0)
        if error.errno != errno.EBADF:
            raise
        signal.pause()  # users' code has closed the connection; the driver, which ends this process, says so


def _watch(server: int) -> NoReturn:
    """Wait for the end of the process that serves, or end it at SIGTERM; kill what it has left; end in the same way."""
    while os.waitid(os.P_PID, server, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if signal.sigwait(WATCHED) == signal.SIGTERM:
            os.kill(server, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(server, 0)[1])
    end_children()
    for folder in Path(tempfile.gettempdir()).glob(f"{scratch_of(server)}*"):
        shutil.rmtree(folder, ignore_errors=True)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core is enough
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code)


def next_message(connection: Connection) -> Any:
    """In a process that runs users' code: what it is asked, or what hinders it, as text. Raises EOFError and OSError at
    the end."""
    message = connection.recv_bytes()
    try:
        return pickle.loads(message)
    except Exception as error:  # e.g. of a class in a file that the driver alone has loaded
        return f"can't be given the row's columns: {named(error)}"


@dataclass(frozen=True)
class Ended:
    """Received from a process that is gone."""

    how: str
    """`ended its process with exit code 3`."""


class UserProcess:
    """A process that runs users' code, and the one that watches over it (`run`), in a session of their own: Ctrl-C in
    the terminal reaches the driver alone."""

    def __init__(self, module: str, setup: Any) -> None:
        """
        Args:
            module: whose `serve` runs there.
            setup: the first message; its `path` is the process's `sys.path`.
        """
        # Not `python -m`: its classes would be those of __main__.
        start = f"from rlhf.processes import run; run({module!r})"
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
        for limit in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", STUCK_S, 0))
        self.connection = Connection(ours.detach())
        self._deaf = False
        """Whether it had to be ended, since it read nothing more."""
        self.send(setup)

    def send(self, message: Any) -> None:
        """Where the process is gone or reads no more, `received` says so. Raises whatever an object of a user's raises
        while it is pickled."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            try:
                self.connection.send(message)
            except BlockingIOError:
                self._deaf = True
                self.stop()

    def received(self) -> Any:
        """Its answer, or `Ended`."""
        try:
            return self.connection.recv()
        except BlockingIOError:
            self.stop()
            return Ended(f"stood still for {STUCK_S} seconds in the middle of an answer")
        except Exception:  # an end, or a message that users' code has cut off or written into
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            if self._deaf:
                return Ended(f"took nothing of what it was sent for {STUCK_S} seconds")
            return Ended(how_ended(self.process.poll()))

    def stop(self) -> None:
        """Have it killed with all that it has started, without waiting for it. For other threads, too."""
        self.process.terminate()

    def kill(self) -> None:
        """With all that it has started."""
        self.stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(KILL_S)
        with contextlib.suppress(ProcessLookupError):  # of who watched over it, if that was stopped or killed
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()


def how_ended(code: int | None) -> str:
    """What the end of a process is called.

    Args:
        code: its exit code; None: it goes on.
    """
    if code is None:
        return "has closed the connection to the run, or written into it: a file descriptor that it didn't open"
    if code >= 0:
        return f"ended its process with exit code {code}"
    known = -code in set(signal.Signals)  # not most of the real-time ones
    return f"ended its process by {signal.Signals(-code).name if known else f'signal {-code}'}"


def _is_a_file(stream: Any) -> bool:
    """Whether a process can write there; not so where tests capture what is printed."""
    try:
        return stream.fileno() >= 0
    except (OSError, ValueError, AttributeError):
        return False
