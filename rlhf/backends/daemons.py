"""The processes of a Ray that this process has started: found, told apart, ended."""

from __future__ import annotations

from contextlib import suppress

import psutil

from rlhf.config.cluster import Cluster


def raylet_processes() -> list[psutil.Process]:
    """What Ray's daemon, a child of this process, has started: `ray.shutdown` leaves some to notice by themselves."""
    daemons = [child for child in psutil.Process().children() if child.name() == "raylet"]
    return [process for daemon in daemons for process in daemon.children(recursive=True)]


def is_actor(process: psutil.Process) -> bool:
    """By the title that Ray gives it."""
    try:
        return " ".join(process.cmdline()).startswith("ray::") and "Actor" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def still_runs(spec: Cluster) -> bool:
    """Whether the Ray of this process has its daemon, if it was started here."""
    return spec.address is not None or any(child.name() == "raylet" for child in psutil.Process().children())


def end(processes: list[psutil.Process], wait_s: float = 0.0) -> None:
    """SIGKILL for those that still run after a while: nothing of theirs is worth keeping."""
    _, processes = psutil.wait_procs(processes, timeout=wait_s) if wait_s else ([], processes)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)
