"""Signals: what they raise, what they return to the shell, and what they can't interrupt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SETUP = "import signal, sys, time\nfrom rlhf.stopping import Stopped, exit_code, unstoppable, watch\n"
TO_THE_SHELL = (
    "try:\n    watch()\n    print('ready', flush=True)\n    time.sleep(60)\n"
    "except Stopped:\n    sys.exit(exit_code())\n"
)


def as_in_a_terminal() -> None:
    """What tests that run in the background, or under nohup, hand down is that these are ignored."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def started(program: str) -> Iterator[subprocess.Popen[str]]:
    """The program, once it watches for signals."""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=as_in_a_terminal,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_signal_is_one_exception_and_its_own_exit_code(number: signal.Signals) -> None:
    with started(SETUP + TO_THE_SHELL) as process:
        process.send_signal(number)
        assert process.wait(timeout=30) == 128 + number


def test_a_signal_during_a_finaliser_is_not_lost() -> None:
    """Python swallows what is raised there."""
    slow = (
        "class Slow:\n    def __del__(self):\n        print('ready', flush=True)\n        time.sleep(0.5)\n"
        "try:\n    watch()\n    Slow()\n    time.sleep(60)\nexcept Stopped:\n    sys.exit(exit_code())\n"
    )
    with started(SETUP + slow) as process:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out, err) == (143, "", "")


def test_a_shutdown_is_not_interrupted() -> None:
    shutdown = "with unstoppable():\n    print('ready', flush=True)\n    time.sleep(1)\n    print('done', flush=True)\n"
    then = TO_THE_SHELL.replace("'ready'", "'then'")
    with started(SETUP + "watch()\n" + shutdown + then) as process:
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["done\n", "then\n"]
        process.send_signal(signal.SIGTERM)  # which counts again
        out, err = process.communicate(timeout=30)
        assert (out, err, process.returncode) == ("", "shutting down, a moment ...\n", 143)


def test_what_nohup_ignores_stays_ignored() -> None:
    ignore = "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    with started(SETUP + ignore + TO_THE_SHELL) as process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 143


def test_ctrl_c_while_the_command_is_imported_is_no_traceback(tmp_path: Path) -> None:
    """`hydra` is the first large package; this one stands for it."""
    (tmp_path / "hydra.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    with subprocess.Popen(
        [sys.executable, "-m", "rlhf.launch"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=as_in_a_terminal,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out, err) == (-signal.SIGINT, "", "")


def test_a_library_that_crashes_at_the_exit_does_not_change_the_exit_code() -> None:
    """As Ray's threads may, where a run was stopped in a call of Ray."""
    crash = (
        "import ctypes, runpy, sys, types\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.__cxa_atexit(ctypes.cast(libc.abort, ctypes.c_void_p), None, None)\n"
        "sys.modules['ray'] = types.ModuleType('ray')\n"
        "sys.argv = ['launch', 'run.steps=0']\n"
        "runpy.run_module('rlhf.launch', run_name='__main__')\n"
    )
    ended = subprocess.run([sys.executable, "-c", crash], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "") and ended.stderr.startswith("error: run.steps must be in")
