"""What is found, and what is said, once models and rows are known."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.algo import GKD
from rlhf.config.cluster import Cluster, Device
from rlhf.config.data import FileData
from rlhf.config.rollout import VllmRollout
from rlhf.config.run import Eval, Run, RunSection
from rlhf.config.teacher import ColocatedTeacher, StandaloneTeacher
from rlhf.errors import ConfigError
from rlhf.preflight import MOST_LOGIT_BIASES, check_inputs, check_writer
from tests.unit import test_execute
from tests.unit.tiny import save_tiny_llama


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, and rows, of one file with privileged prompts."""
    folder = tmp_path_factory.mktemp("world")
    save_tiny_llama(folder / "student", heads=2, seed=0)
    save_tiny_llama(folder / "teacher", heads=2, seed=1)
    rows = [{"prompt": f"how many boxes make {i} boxes", "response": f"the answer is {i}"} for i in range(12)]
    privileged = [row | {"teacher_prompt": "the answer is hidden in a box"} for row in rows]
    for name, content in (("rows", rows), ("privileged", privileged)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return folder


def run_of(folder: Path, rows: str = "rows", data: dict[str, Any] | None = None, **sections: Any) -> Run:
    """A mixed run of the two; `data` and `sections` replace its own."""
    lengths = {"max_length": 64, "max_response_length": 16, **(data or {})}
    own = {
        "rollout": VllmRollout(max_new_tokens=16, kv_cache_gb=0.1),
        "algo": GKD(lmbda=0.5),
        "teacher": ColocatedTeacher(model=str(folder / "teacher")),
    }
    run = test_execute.run_of(
        folder, data=FileData(path=str(folder / f"{rows}.jsonl"), **lengths), **{**own, **sections}
    )
    run.model.path = str(folder / "student")
    return run


EVERY = "nothing is evaluated on the way; use a smaller one, or eval.every=0"


def test_keys_without_effect_are_named_in_a_warning(world: Path) -> None:
    assert check_inputs(run_of(world)).warnings == ()
    used = {"eval": Eval(samples=2, every=2), "data": {"max_teacher_length": 70}}
    assert check_inputs(run_of(world, "privileged", **used)).warnings == ()
    epoch = RunSection(name="test", dir=str(world), steps=None, epochs=1)
    for sections, expected in [
        ({"eval": Eval(samples=2, every=100)}, f"eval.every=100 is more than run.steps=2: {EVERY}"),
        (
            {"eval": Eval(samples=2, every=4), "run": epoch},
            f"eval.every=4 is more than the 3 steps of run.epochs=1: {EVERY}",
        ),
        (
            {"data": {"max_teacher_length": 70}},
            "data.max_teacher_length=70 has no effect, since no row has a teacher_prompt; use "
            "data.preprocessor=opsd_reference_solution (or your own), or leave data.max_teacher_length=null",
        ),
        (
            {"algo": GKD(lmbda=0)},
            "algo.lmbda=0 leaves rollout.max_new_tokens=16, rollout.kv_cache_gb=0.1 without effect, since no engine is "
            "started; use algo.lmbda=0.5, or leave them at their defaults",
        ),
    ]:
        assert check_inputs(run_of(world, **sections)).warnings == (expected,)


def test_more_rows_held_out_than_trained_on(world: Path) -> None:
    assert check_inputs(run_of(world, eval=Eval(samples=6))).warnings == ()
    (warning,) = check_inputs(run_of(world, eval=Eval(samples=8))).warnings
    assert warning == (
        "eval.samples=8 holds out 8 of 12 rows and leaves 4 to train on; use a smaller eval.samples, or held-out rows "
        "of their own (data.eval_path)"
    )
    own = {"eval_path": str(world / "privileged.jsonl")}
    assert check_inputs(run_of(world, data=own, eval=Eval(samples=12))).warnings == ()


def test_a_writer_is_kept_from_as_many_tokens_as_vllm_takes(world: Path) -> None:
    writer = {"algo": GKD(lmbda=0.5, seq_kd=True), "teacher": StandaloneTeacher(model="big")}
    on_gpu = {"cluster": Cluster(device=Device.cuda)}
    run = run_of(world, data={"max_response_length": 512}, **writer, **on_gpu)
    check_writer(run, 500, 500 + MOST_LOGIT_BIASES)
    with pytest.raises(ConfigError) as caught:
        check_writer(run, 500, 501 + MOST_LOGIT_BIASES)
    assert str(caught.value) == (
        f"algo.seq_kd=true: teacher.model=big has vocab_size=1525, 1025 more than model.path={world / 'student'}, and "
        "vLLM on GPUs can keep a writer from 1024 tokens at most; use algo.seq_kd=false, or a teacher.model with a "
        "smaller vocab_size"
    )
    check_writer(run_of(world, **on_gpu), 500, 9000)
    check_writer(dataclasses.replace(run, cluster=Cluster()), 500, 9000)
