"""teacher.offload on a real card: the teacher's layers take memory only while it is asked, and the numbers stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhf.backends.megatron import layers
from rlhf.backends.megatron.trainer import MegatronTrainer
from rlhf.config.train import DType, Train
from tests.integration.megatron import end_groups, experience_of, random_sequences, trainer_setup
from tests.unit.tiny import save_tiny_llama

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("k", [8, None])
def test_an_offloaded_teacher_leaves_the_card(tmp_path: Path, k: int | None) -> None:
    student = save_tiny_llama(tmp_path / "student", layers=1, seed=1)
    teacher = save_tiny_llama(tmp_path / "teacher", layers=8, hidden=1024, heads=16, intermediate=4096, seed=2)
    losses, held = [], []
    for offload in (True, False, True):  # the first time cuBLAS takes memory of its own
        end_groups()
        setup = trainer_setup(student, teacher, Train(dtype=DType.bfloat16), offload_teacher=offload, k=k)
        trainer = MegatronTrainer(setup)
        assert trainer.teacher is not None
        module = trainer.teacher.model.module
        head = layers.head_weight(module)
        body = sum(weight.numel() * 2 for weight in module.parameters() if weight is not head)
        sequences = random_sequences(trainer.student.architecture.vocab, [(4, 12), (7, 30)])
        experience = experience_of(sequences)
        trainer.score(sequences, experience.minibatches)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
        assert head.is_cuda
        losses.append(trainer.train(experience)["train/loss"])
        del trainer, module, head
        torch.cuda.empty_cache()
    assert losses[0] == losses[1] == losses[2]
    assert held[1] - held[2] == pytest.approx(body, rel=0.02)
