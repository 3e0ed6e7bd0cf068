"""A small job on GPUs."""

from __future__ import annotations

import json
from pathlib import Path

from tests.unit.tiny import save_tiny_llama


def world_of(folder: Path, steps: int) -> list[str]:
    """A student and another teacher, small, but with heads and layers enough to be split -> overrides that use them."""
    shape = dict(hidden=512, heads=8, kv_heads=2, intermediate=1024)
    student = save_tiny_llama(folder / "student", tied=True, layers=4, seed=1, **shape)
    teacher = save_tiny_llama(folder / "teacher", layers=6, seed=2, **shape)
    rows = [
        {"prompt": f"how many boxes make {i} boxes", "response": f"the answer is {i} and no other"} for i in range(40)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *("model=hf", f"model.path={student}", f"teacher.model={teacher}"),
        *("data=file", f"data.path={folder / 'rows.jsonl'}", "data.max_length=64"),
        *("rollout.max_new_tokens=32", "rollout.dtype=bfloat16", "rollout.kv_cache_gb=1", "logger.rollouts=true"),
        *("train.global_batch_samples=8", "train.micro_batch_tokens=512", "train.lr=1e-4", "eval.samples=4"),
        *("cluster.device=cuda", f"run.steps={steps}", "run.seed=3"),
    ]
