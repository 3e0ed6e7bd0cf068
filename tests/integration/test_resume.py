"""The command, killed with kill -9 right after a save and started again: what it writes is what one run writes."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM

from rlhf.report.summary import read
from tests.integration.runs import descendants, launch, metrics_of, start, tiny_world

STEPS, SAVED = 4, 2
MEASURED = ("time", "perf/")
"""By a clock."""


def kill_after_save(process: subprocess.Popen[str], checkpoint: Path, timeout: float = 240) -> None:
    """The whole tree of processes at once, as a machine that goes down would."""
    deadline = time.monotonic() + timeout
    while not checkpoint.exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.002)
    doomed = [psutil.Process(process.pid), *descendants(process.pid)]
    for victim in doomed:
        try:
            victim.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    process.communicate()
    psutil.wait_procs(doomed, timeout=30)


def scalars_of(run_dir: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


LORA = ["model.lora.rank=4", "model.lora.dropout=0.1", "train.lr=3e-2"]


@pytest.mark.parametrize("more", [[], pytest.param(LORA, marks=pytest.mark.slow)], ids=["all", "lora"])
def test_a_killed_run_goes_on_as_if_nothing_had_been(more: list[str], tmp_path: Path) -> None:
    """Of an adapter, the first responses after the resume show that the engine has got it."""
    arguments = [
        *tiny_world(tmp_path),
        f"run.steps={STEPS}",
        f"run.save_every={SAVED}",
        "run.keep_last=1",
        "eval.every=2",
        "train.lr_schedule=cosine",
        "rollout.max_new_tokens=8",
        "logger.rollouts=true",
        *more,
    ]
    done = launch([*arguments, "run.name=straight"], tmp_path)
    assert done.returncode == 0, done.stderr
    straight, run_dir = (tmp_path / "outputs" / name for name in ("straight", "killed"))

    checkpoints = run_dir / "checkpoints"
    kill_after_save(start([*arguments, "run.name=killed"], tmp_path), checkpoints / f"step_{SAVED}")
    assert [path.name for path in checkpoints.glob("step_*")] == [f"step_{SAVED}"], "killed too late"
    (checkpoints / ".step_3.unfinished-4711" / "training_state").mkdir(parents=True)

    resumed = launch([*arguments, "run.name=killed", "resume=auto"], tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert f"continuing from step {SAVED}, outputs/killed/checkpoints/step_{SAVED}" in resumed.stdout
    assert f"{STEPS} steps in " in resumed.stdout and f"resumed from step {SAVED}" in resumed.stdout

    expected, found = metrics_of(straight), metrics_of(run_dir)
    assert sorted(found) == sorted(expected) == list(range(STEPS + 1))
    for step in range(STEPS + 1):
        same = {name for name in expected[step] if not name.startswith(MEASURED)}
        assert len(same) > 3
        for name in same:
            assert found[step][name] == pytest.approx(expected[step][name], rel=1e-6), (step, name)
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert sum("train/loss" in line for line in lines) == STEPS
    assert sum("eval/forward_kl" in line for line in lines) == 3, "steps 0, 2 and 4"
    assert (run_dir / "rollouts.jsonl").read_text() == (straight / "rollouts.jsonl").read_text()
    for name in ("train/loss", "eval/forward_kl"):
        points = scalars_of(run_dir, name)
        reference = scalars_of(straight, name)
        assert [step for step, _ in points] == [step for step, _ in reference], name
        assert dict(points) == pytest.approx(dict(reference), rel=1e-6), name

    before, after = read(straight), read(run_dir)
    assert (before.resumed_from, after.resumed_from) == (None, SAVED)
    assert after.eval_before == before.eval_before and after.eval_after == pytest.approx(before.eval_after, rel=1e-6)
    assert after.sample == before.sample
    assert after.best is not None and before.best is not None and after.best["step"] == before.best["step"]
    assert sorted(path.name for path in checkpoints.iterdir()) == ["best", "final", f"step_{STEPS}"]
    weights = [load_file(folder / "checkpoints" / "final" / "model.safetensors") for folder in (straight, run_dir)]
    assert all(torch.equal(weights[1][name], tensor) for name, tensor in weights[0].items())
    AutoModelForCausalLM.from_pretrained(checkpoints / "best")
