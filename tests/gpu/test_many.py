"""Several GPUs: every layout trains as one GPU does. Needs two GPUs, or four; about a minute a layout.

Each layout runs the command for three steps and writes its samples down. One process on one GPU, with the teacher
beside the student, then takes the same steps on the same samples: the losses must be the same, whoever scored and
wherever the student's parts were. That the engines had the weights they should is in the runs' own numbers: sampler
and trainer agree about every token.

    python -m pytest -m gpu tests/gpu/test_many.py
    python -m pytest -m gpu tests/gpu/test_many.py -k "not four"          # two GPUs
    python -m pytest -m gpu tests/gpu/test_many.py -k "separate or standalone"
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf.report.summary import read as read_summary
from tests.gpu.world import world_of
from tests.integration.runs import launch, metrics_of, role_processes, start, wait_for_step

pytestmark = pytest.mark.gpu

STEPS = 3
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
TOP_K = ["distill=topk", "distill.k=16"]
FULL = ["distill=fullvocab"]
STANDALONE = ["teacher=standalone", "teacher.engine.dtype=bfloat16"]
SEPARATE = ["placement=separate"]
TWO = ["train.gpus=2", "rollout.gpus=2"]
LAYOUTS = {
    "colocate-tp2": ("float32", TOP_K, [*TWO, "train.tensor_parallel=2"]),
    "colocate-tp2-bfloat16": ("bfloat16", TOP_K, [*TWO, "train.tensor_parallel=2"]),
    "colocate-dp2": ("float32", TOP_K, TWO),
    "colocate-dp2-sharded": ("bfloat16", FULL, [*TWO, "train.distributed_optimizer=true"]),
    "separate": ("bfloat16", TOP_K, SEPARATE),
    "separate-ahead": ("bfloat16", TOP_K, [*SEPARATE, "placement.max_staleness=1"]),
    "standalone-topk": ("bfloat16", TOP_K, STANDALONE),
    "standalone-fullvocab": ("bfloat16", FULL, STANDALONE),
    "colocate-tp2-engine-tp2": ("float32", TOP_K, [*TWO, "train.tensor_parallel=2", "rollout.tensor_parallel=2"]),
    "colocate-dp2-engine-tp2": ("bfloat16", FULL, [*TWO, "rollout.tensor_parallel=2"]),
}
FOUR = ["train.gpus=4", "train.tensor_parallel=2", "rollout.gpus=4"]
ENGINE_TP2 = ["rollout.gpus=2", "rollout.tensor_parallel=2"]
LAYOUTS_OF_FOUR = {
    "colocate-tp2-dp2": ("bfloat16", TOP_K, FOUR),
    "colocate-tp2-dp2-fullvocab": ("float32", FULL, FOUR),
    "separate-2+2": ("bfloat16", TOP_K, [*SEPARATE, "train.gpus=2", *ENGINE_TP2]),
    "standalone-2+2": (
        "bfloat16",
        FULL,
        [*TWO, "train.tensor_parallel=2", *STANDALONE, "teacher.gpus=2", "teacher.tensor_parallel=2"],
    ),
}
"""Name -> the trainer's number format, what is asked of the teacher, and who is where."""
REPLAY = """
import json, sys
from pathlib import Path
from rlhf.config.train import DType
from tests.gpu.replay import replayed_losses
overrides = json.loads(sys.argv[3])
print("LOSSES", json.dumps(replayed_losses(Path(sys.argv[1]), overrides, DType[sys.argv[2]])))
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return world_of(tmp_path_factory.mktemp("world"), STEPS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_as_one_gpu_does(name: str, world: list[str], tmp_path: Path) -> None:
    check_layout(name, LAYOUTS[name], world, tmp_path)


@pytest.mark.parametrize("name", LAYOUTS_OF_FOUR)
def test_four_gpus_train_as_one_does(name: str, world: list[str], tmp_path: Path) -> None:
    check_layout(name, LAYOUTS_OF_FOUR[name], world, tmp_path)


def check_layout(name: str, of_layout: tuple[str, list[str], list[str]], world: list[str], tmp_path: Path) -> None:
    """Run it and compare with the replay of its samples."""
    dtype, distill, layout = of_layout
    alone = [*world, f"train.dtype={dtype}", *distill]
    done = launch([*alone, *layout, f"run.name={name}"], tmp_path, timeout=500)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    run_dir = tmp_path / "outputs" / name
    steps = metrics_of(run_dir)
    losses = [steps[step]["train/loss"] for step in range(1, STEPS + 1)]
    expected = replay(run_dir, alone, dtype)
    print(f"{name}: losses {losses}, on one GPU {expected}, roles {read_summary(run_dir).roles}")
    assert losses == pytest.approx(expected, abs=TOLERANCE[dtype])
    assert len(set(losses)) == STEPS
    ahead = "ahead" in name
    for step in range(1, STEPS + 1):
        assert steps[step]["rollout/staleness"] == (1 if ahead and step > 1 else 0)
        if not ahead:  # where weights are older, so are their log-probabilities
            assert steps[step]["rollout/logprob_gap_mean"] < 0.1
    assert steps[STEPS]["eval/forward_kl"] < steps[0]["eval/forward_kl"]


def replay(run_dir: Path, overrides: list[str], dtype: str) -> list[float]:
    """Losses of one process on the first GPU, in a process of its own."""
    command = [sys.executable, "-c", REPLAY, str(run_dir), dtype, json.dumps(overrides)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("LOSSES ")]
    losses: list[float] = json.loads(line.removeprefix("LOSSES "))
    return losses


def test_a_killed_engine_ends_the_run_and_frees_the_gpus(world: list[str], tmp_path: Path) -> None:
    """One clear line within a minute, and both cards are empty afterwards."""
    before = used_memory()
    arguments = [*world, "train.dtype=bfloat16", *TOP_K, *SEPARATE, "run.steps=2000", "run.name=killed"]
    process = start(arguments, tmp_path)
    wait_for_step(process, tmp_path / "outputs" / "killed", 3)
    assert all(now - then > 1000 for now, then in zip(used_memory(), before, strict=True)), "one card isn't used"
    role_processes(process.pid)["EngineActor"][0].kill()
    _, errors = process.communicate(timeout=120)
    print(errors)
    assert process.returncode == 1 and "engine" in errors and errors.startswith("error: ")
    assert len([line for line in errors.splitlines() if line.startswith("error: ")]) == 1
    deadline = time.monotonic() + 60
    while any(now - then > 200 for now, then in zip(used_memory(), before, strict=True)):
        assert time.monotonic() < deadline, f"memory is still taken: {used_memory()} MiB, before {before}"
        time.sleep(1)


def used_memory() -> list[int]:
    """MiB of each card."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.check_output(command, text=True).split()]
