"""The command with trainer and engine on devices of their own."""

from __future__ import annotations

import itertools
from pathlib import Path

import psutil
import pytest

from tests.integration.runs import descendants, launch, metrics_of, role_processes, start, tiny_world, wait_for_step

SAME = ["train/loss", "train/divergence", "train/entropy", "train/grad_norm", "rollout/response_tokens_mean"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return tiny_world(tmp_path_factory.mktemp("world"))


def test_without_staleness_it_does_what_colocate_does(world: list[str], tmp_path: Path) -> None:
    """Two replicas, that is three ends of the channel."""
    runs = {"colocate": [], "separate": ["placement=separate", "rollout.gpus=2"]}
    metrics = {}
    for name, arguments in runs.items():
        done = launch([*world, *arguments, f"run.name={name}", "run.steps=2"], tmp_path)
        assert done.returncode == 0, done.stderr
        metrics[name] = metrics_of(tmp_path / "outputs" / name)
    one, other = metrics.values()
    for step in (0, 2):
        assert other[step]["eval/forward_kl"] == pytest.approx(one[step]["eval/forward_kl"], abs=1e-6)
    for step in (1, 2):
        assert other[step]["rollout/staleness"] == 0
        for name in SAME:
            assert other[step][name] == pytest.approx(one[step][name], abs=1e-6), name


def test_one_step_ahead_overlaps_until_the_engine_dies(world: list[str], tmp_path: Path) -> None:
    ahead = ["placement=separate", "placement.max_staleness=1", "run.steps=10000", "run.save_every=1", "eval.samples=0"]
    process = start([*world, *ahead, "run.name=ahead"], tmp_path)
    run_dir = tmp_path / "outputs" / "ahead"
    wait_for_step(process, run_dir, 4)
    left = descendants(process.pid)
    role_processes(process.pid)["EngineActor"][0].kill()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1
    (line,) = err.splitlines()
    assert line.startswith("error: the engine process ended unexpectedly") and "checkpoints/step_3" in line, out + err
    psutil.wait_procs(left, timeout=30)
    assert not [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    steps = [values for step, values in sorted(metrics_of(run_dir).items()) if step > 0]
    assert [step["rollout/staleness"] for step in steps[:4]] == [0, 1, 1, 1]
    assert [step["rollout/weight_version"] for step in steps[:4]] == [0, 0, 1, 2]
    for one, following in itertools.pairwise(steps):
        begins, ends = one["timeline/train_start"], one["timeline/train_start"] + one["time/train"]
        assert following["timeline/rollout_start"] < ends and following["timeline/rollout_end"] > begins
