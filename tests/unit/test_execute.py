"""A run from start to summary, on doubles: its folder, its files, and what is said and closed when it fails."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

import rlhf.placements.colocate
import rlhf.placements.separate
import rlhf.rewards.build
from rlhf.algos.grpo import GRPOObjective
from rlhf.backends.megatron.architecture import Architecture
from rlhf.checkpoint import Checkpoints
from rlhf.config.algo import GKD, GRPO
from rlhf.config.cluster import Cluster
from rlhf.config.data import FileData, OnBadRow
from rlhf.config.distill import FullVocab, NoDistill, Tail, TopK
from rlhf.config.logger import Logger
from rlhf.config.model import Model
from rlhf.config.placement import Colocate, Separate
from rlhf.config.reward import FunctionReward, NoReward
from rlhf.config.rollout import NoRollout, VllmRollout
from rlhf.config.run import Eval, Run, RunSection
from rlhf.config.teacher import ColocatedTeacher, NoTeacher
from rlhf.config.train import DType, Train
from rlhf.data.dataset import Dataset, load
from rlhf.data.rows import BadRow
from rlhf.distill.fullvocab import FullVocabDistill
from rlhf.distill.topk import TopKDistill
from rlhf.errors import ConfigError, RoleDied
from rlhf.execute import build_objective, largest_gap, objective_of, train, verifier_of
from rlhf.loggers.base import MetricLog, build
from rlhf.outcome import report_data, saved_text
from rlhf.preflight import Inputs
from rlhf.roles.doubles import Done, DoubleEngine, DoubleRewarder, DoubleScorer, DoubleTrainer, doubles
from rlhf.run_folder import RunFolder, check
from rlhf.sources.ahead import Background
from rlhf.stopping import Stopped
from tests.unit.test_live_source import table_of
from tests.unit.tiny import SMOLLM2, tiny_tokenizer


def run_of(folder: Path, **sections: Any) -> Run:
    """A legal configuration; `sections` replace its own."""
    defaults: dict[str, Any] = dict(
        run=RunSection(name="test", dir=str(folder), steps=2),
        eval=Eval(samples=2),
        resume="never",
        model=Model(path="student"),
        train=Train(global_batch_samples=4),
        rollout=VllmRollout(),
        data=FileData(path="rows.jsonl"),
        reward=NoReward(),
        distill=TopK(k=4),
        teacher=ColocatedTeacher(),
        placement=Colocate(),
        logger=Logger(console=False, tensorboard=False),
        cluster=Cluster(),
        algo=GKD(),
    )
    return Run(**{**defaults, **sections})


# ---- the folder -----------------------------------------------------------------------------------------------------


def overwriting(folder: Path) -> Run:
    return run_of(folder, run=RunSection(dir=str(folder), overwrite=True))


def prepared(run: Run, config: dict[str, Any]) -> Path:
    """A folder that a run claimed and gave back."""
    folder = RunFolder.claim(run.run, config)
    folder.release()
    return folder.path


@pytest.mark.parametrize("exists", [True, False])
def test_the_configuration_is_written_into_a_new_folder(exists: bool, tmp_path: Path) -> None:
    folder = tmp_path / "outputs" / "test"
    if exists:
        folder.mkdir(parents=True)
    config = {"run": {"steps": 2}, "train": {"dtype": DType.float32, "lr": 1e-5}, "eval": None}
    assert prepared(run_of(folder), config) == folder
    written = yaml.safe_load((folder / "config.yaml").read_text())
    assert written == {"run": {"steps": 2}, "train": {"dtype": "float32", "lr": 1e-5}, "eval": None}


def test_a_folder_that_no_run_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("years of work")
    for run in (run_of(tmp_path), overwriting(tmp_path)):
        with pytest.raises(ConfigError, match=rf"run\.dir={tmp_path} holds something that no run made; choose another"):
            check(run.run)
    assert (tmp_path / "config.yaml").read_text() == "years of work"


def test_overwrite_leaves_nothing_of_the_earlier_run(tmp_path: Path) -> None:
    folder = tmp_path / "test"
    prepared(run_of(folder), {"old": 1})
    (folder / "checkpoints" / "final").mkdir(parents=True)
    (folder / ".rlhf-begun").touch()
    with pytest.raises(ConfigError, match=r"holds an earlier run; choose another .* run\.overwrite=true"):
        check(run_of(folder).run)
    prepared(overwriting(folder), {"new": 1})
    assert sorted(path.name for path in folder.iterdir()) == [".rlhf-run", "config.yaml"]
    assert yaml.safe_load((folder / "config.yaml").read_text()) == {"new": 1}


def test_a_run_that_never_began_may_be_started_again(tmp_path: Path) -> None:
    folder = prepared(run_of(tmp_path / "test"), {"old": 1})
    assert prepared(run_of(tmp_path / "test"), {"new": 1}) == folder
    assert yaml.safe_load((folder / "config.yaml").read_text()) == {"new": 1}


def test_a_folder_in_use_is_refused_until_its_run_ends(tmp_path: Path) -> None:
    """Even one that may be overwritten: the checkpoints in it belong to a run that is alive."""
    path = tmp_path / "test"
    holder = "import sys, time\nfrom rlhf.config.run import RunSection\nfrom rlhf.run_folder import RunFolder\n"
    holder += "folder = RunFolder.claim(RunSection(dir=sys.argv[1]), {'mine': 1})\nfolder.begun()\n"
    holder += "print('claimed', flush=True)\ntime.sleep(60)\n"
    with subprocess.Popen([sys.executable, "-c", holder, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "claimed\n"
        for take in (check, lambda settings: RunFolder.claim(settings, {})):
            with pytest.raises(ConfigError, match=rf"test is in use by process {process.pid}; choose another"):
                take(overwriting(path).run)
        assert yaml.safe_load((path / "config.yaml").read_text()) == {"mine": 1}
        process.kill()
    assert prepared(overwriting(path), {"new": 1}) == path
    assert yaml.safe_load((path / "config.yaml").read_text()) == {"new": 1}


def test_a_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert check(RunSection(dir="~/runs/a")) == tmp_path / "runs" / "a"


def test_a_file_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test").write_text("")
    for run in (run_of(tmp_path / "test"), overwriting(tmp_path / "test")):
        with pytest.raises(ConfigError, match=r"run\.dir=.*/test is a file; choose another run\.name"):
            check(run.run)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    """Below a file, which not even root can write into."""
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"^run\.dir=.*/file/a can't be written: Not a directory; choose another run\."
    ):
        RunFolder.claim(RunSection(dir=str(tmp_path / "file" / "a")), {})
    with pytest.raises(ConfigError, match=r"^run\.dir is empty; use run\.dir=outputs/NAME"):
        RunSection(dir="")


# ---- the parts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rollout", "trainer", "given", "expected"),
    [
        (DType.float32, DType.float32, None, 1e-3),
        (DType.bfloat16, DType.float32, None, 0.1),
        (DType.float32, DType.bfloat16, None, 0.1),
        (DType.bfloat16, DType.bfloat16, None, 0.1),
        (DType.float32, DType.float32, 0.5, 0.5),
    ],
)
def test_largest_gap(rollout: DType, trainer: DType, given: float | None, expected: float, tmp_path: Path) -> None:
    run = run_of(tmp_path, rollout=VllmRollout(dtype=rollout, logprob_gap_warning=given), train=Train(dtype=trainer))
    assert largest_gap(run) == expected


def test_without_an_engine_there_is_no_gap(tmp_path: Path) -> None:
    run = run_of(tmp_path, rollout=NoRollout())
    assert largest_gap(run) == math.inf and build_objective(run).sampler_temperature is None


def test_saved_text(tmp_path: Path) -> None:
    checkpoints = Checkpoints(DoubleTrainer(), tmp_path, save_every=0)
    assert saved_text(checkpoints) == "no checkpoint was saved (run.save_every writes them on the way)"
    for name in (".step_3.unfinished-7", "step_9", "final"):  # the unfinished one doesn't count
        (tmp_path / name).mkdir()
    assert saved_text(checkpoints) == f"saved: {tmp_path}/step_9, {tmp_path}/final"
    checkpoints.remove_unfinished()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final", "step_9"]


def test_the_objective_is_the_configurations(tmp_path: Path) -> None:
    run = run_of(tmp_path, algo=GKD(beta=0.25), distill=TopK(k=3, tail=Tail.drop), rollout=VllmRollout(temperature=0.7))
    objective = build_objective(run)
    assert objective.distill == TopKDistill(k=3, tail=Tail.drop, temperature=1.0)
    assert (objective.beta, objective.sampler_temperature) == (0.25, 0.7)
    objective = build_objective(run_of(tmp_path, distill=FullVocab(temperature=2.0), rollout=VllmRollout(top_k=5)))
    assert objective.distill == FullVocabDistill(temperature=2.0)
    assert (objective.beta, objective.sampler_temperature) == (0.5, None)


class Words:
    """A tokenizer that decodes to token numbers."""

    def decode(self, tokens: Any, skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, tokens.tolist()))


def inputs_of(bad_rows: int = 0, held_out: int = 2, steps: int = 2) -> Inputs:
    bad = [BadRow(f"rows.jsonl:{i}", "no prompt") for i in range(1, bad_rows + 1)]
    statistics = {"data/truncated_rows": 0.0, "data/held_out_rows_also_in_train": 0.0, "data/held_out_rows": 2.0}
    dataset = Dataset(table_of(10), table_of(held_out, first=50), bad, statistics)
    architecture = Architecture.from_config(SMOLLM2, "test")
    return Inputs(Path("student"), Path("teacher"), architecture, Words(), (2,), dataset, steps)


def test_bad_rows_are_counted_and_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = dataclasses.replace(inputs_of(bad_rows=2), warnings=("a column may be missing",))
    report_data(inputs, tmp_path, MetricLog([]))
    listing = tmp_path / "bad_rows.txt"
    assert listing.read_text() == "rows.jsonl:1: no prompt\nrows.jsonl:2: no prompt\n"
    assert capsys.readouterr().err == (
        "warning: a column may be missing\n"
        f"warning: 2 rows were left out (data.on_bad_row=skip), listed in {listing}; "
        "the first: rows.jsonl:1: no prompt\n"
    )


# ---- the whole ------------------------------------------------------------------------------------------------------


@dataclass
class Roles:
    """What a placement starts."""

    trainer: DoubleTrainer
    scorer: DoubleScorer
    engine: DoubleEngine
    writer: None = None
    described: tuple[str, ...] = ("trainer: a double",)
    closed: int = 0
    background: Background = field(default_factory=Background)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def roles(monkeypatch: pytest.MonkeyPatch) -> Roles:
    roles = Roles(*doubles())
    for placement in (rlhf.placements.colocate, rlhf.placements.separate):
        monkeypatch.setattr(placement, "start", lambda run, inputs, objective: roles)
    return roles


def train_in(folder: Path, inputs: Inputs | None = None, **sections: Any) -> float | None:
    run = run_of(folder, **sections)
    claimed = RunFolder.claim(run.run, {})
    inputs = inputs or inputs_of()
    log = build(run.logger, claimed.path, run.run.name, {}, inputs.steps)
    try:
        return train(run, inputs, claimed, log, {})
    finally:
        log.close()
        claimed.release()


def test_a_whole_run(tmp_path: Path, roles: Roles) -> None:
    folder = tmp_path / "test"
    settings = RunSection(name="test", dir=str(folder), steps=3, save_every=2)
    assert train_in(folder, inputs_of(bad_rows=1, steps=3), run=settings) == 1 / 4  # the double's KL at version 3
    assert roles.closed == 1
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["bad_rows"], summary["roles"]) == (3, 1, ["trainer: a double"])
    assert summary["eval_before"] == {"eval/forward_kl": 1.0, "eval/reverse_kl": 2.0}
    assert summary["eval_after"] == {"eval/forward_kl": 0.25, "eval/reverse_kl": 0.5}
    assert summary["sample"]["prompt"] == "150 150 150"
    assert summary["sample"]["before"] != summary["sample"]["after"] != ""
    assert summary["checkpoint"] == str(folder / "checkpoints" / "final")
    assert summary["saved"] == [str(folder / "checkpoints" / "step_2")]
    assert {"rollout", "score", "train", "sync", "step"} <= set(summary["phases"])
    assert (folder / "checkpoints" / "final" / "version.txt").read_text() == "3"
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2, 2, 3, 3], "training, saving, evaluation"


@pytest.mark.parametrize("placement", [Colocate(), Separate(max_staleness=1)], ids=["colocate", "ahead"])
def test_a_whole_run_on_rewards(placement: Any, tmp_path: Path, roles: Roles, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best checkpoint, the summary and what a sweep is told go by the held-out reward."""
    roles.trainer.needs_scores = False
    rewarder = DoubleRewarder(roles.trainer.events)
    monkeypatch.setattr(rlhf.rewards.build, "rewarder_of", lambda run, inputs: rewarder)
    folder = tmp_path / "test"
    found = train_in(
        folder,
        inputs_of(steps=3),
        run=RunSection(name="test", dir=str(folder), steps=3, save_every=2),
        eval=Eval(samples=2, every=1),
        logger=Logger(console=False, tensorboard=False, rollouts=True),
        algo=GRPO(num_generations=2, steps_per_generation=2),
        reward=FunctionReward(),
        teacher=NoTeacher(),
        distill=NoDistill(),
        placement=placement,
    )
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rewards = {step["step"]: step["eval/reward"] for step in steps if "eval/reward" in step}
    assert sorted(rewards) == [0, 1, 2, 3] and found == rewards[3]
    best = json.loads((folder / "checkpoints" / "best" / "best.json").read_text())
    assert best == {"step": max((1, 2, 3), key=rewards.__getitem__), "eval/reward": max(rewards[s] for s in (1, 2, 3))}
    assert "eval/forward_kl" not in json.loads((folder / "summary.json").read_text())["eval_after"]
    assert (folder / "checkpoints" / "final" / "version.txt").read_text() == "6", "two optimizer steps a step"
    rows = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    assert len(rows) == 3 * 8 and all(0 <= row["reward"] <= 1 for row in rows)
    trained = [step["reward/mean"] for step in steps if "reward/mean" in step]
    assert trained == pytest.approx([np.mean([row["reward"] for row in rows if row["step"] == s]) for s in (1, 2, 3)])


def test_the_objective_of_grpo(tmp_path: Path) -> None:
    sections = dict(reward=FunctionReward(), teacher=NoTeacher(), distill=NoDistill())
    algo, train = GRPO(num_generations=2, clip_high=0.4, steps_per_generation=3), Train(global_batch_samples=4)
    run = run_of(tmp_path, algo=algo, train=train, rollout=VllmRollout(temperature=0.7), **sections)
    objective = build_objective(run)
    assert objective == GRPOObjective(
        temperature=0.7, recompute_old=False, comparable=True, clip_low=0.2, clip_high=0.4
    )
    assert largest_gap(run) == math.inf, "the trainer takes steps that the sampler hasn't seen"
    cut = build_objective(run_of(tmp_path, algo=algo, train=train, rollout=VllmRollout(top_p=0.9), **sections))
    assert cut == replace(objective, temperature=1.0, recompute_old=True, comparable=False)


def test_rollouts_ahead_reach_the_log(tmp_path: Path, roles: Roles) -> None:
    folder = tmp_path / "test"
    settings = RunSection(name="test", dir=str(folder), steps=3)
    train_in(folder, inputs_of(steps=3), run=settings, placement=Separate(max_staleness=1))
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["rollout/staleness"] for step in logged if "rollout/staleness" in step] == [0, 1, 1]
    assert largest_gap(run_of(tmp_path, placement=Separate(max_staleness=1))) == math.inf


def test_what_a_sweep_compares_runs_by(tmp_path: Path) -> None:
    measured = {"eval/forward_kl": 0.5, "eval/accuracy": 0.25, "reward/mean": 0.75}
    assert objective_of(run_of(tmp_path), measured) == 0.5
    assert objective_of(run_of(tmp_path), {"eval/accuracy": 0.25}) is None
    by_reward: Any = SimpleNamespace(rewarded=True)
    assert objective_of(by_reward, measured | {"eval/reward": 0.125}) == 0.125
    assert objective_of(by_reward, {"reward/mean": 0.75, "reward/std": 1.0}) == 0.75


def test_a_job_of_a_sweep_prints_one_line(tmp_path: Path, roles: Roles, capsys: pytest.CaptureFixture[str]) -> None:
    class Rewarded(DoubleTrainer):
        def train(self, experience: Any) -> Done[dict[str, float]]:
            return Done({**super().train(experience).value, "reward/mean": float(experience.step)})

    roles.trainer = Rewarded(roles.trainer.events, roles.trainer.scored)
    folder = tmp_path / "test"
    run = run_of(folder, run=RunSection(name="test", dir=str(folder), steps=2), logger=Logger(tensorboard=False))
    claimed = RunFolder.claim(run.run, {})
    log = build(run.logger, claimed.path, run.run.name, {}, 2, brief=True)
    assert train(run, inputs_of(), claimed, log, {}, sweep=True) == 1 / 3
    claimed.release()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("  2 steps in ") and "; forward KL 1.0000 -> 0.3333; reward 2.0000; " in line
    assert json.loads((folder / "summary.json").read_text())["rewards"] == {"reward/mean": 2.0}


def test_without_evaluation_there_is_no_objective(tmp_path: Path, roles: Roles) -> None:
    assert train_in(tmp_path / "test", inputs_of(held_out=0), eval=Eval(samples=0)) is None
    summary = json.loads((tmp_path / "test" / "summary.json").read_text())
    assert (summary["sample"], summary["eval_before"], summary["eval_after"]) == (None, {}, {})


def failing_at_step_2(error: BaseException) -> Any:
    class Fails(DoubleTrainer):
        def train(self, experience: Any) -> Done[dict[str, float]]:
            if experience.step == 2:
                raise error
            return super().train(experience)

    return Fails


@pytest.mark.parametrize(
    ("save_every", "said"), [(0, "no checkpoint was saved"), (1, "saved: .*/checkpoints/step_1; ")]
)
def test_a_failure_says_what_was_saved_and_gives_the_devices_back(
    save_every: int, said: str, tmp_path: Path, roles: Roles
) -> None:
    roles.trainer = failing_at_step_2(RoleDied("the trainer ended"))(roles.trainer.events, roles.trainer.scored)
    settings = RunSection(name="test", dir=str(tmp_path), steps=3, save_every=save_every)
    with pytest.raises(RoleDied, match=rf"^the trainer ended; {said}.*traceback in {tmp_path}/traceback\.txt$"):
        train_in(tmp_path, inputs_of(steps=3), run=settings)
    assert roles.closed >= 1
    assert "in train\n" in (tmp_path / "traceback.txt").read_text()
    assert not (tmp_path / "summary.json").exists()


def test_a_bug_gives_the_devices_back(tmp_path: Path, roles: Roles) -> None:
    roles.trainer = failing_at_step_2(ValueError("a bug"))(roles.trainer.events, roles.trainer.scored)
    with pytest.raises(ValueError, match="a bug"):
        train_in(tmp_path)
    assert roles.closed >= 1


def test_interrupted_says_what_is_on_disk(tmp_path: Path, roles: Roles) -> None:
    """Also a checkpoint that was complete before its future said so."""

    class Interrupted(DoubleTrainer):
        def save(self, folder: Path) -> Any:
            super().save(folder)
            raise KeyboardInterrupt

    roles.trainer = Interrupted(roles.trainer.events, roles.trainer.scored)
    with pytest.raises(Stopped, match=r"^interrupted; saved: .*/checkpoints/final$"):
        train_in(tmp_path)
    assert roles.closed >= 1


def test_interrupted_at_the_very_end_says_what_is_on_disk(
    tmp_path: Path, roles: Roles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rlhf.execute.publish", interrupted)
    with pytest.raises(Stopped, match=r"^interrupted when all steps were done; saved: .*/checkpoints/final$"):
        train_in(tmp_path)


def test_the_configuration_reaches_the_source(tmp_path: Path, roles: Roles) -> None:
    train_in(tmp_path, train=Train(global_batch_samples=3), rollout=VllmRollout(dtype=DType.bfloat16))
    asked = [event.what for event in roles.trainer.events if event.call == "generate"]
    assert [len(prompts) for prompts in asked] == [3, 3]
    assert {bucket.dtypes for bucket in roles.trainer.events[0].what} == {("bfloat16",)}


def test_a_stream_lists_its_bad_rows_as_it_meets_them(
    tmp_path: Path, roles: Roles, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f'{{"prompt": "{i}", "response": "{i}"}}' if i % 3 else "{" for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    spec = FileData(path=str(tmp_path / "rows.jsonl"), streaming=True, shuffle=False, on_bad_row=OnBadRow.skip)
    dataset = load(spec, tiny_tokenizer(), seed=0, eval_samples=1, eval_needs_response=True)
    inputs = dataclasses.replace(inputs_of(), dataset=dataset)
    folder = tmp_path / "test"
    settings = RunSection(name="test", dir=str(folder), steps=2)
    run = run_of(folder, run=settings, eval=Eval(samples=1), data=spec, train=Train(global_batch_samples=2))
    claimed = RunFolder.claim(run.run, {})
    log = build(run.logger, folder, "test", {}, 2)
    report_data(inputs, folder, log)
    train(run, inputs, claimed, log, {})
    claimed.release()
    listed = [line.partition(": ")[0].rpartition(":")[2] for line in (folder / "bad_rows.txt").read_text().splitlines()]
    assert listed == ["1", "4", "7"], "line 1 before the held-out row, 4 and 7 in the steps; line 10 wasn't read"
    assert json.loads((folder / "summary.json").read_text())["bad_rows"] == 3
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 2 and f"further ones are listed in {folder}/bad_rows.txt: " in warnings[1]
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["data/bad_rows"] for step in steps if "train/loss" in step] == [1, 2]
    assert steps[0]["data/held_out_rows"] == 1 and "data/train_rows" not in steps[0]


def test_who_tells_right_answers_from_wrong_ones(tmp_path: Path) -> None:
    entry = {"task": "chain_sum", "entry": {"question": "1 + 2 =", "answer": "3", "metadata": {}}}
    inputs = inputs_of()
    inputs = replace(inputs, dataset=replace(inputs.dataset, held_out=replace(table_of(2), columns=(entry, entry))))
    solves = verifier_of(run_of(tmp_path), inputs)
    assert solves is not None
    assert [solves(np.array([number]), 1) for number in (3, 4)] == [True, False]
    assert verifier_of(run_of(tmp_path, eval=Eval(samples=2, accuracy=False)), inputs) is None
    assert verifier_of(run_of(tmp_path), inputs_of()) is None  # rows without a verifier
