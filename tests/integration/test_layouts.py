"""Two trainer processes equal one: tensor parallel, sequence parallel, data parallel, distributed optimizer.

One pair of processes goes through all layouts, since importing Megatron takes longer than training these models.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rlhf.algos.grpo import GRPOObjective, by_token, plan_minibatches
from rlhf.backends.megatron.adapters import Adapter
from rlhf.backends.megatron.device import megatron_device
from rlhf.backends.megatron.model import architecture_of
from rlhf.backends.megatron.trainer import MegatronTrainer
from rlhf.config.algo import GRPO, Ratio
from rlhf.config.teacher import SelfTeacher
from rlhf.config.train import DType, Train
from rlhf.data.table import PromptTable
from rlhf.sources.privileged import as_the_teacher_reads
from rlhf.types import Experience, Metrics, Rollouts, Sequences
from tests.integration.megatron import (
    adapter_of,
    end_groups,
    experience_of,
    privileged_prompts,
    random_factors,
    random_sequences,
    save_tiny_model,
    set_factors,
    table_of,
    trainer_setup,
)
from tests.integration.ranks import run_ranks

STEPS = 3
LENGTHS = [(4, 12), (7, 5), (3, 29), (6, 6), (5, 9), (8, 17), (2, 3)]
SHAPES = {
    # A vocabulary that two ranks don't divide, and a teacher with another one.
    "llama": dict(vocab_size=251, tie_word_embeddings=False),
    "llama-tied": dict(vocab_size=251, tie_word_embeddings=True),
    "llama-biases": dict(vocab_size=251, tie_word_embeddings=False, attention_bias=True, mlp_bias=True),
    "qwen2": dict(vocab_size=251, tie_word_embeddings=False),
    "qwen3": dict(vocab_size=251, tie_word_embeddings=False),
    "teacher": dict(vocab_size=254, num_hidden_layers=3),
}
TP2 = dict(gpus=2, tensor_parallel=2)
TP2_SP = TP2 | dict(sequence_parallel=True)
DP2 = dict(gpus=2)
PADDED = dict(padding_free=False)


@dataclass(frozen=True)
class Case:
    """A model, a layout, and the teacher's k (None: the whole vocabulary)."""

    family: str
    layout: dict[str, Any]
    k: int | None
    micro_batch_tokens: int = 64
    privileged: bool = False
    """The teacher reads longer prompts of its own, in micro-batches of its own."""
    self_teacher: SelfTeacher | None = None
    adapter: Adapter | None = None
    """Begins at `random_factors`."""
    base_teacher: bool = False
    policy: GRPOObjective | None = None
    """Two optimizer steps a generation, with advantages and a teacher's log-probabilities."""


def policy(**fields: Any) -> GRPOObjective:
    return GRPOObjective(temperature=0.7, clip_low=0.2, clip_high=0.3, comparable=True, **fields)


OF_SAMPLER = policy(recompute_old=False, kl_coef=0.3)
OF_TRAINER = policy(recompute_old=True, ratio=Ratio.sequence, importance_cap=2.0, teacher_kl_coef=0.5)


CASES = {
    "tp2-padded-topk": Case("llama-tied", TP2 | PADDED, 8),
    "tp2-padded-full": Case("qwen3", TP2 | PADDED, None),
    "tp2-sp-packed-topk": Case("qwen3", TP2_SP, 8),
    "tp2-sp-packed-full": Case("llama-tied", TP2_SP, None),
    "tp2-sp-padded-topk": Case("qwen2", TP2_SP | PADDED, 8),
    "tp2-sp-biases-topk": Case("llama-biases", TP2_SP, 8),
    "dp2-packed-topk": Case("llama-tied", DP2, 8),
    "dp2-padded-full": Case("qwen3", DP2 | PADDED, None, micro_batch_tokens=40),
    "dp2-distributed-packed-full": Case("llama-tied", DP2 | dict(distributed_optimizer=True), None),
    "dp2-distributed-padded-topk": Case("qwen3", DP2 | PADDED | dict(distributed_optimizer=True), 8, 40),
    "dp2-privileged-topk": Case("qwen3", DP2, 8, privileged=True),
    "dp2-self-topk": Case("qwen3", DP2 | dict(distributed_optimizer=True), 8, 64, True, SelfTeacher()),
    "tp2-sp-self-full": Case("llama-tied", TP2_SP, None, 64, True, SelfTeacher()),
    "tp2-sp-average-full": Case("qwen3", TP2_SP, None, 64, True, SelfTeacher(ema_decay=0.5)),
    "tp2-padded-lora": Case("llama-biases", TP2 | PADDED, None, adapter=adapter_of()),
    "tp2-sp-lora": Case("qwen3", TP2_SP, 8, adapter=adapter_of()),
    "tp2-sp-lora-some": Case("llama-tied", TP2_SP, None, adapter=adapter_of(modules=("k_proj", "v_proj", "up_proj"))),
    "tp2-sp-lora-base": Case("qwen3", TP2_SP, None, adapter=adapter_of(), base_teacher=True),
    "tp2-sp-lora-average": Case("qwen3", TP2_SP, None, 64, True, SelfTeacher(ema_decay=0.5), adapter_of()),
    "dp2-distributed-lora": Case("qwen3", DP2 | dict(distributed_optimizer=True), 8, adapter=adapter_of()),
    "tp2-padded-policy": Case("llama-tied", TP2 | PADDED, 8, policy=OF_SAMPLER),
    "tp2-sp-policy-of-trainer": Case("qwen3", TP2_SP, 8, 64, True, policy=OF_TRAINER),
    "dp2-policy": Case("qwen3", DP2, 8, 40, self_teacher=SelfTeacher(ema_decay=1), policy=OF_SAMPLER),
    "dp2-distributed-policy-of-trainer": Case(
        "llama-tied", DP2 | dict(distributed_optimizer=True), 8, policy=OF_TRAINER
    ),
}


IN_BFLOAT16 = {
    "tp2-sp-bfloat16": Case("qwen3", TP2_SP | dict(dtype=DType.bfloat16), None),
    "dp2-bfloat16": Case("llama-tied", DP2 | dict(dtype=DType.bfloat16, distributed_optimizer=True), 8),
    "tp2-sp-lora-bfloat16": Case("qwen3", TP2_SP | dict(dtype=DType.bfloat16), None, adapter=adapter_of()),
}


LONG = [
    "tp2-padded-full",
    "tp2-sp-packed-topk",
    "tp2-sp-padded-topk",
    "dp2-packed-topk",
    "dp2-privileged-topk",
    "dp2-self-topk",
    "tp2-sp-average-full",
    "tp2-padded-lora",
    "tp2-sp-lora-some",
    "tp2-sp-lora-base",
    "tp2-sp-lora-average",
    "tp2-padded-policy",
    "dp2-distributed-policy-of-trainer",
    "dp2-bfloat16",
    "tp2-sp-lora-bfloat16",
]
"""Cases of `make test-all`: each says little that another one doesn't."""


def marked(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in names]


@dataclass(frozen=True)
class Outcome:
    """What rank 0 of a case reports."""

    steps: list[Metrics]
    evaluation: Metrics
    weights: dict[str, np.ndarray]
    micro_batches: list[int]
    """Of each data-parallel rank."""


def generation_of(
    trainer: MegatronTrainer, sequences: Sequences, table: PromptTable, train: Train, step: int
) -> Experience:
    """What the source of groups makes: plans, weights, advantages and the teacher's log-probabilities."""
    rollouts = Rollouts(2 * (step - 1), sequences, np.arange(len(sequences)) % 5 != 3)  # one response is masked
    algo = GRPO(num_generations=1, steps_per_generation=2, mask_truncated=True)
    minibatches = plan_minibatches(rollouts, algo, train, train.data_parallel, 32)
    teacher = trainer.logprobs(*as_the_teacher_reads(sequences, minibatches, table, train.micro_batch_tokens), 0.7)
    advantages = np.random.default_rng(step).normal(size=len(sequences)).astype(np.float32)
    of_tokens = by_token(advantages, sequences)
    return Experience(
        step=step,
        version=rollouts.version,
        sequences=sequences,
        minibatches=tuple(replace(one, advantages=of_tokens, teacher_logprobs=teacher) for one in minibatches),
    )


def train_case(case: Case, folder: Path, rank: int = 0, store: Any = None) -> Outcome:
    """Three optimizer steps and an evaluation."""
    train = Train(lr=3e-3, weight_decay=0.1, micro_batch_tokens=case.micro_batch_tokens, **case.layout)
    setup = trainer_setup(
        folder / case.family,
        None if case.self_teacher or case.base_teacher else folder / "teacher",
        train=train,
        k=case.k,
        self_teacher=case.self_teacher,
        adapter=case.adapter,
        base_teacher=case.base_teacher,
    )
    if case.policy is not None:
        setup = replace(setup, objective=case.policy)
    end_groups()  # of a test before
    trainer = MegatronTrainer(setup, rank, store)
    if case.adapter is not None:
        set_factors(trainer, random_factors(trainer.student.architecture, case.adapter))
    steps = []
    for step in range(1, STEPS + 1):
        sequences = random_sequences(251, LENGTHS, seed=step)
        sequences = replace(sequences, logprobs=np.linspace(-7, -4, sequences.response_lengths.sum(), dtype=np.float32))
        experience = experience_of(
            sequences,
            micro_batch_tokens=train.micro_batch_tokens,
            padding_free=train.padding_free,
            data_parallel=train.data_parallel,
            pad_multiple=train.pad_multiple,
            step=step,
        )
        table = table_of(sequences, privileged_prompts(len(LENGTHS)) if case.privileged else [None] * len(LENGTHS))
        asked = as_the_teacher_reads(sequences, experience.minibatches, table, train.micro_batch_tokens)
        if case.policy is None:
            trainer.score(*asked)
            steps.append(trainer.train(experience))
        else:
            steps.append(trainer.train(generation_of(trainer, sequences, table, train, step)))
    plan = experience.minibatches[0].plan
    evaluation = trainer.evaluate(sequences, plan, (asked[0], asked[1][0].plan))
    tensors = [*trainer.student.tensors(), *trainer.student.adapter_tensors()]
    weights = {name: tensor.float().clone().numpy() for name, tensor in tensors}
    end_groups()
    return Outcome(steps, evaluation, weights, [len(micro_batches) for micro_batches in plan.ranks])


def round_trip(source: Path, target: Path, train: Train, rank: int = 0, store: Any = None) -> None:
    """Load a checkpoint over several ranks and save it again."""
    trainer = MegatronTrainer(trainer_setup(source, source, train=train), rank, store)
    trainer.save(target)
    end_groups()


def masks(folder: Path, layout: dict[str, Any], rank: int, store: Any) -> dict[str, np.ndarray]:
    """The dropout that this rank draws before a column-parallel and a row-parallel layer."""
    end_groups()
    setup = trainer_setup(folder / "qwen3", folder / "teacher", train=Train(**layout), adapter=adapter_of(dropout=0.5))
    mlp = MegatronTrainer(setup, rank, store).student.module.decoder.layers[0].mlp
    with megatron_device():
        drawn = {
            name: linear.adapter.dropped(torch.ones(64)).numpy()
            for name, linear in (("column", mlp.linear_fc1), ("row", mlp.linear_fc2))
        }
    end_groups()
    return drawn


def all_cases(rank: int, world_size: int, store: Any, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, case in (CASES | IN_BFLOAT16).items():
        if name not in LONG:
            found[name] = train_case(case, folder, rank, dist.PrefixStore(name, store))
    for family in SHAPES:
        for dtype in DType:
            name = f"{family}-{dtype.name}"
            train = Train(dtype=dtype, **TP2)
            round_trip(folder / family, folder / f"{name}-again", train, rank, dist.PrefixStore(name, store))
    for name, layout in MASKED.items():
        found[f"masks-{name}"] = masks(folder, layout, rank, dist.PrefixStore(f"masks-{name}", store))
    return found


def long_cases(rank: int, world_size: int, store: Any, folder: Path) -> dict[str, Any]:
    every = CASES | IN_BFLOAT16
    return {name: train_case(every[name], folder, rank, dist.PrefixStore(name, store)) for name in LONG}


MASKED = {"tp2": TP2 | PADDED, "tp2-sp": TP2_SP, "dp2": DP2}


@pytest.mark.parametrize(("name", "same"), [("tp2", {"column"}), ("tp2-sp", set()), ("dp2", set())])
def test_ranks_drop_the_same_of_the_same_inputs(name: str, same: set[str], outcomes: list[dict[str, Any]]) -> None:
    """Without sequence parallelism, ranks of one model read all of a column-parallel layer's inputs; all other inputs
    are theirs alone."""
    first, second = (outcome[f"masks-{name}"] for outcome in outcomes)
    for kind in ("column", "row"):
        assert set(first[kind]) == {0.0, 2.0}
        assert np.array_equal(first[kind], second[kind]) == (kind in same), kind


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    for seed, (name, shape) in enumerate(SHAPES.items()):
        family = "llama" if name == "teacher" else name.partition("-")[0]
        save_tiny_model(folder / name, family, seed=seed, initializer_range=0.1, **shape)
    return folder


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> list[dict[str, Outcome]]:
    """Of both ranks."""
    return run_ranks(all_cases, 2, folder)


@pytest.fixture(scope="module")
def long_outcomes(folder: Path) -> list[dict[str, Outcome]]:
    return run_ranks(long_cases, 2, folder)


@pytest.fixture
def both_ranks(name: str, request: pytest.FixtureRequest) -> list[dict[str, Outcome]]:
    """Those among which the case is."""
    found: list[dict[str, Outcome]] = request.getfixturevalue("long_outcomes" if name in LONG else "outcomes")
    return found


def assert_equal(found: Outcome, expected: Outcome, before: dict[str, torch.Tensor]) -> None:
    """Losses to 1e-5, gradient norms to 1e-4 of them, and weights by how far they moved from `before`."""
    for step, reference in zip(found.steps, expected.steps, strict=True):
        assert step.keys() == reference.keys()
        assert step["train/loss"] == pytest.approx(reference["train/loss"], abs=1e-5)
        assert step["train/grad_norm"] == pytest.approx(reference["train/grad_norm"], rel=1e-4)
        for metric in reference.keys() - {"time/train"}:
            assert step[metric] == pytest.approx(reference[metric], rel=1e-3, abs=1e-5), metric
    assert found.evaluation == pytest.approx(expected.evaluation, abs=1e-5)
    assert found.weights.keys() == expected.weights.keys()
    for tensor, weight in expected.weights.items():
        moved = np.linalg.norm(weight - before[tensor].numpy())
        assert np.linalg.norm(found.weights[tensor] - weight) <= 5e-3 * moved, tensor


def before_training(case: Case, folder: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / case.family / "model.safetensors")
    if case.adapter is None:
        return tensors
    return tensors | random_factors(architecture_of(folder / case.family), case.adapter)


@pytest.mark.parametrize("name", marked(CASES))
def test_two_processes_equal_one(name: str, folder: Path, both_ranks: list[dict[str, Outcome]]) -> None:
    case = CASES[name]
    expected = train_case(replace(case, layout={}), folder)
    for rank in (0, 1):
        assert_equal(both_ranks[rank][name], expected, before_training(case, folder))


@pytest.mark.parametrize(
    "policy", [pytest.param(OF_SAMPLER, marks=pytest.mark.slow), OF_TRAINER], ids=["sampler", "trainer"]
)
def test_micro_batches_change_nothing(policy: GRPOObjective, folder: Path) -> None:
    case = Case("qwen3", {}, 8, 4096, policy=policy)
    whole, parts = train_case(case, folder), train_case(replace(case, micro_batch_tokens=40), folder)
    assert len(parts.micro_batches) == 1 and parts.micro_batches[0] > whole.micro_batches[0]
    assert_equal(parts, whole, load_file(folder / "qwen3" / "model.safetensors"))


@pytest.mark.parametrize("name", marked(IN_BFLOAT16))
def test_bfloat16_stays_close(name: str, folder: Path, both_ranks: list[dict[str, Outcome]]) -> None:
    """As far as rounding of sums in another order allows."""
    case = IN_BFLOAT16[name]
    expected = train_case(replace(case, layout={"dtype": DType.bfloat16}), folder)
    for step, reference in zip(both_ranks[1][name].steps, expected.steps, strict=True):
        for metric in ("train/loss", "train/grad_norm"):
            assert step[metric] == pytest.approx(reference[metric], rel=0.03), metric


def test_the_cases_are_what_they_should_be(outcomes: list[dict[str, Outcome]]) -> None:
    """Training moved the models, and data-parallel ranks had different numbers of micro-batches somewhere."""
    for name, outcome in ((name, outcomes[0][name]) for name in CASES | IN_BFLOAT16 if name not in LONG):
        assert abs(outcome.steps[0]["train/loss"]) > 0.001
        assert ("policy/ratio_mean" in outcome.steps[0]) == ("policy" in name)
        assert outcome.steps[0]["train/grad_norm"] > 0.01
        assert len({step["train/loss"] for step in outcome.steps}) == STEPS
    assert outcomes[0]["dp2-padded-full"].micro_batches == outcomes[0]["dp2-distributed-padded-topk"].micro_batches
    assert outcomes[0]["dp2-padded-full"].micro_batches == [2, 3]


@pytest.mark.parametrize("family", SHAPES)
def test_weights_come_back_bit_exact(family: str, folder: Path, outcomes: list[dict[str, Outcome]]) -> None:
    stored = load_file(folder / family / "model.safetensors")
    for dtype in DType:
        again = load_file(folder / f"{family}-{dtype.name}-again" / "model.safetensors")
        assert again.keys() == stored.keys()
        for name, tensor in stored.items():
            assert torch.equal(again[name], tensor.to(getattr(torch, dtype.name))), name


FOUR = Case("qwen3", dict(gpus=4, tensor_parallel=2, distributed_optimizer=True), None)


def four_ranks(rank: int, world_size: int, store: Any, folder: Path) -> Outcome:
    outcome = train_case(FOUR, folder, rank, dist.PrefixStore("train", store))
    target = folder / "four-again"
    round_trip(folder / FOUR.family, target, Train(**FOUR.layout), rank, dist.PrefixStore("save", store))
    return outcome


@pytest.mark.slow
def test_tensor_and_data_parallel_at_once(folder: Path) -> None:
    expected = train_case(replace(FOUR, layout={}), folder)
    before = load_file(folder / FOUR.family / "model.safetensors")
    outcomes = run_ranks(four_ranks, 4, folder)
    for outcome in outcomes:
        for step, reference in zip(outcome.steps, outcomes[0].steps, strict=True):
            assert {**step, "time/train": 0} == {**reference, "time/train": 0}
        assert_equal(outcome, expected, before)
    again = load_file(folder / "four-again" / "model.safetensors")
    assert again.keys() == before.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in before.items())
