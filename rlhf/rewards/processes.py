"""What Linux does for processes whose parent dies."""

from __future__ import annotations

import ctypes
import os
import signal

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
