"""The demo's job for five steps on one GPU, in bfloat16: every role real and on the card, taking turns.

Sampling in bfloat16 gives other tokens than in float32, so a second CPU run would learn from other samples. Instead the
GPU run writes its samples down, and a float32 trainer on the CPU takes the same five steps on them.

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
from tests.gpu.replay import losses_on_cpu
print("LOSSES", json.dumps(losses_on_cpu(Path(sys.argv[1]), {OVERRIDES!r})))
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smoke")
    done = launch(OVERRIDES, folder, timeout=500)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    return folder / "outputs" / "smoke"


def test_losses_are_those_of_float32_on_the_cpu(run_dir: Path) -> None:
    on_gpu = [metrics_of(run_dir)[step]["train/loss"] for step in range(1, STEPS + 1)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", REPLAY, str(run_dir)], capture_output=True, text=True, env=environment, timeout=500
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("LOSSES ")]
    on_cpu = json.loads(line.removeprefix("LOSSES "))
    record(run_dir, on_gpu, on_cpu)
    assert on_gpu == pytest.approx(on_cpu, abs=2e-2)


def test_sampler_and_trainer_agree_after_every_sync(run_dir: Path) -> None:
    """A weight that did not arrive, or a layer left asleep, would show here."""
    for step in range(1, STEPS + 1):
        metrics = metrics_of(run_dir)[step]
        assert metrics["rollout/weight_version"] == step - 1
        assert metrics["rollout/logprob_gap_mean"] < 0.05


def test_the_student_learns(run_dir: Path) -> None:
    steps = metrics_of(run_dir)
    assert steps[STEPS]["eval/forward_kl"] < 0.9 * steps[0]["eval/forward_kl"]


def record(run_dir: Path, on_gpu: list[float], on_cpu: list[float]) -> None:
    """The numbers as JSON, where RLHF_RECORD says."""
    if not (target := os.environ.get("RLHF_RECORD")):
        return
    steps, summary = metrics_of(run_dir), read_summary(run_dir)
    metrics: dict[str, Any] = {
        "loss_gpu_bf16": on_gpu,
        "loss_cpu_fp32_same_samples": on_cpu,
        "largest_loss_difference": max(abs(a - b) for a, b in zip(on_gpu, on_cpu, strict=True)),
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
