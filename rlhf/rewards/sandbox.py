"""Runs a model's program with tests, in a process group of its own, with limits.

THIS IS NO SECURITY BOUNDARY. It keeps clumsy programs from harm: processor time, address space, file size and wall
clock are limited, the working directory is an empty one that is deleted, the environment is empty, where the kernel
lets us there is no network, and whatever the program started is killed. A program that means harm can read and delete
files of the user it runs as. Train on tasks you don't trust in a container or virtual machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from rlhf.processes import adopt_orphans, end_children, scratch_of

HARNESS = Path(__file__).with_name("harness.py")
MOST = 10**9
"""Of each limit: what the kernel takes, in bytes too."""
CHUNK = 1 << 16
"""Bytes that are read at once of what the tests' process reports."""


@dataclass(frozen=True)
class Limits:
    """Of one program with its tests."""

    timeout_s: float
    cpu_s: int
    memory_mb: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 < value <= MOST:
                raise ValueError(f"{name}={value} must be greater than 0 and at most {MOST}")


def program_of(completion: str) -> str:
    """The last fenced block of code, closed or not; without one the whole completion."""
    blocks = re.findall(r"```[^\n`]*\n(.*?)(?:```|\Z)", completion, flags=re.DOTALL)
    return blocks[-1] if blocks else completion


def passed(program: str, tests: list[str], limits: Limits) -> int:
    """How many tests pass, up to the limits."""
    adopt_orphans()
    others = psutil.Process().children(recursive=True)
    secret = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix=scratch_of(os.getpid()), ignore_cleanup_errors=True) as folder:
        reading, writing = os.pipe()
        with Reports(reading, secret) as reports:
            process = subprocess.Popen(
                [sys.executable, "-I", str(HARNESS), str(os.getpid()), str(writing)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"OMP_NUM_THREADS": "1", "PATH": os.defpath, "HOME": folder, "TMPDIR": folder},
                pass_fds=(writing,),
                start_new_session=True,
            )
            os.close(writing)
            job = {"program": program, "tests": tests, "secret": secret, **asdict(limits)}
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.communicate(json.dumps(job).encode(), timeout=limits.timeout_s)
            finally:
                end(process, others)
    return min(len(tests), reports.count)


class Reports:
    """Counts the lines that are the secret, as they come: a pipe that nobody reads is full after 64 KiB. Whatever else
    a program writes there is dropped. Leave it once who may write is gone; nobody else is waited for long."""

    def __init__(self, reading: int, secret: str) -> None:
        self.reading, self.line = reading, secret.encode()
        self.count = 0
        self._thread = threading.Thread(target=self._read, name="reports", daemon=True)

    def __enter__(self) -> Reports:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._thread.join(5.0)

    def _read(self) -> None:
        rest = b""
        with open(self.reading, "rb", buffering=0) as pipe:
            while more := pipe.read(CHUNK):
                *lines, rest = (rest + more).split(b"\n")
                self.count += lines.count(self.line)
                rest = rest[-CHUNK:]  # of a line without an end


def end(process: subprocess.Popen[bytes], others: list[psutil.Process]) -> None:
    """SIGKILL for the program's group, and for what it sent into groups of their own; not for `others`."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    end_children(others)
