"""The fused losses against the dense ones, in value, statistics and gradient."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from rlhf.config.distill import Tail
from rlhf.distill.topk import TopKDistill
from rlhf.losses import divergence as dense
from rlhf.losses.fused import losses as fused
from rlhf.losses.fused import projection
from rlhf.losses.fused.row_losses import steepness
from rlhf.losses.heads import VocabHead

ROWS, HIDDEN = 7, 5
TARGETS = torch.tensor([0, 3, 11, 5, 5, 1, 2])
WEIGHTS = torch.linspace(0.5, 1.5, ROWS, dtype=torch.float64)


def cross_entropy(head: VocabHead, targets: torch.Tensor) -> torch.Tensor:
    """The formula on logits, a row."""
    return torch.nn.functional.cross_entropy(head.logits(), targets.long(), reduction="none")


def heads(vocabulary: int, teacher_vocabulary: int, **options) -> tuple[VocabHead, VocabHead]:
    """Float64; padded to 26 rows, which must not matter."""
    generator = torch.Generator().manual_seed(vocabulary)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    student = VocabHead(random(ROWS, HIDDEN), random(26, HIDDEN), vocab_size=vocabulary, **options)
    if options:
        student = replace(student, bias=random(26))
    return student, VocabHead(random(ROWS, HIDDEN), random(26, HIDDEN), vocab_size=teacher_vocabulary)


def leaves(head: VocabHead) -> VocabHead:
    bias = None if head.bias is None else head.bias.clone().requires_grad_()
    return replace(
        head, hidden=head.hidden.clone().requires_grad_(), weight=head.weight.clone().requires_grad_(), bias=bias
    )


def gradients(head: VocabHead) -> list[torch.Tensor | None]:
    return [head.hidden.grad, head.weight.grad, None if head.bias is None else head.bias.grad]


def assert_same(dense_rows, dense_head, total, rows, head, weights=WEIGHTS) -> None:
    dense_total = (weights * dense_rows.loss).sum()
    dense_total.backward()
    total.backward()
    torch.testing.assert_close(total, dense_total)
    for name in ("loss", "entropy", "teacher_mass", "student_mass", "logprob"):
        torch.testing.assert_close(getattr(rows, name), getattr(dense_rows, name).detach(), msg=name)
        assert not getattr(rows, name).requires_grad
    for ours, theirs in zip(gradients(head), gradients(dense_head), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.fixture(autouse=True)
def three_rows_at_a_time(monkeypatch):
    monkeypatch.setattr(projection, "CPU_BLOCK_BYTES", 3 * 26 * 8)


OPTIONS = [{}, {"scale": 1.5, "softcap": 9.0}]
BETAS = (0.0, 0.3, 0.5, 1.0)


@pytest.mark.parametrize(
    ("options", "vocabulary", "teacher_vocabulary", "beta", "temperature"),
    [*itertools.product(OPTIONS, (26, 25), (23,), BETAS, (1.0, 2.0)), ({}, 26, 26, 0.5, 1.0)],
)
def test_full_vocabulary(options, vocabulary, teacher_vocabulary, beta, temperature):
    student, teacher = heads(vocabulary, teacher_vocabulary, **options)
    a, b = leaves(student), leaves(student)
    rows = dense.full_divergence(a, teacher, beta, temperature, TARGETS, 0.7)
    assert_same(rows, a, *fused.full_divergence(b, teacher, WEIGHTS, beta, temperature, TARGETS, 0.7), b)


@pytest.mark.parametrize(
    ("options", "k", "tail", "beta", "temperature"),
    list(itertools.product(OPTIONS, (6, 25), Tail, (0.0, 0.3, 1.0), (1.0, 2.0))),
)
def test_topk(options, k, tail, beta, temperature):
    student, teacher = heads(25, 25, **options)
    scores = TopKDistill(k, tail, temperature).score(teacher)
    scores.ids[0, 0], scores.logprobs[1, -1] = 25, -torch.inf  # unused slots
    a, b = leaves(student), leaves(student)
    rows = dense.topk_divergence(a, scores, beta, temperature, tail, TARGETS, 0.7)
    assert_same(rows, a, *fused.topk_divergence(b, scores, WEIGHTS, beta, temperature, tail, TARGETS, 0.7), b)


def test_tokens():
    """Cross entropy, and a loss that isn't linear in the log-probability."""
    student, _ = heads(25, 25)
    a, b = leaves(student), leaves(student)
    (WEIGHTS * cross_entropy(a, TARGETS)).sum().backward()
    total, rows = fused.token_loss(b, TARGETS, WEIGHTS, lambda rows, logprobs: -logprobs)
    total.backward()
    torch.testing.assert_close(rows.loss, cross_entropy(student, TARGETS))
    for ours, theirs in zip(gradients(b), gradients(a), strict=True):
        torch.testing.assert_close(ours, theirs)

    a, b = leaves(student), leaves(student)
    advantages = torch.linspace(-1, 1, ROWS, dtype=torch.float64)
    logprobs = dense.log_probs(a.logits() / 0.7)[torch.arange(ROWS), TARGETS]
    (WEIGHTS * advantages * logprobs.exp()).sum().backward()
    total, rows = fused.token_loss(b, TARGETS, WEIGHTS, lambda rows, lp: advantages[rows] * lp.exp(), 0.7)
    total.backward()
    torch.testing.assert_close(rows.logprob, logprobs.detach())
    for ours, theirs in zip(gradients(b), gradients(a), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", ["full", "topk", "tokens"])
def test_rows_without_weight_are_not_projected(kind, monkeypatch):
    student, teacher = heads(25, 25)
    weights = WEIGHTS * torch.tensor([1, 0, 1, 1, 0, 0, 1])
    scores = TopKDistill(6, Tail.bucket, 1.0).score(teacher)
    projected = []
    original = projection.project

    def counted(raw, hidden, weight):
        projected.append(len(raw))
        return original(raw, hidden, weight)

    monkeypatch.setattr(projection, "project", counted)
    a, b = leaves(student), leaves(student)
    if kind == "full":
        (weights * dense.full_divergence(a, teacher, 0.5, 1.0).loss).sum().backward()
        total, rows = fused.full_divergence(b, teacher, weights, 0.5, 1.0)
    elif kind == "topk":
        (weights * dense.topk_divergence(a, scores, 0.5, 1.0, Tail.bucket).loss).sum().backward()
        total, rows = fused.topk_divergence(b, scores, weights, 0.5, 1.0, Tail.bucket)
    else:
        (weights * cross_entropy(a, TARGETS)).sum().backward()
        total, rows = fused.token_loss(b, TARGETS, weights, lambda rows, logprobs: -logprobs)
    total.backward()
    assert sum(projected) == 4
    assert rows.loss.shape == (ROWS,) and rows.loss[1] == 0 and rows.entropy[4] == 0 and rows.loss[0] > 0
    for ours, theirs in zip(gradients(b), gradients(a), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gradients_are_scaled_for_how_steep_a_loss_is():
    """In float16 a gradient of more than 65,504 would be infinite."""
    head, _ = heads(25, 25)
    head = replace(head, scale=1.0)
    assert [steepness(head, 2.0, beta) for beta in (0, 0.5, 1)] == [1, 1, 1]
    assert [steepness(head, 0.05, beta) for beta in (0, 0.5, 1)] == [20, 20, 400]


def test_the_gradient_of_the_total_is_respected():
    student, teacher = heads(25, 25)
    a, b = leaves(student), leaves(student)
    (3 * fused.full_divergence(a, teacher, WEIGHTS, 0.5, 1.0)[0]).backward()
    fused.full_divergence(b, teacher, 3 * WEIGHTS, 0.5, 1.0)[0].backward()
    for one, other in zip(gradients(a), gradients(b), strict=True):
        torch.testing.assert_close(one, other)


def test_weight_gradient_goes_to_main_grad():
    student, teacher = heads(25, 25)
    student = replace(student, hidden=student.hidden.float(), weight=student.weight.float())
    teacher = replace(teacher, hidden=teacher.hidden.float(), weight=teacher.weight.float())
    a, b = leaves(student), leaves(student)
    weights = WEIGHTS.float()
    fused.full_divergence(a, teacher, weights, 0.5, 1.0)[0].backward()
    b.weight.main_grad = torch.ones_like(b.weight)
    fused.full_divergence(b, teacher, weights, 0.5, 1.0)[0].backward()
    assert b.weight.grad is None
    torch.testing.assert_close(b.weight.main_grad, a.weight.grad + 1)
    torch.testing.assert_close(b.hidden.grad, a.hidden.grad)
    b.hidden.grad = None
    with pytest.raises(AssertionError, match="gradient of the total loss is 1"):
        (2 * fused.full_divergence(b, teacher, weights, 0.5, 1.0)[0]).backward()


def test_frozen_head_and_no_grad():
    student, teacher = heads(25, 25)
    frozen = replace(student, hidden=student.hidden.clone().requires_grad_())
    free = leaves(student)
    fused.full_divergence(frozen, teacher, WEIGHTS, 0.5, 1.0)[0].backward()
    fused.full_divergence(free, teacher, WEIGHTS, 0.5, 1.0)[0].backward()
    assert frozen.weight.grad is None
    torch.testing.assert_close(frozen.hidden.grad, free.hidden.grad)
    free.weight.main_grad = torch.zeros_like(free.weight)
    with torch.no_grad():
        total, rows = fused.full_divergence(free, teacher, WEIGHTS, 0.5, 1.0)
    torch.testing.assert_close(total, (WEIGHTS * rows.loss).sum())
    assert not total.requires_grad and not free.weight.main_grad.any()


def test_kls_of_the_evaluation():
    student, teacher = heads(25, 23)
    for ours, theirs in zip(
        fused.forward_and_reverse_kl(student, teacher), dense.forward_and_reverse_kl(student, teacher), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_peaked_distributions():
    """Logits hundreds apart: probabilities that underflow, a tail that holds nothing, gradients that cancel."""
    exact = [replace(head, scale=300.0) for head in heads(26, 26)]
    student, teacher = (replace(head, hidden=head.hidden.float(), weight=head.weight.float()) for head in exact)
    scores = TopKDistill(6, Tail.bucket, 1.0).score(teacher)
    for beta in BETAS:
        for kind in ("full", "topk"):
            a, b = leaves(exact[0]), leaves(student)
            if kind == "full":
                rows = dense.full_divergence(a, exact[1], beta, 1.0)
                total, ours = fused.full_divergence(b, teacher, WEIGHTS.float(), beta, 1.0)
            else:
                rows = dense.topk_divergence(a, scores, beta, 1.0, Tail.bucket)
                total, ours = fused.topk_divergence(b, scores, WEIGHTS.float(), beta, 1.0, Tail.bucket)
            (WEIGHTS * rows.loss).sum().backward()
            total.backward()
            torch.testing.assert_close(ours.loss.double(), rows.loss.detach(), rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(b.hidden.grad.double(), a.hidden.grad, rtol=1e-6, atol=1e-4)


def test_bfloat16_is_close_and_reads_no_memory_beyond_a_row(monkeypatch):
    """Without the zeros beyond the columns, torch's matmul makes NaN of what it finds there."""
    monkeypatch.setattr(projection, "CPU_BLOCK_BYTES", 2**20)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    student, teacher = (
        VocabHead(random(40, 64), random(251, 64) * 0.2),
        VocabHead(random(40, 32), random(251, 32) * 0.2),
    )
    rounded = replace(student, hidden=student.hidden.bfloat16(), weight=student.weight.bfloat16())
    scores, weights = TopKDistill(8, Tail.bucket, 1.0).score(teacher), torch.full((40,), 1 / 40)
    a, b = leaves(student), leaves(rounded)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(float("nan")))
    exact, _ = fused.topk_divergence(a, scores, weights, 0.5, 1.0, Tail.bucket)
    total, _ = fused.topk_divergence(b, scores, weights, 0.5, 1.0, Tail.bucket)
    (exact + total).backward()
    torch.testing.assert_close(total, exact, rtol=0.02, atol=0)
    for ours, theirs in ((b.hidden.grad, a.hidden.grad), (b.weight.grad, a.weight.grad)):
        assert (ours.float() - theirs).norm() < 0.03 * theirs.norm()


@pytest.mark.parametrize("rows", [1, 2, 100])
def test_rows_at_a_time_dont_matter(rows, monkeypatch):
    student, teacher = heads(25, 25)
    a, b = leaves(student), leaves(student)
    one, _ = fused.full_divergence(a, teacher, WEIGHTS, 0.5, 1.0)
    monkeypatch.setattr(projection, "CPU_BLOCK_BYTES", rows * 26 * 8)
    other, _ = fused.full_divergence(b, teacher, WEIGHTS, 0.5, 1.0)
    (one + other).backward()
    torch.testing.assert_close(one, other)
    for ours, theirs in zip(gradients(a), gradients(b), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_blocks_are_even_and_within_the_budget():
    gpu, two = torch.device("cuda"), projection.TWO_MODELS
    plan = projection.RowBlocks.of(8192, 151_936, torch.float16, gpu, two)
    assert (plan.block, plan.part) == (2048, 1024)
    plan = projection.RowBlocks.of(5000, 151_936, torch.float16, gpu, two)
    assert [block.stop - block.start for block in plan.blocks()] == [1792, 1792, 1416]
    assert list(projection.RowBlocks.of(0, 10, torch.float32, gpu, two).blocks()) == []
    assert list(projection.RowBlocks.of(3, 10, torch.float32, gpu, two).blocks()) == [slice(0, 3)]
