"""The vLLM engine: after an update it generates what transformers does with the same weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from rlhf import assets
from rlhf.backends.actors import RayEngine
from rlhf.backends.cluster import RayCluster
from rlhf.backends.megatron.weights import Checkpoint
from rlhf.backends.vllm.setup import EngineSetup
from rlhf.config.rollout import VllmRollout
from rlhf.errors import StaleWeights
from rlhf.roles.replicas import in_order_of
from rlhf.types import Bucket, Prompts, Rollouts, offsets_of
from tests.unit.tiny import save_tiny_llama


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Seven layers of SmolLM2 (tied head), and the same with every tensor changed."""
    folder = assets.resolve(assets.BUILT_IN, drop_layers=[i for i in range(30) if i not in (0, 1, 2, 3, 4, 28, 29)])
    changed = tmp_path_factory.mktemp("engine") / "changed"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.05 * torch.randn_like(parameter))
    model.save_pretrained(changed)
    return folder, changed


@pytest.fixture(scope="module")
def engine(cluster: RayCluster, folders: tuple[Path, Path]) -> RayEngine:
    """One engine for the module: starting vLLM takes longer than all of these tests."""
    setup = EngineSetup(
        model=folders[0],
        rollout=VllmRollout(max_new_tokens=16, kv_cache_gb=0.25, max_num_seqs=2),
        max_model_len=256,
        stop_token_ids=(2,),
        seed=0,
        shares_device=True,
    )
    engine = RayEngine(cluster, setup, bundles=[[0]], share=0.5)
    engine.ready(timeout_s=240)
    return engine


def prompts() -> Prompts:
    rng = np.random.default_rng(0)
    lengths = [5, 40, 170]  # the last spans several cache blocks
    tokens = rng.integers(100, 40000, sum(lengths)).astype(np.int32)
    return Prompts(
        sample_ids=np.arange(3, dtype=np.int64),
        tokens=tokens,
        offsets=offsets_of(lengths),
        seeds=np.arange(3, dtype=np.int64),
    )


def update(engine: RayEngine, folder: Path, version: int) -> None:
    checkpoint = Checkpoint(folder)
    names = sorted(checkpoint.names)
    buckets = []
    for start in range(0, len(names), 7):
        part = names[start : start + 7]
        arrays = tuple(checkpoint[name].float().numpy() for name in part)
        buckets.append(ray.put(Bucket(version, tuple(part), arrays, ("float32",) * len(part))))
    assert engine.update_weights(buckets).result() == version


def greedy_reference(folder: Path) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    responses = []
    for prompt in prompts().rows():
        ids = torch.from_numpy(prompt).long()[None]
        out = model.generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=2, pad_token_id=2)
        responses.append(out[0, len(prompt) :].tolist())
    return responses


def responses_of(rollouts: Rollouts) -> list[list[int]]:
    rows = zip(rollouts.sequences.rows(), rollouts.sequences.prompt_lengths, strict=True)
    return [row[prompt_length:].tolist() for row, prompt_length in rows]


def test_greedy_output_after_each_update_equals_transformers(engine: RayEngine, folders: tuple[Path, Path]) -> None:
    with pytest.raises(StaleWeights, match="holds None"):
        engine.generate(prompts(), version=0).result()
    references = [greedy_reference(folder) for folder in folders]
    assert references[0] != references[1]
    for version, which in enumerate([0, 1, 0]):  # back again: nothing of the one before may be left, the cache included
        update(engine, folders[which], version)
        assert responses_of(engine.generate(prompts(), version, greedy=True).result()) == references[which]
    with pytest.raises(StaleWeights, match="asked to generate with weights of version 1, the engine holds 2"):
        engine.generate(prompts(), version=1).result()


def test_log_probabilities_are_those_of_transformers(engine: RayEngine, folders: tuple[Path, Path]) -> None:
    update(engine, folders[0], 10)
    sequences = engine.generate(prompts(), 10).result().sequences
    model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32).eval()
    expected = []
    with torch.no_grad():
        for tokens, prompt_length in zip(sequences.rows(), sequences.prompt_lengths, strict=True):
            ids = torch.from_numpy(tokens.copy()).long()
            logprobs = model(ids[None]).logits[0].log_softmax(-1)
            expected.append(logprobs[int(prompt_length) - 1 : -1].gather(1, ids[int(prompt_length) :, None])[:, 0])
    gap = np.abs(sequences.logprobs - torch.cat(expected).numpy())
    assert gap.max() < 1e-3


def test_samples_do_not_depend_on_the_order_of_requests(engine: RayEngine, folders: tuple[Path, Path]) -> None:
    update(engine, folders[0], 20)
    whole = prompts()
    rows, order = list(whole.rows()), [2, 0, 1]
    turned = Prompts(
        sample_ids=whole.sample_ids[order],
        tokens=np.concatenate([rows[i] for i in order]),
        offsets=offsets_of([len(rows[i]) for i in order]),
        seeds=whole.seeds[order],
    )
    first, second = (
        responses_of(engine.generate(whole, 20).result()),
        responses_of(engine.generate(turned, 20).result()),
    )
    assert [first[i] for i in order] == second
    assert len({tuple(response) for response in first}) == 3


def test_a_stream_is_the_same_batch_in_parts(engine: RayEngine, folders: tuple[Path, Path]) -> None:
    update(engine, folders[0], 25)
    whole = engine.generate(prompts(), 25).result()
    parts = list(engine.stream(prompts(), 25))
    assert [len(part.sequences) for part in parts] == [2, 1], "the engine works on two at a time"
    together = in_order_of(prompts(), parts)
    assert responses_of(together) == responses_of(whole)
    assert together.finished.tolist() == whole.finished.tolist() and together.version == 25
    np.testing.assert_allclose(together.sequences.logprobs, whole.sequences.logprobs, atol=1e-5)
    with pytest.raises(StaleWeights, match="asked to generate with weights of version 24, the engine holds 25"):
        list(engine.stream(prompts(), 24))


@pytest.mark.slow
def test_a_teacher_writes_with_its_own_weights_and_in_the_students_vocabulary(
    cluster: RayCluster, tmp_path: Path
) -> None:
    """No update; its head has rows beyond the student's tokens, which transformers suppresses."""
    teacher = save_tiny_llama(tmp_path / "teacher", layers=2, heads=2, seed=2)
    setup = EngineSetup(
        model=teacher,
        rollout=VllmRollout(max_new_tokens=16, temperature=0.0, kv_cache_gb=0.1),
        max_model_len=256,
        stop_token_ids=(2,),
        seed=0,
        shares_device=False,
        fixed=True,
        vocab=200,
    )
    writer = RayEngine(cluster, setup, bundles=[[0]], share=0.5, role="writing teacher")
    writer.ready(timeout_s=240)
    asked = replace(prompts(), tokens=prompts().tokens % 500)
    written = writer.generate(asked, version=0).result()
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval()
    beyond = range(200, model.config.vocab_size)
    expected = []
    for prompt in asked.rows():
        ids = torch.from_numpy(prompt).long()[None]
        out = model.generate(
            ids, max_new_tokens=16, do_sample=False, eos_token_id=2, pad_token_id=2, suppress_tokens=list(beyond)
        )
        expected.append(out[0, len(prompt) :].tolist())
        free = model.generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=2, pad_token_id=2)
        assert free[0, len(prompt) :].tolist() != expected[-1], "the limit shows"
    assert responses_of(written) == expected
    ray.kill(writer.replicas[0].actor)


def test_mixed_and_incomplete_updates_are_refused(engine: RayEngine, folders: tuple[Path, Path]) -> None:
    tensor = np.zeros((576,), dtype=np.float32)

    def bucket(version: int) -> ray.ObjectRef:
        return ray.put(Bucket(version, ("model.norm.weight",), (tensor,), ("float32",)))

    with pytest.raises(StaleWeights, match="versions 30 and 31"):
        engine.update_weights([bucket(30), bucket(31)]).result()
    with pytest.raises(StaleWeights, match="holds None"):
        engine.generate(prompts(), version=30).result()
    tensors = len(Checkpoint(folders[0]).names)
    with pytest.raises(StaleWeights, match=f"version 32 lacks {tensors - 1} of {tensors} tensors"):
        engine.update_weights([bucket(32)]).result()
    update(engine, folders[0], 33)  # and a whole one mends it
    assert responses_of(engine.generate(prompts(), 33, greedy=True).result()) == greedy_reference(folders[0])
