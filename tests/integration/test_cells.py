"""Every legal combination of groups runs for two steps on the real stack, and the roles that ran are those it names.

`make test` runs a pairwise subset, `make test-all` every cell. The cells of a test are jobs of one process, as a
sweep's are.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.report.summary import read
from tests.cells import Cell, legal_cells, pairwise
from tests.integration.runs import environment, metrics_of, tiny_world

RUN_CELLS = """
import json, sys
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from rlhf.backends.keep import end_kept_ray, keep_ray
from rlhf.config.compose import to_run
from rlhf.config.registry import PROJECT_ROOT, register
from rlhf.execute import execute
register()
keep_ray()
with initialize_config_dir(str(PROJECT_ROOT / "conf"), version_base="1.3"):
    for overrides in json.loads(sys.argv[1]):
        config = compose("config", overrides)
        execute(to_run(config), OmegaConf.to_container(config, resolve=True))
end_kept_ray()
"""


def overrides_of(cell: Cell, world: list[str], run_dir: Path) -> list[str]:
    """The cell on tiny models; keys that it has no use for are left out."""
    unused = ["teacher.model="] if cell.teacher in ("self", "none") else []
    unused += [] if cell.distill == "topk" else ["distill.k="]
    unused += ["rollout."] if cell.source == "dataset" else []
    kept = [override for override in world if not override.startswith(tuple(unused))]
    cut = [] if cell.source == "live" else ["data.max_response_length=16"]
    small = ["teacher.engine.kv_cache_gb=0.1"] if cell.teacher == "standalone" else []
    groups = ["algo.num_generations=2"] if cell.algo == "grpo" else []
    functions = ["reward.functions=[tests.integration.rewarding.vowels]"] if cell.reward == "functions" else []
    return [
        *cell.overrides,
        *kept,
        *cut,
        *small,
        *groups,
        *functions,
        "run.steps=2",
        f"run.dir={run_dir}",
        "run.seed=1",
    ]


def world_of(folder: Path) -> list[str]:
    """Tiny models, and rows with everything a cell may ask for."""
    overrides = tiny_world(folder)
    rows = [
        {
            "prompt": f"how many boxes make {i} boxes",
            "response": f"the answer is {i}",
            "teacher_prompt": f"the answer is {i} how many boxes make {i} boxes",
        }
        for i in range(24)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return overrides


def run_jobs(jobs: list[list[str]], folder: Path, timeout: float) -> None:
    """Runs with these overrides, one after the other."""
    command = [sys.executable, "-c", RUN_CELLS, json.dumps(jobs)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout, env=environment())
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr


def run_cells(cells: list[Cell], folder: Path, timeout: float) -> None:
    world = world_of(folder)
    # Those with the most devices first: the others have room in the Ray that these start.
    cells = sorted(cells, key=lambda cell: (cell.placement != "separate", cell.teacher != "standalone"))
    run_jobs([overrides_of(cell, world, folder / "-".join(cell)) for cell in cells], folder, timeout)
    for cell in cells:
        check(cell, folder / "-".join(cell))


def check(cell: Cell, run_dir: Path) -> None:
    """Two steps, with the roles and the numbers that the cell is about."""
    trainer, teacher, engine = read(run_dir).roles
    assert "Megatron-core" in trainer
    where = {
        "colocated": "in the trainer's processes",
        "standalone": "of its own, vLLM",
        "self": "the student itself",
        "none": "none",
    }
    assert where[cell.teacher] in teacher, cell
    if cell.source == "dataset":
        assert engine.startswith("engine: none"), cell
    else:
        assert ("the same 1 x cpu" in engine) == (cell.placement == "colocate") and "vLLM" in engine, cell
    steps = metrics_of(run_dir)
    for step in (1, 2):
        metrics = steps[step]
        assert math.isfinite(metrics["train/loss"]) and metrics["train/grad_norm"] > 0, cell
        assert metrics.get("batch/privileged_share", 0) == (cell.teacher != "none"), cell
        if cell.algo == "grpo":
            assert metrics["policy/ratio_mean"] == pytest.approx(1, abs=1e-5), cell
            assert (metrics.get("reward/std", 0) > 0) == (cell.reward == "functions"), cell
            assert (abs(metrics.get("policy/teacher_kl", 0)) > 1e-3) == (cell.distill == "sampled"), cell
        else:
            assert (metrics["distill/teacher_mass"] == 1) == (cell.distill == "fullvocab"), cell
        on_policy = {"live": 1.0, "dataset": 0.0}.get(cell.source, metrics.get("rollout/on_policy"))
        assert ("rollout/logprob_gap_mean" in metrics) == (on_policy == 1), cell
        assert metrics.get("rollout/logprob_gap_mean", 0.0) < 1e-3, cell
    measured = {"eval/forward_kl", "eval/reverse_kl"} if cell.teacher != "none" else set()
    measured |= {"eval/reward"} if cell.reward == "functions" else set()
    assert measured <= set(steps[0]) & set(steps[2]), cell


DISTILLATION = pairwise([cell for cell in legal_cells() if cell.algo != "grpo"])


def test_cells_with_every_pair_of_options(tmp_path: Path) -> None:
    """Of distillation; GRPO has runs of its own (test_grpo.py)."""
    run_cells(DISTILLATION, tmp_path, timeout=800)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_other_cell(tmp_path: Path) -> None:
    run_cells([cell for cell in legal_cells() if cell not in DISTILLATION], tmp_path, timeout=3500)
