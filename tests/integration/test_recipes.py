"""The recipes in small, as docs/recipes.md says to run them: two steps of each on SmolLM2."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rlhf.config.registry import PROJECT_ROOT
from rlhf.report.summary import read
from tests.integration.runs import launch, metrics_of

SMALL = sorted(path.stem for path in (PROJECT_ROOT / "recipes" / "cpu").glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SMALL)
def test_a_recipe_runs_in_small(name: str, tmp_path: Path) -> None:
    done = launch([f"+recipes=cpu/{name}"], tmp_path, timeout=800)
    assert done.returncode == 0, done.stderr
    run_dir = tmp_path / "outputs" / f"{name}_cpu"
    steps = metrics_of(run_dir)
    assert sorted(steps) == [0, 1, 2]
    assert all(math.isfinite(steps[step]["train/loss"]) and steps[step]["train/grad_norm"] > 0 for step in (1, 2))
    updates = 2 if "grpo" in name else 1
    assert [steps[step]["train/weight_version"] for step in (1, 2)] == [updates, 2 * updates]
    off_policy = "off_policy" in name
    for step in (1, 2):
        assert ("time/rollout" in steps[step] or "ahead/rollout" in steps[step]) != off_policy
        if not off_policy:
            assert steps[step]["rollout/staleness"] == (updates if "separate" in name and step > 1 else 0)
        if "grpo" in name:
            assert steps[step]["reward/length/mean"] < 0 and "reward/math_verify/mean" in steps[step]
        else:
            assert steps[step]["train/divergence"] > 0
        assert ("score/head_start" in steps[step]) == ("colocate_standalone" in name)
        assert steps[step].get("batch/privileged_share", 0) == float("opsd" in name)
    measured = "eval/reward" if "grpo" in name else "eval/forward_kl"
    assert measured in steps[0] and measured in steps[2]
    assert (run_dir / "checkpoints" / "final" / "adapter" / "adapter_model.safetensors").exists(), "they train adapters"
    assert read(run_dir).steps == 2
