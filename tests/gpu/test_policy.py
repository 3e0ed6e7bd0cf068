"""Whole runs of algo=grpo, LoRA and conversations on real cards. Two of them need two GPUs.

Sampler and trainer must agree about every token of every step. The learning rates are so high that they wouldn't if an
adapter were missing from what the engine got.

    python -m pytest -m gpu tests/gpu/test_policy.py -k "not apart"       # one GPU
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.world import world_of
from tests.integration.runs import launch, metrics_of

pytestmark = pytest.mark.gpu

STEPS = 4
AGREE = 0.15
"""The largest mean difference of a token's log-probability between bfloat16 programs that hold the same weights."""
FAR = 0.2
"""Forward KL, in nats, of a model that has learned from where it began."""
REWARDS = "reward.functions=[tests.integration.rewarding.vowels]"
GRPO = ["algo=grpo", "algo.num_generations=4", "train.dtype=bfloat16", "train.global_batch_samples=16"]
REFERENCE = ["teacher=reference", "distill=sampled", "algo.kl_coef=0.05"]
LORA = ["model.lora.rank=8", "model.lora.alpha=64", "train.lr=5e-3"]
TALKS = [
    *("reward=none", "environment=multi_turn", "environment.name=tests.integration.talking.Echo"),
    *("environment.max_turns=2", "environment.max_observation_tokens=48", "train.micro_batch_tokens=1024"),
]


def run(folder: Path, name: str, *overrides: str) -> dict[int, dict[str, float]]:
    without = ("teacher.model=",) if "algo=grpo" in overrides else ()
    world = [one for one in world_of(folder, STEPS) if not one.startswith(without)]
    done = launch([*world, *overrides, f"run.name={name}"], folder, timeout=400)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    return metrics_of(folder / "outputs" / name)


def gaps(metrics: dict[int, dict[str, float]]) -> list[float]:
    return [metrics[step]["rollout/logprob_gap_mean"] for step in range(1, STEPS + 1)]


def test_grpo_with_an_adapter_and_a_reference(tmp_path: Path) -> None:
    metrics = run(tmp_path, "grpo", *GRPO, REWARDS, *REFERENCE, *LORA)
    found = gaps(metrics)
    assert max(found) < AGREE, found
    assert metrics[0]["eval/forward_kl"] == pytest.approx(0, abs=1e-6)  # the adapter begins at zero
    assert metrics[STEPS]["eval/forward_kl"] > FAR
    assert all(metrics[step]["train/grad_norm"] > 0 for step in range(1, STEPS + 1))


def test_distillation_into_an_adapter(tmp_path: Path) -> None:
    metrics = run(tmp_path, "lora", "train.dtype=bfloat16", "distill=topk", "distill.k=16", *LORA, "train.lr=2e-3")
    assert max(gaps(metrics)) < AGREE
    assert metrics[STEPS]["eval/forward_kl"] < metrics[0]["eval/forward_kl"]


def test_conversations_apart(tmp_path: Path) -> None:
    """The adapter goes over NCCL."""
    metrics = run(tmp_path, "talks", *GRPO, *REFERENCE, *TALKS, *LORA, "placement=separate")
    assert max(gaps(metrics)) < AGREE
    assert metrics[STEPS]["eval/forward_kl"] > FAR
    assert all(1 <= metrics[step]["environment/turns_mean"] <= 2 for step in range(1, STEPS + 1))


def test_grpo_apart_one_step_ahead(tmp_path: Path) -> None:
    metrics = run(tmp_path, "ahead", *GRPO, REWARDS, "placement=separate", "placement.max_staleness=1")
    assert [metrics[step]["rollout/staleness"] for step in range(1, STEPS + 1)] == [0, 1, 1, 1]
    assert all(metrics[step]["policy/ratio_mean"] == pytest.approx(1, abs=0.1) for step in range(1, STEPS + 1))
