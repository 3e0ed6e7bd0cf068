"""Whole runs of algo=grpo on the real stack: something is learned, and at a learning rate of nothing all stays."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf.loggers.rollouts import read
from tests.integration.runs import last_of_each, launch, metrics_of, tiny_world
from tests.integration.test_cells import run_jobs
from tests.unit.tiny import save_tiny_llama

END = 2
"""The id of the tiny tokenizer's EOS."""
REWARD = "reward.functions=[tests.integration.rewarding.vowels]"


def world_of(folder: Path) -> list[str]:
    world = [one for one in tiny_world(folder) if not one.startswith(("teacher.model=", "distill.k="))]
    return [*world, "algo=grpo", REWARD, "logger.tensorboard=false"]


def run(folder: Path, name: str, *overrides: str, timeout: float = 600) -> dict[int, dict[str, float]]:
    given = [*world_of(folder), *overrides, f"run.name={name}"]
    if "reward=none" in given:
        given.remove(REWARD)
    done = launch(given, folder, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return metrics_of(folder / "outputs" / name)


JOBS = {
    "rises": ["train.global_batch_samples=32", "run.steps=12", "train.lr=1e-2", "rollout.max_new_tokens=8"],
    "stays": [
        "train.lr=1e-30",
        "run.steps=5",
        "train.global_batch_samples=8",
        "algo.steps_per_generation=2",
        "algo.importance_cap=2",
        "rollout.top_p=0.9",
        "rollout.temperature=0.8",
        "algo.kl_coef=0.1",
        "teacher=reference",
        "distill=sampled",
        "eval.responses=student",
    ],
    "talks": [
        "reward=none",
        "environment=multi_turn",
        "environment.name=tests.integration.talking.Echo",
        "environment.max_turns=3",
        "environment.options.turns=2",
        "environment.max_observation_tokens=48",
        "run.steps=2",
        "train.lr=1e-5",
        "train.global_batch_samples=8",
        "algo.num_generations=4",
        "train.micro_batch_tokens=256",
        "algo.kl_coef=0.1",
        "teacher=reference",
        "distill=sampled",
        "logger.rollouts=true",
        "eval.responses=student",
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first job has run."""
    return folder_of(tmp_path_factory.mktemp("grpo"), ["rises"])


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The other jobs have run, in one process."""
    return folder_of(tmp_path_factory.mktemp("grpo"), ["stays", "talks"])


def folder_of(folder: Path, names: list[str]) -> Path:
    world = world_of(folder)
    own = {"talks": [f"model.path={talkative(folder)}"]} if "talks" in names else {}
    jobs = [last_of_each([*world, *JOBS[name], *own.get(name, []), f"run.dir={folder / name}"]) for name in names]
    jobs = [[key for key in job if key != REWARD or "reward=none" not in job] for job in jobs]
    run_jobs(jobs, folder, timeout=800)
    return folder


def talkative(folder: Path) -> Path:
    """A student that ends most of its turns, which the tiny models of other tests hardly do."""
    student = save_tiny_llama(folder / "talkative", tied=True, layers=2, heads=2, kv_heads=1, seed=1)
    weights = load_file(student / "model.safetensors")
    weights["model.embed_tokens.weight"][END] *= 12
    save_file(weights, student / "model.safetensors", metadata={"format": "pt"})
    return student


@pytest.mark.slow
def test_conversations_on_the_real_stack(long_folder: Path) -> None:
    """Two turns with an environment that is over then; what went back into the engine is what came out of it, or
    trainer and sampler would disagree."""
    metrics = metrics_of(long_folder / "talks")
    for step in (1, 2):
        values = metrics[step]
        assert 1 < values["environment/turns_mean"] <= 2 and 0 < values["environment/done_share"] <= 1
        assert values["policy/ratio_max"] == pytest.approx(1, abs=1e-4)
        assert values["rollout/logprob_gap_max"] < 1e-4 and values["train/grad_norm"] > 0
        assert values["reward/environment/mean"] == pytest.approx(values["reward/mean"])
        assert values["environment/observation_tokens_mean"] > 10
    assert {"eval/reward", "eval/reward/environment", "eval/forward_kl"} <= set(metrics[0]) & set(metrics[2])
    rows = [json.loads(line) for line in (long_folder / "talks" / "rollouts.jsonl").read_text().splitlines()]
    assert len(rows) == 16 and 3 in {len(row["turns"]) for row in rows} <= {1, 3}
    for row in rows:
        model, between = row["turns"][::2], row["turns"][1::2]
        assert len(row["logprobs"]) == sum(row["turn_tokens"][::2]) <= 2 * 16
        if between:
            assert model[0]["model"].endswith("<|im_end|>")
            assert between[0]["environment"].startswith("\n<|im_start|>user\nthat was ")
            assert between[0]["environment"].endswith(" characters<|im_end|>\n<|im_start|>assistant\n")
    sequences = read(long_folder / "talks")[2]
    assert sequences.written is not None and sequences.logprobs is not None
    assert len(sequences.logprobs) == sequences.written.sum() < len(sequences.written)


def test_a_dense_reward_rises(folder: Path) -> None:
    """From 0.06 (the share of vowels in random tokens) to above 0.2 within 12 steps of 32 responses."""
    metrics = metrics_of(folder / "rises")
    rewards = [metrics[step]["reward/mean"] for step in range(1, 13)]
    assert np.mean(rewards[:3]) < 0.1 and np.mean(rewards[-3:]) > 0.2, rewards
    assert metrics[12]["eval/reward"] > metrics[0]["eval/reward"] + 0.2
    for step in range(1, 13):
        assert metrics[step]["policy/ratio_mean"] == pytest.approx(1, abs=1e-5), "sampler and trainer agree"
        assert metrics[step]["policy/ratio_max"] == pytest.approx(1, abs=1e-4)
        assert metrics[step]["train/weight_version"] == step
        assert metrics[step]["reward/std"] > 0 and "eval/forward_kl" not in metrics[step]


@pytest.mark.slow
def test_at_a_learning_rate_of_nothing_all_stays(long_folder: Path) -> None:
    """Two optimizer steps a generation, a cut sampler, the trainer's old log-probabilities, and a reference."""
    metrics = metrics_of(long_folder / "stays")
    for step in range(1, 6):
        values = metrics[step]
        for name, expected in (("ratio_mean", 1), ("ratio_max", 1), ("approx_kl", 0), ("teacher_kl", 0)):
            assert values[f"policy/{name}"] == pytest.approx(expected, abs=1e-5), name
        assert values["policy/clip_low_share"] == values["policy/clip_high_share"] == 0
        assert values["policy/importance_mean"] == pytest.approx(0.9, abs=0.02), "what top_p left is raised by 1 / 0.9"
        assert values["train/weight_version"] == 2 * step and values["rollout/weight_version"] == 2 * (step - 1)
        assert "rollout/logprob_gap_mean" not in values
    assert metrics[0]["eval/reward"] == metrics[5]["eval/reward"]
    assert metrics[0]["eval/forward_kl"] == pytest.approx(0, abs=1e-6) == metrics[5]["eval/forward_kl"]
    before = load_file(long_folder / "student" / "model.safetensors")
    after = load_file(long_folder / "stays" / "checkpoints" / "final" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, weight in before.items():  # AdamW moves a weight of exactly zero, the padding's, by about 1e-30
        torch.testing.assert_close(after[name], weight, rtol=0, atol=1e-25)


@pytest.mark.slow
def test_a_dense_reward_rises_within_thirty_steps(tmp_path: Path) -> None:
    """At a smaller learning rate, to above 0.3."""
    metrics = run(tmp_path, "rises", "train.global_batch_samples=32", "run.steps=30", "train.lr=3e-3")
    rewards = [metrics[step]["reward/mean"] for step in range(1, 31)]
    assert np.mean(rewards[:5]) < 0.2 and np.mean(rewards[-5:]) > 0.3, rewards


@pytest.mark.slow
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    """With further prompts for groups of equal rewards, of which there are many at a reward of a few values."""
    arguments = [
        "reward.functions=[tests.integration.rewarding.has_vowel_pair]",
        "train.global_batch_samples=8",
        "algo.num_generations=2",
        "algo.steps_per_generation=2",
        "algo.dynamic_sampling=true",
        "algo.old_logprobs=trainer",
        "train.lr_schedule=linear",
        "eval.samples=0",
    ]
    straight = run(tmp_path, "straight", *arguments, "run.steps=4", "run.save_every=2")
    assert sum(straight[step]["rollout/resample_rounds"] for step in straight if step) > 0
    checkpoint = tmp_path / "outputs" / "straight" / "checkpoints" / "step_2"
    resumed = run(tmp_path, "resumed", *arguments, "run.steps=4", "run.save_every=2", f"resume={checkpoint}")
    for step in (3, 4):
        for name, value in straight[step].items():
            if not name.startswith(("time", "perf/")):
                assert resumed[step][name] == value, name
    one, other = (
        load_file(tmp_path / "outputs" / name / "checkpoints" / "final" / "model.safetensors")
        for name in ("straight", "resumed")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_one_step_ahead_and_on_devices_of_its_own(tmp_path: Path) -> None:
    metrics = run(
        tmp_path,
        "ahead",
        "placement=separate",
        "placement.max_staleness=1",
        "run.steps=4",
        "train.global_batch_samples=16",
        "algo.kl_coef=0.1",
        "algo.kl_in=reward",
        "teacher=reference",
        "distill=sampled",
        "eval.responses=student",
    )
    assert [metrics[step]["rollout/staleness"] for step in range(1, 5)] == [0, 1, 1, 1]
    for step in range(2, 5):
        assert metrics[step]["policy/ratio_max"] > 1 + 1e-4, "the sampler's weights are a step older"
        assert metrics[step]["ahead/reward"] >= 0 and metrics[step]["ahead/score"] > 0


@pytest.mark.slow
def test_distillation_without_rewards_comes_closer_to_the_teacher(tmp_path: Path) -> None:
    """algo.teacher_kl_coef alone: the gradient is that of the reverse KL."""
    teacher = next(one for one in tiny_world(tmp_path) if one.startswith("teacher.model="))
    metrics = run(
        tmp_path,
        "distils",
        teacher,
        "reward=none",
        "teacher=colocated",
        "distill=sampled",
        "algo.teacher_kl_coef=1",
        "algo.num_generations=1",
        "train.global_batch_samples=32",
        "run.steps=30",
        "train.lr=3e-3",
        "eval.responses=student",
    )
    assert metrics[30]["eval/reverse_kl"] < 0.7 * metrics[0]["eval/reverse_kl"]
    assert not any(name.startswith("reward/") for name in metrics[1])
