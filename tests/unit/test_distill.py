"""The options of `distill`: scoring, storing a sample at a time, joining, and the loss from stored scores."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch

from rlhf.config.distill import FullVocab, Tail, TopK
from rlhf.distill.base import Distill
from rlhf.distill.fullvocab import FullVocabDistill, HiddenScores
from rlhf.distill.topk import TopKDistill
from rlhf.errors import ConfigError
from rlhf.losses.divergence import CHUNK_ROWS, full_divergence
from rlhf.losses.heads import VocabHead
from rlhf.losses.rows import TopKScores

ROWS, VOCABULARY = 9, 16
WEIGHTS = torch.ones(ROWS)
OPTIONS: list[Distill] = [
    TopKDistill(4, Tail.bucket, 1.0),
    TopKDistill(4, Tail.bucket, 2.0),
    TopKDistill(4, Tail.renormalise, 2.0),
    TopKDistill(4, Tail.drop, 0.7),
    FullVocabDistill(1.0),
    FullVocabDistill(2.0),
]


def heads(rows: int = ROWS) -> tuple[VocabHead, VocabHead]:
    """A student and a teacher with other hidden sizes."""
    generator = torch.Generator().manual_seed(0)
    student = VocabHead(torch.randn(rows, 6, generator=generator), torch.randn(VOCABULARY, 6, generator=generator))
    teacher = VocabHead(torch.randn(rows, 8, generator=generator), torch.randn(VOCABULARY, 8, generator=generator))
    student.hidden.requires_grad_()
    return student, teacher


def head_of(teacher: VocabHead):
    return lambda hidden: replace(teacher, hidden=hidden)


def test_options_come_from_their_specs():
    assert TopKDistill.from_spec(TopK(k=7, tail=Tail.drop, temperature=2.0)) == TopKDistill(7, Tail.drop, 2.0)
    assert FullVocabDistill.from_spec(FullVocab(temperature=0.5)) == FullVocabDistill(0.5)


def test_topk_scores_are_the_largest_logprobs_at_temperature_one():
    _, teacher = heads()
    every = teacher.logits().double().log_softmax(-1)
    scores = TopKDistill(4, Tail.bucket, 2.0).score(teacher)
    assert scores.ids.dtype == torch.int32 and scores.logprobs.dtype == torch.float32
    assert torch.equal(scores.ids.long(), every.argsort(-1, descending=True)[:, :4])
    torch.testing.assert_close(scores.logprobs.double(), every.gather(1, scores.ids.long()), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores.log_normaliser.double(), (every / 2.0).logsumexp(-1), rtol=1e-5, atol=1e-5)
    assert TopKDistill(4, Tail.bucket, 1.0).score(teacher).log_normaliser is None


def test_scoring_a_bf16_teacher_gives_fp32_logprobs_without_gradient():
    _, teacher = heads()
    low = VocabHead(teacher.hidden.bfloat16().requires_grad_(), teacher.weight.bfloat16())
    scores = TopKDistill(4, Tail.bucket, 1.0).score(low)
    assert scores.logprobs.dtype == torch.float32 and not scores.logprobs.requires_grad
    kept = FullVocabDistill(1.0).score(low)
    assert kept.hidden.dtype == torch.bfloat16 and not kept.hidden.requires_grad


def test_scoring_in_chunks_scores_every_row():
    generator = torch.Generator().manual_seed(1)
    teacher = VocabHead(torch.randn(CHUNK_ROWS + 3, 4, generator=generator), torch.randn(8, 4, generator=generator))
    scores = TopKDistill(2, Tail.bucket, 1.0).score(teacher)
    assert len(scores) == CHUNK_ROWS + 3
    torch.testing.assert_close(scores.logprobs, teacher.logits().log_softmax(-1).topk(2).values)


def test_padding_is_never_among_the_top_k():
    teacher = VocabHead(torch.ones(2, 3), torch.cat([torch.zeros(4, 3), torch.full((4, 3), 9.0)]), vocab_size=4)
    scores = TopKDistill(4, Tail.bucket, 1.0).score(teacher)
    assert scores.ids.max() < 4
    torch.testing.assert_close(scores.logprobs.exp(), torch.full((2, 4), 0.25))


def test_k_above_the_vocabulary_is_refused():
    _, teacher = heads()
    with pytest.raises(ConfigError, match=rf"distill\.k={VOCABULARY + 1} exceeds the vocabulary of {VOCABULARY}"):
        TopKDistill(VOCABULARY + 1, Tail.bucket, 1.0).score(teacher)
    with pytest.raises(ConfigError, match=r"distill\.k=16 exceeds the vocabulary of 15"):
        TopKDistill(VOCABULARY, Tail.bucket, 1.0).score(replace(teacher, vocab_size=VOCABULARY - 1))


@pytest.mark.parametrize("distill", OPTIONS, ids=str)
def test_scores_stored_a_sample_at_a_time_give_the_same_losses(distill):
    student, teacher = heads()
    scores = distill.score(teacher)
    samples = [scores[0:2], scores[2:2], scores[2:8], scores[torch.tensor([8])]]
    assert [len(sample) for sample in samples] == [2, 0, 6, 1]
    joined = type(scores).concat(samples)
    _, whole = distill.divergence(student, scores, WEIGHTS, 0.4, teacher_head_of=head_of(teacher))
    _, again = distill.divergence(student, joined, WEIGHTS, 0.4, teacher_head_of=head_of(teacher))
    torch.testing.assert_close(again.loss, whole.loss, rtol=0, atol=0)
    # Another order of the samples is another order of the rows, nothing else.
    order = torch.tensor([4, 3, 2, 8, 0, 1, 7, 6, 5])
    _, shuffled = distill.divergence(
        student.select(order), scores[order], WEIGHTS, 0.4, teacher_head_of=head_of(teacher)
    )
    torch.testing.assert_close(shuffled.loss, whole.loss[order], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("distill", OPTIONS, ids=str)
def test_every_option_trains_the_student_only(distill):
    student, teacher = heads()
    teacher.weight.requires_grad_()
    targets = torch.zeros(ROWS, dtype=torch.int32)
    scores = distill.score(teacher)
    total, result = distill.divergence(student, scores, WEIGHTS, 0.5, targets, 0.8, head_of(teacher))
    expected = (student.logits().detach() / 0.8).log_softmax(-1)[:, 0]
    torch.testing.assert_close(result.logprob, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total, result.loss.sum())
    total.backward()
    assert student.hidden.grad.abs().sum() > 0
    assert teacher.weight.grad is None


@pytest.mark.parametrize("tail", Tail)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_topk_of_everything_is_fullvocab(tail, temperature, beta):
    student, teacher = heads()
    topk, full = TopKDistill(VOCABULARY, tail, temperature), FullVocabDistill(temperature)
    _, from_topk = topk.divergence(student, topk.score(teacher), WEIGHTS, beta)
    _, from_full = full.divergence(student, full.score(teacher), WEIGHTS, beta, teacher_head_of=head_of(teacher))
    torch.testing.assert_close(from_topk.loss, from_full.loss, rtol=1e-5, atol=1e-6)
    expected = full_divergence(student, teacher, beta, temperature).loss.detach()
    torch.testing.assert_close(from_full.loss, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("distill", OPTIONS, ids=str)
def test_zero_rows_keep_the_graph(distill):
    student, teacher = heads(rows=0)
    scores = distill.score(teacher)
    total, result = distill.divergence(student, scores, WEIGHTS[:0], 0.5, teacher_head_of=head_of(teacher))
    assert result.loss.shape == result.entropy.shape == result.student_mass.shape == (0,)
    total.backward()
    assert student.hidden.grad.shape == (0, 6)


def test_fullvocab_stores_hidden_rows_and_asks_for_the_head():
    student, teacher = heads()
    scores = FullVocabDistill(1.0).score(teacher)
    assert torch.equal(scores.hidden, teacher.hidden)
    with pytest.raises(AssertionError, match="needs the teacher's head"):
        FullVocabDistill(1.0).divergence(student, scores, WEIGHTS, 0.5)


@pytest.mark.parametrize("kind", ["topk", "hidden"])
def test_a_slice_pickles_its_own_rows_only(kind):
    rows = 4096
    scores = (
        TopKScores(torch.zeros(rows, 4, dtype=torch.int32), torch.zeros(rows, 4), torch.zeros(rows))
        if kind == "topk"
        else HiddenScores(torch.zeros(rows, 8))
    )
    assert len(pickle.dumps(scores[10:12])) < 4000 < len(pickle.dumps(scores))


def test_scores_with_and_without_a_normaliser_are_not_joined():
    _, teacher = heads()
    with_it, without = TopKDistill(4, Tail.drop, 2.0).score(teacher), TopKDistill(4, Tail.drop, 1.0).score(teacher)
    with pytest.raises(AssertionError, match="log_normaliser"):
        TopKScores.concat([with_it, without])
