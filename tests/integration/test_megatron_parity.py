"""The Megatron trainer: padded and packed rows, the training step, what it saves. Families: test_families.py."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf.backends.megatron.device import megatron_device
from rlhf.backends.megatron.model import forward, load_model, select_rows
from rlhf.backends.megatron.trainer import MegatronTrainer
from rlhf.backends.megatron.weights import Checkpoint, export
from rlhf.batching import pack
from rlhf.config.train import DType, LRSchedule, Train
from rlhf.types import MicroBatchPlan
from tests.integration.megatron import end_groups, experience_of, random_sequences, trainer_setup
from tests.unit.tiny import save_tiny_llama


def test_padded_rows_equal_packed_rows(tmp_path: Path, megatron_groups: None) -> None:
    folder = save_tiny_llama(tmp_path / "hf")
    with megatron_device(), torch.no_grad():
        model = load_model(folder, torch.float32)
        sequences = random_sequences(model.architecture.vocab, [(5, 11), (3, 20), (9, 2)])
        hidden = [
            select_rows(forward(model.module, micro), micro)
            for micro in (
                pack(sequences, MicroBatchPlan((0, 1, 2), 69), padding_free=packed, pad_multiple=multiple)
                for packed, multiple in [(True, 1), (False, 1), (True, 8)]
            )
        ]
    torch.testing.assert_close(hidden[0], hidden[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hidden[0], hidden[2], rtol=1e-5, atol=1e-6)


# ---- the training step ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tied student and another teacher of the same vocabulary."""
    folder = tmp_path_factory.mktemp("pair")
    student = save_tiny_llama(folder / "student", tied=True, layers=2, seed=1)
    return student, save_tiny_llama(folder / "teacher", layers=3, seed=2)


def fresh_trainer(pair: tuple[Path, Path], **kwargs: object) -> MegatronTrainer:
    end_groups()
    return MegatronTrainer(trainer_setup(*pair, **kwargs))


LENGTHS = [(4, 12), (7, 5), (3, 21), (6, 6), (5, 9), (8, 17)]


def gradients_of(trainer: MegatronTrainer, micro_batch_tokens: int, padding_free: bool) -> tuple[float, dict]:
    sequences = random_sequences(trainer.student.architecture.vocab, LENGTHS)
    experience = experience_of(sequences, micro_batch_tokens=micro_batch_tokens, padding_free=padding_free)
    trainer.score(sequences, experience.minibatches)
    totals = trainer.accumulate_gradients(sequences, experience.minibatches[0])
    gradients = {name: p.main_grad.clone() for name, p in trainer.student.module.named_parameters()}
    return totals.means()["train/loss"], gradients, len(experience.minibatches[0].plan.ranks[0])


@pytest.mark.parametrize(
    ("micro_batch_tokens", "padding_free", "micro_batches"),
    [(64, True, 2), (30, True, 4), (4096, False, 1), (80, False, 2), (45, False, 4)],
)
def test_loss_and_gradient_do_not_depend_on_micro_batches(
    pair: tuple[Path, Path], micro_batch_tokens: int, padding_free: bool, micro_batches: int
) -> None:
    trainer = fresh_trainer(pair)
    loss, gradients, count = gradients_of(trainer, 4096, True)
    assert count == 1
    split_loss, split_gradients, split_count = gradients_of(trainer, micro_batch_tokens, padding_free)
    assert split_count == micro_batches
    assert split_loss == pytest.approx(loss, rel=1e-5)
    for name, gradient in gradients.items():
        assert (split_gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_loss_and_step_equal_a_dense_transformers_step(pair: tuple[Path, Path]) -> None:
    """The whole step (teacher scores, divergence, weights, AdamW, clipping) against ten lines of transformers."""
    trainer = fresh_trainer(pair, k=8, beta=0.5)
    sequences = random_sequences(trainer.student.architecture.vocab, LENGTHS)
    experience = experience_of(sequences, micro_batch_tokens=40)
    trainer.score(sequences, experience.minibatches)
    metrics = trainer.train(experience)

    student, teacher = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in pair)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    total, count = 0.0, int(sequences.response_lengths.sum())
    for tokens, prompt_length in zip(sequences.rows(), sequences.prompt_lengths, strict=True):
        ids = torch.from_numpy(tokens).long()[None]
        s = student(ids).logits[0, prompt_length - 1 : -1].log_softmax(-1)
        with torch.no_grad():
            t = teacher(ids).logits[0, prompt_length - 1 : -1].log_softmax(-1)
        top = t.topk(8, -1)
        p = torch.cat([top.values.exp(), 1 - top.values.exp().sum(-1, keepdim=True)], -1)
        q = s.gather(-1, top.indices).exp()
        q = torch.cat([q, 1 - q.sum(-1, keepdim=True)], -1)
        m = 0.5 * p + 0.5 * q
        total = total + 0.5 * (p * (p / m).log()).sum() + 0.5 * (q * (q / m).log()).sum()
    loss = total / count
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
    optimizer.step()

    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["train/divergence"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    stepped = dict(export(trainer.student.module, trainer.student.architecture))
    before = Checkpoint(pair[0])
    for name, parameter in student.named_parameters():
        moved = (parameter.detach() - before[name]).norm()
        assert (stepped[name] - parameter.detach()).norm() <= 1e-3 * moved, name


@pytest.mark.parametrize(("micro_batch_tokens", "padding_free"), [(4096, True), (40, True), (4096, False), (60, False)])
def test_conversations_equal_the_dense_formula_on_masked_rows(
    pair: tuple[Path, Path], micro_batch_tokens: int, padding_free: bool
) -> None:
    """Loss, gradient and held-out divergence of samples of one, two and three turns: whole texts through transformers,
    rows that predict observations left out, every other one weighed the same."""
    trainer = fresh_trainer(pair, k=8, beta=0.0)
    sequences = random_sequences(trainer.student.architecture.vocab, LENGTHS)
    turns = [[12], [2, 2, 1], [3, 5, 4, 2, 7], [1, 1, 4], [4, 4, 1], [1, 14, 2]]
    masks = [np.repeat([index % 2 == 0 for index in range(len(one))], one) for one in turns]
    sequences = replace(sequences, written=np.concatenate(masks))
    experience = experience_of(sequences, micro_batch_tokens=micro_batch_tokens, padding_free=padding_free)
    (minibatch,) = experience.minibatches
    trainer.score(sequences, experience.minibatches)
    loss = trainer.accumulate_gradients(sequences, minibatch).means()["train/loss"]
    norm = math.sqrt(sum(float(p.main_grad.double().square().sum()) for p in trainer.student.module.parameters()))
    kl = trainer.evaluate(sequences, minibatch.plan)["eval/forward_kl"]
    teachers = trainer.logprobs(sequences, experience.minibatches, 0.7)

    student, teacher = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in pair)
    total, whole, logprobs = torch.zeros(()), torch.zeros(()), []
    for tokens, prompt_length, mask in zip(sequences.rows(), sequences.prompt_lengths, masks, strict=True):
        ids, own = torch.from_numpy(tokens).long(), torch.from_numpy(mask)
        s = student(ids[None]).logits[0, prompt_length - 1 : -1][own].log_softmax(-1)
        with torch.no_grad():
            logits = teacher(ids[None]).logits[0, prompt_length - 1 : -1][own]
        t = logits.log_softmax(-1)
        logprobs += (logits / 0.7).log_softmax(-1).gather(1, ids[prompt_length:][own][:, None])[:, 0].tolist()
        whole = whole + (t.exp() * (t - s)).sum().detach()
        top = t.topk(8, -1)
        p = torch.cat([top.values.exp(), 1 - top.values.exp().sum(-1, keepdim=True)], -1)
        q = s.gather(-1, top.indices).exp()
        total = total + (p * (p / torch.cat([q, 1 - q.sum(-1, keepdim=True)], -1)).log()).sum()
    count = sum(sum(one[::2]) for one in turns)
    (total / count).backward()
    expected = torch.nn.utils.clip_grad_norm_(student.parameters(), math.inf)
    assert loss == pytest.approx(total.item() / count, rel=1e-5)
    assert norm == pytest.approx(expected.item(), rel=1e-4)
    assert kl == pytest.approx(whole.item() / count, rel=1e-4)
    assert teachers.tolist() == pytest.approx(logprobs, abs=1e-4)
    with_observations = trainer.evaluate(replace(sequences, written=None), minibatch.plan)["eval/forward_kl"]
    assert abs(with_observations / kl - 1) > 1e-3, "they would have made a difference"


def test_student_equal_to_teacher_has_no_divergence_and_no_gradient(pair: tuple[Path, Path]) -> None:
    for beta in (0.0, 0.5, 1.0):
        trainer = fresh_trainer((pair[1], pair[1]), beta=beta)
        sequences = random_sequences(trainer.student.architecture.vocab, LENGTHS)
        experience = experience_of(sequences)
        # Before the step, which follows the signs of gradients that are rounding.
        kl = trainer.evaluate(sequences, experience.minibatches[0].plan)
        trainer.score(sequences, experience.minibatches)
        metrics = trainer.train(experience)
        assert abs(metrics["train/divergence"]) < 1e-6
        assert metrics["train/grad_norm"] < 1e-4
        if beta == 0.0:
            assert abs(kl["eval/forward_kl"]) < 1e-5


def test_scores_of_other_samples_are_refused(pair: tuple[Path, Path]) -> None:
    from rlhf.errors import MisalignedScores

    trainer = fresh_trainer(pair)
    sequences = random_sequences(trainer.student.architecture.vocab, LENGTHS)
    experience = experience_of(sequences)
    with pytest.raises(MisalignedScores, match="sample 100 needs 12 rows of teacher scores, there are none"):
        trainer.train(experience)


def test_saved_checkpoint_is_loaded_by_transformers(pair: tuple[Path, Path], tmp_path: Path) -> None:
    trainer = fresh_trainer(pair)
    sequences = random_sequences(trainer.student.architecture.vocab, LENGTHS)
    experience = experience_of(sequences)
    trainer.score(sequences, experience.minibatches)
    trainer.train(experience)
    trainer.save(tmp_path / "saved")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
    assert model.dtype is torch.float32
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]
    tokens = torch.from_numpy(np.concatenate(list(sequences.rows())[:1])).long()[None]
    with torch.no_grad(), megatron_device():
        micro = pack(sequences, MicroBatchPlan((0,), 16), padding_free=True)
        ours = trainer.student.head(trainer.student.hidden_rows(micro)).logits()
    with torch.no_grad():
        theirs = model(tokens).logits[0, sequences.prompt_lengths[0] - 1 : -1]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def lr_of(step: int, schedule: str) -> float:
    """Of 8 steps with 2 of warm-up; `step` counts from 1."""
    if step <= 2:
        return step / 2
    if schedule == "constant":
        return 1.0
    if schedule == "wsd":
        return 1.0 if step <= 5 else 0.1 + 0.9 * (9 - step) / 4
    left = (9 - step) / 7
    return 0.1 + 0.9 * (left if schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left)))


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_learning_rate_follows_its_schedule_and_norms_are_not_decayed(pair: tuple[Path, Path], schedule: str) -> None:
    train = Train(
        lr=1e-3,
        warmup_steps=2,
        weight_decay=0.1,
        lr_schedule=LRSchedule(schedule),
        min_lr=0.0 if schedule == "constant" else 1e-4,
        decay_steps=3 if schedule == "wsd" else 0,
    )
    trainer = fresh_trainer(pair, train=train, steps=8)
    sequences = random_sequences(trainer.student.architecture.vocab, LENGTHS)
    rates = []
    for step in range(1, 9):
        experience = experience_of(sequences, step=step)
        trainer.score(sequences, experience.minibatches)
        rates.append(trainer.train(experience)["train/lr"])
    assert rates == pytest.approx([1e-3 * lr_of(step, schedule) for step in range(1, 9)])
    decay = {id(p): group["weight_decay"] for group in trainer.optimizer.param_groups for p in group["params"]}
    for name, parameter in trainer.student.module.named_parameters():
        assert decay[id(parameter)] == (0.0 if "norm" in name else 0.1), name


def test_bfloat16_weights_are_rounded_from_float32_ones(pair: tuple[Path, Path]) -> None:
    """Updates too small for bfloat16 add up in the optimizer's copy: none is lost, though none shows at first."""
    trainer = fresh_trainer(pair, train=Train(lr=2e-6, dtype=DType.bfloat16, weight_decay=0.0), steps=50)
    optimizer = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])[0]
    weights, mains = (
        [parameter for group in groups for parameter in group]
        for groups in (optimizer.float16_groups, optimizer.fp32_from_float16_groups)
    )
    assert {parameter.dtype for parameter in mains} == {torch.float32} and len(weights) == len(mains)
    before = [parameter.detach().clone() for parameter in weights]
    sequences = random_sequences(trainer.student.architecture.vocab, LENGTHS)
    for step in range(1, 6):
        experience = experience_of(sequences, step=step)
        trainer.score(sequences, experience.minibatches)
        trainer.train(experience)
        for weight, main in zip(weights, mains, strict=True):
            assert torch.equal(weight, main.to(torch.bfloat16))
    shown = sum(int((a != b).sum()) for a, b in zip(before, weights, strict=True))
    moved = sum(int((a.float() != b).sum()) for a, b in zip(before, mains, strict=True))
    assert moved > 20 * shown and moved > 10_000
