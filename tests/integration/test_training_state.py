"""Saved and loaded training goes on as if it had never stopped, bit for bit, in every layout.

One pair of processes goes through all layouts, since importing Megatron takes longer than training these models.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rlhf.backends.megatron.trainer import MegatronTrainer, on_device
from rlhf.config.teacher import SelfTeacher
from rlhf.config.train import DType, LRSchedule, Train
from rlhf.errors import CheckpointError
from tests.integration.megatron import (
    adapter_of,
    end_groups,
    experience_of,
    random_sequences,
    save_tiny_model,
    trainer_setup,
)
from tests.integration.ranks import run_ranks

STEPS, SAVED = 4, 2
LENGTHS = [(4, 12), (7, 5), (3, 29), (6, 6)]
BF16 = dict(dtype=DType.bfloat16)
DISTRIBUTED = dict(gpus=2, distributed_optimizer=True)
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "one-bfloat16": BF16,
    "dp2": dict(gpus=2),
    "dp2-distributed": DISTRIBUTED,
    "dp2-distributed-bfloat16": DISTRIBUTED | BF16,
    "tp2": dict(gpus=2, tensor_parallel=2),
    "tp2-bfloat16": dict(gpus=2, tensor_parallel=2) | BF16,
}

AVERAGED = ("average", "average-bfloat16")
"""The student's moving average is its teacher; weight decay moves them apart."""
LAYOUTS |= {"average": {}, "average-bfloat16": BF16}

LORA: dict[str, dict[str, Any]] = {
    "lora": {},
    "lora-average-bfloat16": BF16,
    "lora-tp2": dict(gpus=2, tensor_parallel=2),
    "lora-dp2-distributed-bfloat16": DISTRIBUTED | BF16,
}
"""With dropout, whose random states must go on, too."""
LAYOUTS |= LORA


@dataclass(frozen=True)
class Outcome:
    """Of the steps after the save."""

    losses: list[float]
    lrs: list[float]
    weights: dict[str, np.ndarray]
    moments: list[np.ndarray]
    version: int
    drawn: list[float]
    """From every random generator."""


def trainer_of(folder: Path, name: str, phase: str, rank: int, store: Any) -> MegatronTrainer:
    train = Train(
        lr=3e-3,
        weight_decay=0.1,
        warmup_steps=1,
        lr_schedule=LRSchedule.cosine,
        micro_batch_tokens=64,
        global_batch_samples=4,
        **LAYOUTS[name],
    )
    end_groups()
    setup = trainer_setup(folder / "student", folder / "teacher", train=train, steps=STEPS, k=8)
    if name in LORA:
        setup = replace(setup, adapter=adapter_of(dropout=0.2))
    if name in AVERAGED or "average" in name:
        setup = replace(setup, teacher=None, self_teacher=SelfTeacher(ema_decay=0.5))
    return MegatronTrainer(setup, rank, None if store is None else dist.PrefixStore(f"{name}-{phase}", store))


def train_step(trainer: MegatronTrainer, step: int) -> tuple[float, float]:
    train = trainer.setup.train
    sequences = random_sequences(250, LENGTHS, seed=step)
    experience = experience_of(
        sequences,
        micro_batch_tokens=64,
        data_parallel=train.data_parallel,
        pad_multiple=train.pad_multiple,
        step=step,
    )
    trainer.score(sequences, experience.minibatches)
    metrics = trainer.train(experience)
    return metrics["train/loss"], metrics["train/lr"]


@on_device
def draw() -> list[float]:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    with get_cuda_rng_tracker().fork():
        return [*drawn, float(torch.rand(()))]


def outcome(trainer: MegatronTrainer) -> Outcome:
    """Two more steps."""
    drawn = draw()
    losses, lrs = zip(*(train_step(trainer, step) for step in range(SAVED + 1, STEPS + 1)), strict=True)
    adam = [part.optimizer for part in trainer.optimizer.chained_optimizers]
    return Outcome(
        losses=list(losses),
        lrs=list(lrs),
        weights={name: tensor.float().clone().numpy() for name, tensor in trainer.student.tensors()},
        moments=[
            state[name].detach().clone().numpy()
            for part in adam
            for state in part.state.values()
            for name in ("step", "exp_avg", "exp_avg_sq")
        ],
        version=trainer.version,
        drawn=drawn,
    )


def straight_and_continued(folder: Path, name: str, rank: int = 0, store: Any = None) -> tuple[Outcome, Outcome]:
    """Four steps; and the last two of them by a new trainer, from what the first one saved."""
    first = trainer_of(folder, name, "first", rank, store)
    for step in range(1, SAVED + 1):
        train_step(first, step)
    draw()  # so that the generators aren't where a new trainer's are
    first.save_state(folder / name)
    straight = outcome(first)
    second = trainer_of(folder, name, "second", rank, store)
    assert second.load_state(folder / name) == SAVED
    continued = outcome(second)
    end_groups()
    return straight, continued


def two_ranks(rank: int, world_size: int, store: Any, folder: Path) -> dict[str, tuple[Outcome, Outcome]]:
    names = [name for name, layout in LAYOUTS.items() if layout.get("gpus") == world_size]
    return {name: straight_and_continued(folder, name, rank, store) for name in names}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states")
    save_tiny_model(folder / "student", "qwen3", seed=1, initializer_range=0.1, tie_word_embeddings=True)
    save_tiny_model(folder / "teacher", "qwen3", seed=2, initializer_range=0.1)
    return folder


@pytest.fixture(scope="module")
def of_two_ranks(folder: Path) -> list[dict[str, tuple[Outcome, Outcome]]]:
    return run_ranks(two_ranks, 2, folder)


def assert_same(straight: Outcome, continued: Outcome) -> None:
    """Equal, not close: nothing that was saved may have been rounded."""
    assert continued.losses == straight.losses and len(set(straight.losses)) == STEPS - SAVED
    assert continued.lrs == straight.lrs and len(set(straight.lrs)) == STEPS - SAVED
    assert continued.version == straight.version == STEPS
    assert continued.drawn == straight.drawn
    assert continued.weights.keys() == straight.weights.keys()
    for name, weight in straight.weights.items():
        assert np.array_equal(continued.weights[name], weight), name
    assert len(straight.moments) == len(continued.moments) > 0
    for found, expected in zip(continued.moments, straight.moments, strict=True):
        assert np.array_equal(found, expected)
    assert {float(step) for step in straight.moments[::3]} == {STEPS}


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if "gpus" not in layout])
def test_one_process_goes_on_exactly(name: str, folder: Path) -> None:
    assert_same(*straight_and_continued(folder, name))


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.get("gpus") == 2])
def test_two_processes_go_on_exactly(name: str, of_two_ranks: list[dict[str, tuple[Outcome, Outcome]]]) -> None:
    for outcomes in of_two_ranks:
        assert_same(*outcomes[name])


def test_copies_are_written_once(folder: Path, of_two_ranks: list[dict[str, tuple[Outcome, Outcome]]]) -> None:
    """The second copy writes its random states, and under the distributed optimizer its part of the moments."""
    keys = {
        name: [set(torch.load(folder / name / f"rank_{rank}.pt", weights_only=True)) for rank in (0, 1)]
        for name in of_two_ranks[0]
    }
    alone, moments, whole = (
        {"num_steps", "rng"},
        {"num_steps", "rng", "optimizer"},
        {"num_steps", "rng", "optimizer", "model", "frozen", "teacher"},
    )
    assert keys["dp2"] == [whole, alone]
    assert keys["dp2-distributed"] == keys["dp2-distributed-bfloat16"] == [whole, moments]
    assert keys["tp2"] == [whole, whole]


def test_a_frozen_base_is_not_written_but_known(folder: Path, tmp_path: Path) -> None:
    straight_and_continued(folder, "lora")
    state = torch.load(folder / "lora" / "rank_0.pt", weights_only=True)
    assert {name.split(".")[-2] for name in state["model"]} == {"a", "b"}
    assert all(".adapter." not in name for name in state["frozen"]) and len(state["frozen"]) > 10
    base = save_tiny_model(tmp_path / "student", "qwen3", seed=3, initializer_range=0.1, tie_word_embeddings=True)
    end_groups()
    trainer = MegatronTrainer(trainer_setup(base, folder / "teacher", adapter=adapter_of()))
    with pytest.raises(CheckpointError, match=r"adapter on another base: the weights of model\.path have changed"):
        trainer.load_state(folder / "lora")
    end_groups()


def test_state_that_does_not_fit_is_refused(folder: Path, tmp_path: Path) -> None:
    straight_and_continued(folder, "one")
    state = folder / "one" / "rank_0.pt"
    save_tiny_model(tmp_path / "student", "qwen3", num_hidden_layers=1)
    for train, model, said in (
        (Train(), tmp_path / "student", "is the state of another model"),
        (Train(dtype=DType.bfloat16), folder / "student", "holds a tensor of torch.float32"),
    ):
        end_groups()
        trainer = MegatronTrainer(trainer_setup(model, folder / "teacher", train=train))
        with pytest.raises(CheckpointError, match=said):
            trainer.load_state(folder / "one")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "rank_0.pt").write_bytes(state.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match=r"torn/rank_0\.pt can't be read .*; continue from another checkpoint"):
        trainer.load_state(tmp_path / "torn")
    end_groups()
