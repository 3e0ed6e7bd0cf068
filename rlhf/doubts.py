"""What may be a mistake but needn't be, said before anything starts. Refusals are in `preflight`."""

from __future__ import annotations

from pathlib import Path

from rlhf.config.algo import GKD
from rlhf.config.checks import left_by_lmbda
from rlhf.config.data import FileData, HubData, PluginData
from rlhf.config.run import Run
from rlhf.config.teacher import ColocatedTeacher, StandaloneTeacher
from rlhf.data.dataset import Dataset


def doubts(run: Run, student: Path, teacher: Path | None, steps: int, dataset: Dataset) -> list[str]:
    """Warnings, a line each. No refusals: a recipe may have set the keys, or they are for other jobs of a sweep, or for
    rows to come.

    Args:
        steps: of the run.
    """
    return (
        _is_taught_by_itself(run, student, teacher, dataset)
        + _without_effect(run, steps, dataset)
        + _mostly_held_out(run, dataset)
    )


def _is_taught_by_itself(run: Run, student: Path, teacher: Path | None, dataset: Dataset) -> list[str]:
    """Teacher and student are the same model and read the same."""
    same = teacher == student and not run.model.drop_layers and run.model.lora.path is None
    reads_the_same = dataset.statistics.get("data/teacher_prompt_rows") == 0
    if not (same and reads_the_same and isinstance(run.algo, GKD)):
        return []
    assert isinstance(run.teacher, ColocatedTeacher | StandaloneTeacher), "others have no checkpoint of their own"
    return [
        f"teacher.model={run.teacher.model} is the student itself (model.path={run.model.path}): their divergence is "
        "zero from the start, and training can only raise it"
    ]


def _without_effect(run: Run, steps: int, dataset: Dataset) -> list[str]:
    """Keys that were set and change nothing."""
    by_lmbda = left_by_lmbda(run)
    found = [] if by_lmbda is None else [by_lmbda]
    if run.eval.every > steps:
        length = f"run.steps={steps}" if run.run.epochs is None else f"the {steps} steps of run.epochs={run.run.epochs}"
        found.append(
            f"eval.every={run.eval.every} is more than {length}: nothing is evaluated on the way; use a smaller one, "
            "or eval.every=0"
        )
    privileged = dataset.statistics.get("data/teacher_prompt_rows") != 0 or dataset.held_out.teacher_lengths.any()
    if run.data.max_teacher_length is not None and not privileged:
        found.append(
            f"data.max_teacher_length={run.data.max_teacher_length} has no effect, since no row has a teacher_prompt; "
            "use data.preprocessor=opsd_reference_solution (or your own), or leave data.max_teacher_length=null"
        )
    return found


def _mostly_held_out(run: Run, dataset: Dataset) -> list[str]:
    """More rows are held out of a source than are left of it to train on."""
    own = {FileData: "eval_path", HubData: "eval_split", PluginData: "eval_function"}.get(type(run.data))
    held_out, left = len(dataset.held_out), dataset.train_rows
    if own is None or getattr(run.data, own) is not None or left is None or held_out <= left:
        return []
    return [
        f"eval.samples={run.eval.samples} holds out {held_out} of {held_out + left} rows and leaves {left} to train "
        f"on; use a smaller eval.samples, or held-out rows of their own (data.{own})"
    ]
