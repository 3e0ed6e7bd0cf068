"""vLLM over two tensor-parallel processes: student's engine and teacher, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from rlhf.backends.actors import RayEngine
from rlhf.backends.cluster import RayCluster
from rlhf.backends.megatron.weights import Checkpoint
from rlhf.backends.scorer_actors import RayScorer
from rlhf.backends.vllm.setup import EngineSetup, ScorerSetup
from rlhf.config.cluster import Cluster
from rlhf.config.distill import Tail
from rlhf.config.rollout import VllmRollout
from rlhf.config.teacher import TeacherEngine
from rlhf.distill.topk import TopKDistill
from rlhf.report.summary import read as read_summary
from rlhf.types import Bucket, Prompts, offsets_of
from tests.integration.megatron import experience_of, random_sequences
from tests.integration.runs import launch, metrics_of, tiny_world
from tests.unit.tiny import save_tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Two devices, which a replica shares."""
    cluster = RayCluster(Cluster(object_store_gb=1.0), bundles=2)
    yield cluster
    cluster.close()


def test_an_engine_of_two_processes_takes_weights_and_generates(cluster: RayCluster, tmp_path: Path) -> None:
    """A tied head, whose copy on CPU is made again after each update, in each process."""
    first, second = (save_tiny_llama(tmp_path / str(s), tied=True, layers=2, heads=2, seed=s) for s in (1, 2))
    setup = EngineSetup(
        model=first,
        rollout=VllmRollout(gpus=2, tensor_parallel=2, max_new_tokens=12, kv_cache_gb=0.1),
        max_model_len=64,
        stop_token_ids=(2,),
        seed=0,
        shares_device=True,
    )
    engine = RayEngine(cluster, setup, bundles=[[0, 1]], share=0.5)
    engine.ready(timeout_s=400)
    tokens = np.arange(10, 22, dtype=np.int32)
    asked = Prompts(np.arange(2), tokens, offsets_of([7, 5]), np.arange(2))
    generated = []
    for version, folder in enumerate((first, second)):
        checkpoint = Checkpoint(folder)
        names = tuple(sorted(checkpoint.names))
        arrays = tuple(checkpoint[name].numpy() for name in names)
        engine.update_weights([ray.put(Bucket(version, names, arrays, ("float32",) * len(names)))]).result()
        rollouts = engine.generate(asked, version, greedy=True).result()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for prompt, row in zip(asked.rows(), rollouts.sequences.rows(), strict=True):
            ids = torch.from_numpy(prompt).long()[None]
            out = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=2, pad_token_id=2)
            assert row.tolist() == out[0].tolist(), version
        generated.append(rollouts.sequences.tokens.tolist())
    assert generated[0] != generated[1]
    ray.kill(engine.replicas[0].actor)


def test_a_teacher_of_two_processes_scores(cluster: RayCluster, tmp_path: Path) -> None:
    teacher = save_tiny_llama(tmp_path / "teacher", layers=2, heads=2, seed=2)
    setup = ScorerSetup(
        model=teacher,
        engine=TeacherEngine(kv_cache_gb=0.1),
        max_model_len=64,
        distill=TopKDistill(k=8, tail=Tail.bucket, temperature=1.0),
        head="lm_head.weight",
        vocab=512,
        seed=0,
        tensor_parallel=2,
    )
    scorer = RayScorer(cluster, setup, bundles=[[0, 1]], share=0.5)
    scorer.ready(timeout_s=400)
    sequences = random_sequences(500, [(4, 12), (7, 5)])
    (references,) = scorer.score(sequences, experience_of(sequences).minibatches).result()
    found = dict(pair for part in ray.get(references) for pair in part.by_sample(sequences, "cpu"))
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval()
    for sample_id, tokens, length in zip(sequences.sample_ids, sequences.rows(), sequences.prompt_lengths, strict=True):
        with torch.no_grad():
            every = model(torch.from_numpy(tokens).long()[None]).logits[0].log_softmax(-1)
        expected = every[int(length) - 1 : len(tokens) - 1].topk(8).values
        torch.testing.assert_close(found[int(sample_id)].logprobs, expected, rtol=1e-4, atol=1e-4)
    ray.kill(scorer.replicas[0].actor)


def test_weights_are_pushed_to_both_processes_of_an_engine(tmp_path: Path) -> None:
    """A high learning rate: sampler and trainer wouldn't agree about a token if a part of the weights were old."""
    layout = ["placement=separate", "rollout.gpus=2", "rollout.tensor_parallel=2", "train.lr=1e-2", "run.steps=3"]
    done = launch([*tiny_world(tmp_path, kv_heads=2), *layout, "run.name=pushed"], tmp_path, timeout=500)
    assert done.returncode == 0, done.stderr
    metrics = metrics_of(tmp_path / "outputs" / "pushed")
    assert max(metrics[step]["rollout/logprob_gap_max"] for step in (1, 2, 3)) < 1e-4
    assert metrics[3]["eval/forward_kl"] != pytest.approx(metrics[0]["eval/forward_kl"], rel=0.01)
    roles = read_summary(tmp_path / "outputs" / "pushed").roles
    assert roles[-1] == "engine: 2 x cpu of its own (tensor parallel 2), vLLM, float32"
