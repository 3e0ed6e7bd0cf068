"""Checkpoints: complete or absent, which are kept, what is in them, and what a full disk leaves."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rlhf import training_state
from rlhf.checkpoint import Better, Checkpoints, put
from rlhf.errors import CheckpointError
from rlhf.export import writing
from rlhf.roles.doubles import Done, DoubleTrainer
from rlhf.training_state import TrainingState, newest, read


def state_of(step: int, **fields: object) -> TrainingState:
    values = dict(
        step=step,
        version=step,
        cursor={"n": 10, "epoch": 0, "position": step},
        data={"train_rows": 10, "hash": "abc"},
        evaluations={0: {"eval/forward_kl": 1.0}},
        samples={0: [1, 2]},
        phases={"train": 1.5},
        seconds=2.5,
        bad_rows=0,
        wandb_id=None,
        config={"run": {"steps": 4}},
        versions={"rlhf": "0.1.0"},
    )
    return TrainingState(**{**values, **fields})  # type: ignore[arg-type]


def checkpoints_in(run_dir: Path, trainer: DoubleTrainer | None = None, **options: object) -> Checkpoints:
    values = dict(save_every=1, describe=state_of)
    return Checkpoints(trainer or DoubleTrainer(), run_dir / "checkpoints", **{**values, **options})  # type: ignore[arg-type]


def save_steps(checkpoints: Checkpoints, steps: int) -> None:
    for step in range(1, steps + 1):
        checkpoints.trainer.version = step  # type: ignore[misc]
        checkpoints.after_step(step)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_the_state_comes_back_as_it_was(tmp_path: Path) -> None:
    save_steps(checkpoints_in(tmp_path), 1)
    folder = tmp_path / "checkpoints" / "step_1"
    assert sorted(path.name for path in folder.rglob("*")) == [
        "driver.json",
        "rank_0.pt",
        "training_state",
        "version.txt",
    ]
    assert read(folder) == state_of(1)


def test_nothing_has_the_name_of_a_checkpoint_before_all_of_it_is_there(tmp_path: Path) -> None:
    """Looked at from inside every call that writes a part."""
    seen: list[list[str]] = []

    class Looks(DoubleTrainer):
        def save(self, folder: Path) -> Done[None]:
            seen.append(names(tmp_path))
            return super().save(folder)

        def save_state(self, folder: Path) -> Done[int]:
            seen.append(names(tmp_path))
            return super().save_state(folder)

    def describe(step: int) -> TrainingState:
        seen.append(names(tmp_path))
        return state_of(step)

    checkpoints_in(tmp_path, Looks(), describe=describe).after_step(1)
    assert len(seen) == 3 and all(name.startswith(".step_1.unfinished-") for listed in seen for name in listed)
    assert names(tmp_path) == ["step_1"]


@pytest.mark.parametrize("fails", ["save", "save_state"])
def test_a_save_that_fails_leaves_the_earlier_ones(fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = checkpoints_in(tmp_path, keep_last=1)
    save_steps(checkpoints, 1)

    def full(folder: Path) -> Done[None]:
        folder.mkdir(parents=True)
        raise CheckpointError("no space left")

    monkeypatch.setattr(checkpoints.trainer, fails, full)
    with pytest.raises(CheckpointError, match="no space left"):
        checkpoints.after_step(2)
    assert names(tmp_path) == ["step_1"]
    assert read(tmp_path / "checkpoints" / "step_1").step == 1


def test_files_that_another_machine_kept_to_itself(tmp_path: Path) -> None:
    class Elsewhere(DoubleTrainer):
        def save_state(self, folder: Path) -> Done[int]:
            super().save_state(folder)
            return Done(2)

    with pytest.raises(CheckpointError, match=r"of 2 files of training state 1 are in .*; use a run\.dir that they do"):
        checkpoints_in(tmp_path, Elsewhere()).after_step(1)
    assert names(tmp_path) == []


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file may grow beyond `size` bytes: what the system says then takes the way of a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    """From torch, from safetensors and from Python."""
    from safetensors.torch import save_file

    tensor = torch.zeros(1_000_000)
    writers = [
        lambda path: torch.save({"tensor": tensor}, path),
        lambda path: save_file({"tensor": tensor}, path),
        lambda path: path.write_bytes(bytes(1_000_000)),
    ]
    for number, write in enumerate(writers):
        said = r"can't be written, \d+\.\d GiB are free there: "
        with pytest.raises(CheckpointError, match=said) as error, full_disk(10_000), writing(tmp_path / "a" / "step_1"):
            write(tmp_path / str(number))
        assert "\n" not in str(error.value)


def test_a_full_disk_while_the_driver_writes(tmp_path: Path) -> None:
    checkpoints = checkpoints_in(tmp_path, describe=lambda step: state_of(step, config={"text": "x" * 50_000}))
    with full_disk(10_000), pytest.raises(CheckpointError, match=r"step_1 can't be written: File too large"):
        checkpoints.after_step(1)
    assert names(tmp_path) == []


@pytest.mark.parametrize(("keep_last", "kept"), [(0, [1, 2, 3, 4]), (1, [4]), (2, [3, 4]), (9, [1, 2, 3, 4])])
def test_older_ones_are_deleted(keep_last: int, kept: list[int], tmp_path: Path) -> None:
    checkpoints = checkpoints_in(tmp_path, keep_last=keep_last, keep_best=True)
    checkpoints.after_evaluation(1, {"eval/forward_kl": 1.0})
    save_steps(checkpoints, 4)
    assert names(tmp_path) == ["best", *(f"step_{step}" for step in kept)]
    assert [path.name for path in checkpoints.saved] == [f"step_{step}" for step in kept]


def test_steps_are_numbers_not_words(tmp_path: Path) -> None:
    save_steps(checkpoints_in(tmp_path, keep_last=2), 11)
    assert names(tmp_path) == ["step_10", "step_11"]
    assert newest(tmp_path) == tmp_path / "checkpoints" / "step_11"


def test_a_continuation_takes_over_and_deletes_once_it_has_saved(tmp_path: Path) -> None:
    save_steps(checkpoints_in(tmp_path), 3)
    (tmp_path / "checkpoints" / ".step_4.unfinished-99").mkdir()
    checkpoints = checkpoints_in(tmp_path, keep_last=1)
    checkpoints.go_on()
    assert names(tmp_path) == ["step_1", "step_2", "step_3"]
    checkpoints.after_step(4)
    assert names(tmp_path) == ["step_4"]


def test_the_final_one_is_linked_to_the_last_step(tmp_path: Path) -> None:
    checkpoints = checkpoints_in(tmp_path, describe=lambda step: state_of(step, seconds=1.0))
    save_steps(checkpoints, 2)
    checkpoints.describe = lambda step: state_of(step, seconds=9.0)
    final = checkpoints.finish(2)
    step_2 = tmp_path / "checkpoints" / "step_2"
    for name in ("version.txt", "training_state/rank_0.pt"):
        assert (final / name).samefile(step_2 / name)
    assert (read(final).seconds, read(step_2).seconds) == (9.0, 1.0), "each has a driver.json of its own"
    assert [event.call for event in checkpoints.trainer.events].count("save") == 2  # type: ignore[attr-defined]
    assert newest(tmp_path) == final
    checkpoints.trainer.version = 3  # type: ignore[misc]
    assert (checkpoints.finish(3) / "version.txt").read_text() == "3", "not linked to another step"


def test_the_best_one_is_kept(tmp_path: Path) -> None:
    checkpoints = checkpoints_in(tmp_path, keep_best=True)
    best = tmp_path / "checkpoints" / "best"
    kept = []
    for step, value in [(0, 0.1), (1, 3.0), (2, float("nan")), (3, 2.0), (4, 2.5), (5, 2.0)]:
        checkpoints.trainer.version = step  # type: ignore[misc]
        if step == 3:
            checkpoints.after_step(step)
        checkpoints.after_evaluation(step, {"eval/forward_kl": value})
        kept.append((best / "version.txt").read_text() if best.exists() else None)
    assert kept == [None, "1", "1", "3", "3", "3"], "step 0 is the student as it came"
    assert json.loads((best / "best.json").read_text()) == {"step": 3, "eval/forward_kl": 2.0}
    assert sorted(path.name for path in best.iterdir()) == ["best.json", "version.txt"], "no training state"
    assert (best / "version.txt").samefile(best.parent / "step_3" / "version.txt")
    assert not (best.parent / "step_3" / "best.json").exists()


def test_without_keep_best_there_is_none(tmp_path: Path) -> None:
    checkpoints = checkpoints_in(tmp_path)
    checkpoints.after_evaluation(1, {"eval/forward_kl": 1.0})
    assert checkpoints.best() is None and not (tmp_path / "checkpoints").exists()


def test_an_evaluation_after_a_save_is_noted_in_it(tmp_path: Path) -> None:
    checkpoints = checkpoints_in(tmp_path)
    save_steps(checkpoints, 1)
    checkpoints.describe = lambda step: state_of(step, evaluations={1: {"eval/forward_kl": 0.5}})
    checkpoints.after_evaluation(1, {"eval/forward_kl": 0.5})
    assert read(tmp_path / "checkpoints" / "step_1").evaluations == {1: {"eval/forward_kl": 0.5}}


@pytest.mark.parametrize("new_is_there", [True, False])
def test_a_replacement_that_was_cut_short(new_is_there: bool, tmp_path: Path) -> None:
    """Killed after the old one was renamed: before the new one came, the old one comes back."""
    checkpoints = checkpoints_in(tmp_path)
    folder = checkpoints.folder
    (folder / ".best.replaced" / "old").mkdir(parents=True)
    if new_is_there:
        (folder / "best" / "new").mkdir(parents=True)
    checkpoints.remove_unfinished()
    assert [path.name for path in (folder / "best").iterdir()] == ["new" if new_is_there else "old"]
    assert names(tmp_path) == ["best"]


def test_put_replaces(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "new" / name).mkdir(parents=True)
        put(tmp_path / "new", tmp_path / "place")
    assert [path.name for path in tmp_path.iterdir()] == ["place"]
    assert [path.name for path in (tmp_path / "place").iterdir()] == ["b"]


def damaged(folder: Path, how: str) -> None:
    state = folder / training_state.FOLDER
    content = json.loads((state / "driver.json").read_text())
    if how == "format":
        content["format"] = 2
    elif how == "field":
        del content["cursor"]
    elif how == "step":
        content["step"] = "1"
    elif how == "config":
        content["config"] = []
    if how == "cut":
        (state / "driver.json").write_text(json.dumps(content)[:100])
    elif how == "list":
        (state / "driver.json").write_text("[]")
    else:
        (state / "driver.json").write_text(json.dumps(content))
    if how == "missing":
        (state / "rank_0.pt").unlink()
    elif how == "short":
        (state / "rank_0.pt").write_text("")
    elif how == "none":
        (state / "driver.json").unlink()


DAMAGE = {
    "format": r"driver\.json has format 2, this version of rlhf reads format 1; it was written with rlhf 0\.1\.0",
    "field": r"driver\.json is damaged \(TypeError\); continue from another checkpoint: resume=FOLDER",
    "cut": r"driver\.json is damaged \(JSONDecodeError\); continue",
    "list": r"driver\.json is damaged \(TypeError\); continue",
    "missing": r"rank_0\.pt is missing; continue from another",
    "short": r"rank_0\.pt has 0 bytes instead of 1; continue from another",
    "step": r"driver\.json is damaged \(ValueError\); continue",
    "config": r"driver\.json is damaged \(TypeError\); continue",
    "none": r"step_1 has no training state: run\.save_every writes it",
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_named(how: str, tmp_path: Path) -> None:
    save_steps(checkpoints_in(tmp_path), 1)
    damaged(tmp_path / "checkpoints" / "step_1", how)
    with pytest.raises(CheckpointError, match=DAMAGE[how]):
        read(tmp_path / "checkpoints" / "step_1")


def test_damage_in_an_older_one_does_not_matter(tmp_path: Path) -> None:
    save_steps(checkpoints_in(tmp_path), 2)
    folder = tmp_path / "checkpoints"
    damaged(folder / "step_1", "short")
    assert newest(tmp_path) == folder / "step_2"
    damaged(folder / "step_1", "cut")
    with pytest.raises(CheckpointError, match=r"step_1/.*driver\.json is damaged .*; delete its checkpoint to go on"):
        newest(tmp_path)


def test_other_folders_are_no_checkpoints(tmp_path: Path) -> None:
    assert newest(tmp_path / "nothing") is None
    save_steps(checkpoints_in(tmp_path), 1)
    for name in ("final", "best", ".step_9.unfinished-1"):
        (tmp_path / "checkpoints" / name).mkdir()
    assert newest(tmp_path) == tmp_path / "checkpoints" / "step_1"


def test_with_rewards_the_best_one_has_the_highest(tmp_path: Path) -> None:
    checkpoints = checkpoints_in(tmp_path, keep_best=True, better=Better("eval/reward", highest=True))
    best = tmp_path / "checkpoints" / "best" / "best.json"
    for step, value in [(0, 9.0), (1, 0.25), (2, 0.5), (3, 0.5), (4, float("nan")), (5, 0.0)]:
        checkpoints.after_evaluation(step, {"eval/reward": value, "eval/forward_kl": -value})
    assert json.loads(best.read_text()) == {"step": 2, "eval/reward": 0.5}
