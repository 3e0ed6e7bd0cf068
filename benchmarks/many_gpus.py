"""The layouts of several GPUs, timed: the same distillation job on one GPU, on two and on four.

    python -m benchmarks.many_gpus FOLDER                                  # all layouts, 20 steps each
    python -m benchmarks.many_gpus FOLDER --layouts separate ahead         # adds to what the record holds

FOLDER holds `student` and `teacher`, Hugging Face checkpoints with one tokenizer. Those that aren't there are made:
Qwen3-0.6B's and Qwen3-4B's shapes with random weights, and the tokenizer of SmolLM2 (49,152 tokens; as in Qwen's own
checkpoints, the model has rows for more). Random weights are as fast as trained ones. What they learn means nothing,
but the same losses on every layout do. Responses have their full length, since nothing makes a random model stop.

The record is benchmarks/results/many_gpus.json, with the number of `steps` of each layout. Seconds, and tokens a
second, are means over the steps after the warm-up (the first `WARM_UP` steps).
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.models import make_model
from benchmarks.record import RESULTS, device_name, write_record

WARM_UP = 3
LOSSES = 5
BYTES = 2
"""Of a number in bfloat16."""
SHAPES = {"student": "0p6b", "teacher": "4b"}
JOB = [
    *("model=hf", "data=file", "data.max_length=256"),
    *("cluster.device=cuda", "cluster.start_timeout_s=500", "train.dtype=bfloat16", "rollout.dtype=bfloat16"),
    *("train.global_batch_samples=128", "train.micro_batch_tokens=16384", "train.lr=1e-5"),
    *("rollout.max_new_tokens=128", "rollout.max_num_seqs=128", "rollout.kv_cache_gb=16"),
    *("rollout.logprob_gap_warning=1.0", "eval.samples=0", "run.seed=1"),
]
TOP_K = ["distill=topk", "distill.k=64"]
STANDALONE = ["teacher=standalone", "teacher.engine.dtype=bfloat16", "teacher.engine.kv_cache_gb=16"]
TWO = ["train.gpus=2", "rollout.gpus=2"]
FOUR = ["train.gpus=4", "train.tensor_parallel=2", "rollout.gpus=4"]
LAYOUTS = {
    "one": TOP_K,
    "one_fullvocab": ["distill=fullvocab"],
    "tp2": [*TOP_K, *TWO, "train.tensor_parallel=2"],
    "dp2": [*TOP_K, *TWO],
    "separate": [*TOP_K, "placement=separate"],
    "separate_4b": [*TOP_K, "placement=separate", "train.micro_batch_tokens=4096"],
    "ahead": [*TOP_K, "placement=separate", "placement.max_staleness=1"],
    "standalone_topk": [*TOP_K, *STANDALONE],
    "standalone_fullvocab": ["distill=fullvocab", *STANDALONE],
    "tp2_engine_tp2": [*TOP_K, *TWO, "train.tensor_parallel=2", "rollout.tensor_parallel=2"],
    "four": [*TOP_K, *FOUR],
    "four_fullvocab": ["distill=fullvocab", *FOUR],
    "separate_2_2": [*TOP_K, "placement=separate", *TWO, "rollout.tensor_parallel=2"],
    "standalone_2_2": [*TOP_K, *TWO, *STANDALONE, "teacher.gpus=2"],
}
LEARNERS = {"separate_4b": "teacher"}
"""Layout -> the model that learns, if it isn't the student: how fast larger weights are pushed."""


def make_checkpoint(folder: Path, shape: str, seed: int) -> None:
    """A model, and a tokenizer of fewer tokens."""
    from transformers import AutoTokenizer

    from rlhf import assets

    tokenizer = AutoTokenizer.from_pretrained(assets.resolve(assets.BUILT_IN))
    make_model(folder, shape, seed, tokenizer.eos_token_id)
    tokenizer.save_pretrained(folder)


def make_prompts(file: Path) -> None:
    """Sums of a few numbers, about a hundred tokens each."""
    numbers = random.Random(0)
    rows = []
    for _ in range(512):
        terms = [numbers.randint(100, 999) for _ in range(20)]
        rows.append({"prompt": "Add these numbers, one after another: " + " + ".join(map(str, terms))})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def measure(run_dir: Path, student_bytes: int) -> dict[str, float]:
    """The numbers of a finished run."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = sorted((row for row in rows if "train/loss" in row), key=lambda row: row["step"])
    measured = {f"loss_{row['step']}": row["train/loss"] for row in steps[:LOSSES]}
    timed = steps[min(WARM_UP, len(steps) - 1) :]
    names = sorted({name for row in timed for name in row if name.startswith(("time/", "ahead/", "perf/"))})
    for name in names:
        values = [row[name] for row in timed if name in row]
        measured[name.replace("time/", "seconds/")] = round(sum(values) / len(values), 4)
    if seconds := measured.get("seconds/sync"):
        measured["weight_push_gb_per_second"] = round(student_bytes / 1e9 / seconds, 3)
    gaps = [row["rollout/logprob_gap_mean"] for row in steps if "rollout/logprob_gap_mean" in row]
    return measured | ({"largest_logprob_gap_mean": max(gaps)} if gaps else {})


def run_layout(name: str, models: list[str], steps: int, student_bytes: int) -> dict[str, float]:
    """One run of the command, in a folder that is deleted afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        of_layout = [key.partition("=")[0] for key in LAYOUTS[name]]
        job = [given for given in JOB if given.partition("=")[0] not in of_layout]
        command = [sys.executable, "-m", "rlhf.launch", *job, *models, *LAYOUTS[name], f"run.steps={steps}"]
        done = subprocess.run([*command, f"run.name={name}"], cwd=folder, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(f"layout {name}: {done.stderr[-3000:]}")
        return measure(Path(folder) / "outputs" / name, student_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for many_gpus.json")
    arguments = parser.parse_args()
    for seed, (role, shape) in enumerate(SHAPES.items()):
        folder = arguments.folder / role
        if not folder.exists():
            print(f"making {folder}", flush=True)
            unfinished = folder.with_name(f".{role}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            make_checkpoint(unfinished, shape, seed)
            unfinished.rename(folder)
    folders = {role: (arguments.folder / role).resolve() for role in SHAPES}
    prompts = (arguments.folder / "prompts.jsonl").resolve()
    make_prompts(prompts)
    record = arguments.out / "many_gpus.json"
    metrics = json.loads(record.read_text())["metrics"] if record.exists() else {}
    for name in arguments.layouts:
        learner = folders[LEARNERS.get(name, "student")]
        models = [f"model.path={learner}", f"teacher.model={folders['teacher']}", f"data.path={prompts}"]
        student_bytes = sum(file.stat().st_size for file in learner.glob("*.safetensors"))
        numbers = run_layout(name, models, arguments.steps, student_bytes)
        metrics = {key: value for key, value in metrics.items() if not key.startswith(f"{name}/")}
        metrics |= {f"{name}/{key}": value for key, value in (numbers | {"steps": arguments.steps}).items()}
        command = "python -m benchmarks.many_gpus FOLDER --layouts LAYOUT --steps STEPS"
        packages = ("torch", "vllm", "ray", "megatron-core", "transformers")
        write_record("many_gpus", command, metrics, packages, arguments.out, device_name(count=True))
        print(f"{name}: {json.dumps(numbers)}", flush=True)


if __name__ == "__main__":
    main()
