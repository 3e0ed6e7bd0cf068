"""The demo's job for five steps on one GPU, in bfloat16: every role real and on the card, taking turns.

Sampling in bfloat16 gives other tokens than in float32, so a second run elsewhere would learn from other samples.
Instead the GPU run writes its samples down, and other trainers take the same five steps on them:

- float32 on the CPU: its first loss is that of the same weights. Later ones are not, on any device: the student starts
  from bfloat16 numbers, and an update smaller than half the distance to the next one shows once several have added up.
- bfloat16 on the CPU: all five losses, so the card computes and updates as the CPU does.
- float32 on the GPU against float32 on the CPU: all five losses, much closer.

    RLHF_RECORD=smoke.json python -m pytest -m gpu tests/gpu/test_smoke.py     # also writes the numbers down
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.report.summary import read as read_summary
from tests.integration.runs import launch, metrics_of

pytestmark = pytest.mark.gpu

STEPS = 5
OVERRIDES = [
    "+recipes=demo",
    "run.name=smoke",
    f"run.steps={STEPS}",
    "cluster.device=cuda",
    "train.dtype=bfloat16",
    "rollout.dtype=bfloat16",
    "rollout.kv_cache_gb=8",
    "logger.rollouts=true",
]
REPLAY = f"""
import json, sys
from pathlib import Path
from rlhf.config.train import DType
from tests.gpu.replay import replayed_losses
print("LOSSES", json.dumps(replayed_losses(Path(sys.argv[1]), {OVERRIDES!r}, DType[sys.argv[2]])))
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smoke")
    done = launch(OVERRIDES, folder, timeout=500)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    return folder / "outputs" / "smoke"


def replay(run_dir: Path, dtype: str, device: str) -> list[float]:
    """Losses of the run's own samples with another trainer, in a process of its own."""
    environment = dict(os.environ) if device == "gpu" else {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", REPLAY, str(run_dir), dtype]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("LOSSES ")]
    losses: list[float] = json.loads(line.removeprefix("LOSSES "))
    return losses


def test_losses_are_those_of_the_cpu(run_dir: Path) -> None:
    losses = {"run": [metrics_of(run_dir)[step]["train/loss"] for step in range(1, STEPS + 1)]}
    for dtype, device in [("float32", "cpu"), ("bfloat16", "cpu"), ("float32", "gpu")]:
        losses[f"{dtype}_{device}"] = replay(run_dir, dtype, device)
    record(run_dir, losses)
    assert losses["run"][0] == pytest.approx(losses["float32_cpu"][0], abs=2e-2)
    assert losses["run"] == pytest.approx(losses["bfloat16_cpu"], abs=2e-2)
    assert losses["float32_gpu"] == pytest.approx(losses["float32_cpu"], abs=1e-3)


def test_sampler_and_trainer_agree_after_every_sync(run_dir: Path) -> None:
    """A weight that did not arrive, or a layer left asleep, would show here."""
    for step in range(1, STEPS + 1):
        metrics = metrics_of(run_dir)[step]
        assert metrics["rollout/weight_version"] == step - 1
        assert metrics["rollout/logprob_gap_mean"] < 0.1


def test_the_student_learns(run_dir: Path) -> None:
    steps = metrics_of(run_dir)
    assert steps[STEPS]["eval/forward_kl"] < 0.9 * steps[0]["eval/forward_kl"]


def record(run_dir: Path, losses: dict[str, list[float]]) -> None:
    """The numbers as JSON, where RLHF_RECORD says."""
    if not (target := os.environ.get("RLHF_RECORD")):
        return
    steps, summary = metrics_of(run_dir), read_summary(run_dir)
    metrics: dict[str, Any] = {f"loss_{name}": values for name, values in losses.items()}
    metrics |= {
        "first_loss_difference_to_float32_cpu": abs(losses["run"][0] - losses["float32_cpu"][0]),
        "largest_loss_difference_to_bfloat16_cpu": largest_difference(losses["run"], losses["bfloat16_cpu"]),
        "largest_loss_difference_float32_gpu_to_cpu": largest_difference(losses["float32_gpu"], losses["float32_cpu"]),
        "largest_logprob_gap_mean": max(steps[step]["rollout/logprob_gap_mean"] for step in range(1, STEPS + 1)),
        "forward_kl_before": steps[0]["eval/forward_kl"],
        "forward_kl_after": steps[STEPS]["eval/forward_kl"],
    }
    metrics |= {f"seconds_{name}": round(seconds, 3) for name, seconds in summary.phases.items()}
    packages = ("torch", "vllm", "ray", "megatron-core", "transformers")
    content = {
        "name": "smoke",
        "command": f"python -m rlhf.launch {' '.join(OVERRIDES)}",
        "device": torch.cuda.get_device_name(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "metrics": metrics,
    }
    Path(target).write_text(json.dumps(content, indent=2) + "\n")


def largest_difference(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))
