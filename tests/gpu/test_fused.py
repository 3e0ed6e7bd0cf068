"""The Triton kernels against the torch ones, and the fused losses on a GPU against dense float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlhf.config.distill import Tail
from rlhf.distill.topk import TopKDistill
from rlhf.losses import divergence as dense
from rlhf.losses.fused import kernels_torch
from rlhf.losses.fused import losses as fused
from rlhf.losses.fused.kernels_torch import EXCLUDED, Transform
from rlhf.losses.heads import VocabHead

pytestmark = pytest.mark.gpu

ROWS, WIDTH, COLUMNS = 9, 10_016, 10_001


@pytest.fixture
def triton_kernels():
    from rlhf.losses.fused import kernels_triton

    return kernels_triton


def block(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    raw = 4 * torch.randn(ROWS, WIDTH + 16, generator=generator, device="cuda")
    raw[torch.arange(ROWS), torch.arange(ROWS) * 7] = EXCLUDED
    return raw.to(dtype)[:, :WIDTH]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "options", [{}, {"scale": 1.5}, {"scale": 1.5, "softcap": 9.0}, {"bias": True, "softcap": 9.0}]
)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_kernels(triton_kernels, dtype, options, temperature):
    bias = torch.linspace(-1, 1, WIDTH, device="cuda") if options.get("bias") else None
    x, y = block(0, dtype), block(1, dtype)
    y = y.masked_fill(y <= EXCLUDED, 0)  # a teacher has all tokens
    of_x, of_y = Transform(options.get("scale", 1.0), options.get("softcap"), bias), Transform(softcap=20.0)

    def close(ours, theirs, tolerance=2e-5):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=tolerance, atol=tolerance)

    for pair in ((), (y, of_y)):
        x = x.masked_fill(x <= EXCLUDED, 0) if pair else x
        ours = triton_kernels.statistics(x, of_x, COLUMNS, temperature, *pair, gaps=bool(pair))
        theirs = kernels_torch.statistics(x, of_x, COLUMNS, temperature, *pair, gaps=bool(pair))
        for one, other in zip(ours, theirs, strict=True):
            if one is not None:
                close(one.log_z, other.log_z)
                if None not in (one.mean, other.mean):
                    close(one.mean, other.mean)
                if pair:
                    close(one.mean_gap, other.mean_gap, 1e-4)
    both = kernels_torch.statistics(x, of_x, COLUMNS, temperature, y, of_y, gaps=True)
    log_z = [one.log_z for one in both]
    weights = torch.linspace(0.5, 1.5, ROWS, device="cuda") * 100
    for beta in (0.0, 0.3, 1.0):
        moments = [
            kernels.mixture_moments(x, y, of_x, of_y, COLUMNS, temperature, 0.3, *log_z)
            for kernels in (triton_kernels, kernels_torch)
        ]
        for one, other in zip(*moments, strict=True):
            close(one, other)
        a, b = x.clone(), x.clone()
        mean = both[0].mean_gap if beta == 1 else moments[1][0]
        arguments = (of_x, of_y, COLUMNS, temperature, beta, *log_z, mean, weights)
        triton_kernels.divergence_gradient_(a, y, *arguments)
        kernels_torch.divergence_gradient_(b, y, *arguments)
        close(a, b, 1e-3 if dtype is torch.float16 else 3e-5)
        assert (a[:, COLUMNS:] == 0).all()
    x = block(0, dtype)
    a, b = x.clone(), x.clone()
    for kernels, out in ((triton_kernels, a), (kernels_torch, b)):
        kernels.softmax_gradient_(out, of_x, COLUMNS, temperature, weights, log_z[0] - 1, -weights, log_z[0], out)
    close(a, b, 1e-3 if dtype is torch.float16 else 3e-5)
    assert (a[x <= EXCLUDED] == 0).all() and (a[:, COLUMNS:] == 0).all() and a.abs().max() > 0


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["full", "topk"])
def test_bf16_models_against_float64(kind, beta):
    """Hidden rows' gradients are rounded to bfloat16 at the end, and that is the only rounding of that size."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

    rows, hidden, vocabulary = 700, 256, 5_003
    student = VocabHead(random(rows, hidden), random(vocabulary, hidden) * 0.1)
    teacher = VocabHead(random(rows, hidden), random(vocabulary, hidden) * 0.1)
    exact = [VocabHead(head.hidden.double(), head.weight.double()) for head in (student, teacher)]
    weights = torch.rand(rows) / rows
    leaf = replace(student, hidden=student.hidden.requires_grad_(), weight=student.weight.requires_grad_())
    exact_leaf = replace(
        exact[0], hidden=exact[0].hidden.detach().requires_grad_(), weight=exact[0].weight.detach().requires_grad_()
    )
    if kind == "full":
        total, ours = fused.full_divergence(leaf, teacher, weights, beta, 1.0)
        theirs = dense.full_divergence(exact_leaf, exact[1], beta, 1.0)
    else:
        scores = TopKDistill(16, Tail.bucket, 1.0).score(exact[1])
        total, ours = fused.topk_divergence(leaf, scores, weights, beta, 1.0, Tail.bucket)
        theirs = dense.topk_divergence(exact_leaf, scores, beta, 1.0, Tail.bucket)
    total.backward()
    (weights.cuda().double() * theirs.loss).sum().backward()
    torch.testing.assert_close(ours.loss.double(), theirs.loss.detach(), rtol=2e-3, atol=2e-4)
    torch.testing.assert_close(ours.entropy.double(), theirs.entropy, rtol=1e-3, atol=1e-3)
    for one, other in ((leaf.hidden.grad, exact_leaf.hidden.grad), (leaf.weight.grad, exact_leaf.weight.grad)):
        assert (one.double() - other).norm() / other.norm() < 2.5e-3


def test_policy_losses_have_no_bound():
    """Advantages of 1e4: beyond float16, whose gradients would be infinite."""
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(300, 256, generator=generator, device="cuda").bfloat16()
    weight = (torch.randn(5_003, 256, generator=generator, device="cuda") * 0.1).bfloat16()
    targets = torch.randint(0, 5_003, (300,), generator=generator, device="cuda")
    weights = torch.full((300,), 1 / 300)
    a = VocabHead(hidden.clone().requires_grad_(), weight.clone().requires_grad_())
    b = VocabHead(hidden.double().requires_grad_(), weight.double().requires_grad_())
    total, _ = fused.token_loss(a, targets, weights, lambda rows, logprobs: -1e4 * logprobs)
    total.backward()
    (-1e4 * b.logits().log_softmax(-1).gather(1, targets[:, None]).mean()).backward()
    for one, other in ((a.hidden.grad, b.hidden.grad), (a.weight.grad, b.weight.grad)):
        assert (one.double() - other).norm() / other.norm() < 5e-3


@pytest.mark.parametrize("options", [{}, {"softcap": 6.0, "scale": 2.0}, {"bias": True}])
@pytest.mark.parametrize(("vocabulary", "rows", "k"), [(5_003, 700, 16), (1_280, 3, 32), (300, 5, 32)])
def test_top_k_scores(options, vocabulary, rows, k):
    """A vocabulary that fills its groups of columns and one that doesn't, padding in the head, and fewer groups than k;
    the first tokens of a row are neighbours, so that one group holds many of them."""
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(rows, 256, generator=generator, device="cuda").bfloat16()
    weight = (torch.randn(vocabulary + 61, 256, generator=generator, device="cuda") * 0.1).bfloat16()
    weight[:20] = weight[:1] * (1 + torch.arange(20, device="cuda")[:, None] / 64)
    weight[vocabulary:] *= 10  # padding must not win
    bias = torch.linspace(-1, 1, len(weight), device="cuda") if options.get("bias") else None
    head = VocabHead(hidden, weight, bias, options.get("scale", 1.0), options.get("softcap"), vocab_size=vocabulary)
    exact = replace(head, hidden=hidden.double(), weight=weight.double()).logits()
    expected = exact.log_softmax(-1)
    scores = TopKDistill(k, Tail.bucket, 0.7).score(head)
    assert (scores.ids < vocabulary).all() and all(len(set(row)) == k for row in scores.ids.tolist())
    close = dict(rtol=2e-3, atol=4e-3)
    torch.testing.assert_close(scores.logprobs.double(), expected.topk(k).values, **close)
    torch.testing.assert_close(scores.logprobs.double(), expected.gather(1, scores.ids.long()), **close)
    torch.testing.assert_close(scores.log_normaliser.double(), (expected / 0.7).logsumexp(-1), **close)
