"""What a run's choices mean for the processes: who gets which model, and what the summary says of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rlhf.backends.megatron.adapters import Adapter
from rlhf.config.lora import Lora
from rlhf.config.model import Model
from rlhf.config.teacher import ColocatedTeacher, StandaloneTeacher
from rlhf.execute import build_objective
from rlhf.placements.roles import describe, trainer_setup
from tests.unit.test_execute import inputs_of, run_of

ADAPTER = Adapter(rank=4, alpha=8.0, dropout=0.1, modules=("q_proj", "v_proj"), base="org/base")


def test_a_teacher_that_is_the_base_is_not_loaded_again(tmp_path: Path) -> None:
    """Only where an adapter tells the two apart."""
    run = run_of(tmp_path, teacher=ColocatedTeacher(model="student"))
    same = replace(inputs_of(), teacher=inputs_of().student)
    for inputs, loaded, base in (
        (replace(same, adapter=ADAPTER), None, True),
        (same, same.student, False),
        (replace(inputs_of(), adapter=ADAPTER), Path("teacher"), False),
    ):
        setup = trainer_setup(run, inputs, build_objective(run))
        assert (setup.teacher, setup.base_teacher, setup.adapter) == (loaded, base, inputs.adapter)
    elsewhere = run_of(tmp_path, teacher=StandaloneTeacher(model="student"))
    setup = trainer_setup(elsewhere, replace(same, adapter=ADAPTER), build_objective(elsewhere))
    assert (setup.teacher, setup.base_teacher) == (None, False)


def test_the_summary_says_what_is_trained(tmp_path: Path) -> None:
    run = run_of(tmp_path, model=Model(path="student", lora=Lora(rank=4)), teacher=ColocatedTeacher(model="student"))
    same = replace(inputs_of(), teacher=inputs_of().student, adapter=ADAPTER)
    trainer, teacher, _ = describe(run, same, shared=True)
    trained = 30 * 4 * (2 * 576 + 576 + 192)
    layer = 2 * 576 * (576 + 192) + 3 * 576 * 1536 + 2 * 576
    base = 30 * layer + 576 + 2 * 49152 * 576
    every = base + trained
    assert (
        f"student student, LoRA of rank 4 on q_proj, v_proj: {trained:,} of {every:,} parameters are trained (0.14%); "
        f"weights, gradients and optimizer states: {(4 * every + 12 * trained) / 2**30:.2g} GiB a device"
    ) in trainer
    assert teacher == "teacher: student, the student without its adapter, in the trainer's processes"
    trainer, teacher, _ = describe(run, inputs_of(), shared=True)
    size = f"{16 * base / 2**30:.2g} GiB a device"
    assert trainer.endswith(f"student student; weights, gradients and optimizer states: {size}")
    assert teacher == "teacher: student, in the trainer's processes"
