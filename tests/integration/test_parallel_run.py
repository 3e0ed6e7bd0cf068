"""The command on two devices: a student over two tensor-parallel ranks, and two engine replicas."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from transformers import AutoModelForCausalLM

from tests.integration.runs import descendants, launch, metrics_of, role_processes, start, tiny_world, wait_for_step

SAME = ["train/loss", "train/divergence", "train/entropy", "distill/student_mass", "rollout/response_tokens_mean"]


def test_two_devices_do_what_one_does_until_a_rank_dies(tmp_path: Path) -> None:
    arguments = [*tiny_world(tmp_path, kv_heads=2), "eval.samples=0"]
    done = launch([*arguments, "run.name=one", "run.steps=2"], tmp_path)
    assert done.returncode == 0, done.stderr

    two = ["train.gpus=2", "rollout.gpus=2", "train.tensor_parallel=2", "run.steps=10000", "run.save_every=1"]
    process = start([*arguments, *two, "run.name=two"], tmp_path)
    run_dir = tmp_path / "outputs" / "two"
    wait_for_step(process, run_dir, 2)
    left = descendants(process.pid)
    roles = role_processes(process.pid)
    assert {role: len(processes) for role, processes in roles.items()} == {"TrainerActor": 2, "EngineActor": 2}
    roles["TrainerActor"][1].kill()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    (line,) = err.splitlines()
    assert line.startswith("error: the trainer rank ") and "process ended unexpectedly" in line, err
    assert "outputs/two/checkpoints/step_1" in line
    psutil.wait_procs(left, timeout=30)
    assert not [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    AutoModelForCausalLM.from_pretrained(run_dir / "checkpoints" / "step_1")
    one, both = metrics_of(tmp_path / "outputs" / "one"), metrics_of(run_dir)
    for step in (1, 2):
        assert both[step]["rollout/logprob_gap_mean"] < 1e-3
        assert both[step]["train/grad_norm"] == pytest.approx(one[step]["train/grad_norm"], rel=1e-4)
        for name in SAME:
            assert both[step][name] == pytest.approx(one[step][name], abs=1e-5), name
