"""The demo, as `make demo` runs it but shorter: a real pretrained model, distilled by the real stack."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf import assets
from rlhf.config.data import ReasoningGymData
from rlhf.config.model import SmolLM2With24Layers
from rlhf.config.registry import PROJECT_ROOT
from rlhf.data.dataset import load
from rlhf.report.summary import read
from rlhf.tokenizers import load_tokenizer
from tests.integration.runs import launch, metrics_of


def test_demo_heals_the_student(tmp_path: Path) -> None:
    teacher = assets.resolve(assets.BUILT_IN)  # the second run on a machine: models are converted already
    assets.resolve(assets.BUILT_IN, drop_layers=SmolLM2With24Layers().drop_layers)
    started = time.time()
    done = launch(["+recipes=demo", "run.steps=3", "eval.samples=8"], tmp_path, timeout=800)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    run_dir = tmp_path / "outputs" / "demo"
    summary = read(run_dir)
    ratio = summary.eval_after["eval/forward_kl"] / summary.eval_before["eval/forward_kl"]
    assert ratio <= 0.8
    steps = metrics_of(run_dir)
    began = steps[0]["time"] - steps[0]["time/eval"]  # every role is ready and has its weights
    assert began - started < 60
    assert sorted(steps) == list(range(summary.steps + 1))
    assert 0 <= steps[3]["eval/accuracy"] <= 1
    assert all(steps[step]["rollout/logprob_gap_mean"] < 1e-3 for step in steps if step > 0)

    # The saved student is the one that was evaluated: transformers continues the held-out prompt as the engine did.
    assert summary.sample is not None and summary.sample["before"] != summary.sample["after"]
    final = run_dir / "checkpoints" / "final"
    model = AutoModelForCausalLM.from_pretrained(final, dtype=torch.float32)
    assert model.config.num_hidden_layers == 24
    tokenizer = load_tokenizer(final)
    held_out = load(
        ReasoningGymData(max_length=256), tokenizer, seed=0, eval_samples=8, eval_needs_response=True
    ).held_out
    prompt = torch.from_numpy(held_out.prompt(0)).long()[None]
    answer = model.generate(prompt, max_new_tokens=32, do_sample=False)[0, prompt.shape[1] :]
    text = tokenizer.decode(answer, skip_special_tokens=True)
    assert summary.sample["after"].startswith(text[: len(text) // 2])
    assert load_tokenizer(teacher).get_vocab() == tokenizer.get_vocab()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_first_commands_of_the_readme(tmp_path: Path) -> None:
    """As they are written there, for two steps."""
    lines = (PROJECT_ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    commands = [line.partition("#")[0].split() for line in lines if line.startswith("    python -m rlhf.launch ")]
    assert commands[1][3:] == ["placement=separate", "teacher=standalone", "run.steps=2"]
    for command in commands[:2]:
        done = launch([*command[3:], "run.steps=2"], tmp_path, timeout=900)
        assert done.returncode == 0, done.stderr
        time.sleep(1)  # their folders are named by the second


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_another_divergence_heals_the_student_too(tmp_path: Path) -> None:
    """The whole vocabulary and a Jensen-Shannon divergence, for as many steps."""
    done = launch(["+recipes=demo", "distill=fullvocab", "algo.beta=0.5", "run.name=jsd"], tmp_path, timeout=1200)
    assert done.returncode == 0, done.stderr
    summary = read(tmp_path / "outputs" / "jsd")
    assert summary.eval_after["eval/forward_kl"] <= 0.8 * summary.eval_before["eval/forward_kl"]
