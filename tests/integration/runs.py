"""Runs of the real command in a process of its own, on tiny models and a small file of rows."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from hydra import compose, initialize_config_dir

from rlhf.config.compose import to_run
from rlhf.config.registry import PROJECT_ROOT, register
from rlhf.config.run import Run
from tests.unit.tiny import save_tiny_llama

COMMAND = [sys.executable, "-m", "rlhf.launch"]


def tiny_world(folder: Path, kv_heads: int = 1) -> list[str]:
    """A tiny student, a tiny teacher and rows of both kinds -> the overrides that use them."""
    student = save_tiny_llama(folder / "student", tied=True, layers=2, heads=2, kv_heads=kv_heads, seed=1)
    teacher = save_tiny_llama(folder / "teacher", layers=2, heads=2, kv_heads=kv_heads, seed=2)
    rows: list[object] = [{"prompt": f"what is {i} apples and {i} pears"} for i in range(20)]
    rows += [
        {
            "messages": [
                {"role": "user", "content": f"how many boxes make {i} boxes"},
                {"role": "assistant", "content": f"the answer is {i}"},
            ]
        }
        for i in range(20)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "model=hf",
        f"model.path={student}",
        f"teacher.model={teacher}",
        "data=file",
        f"data.path={folder / 'rows.jsonl'}",
        "data.max_length=64",
        "rollout.max_new_tokens=16",
        "rollout.kv_cache_gb=0.1",
        "train.global_batch_samples=4",
        "train.lr=1e-3",
        "distill.k=8",
        "eval.samples=4",
        "cluster.object_store_gb=0.5",
    ]


def launch(
    overrides: list[str], cwd: Path, timeout: float = 300, command: list[str] = COMMAND
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end. Of a key given twice the last counts, which the command itself would refuse."""
    return subprocess.run(
        [*command, *last_of_each(overrides)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(),
    )


def start(overrides: list[str], cwd: Path) -> subprocess.Popen[str]:
    """Run the command in the background, in a session of its own, as a terminal would: a background job (of which this
    test may be one) hands down that Ctrl-C is ignored."""
    return subprocess.Popen(
        [*COMMAND, *last_of_each(overrides)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def last_of_each(overrides: list[str]) -> list[str]:
    return list({override.partition("=")[0]: override for override in overrides}.values())


def composed(overrides: list[str]) -> Run:
    """The configuration the command would run."""
    register()
    with initialize_config_dir(str(PROJECT_ROOT / "conf"), version_base="1.3"):
        return to_run(compose("config", last_of_each(overrides)))


def environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "HYDRA_FULL_ERROR"}


def metrics_of(run_dir: Path) -> dict[int, dict[str, float]]:
    """Step -> metrics, of metrics.jsonl."""
    steps: dict[int, dict[str, float]] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        steps.setdefault(values["step"], {}).update(values)
    return steps


def wait_for_step(process: subprocess.Popen[str], run_dir: Path, step: int, timeout: float = 240) -> None:
    """Wait until a background run has logged `step`."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"ended early: {process.communicate()}")
        if (run_dir / "metrics.jsonl").exists() and step in metrics_of(run_dir):
            return
        time.sleep(0.2)
    process.kill()
    raise AssertionError(f"step {step} was not reached")


def role_processes(parent: int) -> dict[str, list[psutil.Process]]:
    """Ray actors below a process: class name -> processes."""
    found: dict[str, list[psutil.Process]] = {}
    for process in psutil.Process(parent).children(recursive=True):
        try:
            title = " ".join(process.cmdline()) or process.name()
        except psutil.Error:
            continue
        actor = re.search(r"ray::(\w+Actor)", title)
        if actor:
            found.setdefault(actor[1], []).append(process)
    return found


def descendants(parent: int) -> list[psutil.Process]:
    return psutil.Process(parent).children(recursive=True)
