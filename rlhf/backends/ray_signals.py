"""Whose the signals are while a run has Ray: the one place where Ray itself is changed (2.60)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import ray._private.services
import ray._private.utils

from rlhf.stopping import watch


@contextmanager
def signals_are_ours() -> Iterator[None]:
    """Around `ray.init`.

    Ray keeps Ctrl-C from the processes it starts, but not the SIGTERM that `timeout` and batch schedulers send to a
    whole process group: they would be gone before the run could end its roles, and it would wait a minute for them. So
    they get a session of their own; that they die with this process is the kernel's doing, as before.

    Ray's handlers of SIGTERM would take the place of ours: Python's waits for a drain and exits with another code, and
    that of the core prints a stack.
    """
    services: Any = ray._private.services
    utils: Any = ray._private.utils
    popen, set_handler = services.ConsolePopen, utils.set_sigterm_handler
    services.ConsolePopen = partial(popen, start_new_session=True)
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        services.ConsolePopen, utils.set_sigterm_handler = popen, set_handler
        watch()
