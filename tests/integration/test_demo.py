"""The demo, as `make demo` runs it: a real pretrained model, distilled by the real stack."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf.report.summary import read
from tests.integration.runs import launch, metrics_of


def test_demo_heals_the_student(tmp_path: Path) -> None:
    done = launch(["+recipes=demo"], tmp_path, timeout=800)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    run_dir = tmp_path / "outputs" / "demo"
    summary = read(run_dir)
    ratio = summary.eval_after["eval/forward_kl"] / summary.eval_before["eval/forward_kl"]
    assert ratio <= 0.6
    steps = metrics_of(run_dir)
    assert sorted(steps) == list(range(summary.steps + 1))
    assert all(steps[step]["rollout/logprob_gap_mean"] < 1e-3 for step in steps if step > 0)
    assert summary.sample is not None and summary.sample["before"] != summary.sample["after"]

    # The saved student is the one that was evaluated: transformers continues as the engine did.
    final = run_dir / "checkpoints" / "final"
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(final, dtype=torch.float32),
        AutoTokenizer.from_pretrained(final),
    )
    assert model.config.num_hidden_layers == 24
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    assert len(answer[0]) > prompt["input_ids"].shape[1]
