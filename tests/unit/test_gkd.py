"""The GKD objective against dense formulas, totals over micro-batches, and the batch it makes."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf.algos.gkd import GKDObjective, make_minibatches
from rlhf.algos.objective import RowBatch, Totals
from rlhf.config.distill import Tail
from rlhf.config.rollout import VllmRollout
from rlhf.config.train import Train
from rlhf.distill.fullvocab import FullVocabDistill
from rlhf.distill.topk import TopKDistill
from rlhf.losses.fused.losses import token_loss
from rlhf.losses.heads import VocabHead
from rlhf.types import Sequences, offsets_of

ROWS, VOCABULARY = 9, 12


def heads() -> tuple[VocabHead, VocabHead]:
    generator = torch.Generator().manual_seed(0)
    student = VocabHead(torch.randn(ROWS, 6, generator=generator), torch.randn(VOCABULARY, 6, generator=generator))
    teacher = VocabHead(torch.randn(ROWS, 8, generator=generator), torch.randn(VOCABULARY, 8, generator=generator))
    student.hidden.requires_grad_()
    return student, teacher


def batch_of(behaviour_logprobs: Tensor | None = None) -> RowBatch:
    generator = torch.Generator().manual_seed(1)
    return RowBatch(
        weights=torch.rand(ROWS, generator=generator),
        targets=torch.randint(0, VOCABULARY, (ROWS,), generator=generator),
        behaviour_logprobs=behaviour_logprobs,
    )


def dense_rows(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """The divergence of two distributions, a row; GKD's equation 1."""

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return (p * (p.log() - q.log())).sum(-1)

    if beta == 0:
        return kl(teacher, student)
    if beta == 1:
        return kl(student, teacher)
    mixture = beta * teacher + (1 - beta) * student
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def bucketed(probabilities: Tensor, ids: Tensor) -> Tensor:
    """The chosen tokens, and everything else as one outcome."""
    kept = probabilities.gather(1, ids)
    return torch.cat([kept, 1 - kept.sum(-1, keepdim=True)], dim=-1)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("option", ["fullvocab", "topk"])
def test_loss_and_gradient_are_the_dense_formula_times_the_weights(
    option: str, beta: float, temperature: float
) -> None:
    student, teacher = heads()
    batch = batch_of()
    distill = TopKDistill(4, Tail.bucket, temperature) if option == "topk" else FullVocabDistill(temperature)
    objective = GKDObjective(beta, distill, sampler_temperature=1.0)
    loss, totals = objective.loss(
        student, distill.score(teacher), batch, lambda hidden: replace(teacher, hidden=hidden)
    )

    hidden = student.hidden.detach().double().requires_grad_()
    student_p = (hidden @ student.weight.double().T / temperature).softmax(-1)
    teacher_p = (teacher.logits().double() / temperature).softmax(-1)
    if option == "topk":
        ids = teacher_p.topk(4).indices
        student_p, teacher_p = bucketed(student_p, ids), bucketed(teacher_p, ids)
    rows = dense_rows(student_p, teacher_p, beta)
    expected = (batch.weights.double() * rows).sum()

    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    assert totals.weighted == {"train/loss": pytest.approx(expected.item(), rel=1e-5)}
    assert totals.means()["train/divergence"] == pytest.approx(rows.mean().item(), rel=1e-5)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(student.hidden.grad.double(), hidden.grad, rtol=1e-4, atol=1e-6)


def test_cross_entropy_is_torchs() -> None:
    student, _ = heads()
    targets, weights = batch_of().targets, torch.arange(ROWS).float()
    total, rows = token_loss(student, targets, weights, lambda part, logprobs: -logprobs)
    total.backward()
    hidden = student.hidden.detach().requires_grad_()
    expected = torch.nn.functional.cross_entropy(hidden @ student.weight.T, targets, reduction="none")
    expected.dot(weights).backward()
    torch.testing.assert_close(rows.loss[1:], expected[1:])  # the first has no weight
    torch.testing.assert_close(student.hidden.grad, hidden.grad, rtol=1e-5, atol=1e-6)


def test_target_weights_add_cross_entropy_to_the_divergence() -> None:
    student, teacher = heads()
    distill = TopKDistill(4, Tail.bucket, 2.0)
    objective, scores, plain = GKDObjective(0.5, distill, None), distill.score(teacher), batch_of()
    weights = torch.linspace(0.1, 0.3, ROWS)
    alone, _ = objective.loss(student, scores, plain, None)
    loss, totals = objective.loss(student, scores, replace(plain, target_weights=weights), None)
    rows = torch.nn.functional.cross_entropy(student.logits(), plain.targets, reduction="none")
    torch.testing.assert_close(loss, alone + (weights * rows).sum())
    assert totals.weighted["train/loss"] == pytest.approx(loss.item())
    assert totals.means()["train/cross_entropy"] == pytest.approx(rows.mean().item())
    assert totals.means()["train/divergence"] != pytest.approx(loss.item())


def test_what_is_reported_beside_the_loss() -> None:
    student, teacher = heads()
    distill = TopKDistill(4, Tail.bucket, 1.0)
    _, totals = GKDObjective(0.5, distill, 1.0).loss(student, distill.score(teacher), batch_of(), None)
    teacher_p, student_p = teacher.logits().softmax(-1), student.logits().detach().softmax(-1)
    ids = teacher_p.topk(4).indices
    means = totals.means()
    assert means["distill/teacher_mass"] == pytest.approx(float(teacher_p.gather(1, ids).sum(-1).mean()), rel=1e-5)
    assert means["distill/student_mass"] == pytest.approx(float(student_p.gather(1, ids).sum(-1).mean()), rel=1e-5)
    assert means["train/entropy"] == pytest.approx(float(-(student_p * student_p.log()).sum(-1).mean()), rel=1e-5)


# ---- the gap to the sampler -----------------------------------------------------------------------------------------


def gap_metrics(temperature: float | None, behaviour_logprobs: Tensor | None) -> dict[str, float]:
    student, teacher = heads()
    distill = TopKDistill(4, Tail.bucket, 1.0)
    objective = GKDObjective(0.5, distill, sampler_temperature=temperature)
    _, totals = objective.loss(student, distill.score(teacher), batch_of(behaviour_logprobs), None)
    return {name: value for name, value in totals.means().items() if name.startswith("rollout/")}


def behaviour(temperature: float, offsets: Tensor) -> Tensor:
    """Log-probabilities of the targets at the sampler's temperature, off by `offsets`."""
    student, _ = heads()
    logprobs = (student.logits().detach() / temperature).log_softmax(-1)
    return logprobs.gather(1, batch_of().targets[:, None])[:, 0] + offsets


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gap_to_the_sampler_is_measured_at_its_temperature(temperature: float) -> None:
    offsets = torch.tensor([0.0, 0.1, -0.4, 0.0, 0.0, 0.2, 0.0, 0.0, -0.2])
    assert gap_metrics(temperature, behaviour(temperature, offsets)) == {
        "rollout/logprob_gap_mean": pytest.approx(0.1, abs=1e-5),
        "rollout/logprob_gap_max": pytest.approx(0.4, abs=1e-5),
    }


def test_no_gap_without_log_probabilities_that_can_be_compared() -> None:
    assert gap_metrics(None, behaviour(1.0, torch.zeros(ROWS))) == {}
    assert gap_metrics(1.0, None) == {}


@pytest.mark.parametrize(
    ("options", "comparable"),
    [
        ({}, 1.0),
        ({"temperature": 0.7}, 0.7),
        ({"temperature": 0.0}, None),
        ({"top_p": 0.9}, None),
        ({"top_k": 50}, None),
        ({"min_p": 0.1}, None),
    ],
)
def test_comparable_temperature(options: dict[str, float], comparable: float | None) -> None:
    assert VllmRollout(**options).comparable_temperature == comparable


# ---- totals ---------------------------------------------------------------------------------------------------------


def test_totals_of_micro_batches_add_up_to_those_of_one_batch() -> None:
    student, teacher = heads()
    offsets = torch.linspace(-0.3, 0.2, ROWS)
    batch = batch_of(behaviour(1.0, offsets))
    distill = TopKDistill(4, Tail.bucket, 1.0)
    objective, scores = GKDObjective(0.5, distill, 1.0), distill.score(teacher)
    whole_loss, whole = objective.loss(student, scores, batch, None)

    losses, parts = [], []
    for rows in (slice(0, 5), slice(5, 5), slice(5, 6), slice(6, 9)):
        part = RowBatch(batch.weights[rows], batch.targets[rows], batch.behaviour_logprobs[rows])
        loss, totals = objective.loss(student.select(rows), scores[rows], part, None)
        losses.append(loss)
        parts.append(totals)
    added = functools.reduce(Totals.__add__, parts, Totals())
    torch.testing.assert_close(torch.stack(losses).sum(), whole_loss)
    assert added.rows == whole.rows == ROWS
    assert added.means() == {name: pytest.approx(value, rel=1e-5) for name, value in whole.means().items()}
    assert added.means()["rollout/logprob_gap_max"] == pytest.approx(0.3, abs=1e-5)


def test_totals_keep_what_only_one_side_has() -> None:
    one = Totals(2, {"w": 0.25}, {"s": 3.0}, {"m": -1.0})
    two = Totals(2, {"w": 0.5, "v": 1.0}, {"t": 1.0}, {"m": -2.0, "n": 0.0})
    assert (one + two).means() == {"w": 0.75, "v": 1.0, "s": 0.75, "t": 0.25, "m": -1.0, "n": 0.0}
    assert (one.rows, one.weighted) == (2, {"w": 0.25}), "adding changes neither side"


# ---- the batch ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding_free", [True, False])
def test_one_optimizer_step_on_everything_every_token_weighs_the_same(padding_free: bool) -> None:
    lengths = [10, 4, 7, 9]
    sequences = Sequences(
        sample_ids=np.arange(4),
        tokens=np.ones(30, dtype=np.int32),
        offsets=offsets_of(lengths),
        prompt_lengths=np.array([2, 1, 3, 4], dtype=np.int32),
    )
    train = Train(micro_batch_tokens=12, padding_free=padding_free)
    (minibatch,) = make_minibatches(sequences, train, data_parallel=2)
    assert sorted(minibatch.plan.samples) == [0, 1, 2, 3]
    assert len(minibatch.plan.ranks) == 2 and minibatch.plan.padding_free is padding_free
    assert max(micro.tokens for rank in minibatch.plan.ranks for micro in rank) <= 12
    assert minibatch.weights.tolist() == pytest.approx([1 / 20] * 20)


@pytest.mark.parametrize(
    ("sft_alpha", "sampled", "expected"), [(0.0, False, None), (0.3, True, None), (0.3, False, 0.1)]
)
def test_only_reference_responses_are_fine_tuned_on(sft_alpha: float, sampled: bool, expected: float | None) -> None:
    sequences = Sequences(
        sample_ids=np.arange(1),
        tokens=np.ones(5, dtype=np.int32),
        offsets=offsets_of([5]),
        prompt_lengths=np.array([2], dtype=np.int32),
        logprobs=np.zeros(3, dtype=np.float32) if sampled else None,
    )
    (minibatch,) = make_minibatches(sequences, Train(), 1, sft_alpha)
    if expected is None:
        assert minibatch.target_weights is None
    else:
        assert minibatch.target_weights is not None
        assert minibatch.target_weights.tolist() == pytest.approx([expected] * 3)
