"""Resuming, on doubles: from where, whether it is allowed, what is cut off, and that nothing shows where it stopped."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlhf.execute
import rlhf.placements.colocate
import rlhf.rewards.build
from rlhf import training_state
from rlhf.checkpoint import best_of
from rlhf.config.algo import GRPO
from rlhf.config.arguments import check_resume
from rlhf.config.distill import NoDistill
from rlhf.config.logger import Logger
from rlhf.config.reward import FunctionReward
from rlhf.config.run import Eval, Run, RunSection
from rlhf.config.teacher import NoTeacher
from rlhf.config.train import Train
from rlhf.data.stream import RowStream
from rlhf.errors import CheckpointError, ConfigError, DataError, RoleDied
from rlhf.loggers.cut import cut_lines, cut_rows
from rlhf.preflight import Inputs
from rlhf.resume import compare, find, mark_of, still_as_found
from rlhf.roles.doubles import Done, DoubleRewarder, DoubleTrainer, doubles
from rlhf.types import Experience, Metrics
from tests.unit.test_execute import Roles, inputs_of, run_of
from tests.unit.test_live_source import table_of

STEPS = 6


def settings(folder: Path, steps: int = STEPS, **fields: Any) -> RunSection:
    return RunSection(**{**dict(name="test", dir=str(folder), steps=steps, save_every=2), **fields})


def config_of(run: Run) -> dict[str, Any]:
    """The configuration as containers, which Hydra has beside the dataclasses."""
    sections = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
    return {
        name: dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]
        for name, value in sections.items()
    }


class Kills(DoubleTrainer):
    """Ends at a step, before training on it."""

    at = STEPS + 1

    def train(self, experience: Experience) -> Done[Metrics]:
        if experience.step == self.at:
            raise RoleDied("the trainer ended")
        self.metrics = {"train/loss": 1.0 / (1 + self.version), "time/train": 0.25}
        return super().train(experience)


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`execute` on doubles. Returns the roles, to see what was asked of them."""

    def execute(folder: Path, at: int = STEPS + 1, inputs: Inputs | None = None, **sections: Any) -> Roles:
        _, scorer, engine = doubles()
        trainer = Kills(scorer.events, scorer.scored)
        engine.events = scorer.events
        trainer.at = at
        trainer.needs_scores = not isinstance(sections.get("teacher"), NoTeacher)
        roles = Roles(trainer, scorer, engine)
        sections = {
            "run": settings(folder),
            "logger": Logger(console=False),
            "eval": Eval(samples=2, every=2),
        } | sections
        run = run_of(folder, **sections)
        chosen = inputs or inputs_of(steps=run.run.steps or 0)
        monkeypatch.setattr(rlhf.placements.colocate, "start", lambda *args: roles)
        monkeypatch.setattr(rlhf.execute, "check_inputs", lambda run: chosen)
        roles.result = rlhf.execute.execute(run, config_of(run))  # type: ignore[attr-defined]
        return roles

    return execute


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Without what a clock measured, and without seconds of saving, which a killed run may not have logged."""
    found = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    plain = [{k: v for k, v in row.items() if not k.startswith(("time", "perf/"))} for row in found]
    return [row for row in plain if row.keys() - {"step", "run/resumed_from"}]


@pytest.mark.parametrize("at", [3, 4, 5])
def test_a_resumed_run_is_the_run_that_never_stopped(at: int, tmp_path: Path, launch: Any) -> None:
    """Stopped right after a save, in the middle, and after a later save: rows, samples, versions and summary agree."""
    straight = launch(tmp_path / "straight", logger=Logger(console=False, rollouts=True))
    stopped = tmp_path / "stopped"
    with pytest.raises(RoleDied):
        launch(stopped, at=at, logger=Logger(console=False, rollouts=True))
    (stopped / "checkpoints" / ".step_9.unfinished-1").mkdir()
    with (stopped / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "train/lo')  # the kill came in the middle of a line
    resumed = launch(stopped, logger=Logger(console=False, rollouts=True), resume="auto")

    assert rows(stopped) == rows(tmp_path / "straight")
    assert rows(stopped, "rollouts.jsonl") == rows(tmp_path / "straight", "rollouts.jsonl")
    begun = 2 if at < 5 else 4
    calls = [event.call for event in resumed.trainer.events]
    assert calls[:2] == ["load_state", "update"], "the weights go to the engine before anything else"
    assert calls.count("train") == STEPS - begun
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (tmp_path / "straight", stopped)]
    for key in ("steps", "eval_before", "eval_after", "sample", "bad_rows"):
        assert summaries[0][key] == summaries[1][key], key
    assert [summary["resumed_from"] for summary in summaries] == [None, begun]
    assert resumed.result == straight.result == 1 / (1 + STEPS)
    assert [Path(path).name for path in summaries[1]["saved"]] == ["step_2", "step_4", "step_6"]
    assert (summaries[1]["best"]["step"], Path(summaries[1]["best"]["path"]).name) == (STEPS, "best")
    logged = [json.loads(line) for line in (stopped / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in logged if "run/resumed_from" in row] == [begun]
    assert summaries[1]["phases"]["train"] == pytest.approx(STEPS * 0.25), "seconds of both parts"
    assert not list((stopped / "checkpoints").glob(".*"))


def test_a_run_that_is_done_is_left_alone_or_made_longer(
    tmp_path: Path, launch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    launch(tmp_path / "straight", run=settings(tmp_path / "straight", steps=5))
    folder = tmp_path / "test"
    launch(folder, run=settings(folder, steps=3))
    before = (folder / "metrics.jsonl").read_text()
    again = launch(folder, run=settings(folder, steps=3), resume="auto")
    assert again.trainer.events == [] and again.result == 1 / 4
    assert f"{folder} is done: 3 steps; use a higher run.steps to go on\n" in capsys.readouterr().out
    launch(folder, run=settings(folder, steps=3), resume="auto", train=Train(global_batch_samples=4, lr=1e-3))
    assert "changed since, without effect: train.lr=0.001 (was 1e-05)\n" in capsys.readouterr().out
    assert (folder / "metrics.jsonl").read_text() == before
    with pytest.raises(ConfigError, match=r"final is at step 3, the last of the run: .* use run\.steps=4 or more"):
        launch(folder, run=settings(folder, steps=3), resume=str(folder))
    with pytest.raises(ConfigError, match=r"final is at step 3, past run\.steps=2: "):
        launch(folder, run=settings(folder, steps=2), resume="auto")
    longer = launch(folder, run=settings(folder, steps=5), resume="auto")
    assert [event.call for event in longer.trainer.events].count("train") == 2
    extra = {"step": 3, "eval/forward_kl": 1 / 4, "eval/reverse_kl": 2 / 4}
    assert [row for row in rows(folder) if row != extra] == rows(tmp_path / "straight"), "an evaluation more"
    assert json.loads((folder / "summary.json").read_text())["resumed_from"] == 3


def test_a_run_on_rewards_that_is_done_tells_the_sweeper_its_reward_again(
    tmp_path: Path, launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without evaluation there is the last step's reward, which only the summary has."""
    monkeypatch.setattr(rlhf.rewards.build, "rewarder_of", lambda run, inputs: DoubleRewarder([]))
    sections = dict(
        run=settings(tmp_path / "test", steps=3),
        eval=Eval(samples=0),
        algo=GRPO(num_generations=2),
        reward=FunctionReward(),
        teacher=NoTeacher(),
        distill=NoDistill(),
    )
    first = launch(tmp_path / "test", **sections)
    again = launch(tmp_path / "test", resume="auto", **sections)
    assert again.trainer.events == [] and again.result == first.result is not None


def test_a_run_killed_before_its_summary_is_finished(tmp_path: Path, launch: Any) -> None:
    launch(tmp_path / "test")
    (tmp_path / "test" / "summary.json").unlink()
    resumed = launch(tmp_path / "test", resume="auto")
    calls = [event.call for event in resumed.trainer.events]
    assert "train" not in calls and "evaluate" not in calls
    assert json.loads((tmp_path / "test" / "summary.json").read_text())["eval_after"]["eval/forward_kl"] == 1 / 7


def test_auto_starts_where_there_is_nothing(tmp_path: Path, launch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Also in the folder of a run that had saved nothing."""
    folder = tmp_path / "test"
    with pytest.raises(RoleDied):
        launch(folder, at=2)
    with pytest.raises(ConfigError, match="holds an earlier run"):
        launch(folder)
    launch(folder, resume="auto", logger=Logger())
    assert "resume=auto: no checkpoint to continue from; starting at the beginning" in capsys.readouterr().out
    assert [row["step"] for row in rows(folder) if "train/loss" in row] == [1, 2, 3, 4, 5, 6]


def test_a_checkpoint_is_continued_in_a_new_run(tmp_path: Path, launch: Any) -> None:
    launch(tmp_path / "old")
    before = (tmp_path / "old" / "metrics.jsonl").read_text()
    new = tmp_path / "new"
    launch(new, resume=str(tmp_path / "old" / "checkpoints" / "step_4"))
    assert [row["step"] for row in rows(new) if "train/loss" in row] == [5, 6]
    expected = [row for row in rows(tmp_path / "old") if row["step"] > 4]
    assert [row for row in rows(new) if row["step"] > 4] == expected
    assert (tmp_path / "old" / "metrics.jsonl").read_text() == before
    assert json.loads((new / "summary.json").read_text())["eval_before"]["eval/forward_kl"] == 1.0


def test_an_earlier_checkpoint_in_place_takes_the_place_of_later_ones(tmp_path: Path, launch: Any) -> None:
    folder = tmp_path / "test"
    launch(folder)
    expected = rows(folder)
    step_2 = str(folder / "checkpoints" / "step_2")
    with pytest.raises(ConfigError, match=r"is step 2 of a run that has later checkpoints \(step_6\).*overwrite=true"):
        launch(folder, resume=step_2)
    with pytest.raises(RoleDied):
        launch(folder, at=3, resume=step_2, run=settings(folder, overwrite=True))
    assert training_state.newest(folder) == folder / "checkpoints" / "step_2"
    launch(folder, resume="auto")
    assert rows(folder) == expected


def test_nothing_to_continue_from_is_named(tmp_path: Path, launch: Any) -> None:
    with pytest.raises(ConfigError, match=r"^resume=nowhere: no such folder; write never, auto, or"):
        launch(tmp_path / "test", resume="nowhere")
    launch(tmp_path / "plain", run=settings(tmp_path / "plain", save_every=0))
    with pytest.raises(ConfigError, match=r"plain holds no training state; write the folder of a run with run\.save_e"):
        launch(tmp_path / "test", resume=str(tmp_path / "plain"))
    with pytest.raises(ConfigError, match=r"checkpoints of run\.dir=.*/plain \(final\) have no training state"):
        launch(tmp_path / "plain", resume="auto")


def test_other_rows_are_refused(tmp_path: Path, launch: Any) -> None:
    with pytest.raises(RoleDied):
        launch(tmp_path / "test", at=3)
    inputs = inputs_of(steps=STEPS)
    fewer = dataclasses.replace(inputs.dataset, train=table_of(9))
    other = dataclasses.replace(inputs.dataset, train=table_of(10, first=1))
    held_out = dataclasses.replace(inputs.dataset, held_out=table_of(2, first=51))
    for dataset, said in (
        (fewer, "there were 10 rows to train on, and are 9 now"),
        (other, "the rows, or the tokens they give, have changed"),
        (held_out, "the rows, or the tokens they give, have changed"),
    ):
        with pytest.raises(CheckpointError, match=f"can't continue from .*step_2: {said}; use the data"):
            launch(tmp_path / "test", resume="auto", inputs=dataclasses.replace(inputs, dataset=dataset))


# ---- the configuration ----------------------------------------------------------------------------------------------


BEFORE = {
    "resume": "never",
    "run": {"name": "a", "dir": "outputs/a", "steps": 4, "seed": 0, "overwrite": False},
    "model": {"_target_": "rlhf.config.model.Model", "path": "student", "drop_layers": [1, 2]},
    "data": {"_target_": "rlhf.config.data.FileData", "path": "rows.jsonl", "shuffle": True},
    "train": {"gpus": 2, "tensor_parallel": 1, "dtype": "float32", "lr": 1e-5, "global_batch_samples": 4},
    "algo": {"_target_": "rlhf.config.algo.GKD", "beta": 0.5},
    "eval": {"samples": 4},
    "logger": {"wandb": False},
}
REFUSED = {
    ("model", "path"): ("other", "model.path=other (was student)"),
    ("model", "drop_layers"): ([1], "model.drop_layers=[1] (was [1, 2])"),
    ("data", "shuffle"): (False, "data.shuffle=false (was true)"),
    ("data", "path"): ("b.jsonl", "data.path=b.jsonl (was rows.jsonl)"),
    ("run", "seed"): (1, "run.seed=1 (was 0)"),
    ("train", "gpus"): (4, "train.gpus=4 (was 2)"),
    ("train", "tensor_parallel"): (2, "train.tensor_parallel=2 (was 1)"),
    ("train", "dtype"): ("bfloat16", "train.dtype=bfloat16 (was float32)"),
    ("train", "global_batch_samples"): (8, "train.global_batch_samples=8 (was 4)"),
    ("eval", "samples"): (8, "eval.samples=8 (was 4)"),
    ("algo", "_target_"): ("rlhf.config.algo.OPSD", "algo=OPSD (was GKD)"),
}


def changed(section: str, key: str, value: object) -> dict[str, Any]:
    return {**BEFORE, section: {**BEFORE[section], key: value}}  # type: ignore[dict-item]


@pytest.mark.parametrize(("section", "key"), REFUSED)
def test_what_makes_another_run_is_refused_by_name(section: str, key: str, tmp_path: Path) -> None:
    value, said = REFUSED[section, key]
    with pytest.raises(ConfigError) as error:
        compare(BEFORE, changed(section, key, value), tmp_path)
    assert f" with {said}: that would be another run; " in str(error.value)
    assert "\n" not in str(error.value)


def test_of_an_adapter_its_shape_decides(tmp_path: Path) -> None:
    before = BEFORE | {"model": {"path": "a", "lora": {"rank": 8, "alpha": 32.0, "dropout": 0.0, "save": "both"}}}

    def now(**keys: object) -> dict[str, Any]:
        return before | {"model": {"path": "a", "lora": {**before["model"]["lora"], **keys}}}  # type: ignore[index,dict-item]

    assert compare(before, now(dropout=0.1, save="adapter"), tmp_path) == [
        "model.lora.dropout=0.1 (was 0.0)",
        "model.lora.save=adapter (was both)",
    ]
    for key, value in (("rank", 4), ("alpha", 8.0), ("target", "mlp"), ("path", "adapter")):
        with pytest.raises(ConfigError, match=rf"model\.lora\.{key}={value}"):
            compare(before, now(**{key: value}), tmp_path)


def test_keys_that_came_later_are_unchanged_at_their_defaults(tmp_path: Path) -> None:
    """The earlier run behaved as they do: it can be resumed, unless one of them is set."""
    writer = {"_target_": "rlhf.config.teacher.StandaloneTeacher", "model": "big", "gpus": 1}
    before = BEFORE | {"teacher": writer}
    lora = {"rank": 0, "alpha": 32.0, "target": "all-linear", "path": None, "dropout": 0.0, "save": "both"}
    generation = {"max_new_tokens": 128, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "kv_cache_gb": 1.0}

    def now(rank: int = 0, top_k: int = 0) -> dict[str, Any]:
        return before | {
            "model": {**BEFORE["model"], "lora": lora | {"rank": rank}},  # type: ignore[dict-item]
            "teacher": writer | {"generation": generation | {"top_k": top_k}},
            "plugins": [],
        }

    assert compare(before, now(), tmp_path) == compare(before, now(), tmp_path, in_a_sweep=True) == []
    expected = r"with model\.lora\.rank=8 \(was 0\), teacher\.generation\.top_k=5 \(was 0\): that would be another run"
    with pytest.raises(ConfigError, match=expected):
        compare(before, now(rank=8, top_k=5), tmp_path)
    with pytest.raises(ConfigError, match=r"with model\.lora\.rank=0 \(was 8\): that"):
        compare(now(rank=8), now(), tmp_path)


def test_the_refusal_names_all_of_them(tmp_path: Path) -> None:
    now = changed("run", "seed", 1) | {"eval": {"samples": 2}}
    with pytest.raises(ConfigError, match=r"run\.seed=1 \(was 0\), eval\.samples=2 \(was 4\): that would be another"):
        compare(BEFORE, now, tmp_path)


def test_plugins_decide_what_a_run_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"with plugins=\['mine\.py'\] \(was \[\]\): that would be another run"):
        compare(BEFORE, BEFORE | {"plugins": ["mine.py"]}, tmp_path)
    assert compare(BEFORE, BEFORE | {"plugins": []}, tmp_path) == []


def test_what_is_harmless_is_listed(tmp_path: Path) -> None:
    assert compare(BEFORE, BEFORE, tmp_path) == []
    now = changed("train", "lr", 1e-4) | {"logger": {"wandb": True, "new": 1}, "resume": "auto"}
    now["run"] = {**now["run"], "name": "b", "dir": "outputs/b", "overwrite": True, "steps": 8}
    assert sorted(compare(BEFORE, now, tmp_path)) == [
        "logger.new=1 (was (none))",
        "logger.wandb=true (was false)",
        "run.steps=8 (was 4)",
        "train.lr=0.0001 (was 1e-05)",
    ]


def test_a_job_of_a_sweep_does_not_go_on_with_what_was_another(tmp_path: Path) -> None:
    now = changed("algo", "beta", 1.0)
    now["run"] = {**now["run"], "name": "b", "steps": 8}
    assert sorted(compare(BEFORE, now, tmp_path)) == ["algo.beta=1.0 (was 0.5)", "run.steps=8 (was 4)"]
    with pytest.raises(ConfigError, match=r"with algo\.beta=1\.0 \(was 0\.5\): .* and another hydra\.sweep\.dir"):
        compare(BEFORE, now, tmp_path, in_a_sweep=True)
    assert compare(BEFORE, changed("run", "steps", 8), tmp_path, in_a_sweep=True) == ["run.steps=8 (was 4)"]


def test_the_layout_of_a_run_is_compared(tmp_path: Path, launch: Any) -> None:
    """From the files of a run, not from made-up dictionaries."""
    with pytest.raises(RoleDied):
        launch(tmp_path / "test", at=3)
    two = Train(global_batch_samples=4, gpus=2, distributed_optimizer=True)
    run = run_of(tmp_path / "test", run=settings(tmp_path / "test"), resume="auto")
    config = {**config_of(run), "train": dataclasses.asdict(two)}
    with pytest.raises(ConfigError, match=r"train\.gpus=2 \(was 1\), train\.distributed_optimizer=true \(was false\)"):
        find(run, config, sweep=False)


def test_auto_needs_a_folder_that_stays_the_same() -> None:
    from omegaconf import OmegaConf

    now = "${now:%Y}"
    default = {"name": now, "dir": "outputs/${run.name}"}

    def refused(section: dict[str, str], resume: str = "auto", sweep: str | None = None) -> str | None:
        config = OmegaConf.create({"resume": resume, "run": section})
        try:
            check_resume(config, OmegaConf.create({"dir": sweep or ""}), sweep is not None)
        except ConfigError as error:
            return str(error)
        return None

    assert (refused(default) or "").endswith("write run.name=NAME")
    assert refused(default, resume="never") is None
    assert refused(default | {"name": "mine"}) is None
    assert refused(default | {"dir": "/runs/mine"}) is None
    assert (refused(default | {"dir": f"/runs/{now}"}) or "").endswith("write run.name=NAME")
    assert (refused(default | {"name": "mine"}, sweep=f"multirun/{now}") or "").endswith(
        "hydra.sweep.dir=multirun/NAME"
    )
    assert refused(default, sweep="multirun/mine") is None


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "kept"),
    [
        (['{"step": 1}\n', '{"step": 2}\n', '{"step": 3}\n', '{"step": 2}\n'], 2),
        (['{"step": 1}\n', '{"step": 2'], 1),
        (['{"step": 1}\n', '{"step": 2}'], 1),
        ([], 0),
    ],
)
def test_rows_are_cut_at_the_first_that_goes(lines: list[str], kept: int, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(lines))
    cut_rows(path, lambda row: row["step"] <= 2)
    assert path.read_text() == "".join(lines[:kept])


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step"\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2: can't be read .* delete it"):
        cut_rows(path, lambda row: row["step"] <= 2)
    assert len(path.read_text().splitlines()) == 3


def test_lines_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "bad_rows.txt"
    path.write_text("a\nb\nc\n")
    cut_lines(path, 2)
    assert path.read_text() == "a\nb\n"
    cut_lines(path, 5)
    assert path.read_text() == "a\nb\n"
    cut_lines(tmp_path / "none", 1)
    cut_rows(tmp_path / "none", lambda row: True)
    assert not (tmp_path / "none").exists()


def test_a_mark_is_of_the_tokens(tmp_path: Path) -> None:
    dataset = inputs_of().dataset
    again = dataclasses.replace(dataset, train=table_of(10))
    assert mark_of(dataset) == mark_of(again)
    tokens = np.array(dataset.train.tokens)  # type: ignore[union-attr]
    tokens[-1] += 1
    other = dataclasses.replace(dataset, train=dataclasses.replace(dataset.train, tokens=tokens))  # type: ignore[arg-type,type-var]
    assert mark_of(other) != mark_of(dataset)


def test_a_mark_is_of_what_the_teacher_reads_as_well() -> None:
    dataset = inputs_of().dataset
    assert not isinstance(dataset.train, RowStream)
    told = np.arange(len(dataset.train), dtype=np.int32)
    train = dataclasses.replace(
        dataset.train, teacher_tokens=told, teacher_offsets=np.arange(len(dataset.train) + 1, dtype=np.int64)
    )
    assert mark_of(dataclasses.replace(dataset, train=train)) != mark_of(dataset)


def test_the_best_of_steps_that_are_taken_again_is_forgotten(tmp_path: Path, launch: Any) -> None:
    """A rewound run may do worse; its best is one of its own."""
    launch(tmp_path)
    best = tmp_path / "checkpoints" / "best" / "best.json"
    assert json.loads(best.read_text())["step"] == STEPS
    best.write_text(json.dumps({"step": STEPS, "eval/forward_kl": 0.0}))
    earlier = tmp_path / "checkpoints" / "step_2"
    launch(tmp_path, resume=str(earlier), run=settings(tmp_path, overwrite=True))
    assert json.loads(best.read_text())["eval/forward_kl"] > 0


def test_a_damaged_best_one_is_named(tmp_path: Path, launch: Any) -> None:
    launch(tmp_path)
    best = tmp_path / "checkpoints" / "best" / "best.json"
    for damaged in ("{", "[]", "{}"):
        best.write_text(damaged)
        with pytest.raises(
            CheckpointError, match=r"best/best\.json is damaged \(\w+\); delete its checkpoint to go on"
        ):
            launch(tmp_path, resume="auto", run=settings(tmp_path, steps=STEPS + 2))


def test_the_step_of_the_best_one_is_a_number(tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "best.json").write_text('{"step": "4", "eval/reward": 0.5}')
    assert best_of(tmp_path) == {"step": 4, "eval/reward": 0.5}


def test_a_folder_that_another_process_has_used_meanwhile(tmp_path: Path, launch: Any) -> None:
    launch(tmp_path)
    run = run_of(tmp_path, run=settings(tmp_path, steps=9), eval=Eval(samples=2, every=2), resume="auto")
    config = config_of(run)
    found = find(run, config, False)
    still_as_found(found, run, config, False)
    launch(tmp_path, at=99, resume="auto", run=settings(tmp_path, steps=8))
    with pytest.raises(ConfigError, match="was used by another process just now; start the command again"):
        still_as_found(found, run, config, False)
