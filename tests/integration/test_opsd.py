"""Teachers that read a privileged prompt, and the student as its own teacher: the real trainer against transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhf.backends.megatron.device import megatron_device
from rlhf.backends.megatron.trainer import MegatronTrainer
from rlhf.backends.megatron.weights import export
from rlhf.batching import plan_batch, plan_on_ranks, token_mean_weights
from rlhf.config.teacher import SelfTeacher
from rlhf.sources.privileged import as_the_teacher_reads, privileged_sequences
from rlhf.types import BatchPlan, Experience, MicroBatchPlan, MiniBatch, Sequences
from tests.integration.megatron import (
    end_groups,
    experience_of,
    privileged_prompts,
    random_sequences,
    table_of,
    trainer_setup,
)
from tests.unit.tiny import save_tiny_llama

LENGTHS = [(4, 12), (7, 5), (3, 21), (6, 6), (5, 9), (8, 17)]
"""(prompt, response) of each sample."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    student = save_tiny_llama(folder / "student", tied=True, layers=2, seed=1)
    return student, save_tiny_llama(folder / "teacher", layers=3, seed=2)


def trainer_of(student: Path, teacher: Path | None, **kwargs: object) -> MegatronTrainer:
    end_groups()
    return MegatronTrainer(trainer_setup(student, teacher, **kwargs))  # type: ignore[arg-type]


def sequences_of(trainer: MegatronTrainer) -> Sequences:
    return random_sequences(trainer.student.architecture.vocab, LENGTHS)


def dense_logprobs(model: torch.nn.Module, prompt: np.ndarray, response: np.ndarray) -> Tensor:
    """[response, vocabulary], of prompt and response put together by hand."""
    ids = torch.from_numpy(np.concatenate([prompt, response])).long()[None]
    return model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)


def dense_rows(s: Tensor, t: Tensor, k: int | None) -> Tensor:
    """JSD at beta 0.5 a row, over the teacher's top k and the rest, or over everything."""
    p, q = t.exp(), s.exp()
    if k is not None:
        top = t.topk(k, -1).indices
        p, q = p.gather(-1, top), q.gather(-1, top)
        p, q = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (p, q))
    m = 0.5 * p + 0.5 * q
    return 0.5 * (p * (p / m).log()).sum(-1) + 0.5 * (q * (q / m).log()).sum(-1)


def load(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def parts(sequences: Sequences) -> list[tuple[np.ndarray, np.ndarray]]:
    """(prompt, response) of each sample."""
    return [
        (row[:length], row[length:]) for row, length in zip(sequences.rows(), sequences.prompt_lengths, strict=True)
    ]


@pytest.mark.parametrize("padding_free", [True, False])
@pytest.mark.parametrize("k", [8, None])
def test_privileged_loss_and_gradient_equal_dense_transformers(
    pair: tuple[Path, Path], k: int | None, padding_free: bool
) -> None:
    """Ragged lengths, several micro-batches that differ between student and teacher, rows with and without."""
    trainer = trainer_of(*pair, k=k)
    sequences, prompts = sequences_of(trainer), privileged_prompts(len(LENGTHS))
    budget = 60 if padding_free else 110
    experience = experience_of(sequences, micro_batch_tokens=budget, padding_free=padding_free)
    asked, asked_batches = as_the_teacher_reads(sequences, experience.minibatches, table_of(sequences, prompts), budget)
    micros = [len(one[0].plan.ranks[0]) for one in (experience.minibatches, asked_batches)]
    assert micros[0] >= 2 and micros[1] > micros[0]
    trainer.score(asked, asked_batches)
    loss = trainer.accumulate_gradients(sequences, experience.minibatches[0]).means()["train/loss"]
    norm = float(torch.stack([p.main_grad.norm() for p in trainer.student.module.parameters()]).norm())

    student, teacher = load(pair[0]), load(pair[1])
    total = torch.zeros(())
    for (prompt, response), own in zip(parts(sequences), prompts, strict=True):
        with torch.no_grad():
            t = dense_logprobs(teacher, prompt if own is None else own, response)
        total = total + dense_rows(dense_logprobs(student, prompt, response), t, k).sum()
    expected = total / int(sequences.response_lengths.sum())
    expected.backward()
    gradients = [p.grad for p in student.parameters() if p.grad is not None]
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert norm == pytest.approx(float(torch.stack([g.norm() for g in gradients]).norm()), rel=1e-5)
    embedding = trainer.student.module.embedding.word_embeddings.weight.main_grad
    theirs = student.get_input_embeddings().weight.grad
    assert (embedding[: len(theirs)] - theirs).norm() <= 1e-5 * theirs.norm()


def test_a_teacher_prompt_that_is_the_prompt_is_plain_distillation(pair: tuple[Path, Path]) -> None:
    results = []
    for privileged in (False, True):
        trainer = trainer_of(*pair)
        sequences = sequences_of(trainer)
        experience = experience_of(sequences, micro_batch_tokens=60)
        own = [prompt if privileged else None for prompt, _ in parts(sequences)]
        trainer.score(*as_the_teacher_reads(sequences, experience.minibatches, table_of(sequences, own), 60))
        metrics = trainer.train(experience)
        results.append([metrics[name] for name in ("train/loss", "train/grad_norm")])
    assert results[0] == pytest.approx(results[1], rel=1e-6)


def test_evaluation_asks_the_teacher_what_it_reads(pair: tuple[Path, Path]) -> None:
    trainer = trainer_of(*pair)
    sequences, prompts = sequences_of(trainer), privileged_prompts(len(LENGTHS))
    plan = plan_batch(sequences.lengths, data_parallel=1, micro_batch_tokens=60)
    read = privileged_sequences(sequences, table_of(sequences, prompts))
    assert read is not None
    measured = trainer.evaluate(sequences, plan, (read, plan_on_ranks(plan, read.lengths, 60)))
    student, teacher = load(pair[0]), load(pair[1])
    rows = []
    with torch.no_grad():
        for (prompt, response), own in zip(parts(sequences), prompts, strict=True):
            s, t = (
                dense_logprobs(student, prompt, response),
                dense_logprobs(teacher, prompt if own is None else own, response),
            )
            rows.append((t.exp() * (t - s)).sum(-1))
    assert measured["eval/forward_kl"] == pytest.approx(float(torch.cat(rows).mean()), rel=1e-5)
    plain = trainer.evaluate(sequences, plan)["eval/forward_kl"]
    assert abs(plain - measured["eval/forward_kl"]) > 1e-3


# ---- the student as its own teacher ---------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [8, None])
def test_the_student_under_its_own_prompt_teaches_exactly_nothing(pair: tuple[Path, Path], k: int | None) -> None:
    trainer = trainer_of(pair[0], None, self_teacher=SelfTeacher(), k=k)
    sequences = sequences_of(trainer)
    experience = experience_of(sequences, micro_batch_tokens=60)
    trainer.score(sequences, experience.minibatches)
    metrics = trainer.train(experience)
    # In the top k, the tails of both sides are computed in different ways, and round differently.
    assert abs(metrics["train/loss"]) <= (0.0 if k is None else 1e-7)
    assert metrics["train/grad_norm"] < 1e-6
    assert trainer.evaluate(sequences, experience.minibatches[0].plan)["eval/forward_kl"] == pytest.approx(0, abs=1e-5)


def halves(sequences: Sequences) -> tuple[MiniBatch, ...]:
    """Two optimizer steps on one experience."""
    weights = token_mean_weights(sequences) * 2
    tokens = sequences.lengths
    return tuple(
        MiniBatch(BatchPlan(((MicroBatchPlan(rows, int(tokens[list(rows)].sum())),),), True, 1), weights)
        for rows in ((0, 1, 2), (3, 4, 5))
    )


def as_transformers(trainer: MegatronTrainer, folder: Path) -> torch.nn.Module:
    """The student as it is now."""
    model = load(folder)
    model.load_state_dict(dict(export(trainer.student.module, trainer.student.architecture)), strict=False)
    return model


@pytest.mark.parametrize("k", [8, None])
def test_scores_of_several_optimizer_steps_are_of_one_version(pair: tuple[Path, Path], k: int | None) -> None:
    """The second step's teacher is the student before the first, hidden rows and head alike."""
    trainer = trainer_of(pair[0], None, self_teacher=SelfTeacher(), k=k)
    sequences, prompts = sequences_of(trainer), privileged_prompts(len(LENGTHS))
    minibatches = halves(sequences)
    trainer.score(*as_the_teacher_reads(sequences, minibatches, table_of(sequences, prompts), 200))
    before = load(pair[0])
    losses = []
    for number, minibatch in enumerate(minibatches):
        student = as_transformers(trainer, pair[0])
        rows = minibatch.plan.samples
        with torch.no_grad():
            expected = sum(
                dense_rows(
                    dense_logprobs(student, prompt, response),
                    dense_logprobs(before, prompt if own is None else own, response),
                    k,
                ).sum()
                for row, ((prompt, response), own) in enumerate(zip(parts(sequences), prompts, strict=True))
                if row in rows
            )
        loss = trainer.accumulate_gradients(sequences, minibatch).weighted["train/loss"]
        assert loss == pytest.approx(float(expected) * float(minibatch.weights[0]), rel=2e-5), number
        losses.append(loss)
        with megatron_device():
            trainer._step()
    assert min(losses) > 1e-3


def test_an_average_of_the_student_teaches(pair: tuple[Path, Path]) -> None:
    trainer = trainer_of(pair[0], None, self_teacher=SelfTeacher(ema_decay=0.75), k=None)
    sequences, prompts = sequences_of(trainer), privileged_prompts(len(LENGTHS))
    average = dict(export(trainer.student.module, trainer.student.architecture))
    average = {name: weight.clone() for name, weight in average.items()}
    for step in (1, 2, 3):
        experience = experience_of(sequences, micro_batch_tokens=60, step=step)
        trainer.score(*as_the_teacher_reads(sequences, experience.minibatches, table_of(sequences, prompts), 60))
        trainer.train(experience)
        for name, weight in export(trainer.student.module, trainer.student.architecture):
            average[name] = 0.75 * average[name] + 0.25 * weight
    assert trainer.teacher is not None
    teachers = dict(export(trainer.teacher.model.module, trainer.student.architecture))
    students = dict(export(trainer.student.module, trainer.student.architecture))
    for name, weight in teachers.items():
        torch.testing.assert_close(weight, average[name], rtol=1e-5, atol=1e-7)
        assert not torch.equal(weight, students[name]), name


# ---- offloading and freeing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [8, None])
def test_an_offloaded_teacher_gives_the_same_numbers(pair: tuple[Path, Path], k: int | None) -> None:
    results = []
    for offload in (False, True):
        trainer = trainer_of(*pair, offload_teacher=offload, k=k)
        sequences = sequences_of(trainer)
        experience = experience_of(sequences)
        trainer.score(sequences, experience.minibatches)
        metrics = trainer.train(experience)
        kl = trainer.evaluate(sequences, experience.minibatches[0].plan)
        results.append([metrics["train/loss"], metrics["train/grad_norm"], kl["eval/forward_kl"]])
    assert results[0] == results[1]


def test_nothing_of_the_teacher_outlives_the_step(pair: tuple[Path, Path]) -> None:
    """Full vocabulary: rows x hidden are kept, never rows x vocabulary, and freed when the step is done."""
    trainer = trainer_of(pair[0], None, self_teacher=SelfTeacher(), k=None)
    sequences = sequences_of(trainer)
    experience = Experience(1, 0, sequences, halves(sequences))
    trainer.score(sequences, experience.minibatches)
    kept = [scores.hidden for scores in trainer._scores.values()]
    assert sum(hidden.numel() for hidden in kept) == sequences.response_lengths.sum() * 64
    trainer.train(experience)
    assert trainer._scores == {} and trainer._heads == {}


def test_scores_of_the_next_step_are_kept_with_their_own_head(pair: tuple[Path, Path]) -> None:
    """A source that runs ahead has step 2 scored before step 1 is trained on."""
    trainer = trainer_of(pair[0], None, self_teacher=SelfTeacher(), k=None)
    first = sequences_of(trainer)
    second = replace(first, sample_ids=first.sample_ids + 100)
    table = table_of(first, privileged_prompts(len(LENGTHS)))
    losses = []
    for sequences in (first, second):
        trainer.score(*as_the_teacher_reads(sequences, experience_of(sequences).minibatches, table, 4096))
    for sequences in (first, second):
        student = as_transformers(trainer, pair[0])
        losses.append(trainer.train(experience_of(sequences))["train/loss"])
        with torch.no_grad():
            rows = [
                dense_rows(
                    dense_logprobs(student, prompt, response),
                    dense_logprobs(load(pair[0]), prompt if own is None else own, response),
                    None,
                )
                for (prompt, response), own in zip(parts(sequences), privileged_prompts(len(LENGTHS)), strict=True)
            ]
        assert losses[-1] == pytest.approx(float(torch.cat(rows).mean()), rel=2e-5)
    assert losses[0] != losses[1] and trainer._scores == {} and trainer._heads == {}
