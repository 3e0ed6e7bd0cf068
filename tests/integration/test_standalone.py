"""A standalone teacher in vLLM says what the same teacher says in the trainer and in transformers."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from rlhf.backends.actors import ENGINE_ENVIRONMENT
from rlhf.backends.cluster import RayCluster
from rlhf.backends.megatron.trainer import MegatronTrainer
from rlhf.backends.scorer_actors import RayScorer
from rlhf.backends.scores import PackedScores
from rlhf.backends.vllm.setup import ScorerSetup
from rlhf.batching import plan_batch
from rlhf.config.distill import Tail
from rlhf.config.registry import PROJECT_ROOT
from rlhf.config.teacher import TeacherEngine
from rlhf.distill.topk import TopKDistill
from rlhf.errors import MisalignedScores
from rlhf.losses.rows import TopKScores
from rlhf.types import Rollouts, Sequences, offsets_of
from tests.integration.megatron import end_groups, experience_of, random_sequences, trainer_setup
from tests.integration.runs import launch, metrics_of, tiny_world
from tests.unit.tiny import save_tiny_llama, tiny_tokenizer

DISTILL = TopKDistill(k=8, tail=Tail.bucket, temperature=0.7)
LENGTHS = [(4, 12), (7, 5), (3, 21), (1, 1), (5, 9)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tied student and another teacher of the same vocabulary."""
    folder = tmp_path_factory.mktemp("pair")
    student = save_tiny_llama(folder / "student", tied=True, layers=2, heads=2, seed=1)
    return student, save_tiny_llama(folder / "teacher", layers=3, heads=2, seed=2)


@pytest.fixture(scope="module")
def sequences(pair: tuple[Path, Path]) -> Sequences:
    return random_sequences(500, LENGTHS)


@pytest.fixture(scope="module")
def scorer(cluster: RayCluster, pair: tuple[Path, Path]) -> RayScorer:
    """One engine for the module: starting vLLM takes longer than all of these tests."""
    setup = ScorerSetup(
        model=pair[1],
        engine=TeacherEngine(kv_cache_gb=0.1, max_num_seqs=4, max_num_batched_tokens=16),  # prompts in several steps
        max_model_len=24,
        distill=DISTILL,
        head="lm_head.weight",
        vocab=AutoModelForCausalLM.from_pretrained(pair[1]).config.vocab_size,
        seed=0,
    )
    scorer = RayScorer(cluster, setup, bundles=[[0]])
    scorer.ready(timeout_s=240)
    return scorer


def scored(scorer: RayScorer, sequences: Sequences, ranks: int = 1) -> list[list[PackedScores]]:
    """By data-parallel rank: what its process fetches."""
    references = scorer.score(sequences, experience_of(sequences, data_parallel=ranks).minibatches).result()
    return [ray.get(rank) for rank in references]


def by_sample(parts: list[PackedScores], sequences: Sequences) -> dict[int, Any]:
    return dict(pair for part in parts for pair in part.by_sample(sequences, "cpu"))


def test_top_k_of_transformers(scorer: RayScorer, sequences: Sequences, pair: tuple[Path, Path]) -> None:
    """Row by row: the first response token is predicted by the prompt's last, the last token predicts nothing."""
    (parts,) = scored(scorer, sequences)
    found = by_sample(parts, sequences)
    teacher = AutoModelForCausalLM.from_pretrained(pair[1], dtype=torch.float32).eval()
    assert sorted(found) == sequences.sample_ids.tolist()
    for sample_id, tokens, prompt_length in zip(
        sequences.sample_ids, sequences.rows(), sequences.prompt_lengths, strict=True
    ):
        with torch.no_grad():
            every = teacher(torch.from_numpy(tokens).long()[None]).logits[0].log_softmax(-1)
        expected = every[int(prompt_length) - 1 : len(tokens) - 1]
        scores: TopKScores = found[int(sample_id)]
        assert len(scores) == len(tokens) - prompt_length
        torch.testing.assert_close(scores.logprobs, expected.topk(8).values, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(scores.logprobs, expected.gather(1, scores.ids.long()), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(scores.log_normaliser, (expected / 0.7).logsumexp(-1), rtol=1e-4, atol=1e-4)


def test_sampled_log_probabilities_of_transformers(
    scorer: RayScorer, sequences: Sequences, pair: tuple[Path, Path], megatron_groups: None
) -> None:
    """At the sampler's temperature, in the order of the batch, in any plan, of both kinds of teacher."""
    teacher = AutoModelForCausalLM.from_pretrained(pair[1], dtype=torch.float32).eval()
    expected = []
    for tokens, prompt_length in zip(sequences.rows(), sequences.prompt_lengths, strict=True):
        ids = torch.from_numpy(tokens).long()
        with torch.no_grad():
            every = (teacher(ids[None]).logits[0] / 0.7).log_softmax(-1)
        expected += every[prompt_length - 1 : -1].gather(1, ids[prompt_length:, None])[:, 0].tolist()
    for ranks in (1, 2):
        minibatches = experience_of(sequences, data_parallel=ranks, micro_batch_tokens=40).minibatches
        found = scorer.logprobs(sequences, minibatches, 0.7).result()
        assert found.dtype == np.float32 and found.tolist() == pytest.approx(expected, abs=1e-4)
    conversations = replace(sequences, written=np.arange(len(expected)) % 5 < 2)  # observations in every sample
    minibatches = experience_of(conversations, micro_batch_tokens=40).minibatches
    found = scorer.logprobs(conversations, minibatches, 0.7).result()
    own = [value for index, value in enumerate(expected) if index % 5 < 2]
    assert found.tolist() == pytest.approx(own, abs=1e-4)
    minibatches = experience_of(sequences, micro_batch_tokens=40).minibatches
    colocated = trainer_of(pair, standalone=False, full=False).logprobs(sequences, minibatches, 0.7)
    assert colocated.dtype == np.float32 and colocated.tolist() == pytest.approx(expected, abs=1e-4)


FALLBACK = """
import json, sys
import numpy as np
from rlhf.backends.vllm import capture, scorer
from rlhf.backends.vllm.setup import ScorerSetup
from rlhf.config.distill import Tail
from rlhf.config.teacher import TeacherEngine
from rlhf.distill.topk import TopKDistill
from tests.integration.megatron import random_sequences
from dataclasses import replace

capture.ScoreCapture.rlhf_capture = lambda worker, setup: None
setup = ScorerSetup(
    model=sys.argv[1], engine=TeacherEngine(kv_cache_gb=0.1), max_model_len=24,
    distill=TopKDistill(8, Tail.bucket, 1.0), head="lm_head.weight", vocab=int(sys.argv[2]), seed=0,
)
sequences = random_sequences(500, json.loads(sys.argv[3]))
order = [3, 0, 4, 2, 1]
made = scorer.VllmScorer(setup)
for part in made.score(sequences, order):
    for sample_id, scores in part.by_sample(sequences, "cpu"):
        print("SCORES", json.dumps([sample_id, scores.ids.tolist(), scores.logprobs.tolist()]))
for needs in ({"distill": TopKDistill(8, Tail.bucket, 0.7)}, {"evaluates": True}):
    made.setup = replace(setup, **needs)
    try:
        made._require_flat()
    except Exception as error:
        print("REFUSED", error)
"""


@pytest.mark.slow
def test_without_a_known_model_runner_scores_come_as_flat_log_probabilities(
    sequences: Sequences, pair: tuple[Path, Path]
) -> None:
    teacher = AutoModelForCausalLM.from_pretrained(pair[1], dtype=torch.float32).eval()
    done = subprocess.run(
        [sys.executable, "-c", FALLBACK, str(pair[1]), str(teacher.config.vocab_size), json.dumps(LENGTHS)],
        capture_output=True,
        text=True,
        env={**os.environ, **ENGINE_ENVIRONMENT},
        cwd=PROJECT_ROOT,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("come as Python objects, which is slower") == 1
    lines = [line.partition(" ") for line in done.stdout.splitlines()]
    refusals = [text for word, _, text in lines if word == "REFUSED"]
    assert len(refusals) == 2
    assert all("distill.temperature=1 with eval.samples=0" in text and "teacher=colocated" in text for text in refusals)
    found = [json.loads(text) for word, _, text in lines if word == "SCORES"]
    assert [sample_id for sample_id, _, _ in found] == sequences.sample_ids[[3, 0, 4, 2, 1]].tolist()
    of_sample = zip(sequences.rows(), sequences.prompt_lengths.tolist(), strict=True)
    rows = dict(zip(sequences.sample_ids.tolist(), of_sample, strict=True))
    for sample_id, ids, logprobs in found:
        tokens, prompt_length = rows[sample_id]
        with torch.no_grad():
            every = teacher(torch.from_numpy(tokens).long()[None]).logits[0].log_softmax(-1)
        expected = every[int(prompt_length) - 1 : len(tokens) - 1]
        torch.testing.assert_close(torch.tensor(logprobs), expected.topk(8).values, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(torch.tensor(logprobs), expected.gather(1, torch.tensor(ids)), rtol=1e-4, atol=1e-4)


def changed(sequences: Sequences, at: int) -> Sequences:
    tokens = sequences.tokens.copy()
    tokens[at] = (tokens[at] + 1) % 500
    return replace(sequences, tokens=tokens)


def test_a_row_sees_the_tokens_before_its_own_and_no_others(scorer: RayScorer, sequences: Sequences) -> None:
    """Response token 3 of the first sample changes: rows 0 to 3 say what they said, from row 4 on all differ."""
    other = changed(sequences, 4 + 3)
    before, after = (by_sample(scored(scorer, one)[0], one)[100].logprobs for one in (sequences, other))
    torch.testing.assert_close(before[:4], after[:4], rtol=1e-5, atol=1e-5)
    assert all((one - two).abs().max() > 1e-3 for one, two in zip(before[4:], after[4:], strict=True))


def test_the_order_of_samples_and_ranks_is_irrelevant(scorer: RayScorer, sequences: Sequences) -> None:
    order = [3, 1, 4, 0, 2]
    rows = list(sequences.rows())
    turned = Sequences(
        sample_ids=sequences.sample_ids[order],
        tokens=np.concatenate([rows[i] for i in order]),
        offsets=offsets_of([len(rows[i]) for i in order]),
        prompt_lengths=sequences.prompt_lengths[order],
    )
    first = by_sample(scored(scorer, sequences)[0], sequences)
    ranks = scored(scorer, turned, ranks=2)
    plan = experience_of(turned, data_parallel=2).minibatches[0].plan
    for parts, rank in zip(ranks, plan.ranks, strict=True):  # each rank gets its own samples, and only those
        mine = by_sample(parts, turned)
        assert sorted(mine) == sorted(int(turned.sample_ids[row]) for micro in rank for row in micro.rows)
        for sample_id, scores in mine.items():
            assert torch.equal(scores.ids, first[sample_id].ids)
            torch.testing.assert_close(scores.logprobs, first[sample_id].logprobs, rtol=1e-5, atol=1e-5)


def test_what_was_begun_before_the_plan_is_part_of_the_answer(scorer: RayScorer, sequences: Sequences) -> None:
    """Two parts of the batch, in another order; each rank finds its own samples among them."""
    whole = by_sample(scored(scorer, sequences)[0], sequences)
    made = Rollouts(0, sequences, np.ones(len(sequences), dtype=bool))
    for rows in ([3, 1], [4]):
        scorer.begin(made.select(rows).sequences)
    ranks = scored(scorer, sequences, ranks=2)
    assert scorer.begun == []
    plan = experience_of(sequences, data_parallel=2).minibatches[0].plan
    for parts, rank in zip(ranks, plan.ranks, strict=True):
        own = {int(sequences.sample_ids[row]) for micro in rank for row in micro.rows}
        mine = by_sample([part.only(own) for part in parts], sequences)
        assert set(mine) == own
        for sample_id, scores in mine.items():
            assert torch.equal(scores.ids, whole[sample_id].ids)
            torch.testing.assert_close(scores.logprobs, whole[sample_id].logprobs, rtol=1e-5, atol=1e-5)


def trainer_of(pair: tuple[Path, Path], standalone: bool, full: bool) -> MegatronTrainer:
    end_groups()
    setup = trainer_setup(*pair, k=None if full else 8)
    if not full:
        setup = replace(setup, objective=replace(setup.objective, distill=DISTILL))
    return MegatronTrainer(replace(setup, teacher=None, teacher_head=pair[1]) if standalone else setup)


@pytest.mark.parametrize("full", [False, True])
def test_a_step_and_an_evaluation_equal_those_of_a_colocated_teacher(
    scorer: RayScorer, sequences: Sequences, pair: tuple[Path, Path], full: bool, megatron_groups: None
) -> None:
    experience = experience_of(sequences, micro_batch_tokens=40)
    plan = experience.minibatches[0].plan
    hidden = ray.get(scorer.hidden_rows(sequences, plan).result()[0])

    colocated = trainer_of(pair, standalone=False, full=full)
    expected = colocated.evaluate(sequences, plan)
    colocated.score(sequences, experience.minibatches)
    expected |= colocated.train(experience)

    alone = trainer_of(pair, standalone=True, full=full)
    found = alone.evaluate(sequences, plan, hidden=hidden)
    found |= alone.train(experience, hidden if full else scored(scorer, sequences)[0])
    for name in ("train/loss", "train/grad_norm", "distill/teacher_mass", "eval/forward_kl", "eval/reverse_kl"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4), name


def test_missing_and_shifted_scores_are_refused(
    scorer: RayScorer, sequences: Sequences, pair: tuple[Path, Path], megatron_groups: None
) -> None:
    alone = trainer_of(pair, standalone=True, full=False)
    experience = experience_of(sequences)
    part = next(one for one in scored(scorer, sequences)[0] if 100 in one.sample_ids)
    with pytest.raises(MisalignedScores, match="needs 12 rows of teacher scores, there are none"):
        alone.train(experience)
    with pytest.raises(MisalignedScores, match="are about other tokens than"):
        alone.train(experience, [replace(part, targets=np.roll(part.targets, -1))])
    other = changed(sequences, int(sequences.offsets[1]) - 1)  # the last token, which no row sees
    with pytest.raises(MisalignedScores, match="12 rows of sample 100 are about other tokens than the 12"):
        alone.train(replace(experience, sequences=other), [part])
    with pytest.raises(MisalignedScores, match="needs 12 rows of teacher scores, there are none"):
        alone.evaluate(sequences, plan_batch(sequences.lengths, data_parallel=1, micro_batch_tokens=4096))


@pytest.mark.slow
def test_runs_of_the_command(tmp_path: Path) -> None:
    """The whole vocabulary over two ranks and two replicas; and everything on devices of its own."""
    world = tiny_world(tmp_path, kv_heads=2)
    full = [*(one for one in world if not one.startswith("distill.k")), "distill=fullvocab", "run.steps=2"]
    two = ["train.gpus=2", "train.tensor_parallel=2", "rollout.gpus=2", "teacher.gpus=2"]
    runs = {
        "colocated": full,
        "standalone": [*full, *two, "teacher=standalone", "teacher.engine.kv_cache_gb=0.1"],
        "separate": [*world, "run.steps=2", "placement=separate", "teacher=standalone"],
    }
    metrics = {}
    for name, arguments in runs.items():
        done = launch([*arguments, f"run.name={name}"], tmp_path)
        assert done.returncode == 0, done.stderr
        metrics[name] = metrics_of(tmp_path / "outputs" / name)
    for step in (0, 2):
        for name in ("eval/forward_kl", "eval/reverse_kl"):
            assert metrics["standalone"][step][name] == pytest.approx(metrics["colocated"][step][name], abs=1e-5)
    for step in (1, 2):
        for name in ("train/loss", "train/grad_norm", "rollout/response_tokens_mean"):
            assert metrics["standalone"][step][name] == pytest.approx(metrics["colocated"][step][name], rel=1e-4)
        assert math.isfinite(metrics["separate"][step]["train/loss"])
    assert metrics["separate"][0]["eval/forward_kl"] == pytest.approx(
        metrics["colocated"][0]["eval/forward_kl"], abs=1e-5
    )
    summary = (tmp_path / "outputs" / "separate" / "summary.json").read_text()
    assert "1 x cpu of its own, vLLM" in summary

    other = save_tiny_llama(tmp_path / "other", layers=2, heads=2, tokenizer=tiny_tokenizer(seed=1))
    done = launch([*world, "teacher=standalone", f"teacher.model={other}", "run.name=mistake"], tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and "the tokenizers of student and teacher differ" in done.stderr
