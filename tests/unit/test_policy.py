"""Policy losses on rows, against dense formulas and autograd."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rlhf.config.algo import KLEstimator
from rlhf.losses.divergence import IMPOSSIBLE
from rlhf.losses.heads import VocabHead
from rlhf.losses.policy import (
    LARGEST_LOG_RATIO,
    clipped_surrogate,
    kl_estimate,
    log_ratios,
    mean_log_ratios,
    sampled_logprobs,
)

ROWS, VOCABULARY = 7, 11


def head_of(dtype: torch.dtype = torch.float64) -> VocabHead:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, 5, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(16, 5, generator=generator, dtype=torch.float64).to(dtype)
    return VocabHead(hidden.requires_grad_(), weight.requires_grad_(), vocab_size=VOCABULARY)


TARGETS = torch.tensor([0, 10, 3, 3, 7, 1, 9])


@pytest.mark.parametrize("chunk_rows", [3, 512])
def test_sampled_log_probabilities_are_fp32_without_gradient(chunk_rows: int) -> None:
    head = head_of()
    found = sampled_logprobs(head, TARGETS, 0.6, chunk_rows)
    logits = (head.hidden @ head.weight[:VOCABULARY].T).detach()
    expected = (logits / 0.6).log_softmax(-1).gather(1, TARGETS[:, None])[:, 0].float()
    assert found.dtype == torch.float32 and not found.requires_grad
    torch.testing.assert_close(found, expected)


def test_a_token_the_teacher_does_not_have_is_impossible() -> None:
    targets = TARGETS.clone()
    targets[2] = VOCABULARY  # padding of this head, a token of the student's
    found = sampled_logprobs(head_of(), targets, 1.0)
    assert found[2] == IMPOSSIBLE and bool((found[[0, 1, 3, 4, 5, 6]] > -20).all())


def test_token_ratios_and_their_limit() -> None:
    new = torch.tensor([-1.0, -2.0, -0.1, -90.0], requires_grad=True)
    old = torch.tensor([-1.5, -1.0, -90.0, -0.1])
    ratios = log_ratios(new, old).exp()
    assert ratios.tolist() == pytest.approx([math.exp(0.5), math.exp(-1.0), math.exp(20), math.exp(-20)])
    (gradient,) = torch.autograd.grad(ratios.sum(), new)
    assert gradient.tolist() == pytest.approx([math.exp(0.5), math.exp(-1.0), 0, 0])


def test_the_ratio_of_a_response_is_gspos() -> None:
    """Value and gradient of exp(mean of the log-ratios), whose own gradient autograd takes here."""
    new = torch.tensor([-1.0, -2.0, -0.3, -0.7, -1.1], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.5, -1.0, -0.4, -0.9, -0.2], dtype=torch.float64)
    counts, advantages = (3, 2), torch.tensor([2.0, -1.0], dtype=torch.float64)
    whole = torch.stack([part.mean() for part in (new - old).split(counts)]).exp()
    ratios = (mean_log_ratios(new.detach(), old, counts) + (new - new.detach())).exp()
    torch.testing.assert_close(ratios, torch.repeat_interleave(whole, torch.tensor(counts)))
    weights = torch.tensor([0.25, 0.5], dtype=torch.float64)  # one a response, spread over its tokens
    expected = (weights * whole * advantages * torch.tensor(counts)).sum()
    rows = torch.repeat_interleave(weights * advantages, torch.tensor(counts))
    (one,), (other,) = torch.autograd.grad((rows * ratios).sum(), new), torch.autograd.grad(expected, new)
    torch.testing.assert_close(one, other)


def test_the_ratio_of_an_empty_batch() -> None:
    assert mean_log_ratios(torch.zeros(0), torch.zeros(0), ()).shape == (0,)


def dense_surrogate(ratio: float, advantage: float, low: float, high: float, dual: float | None) -> float:
    """PPO's objective, case by case."""
    if advantage >= 0:
        return -min(ratio, 1 + high) * advantage
    held = max(ratio, 1 - low)
    return -(held if dual is None else min(held, dual)) * advantage


@pytest.mark.parametrize("dual", [None, 3.0])
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.1, 0.4)])
def test_the_clip_is_one_sided_on_each_side(low: float, high: float, dual: float | None) -> None:
    ratios = torch.tensor([0.1, 0.85, 0.95, 1.0, 1.15, 1.3, 1.5, 2.0, 5.0], dtype=torch.float64).repeat(3)
    advantages = torch.repeat_interleave(torch.tensor([1.5, -0.5, 0.0], dtype=torch.float64), 9)
    ratios.requires_grad_()
    losses = clipped_surrogate(ratios, advantages, low, high, dual)
    pairs = zip(ratios.tolist(), advantages.tolist(), strict=True)
    expected = [dense_surrogate(ratio, advantage, low, high, dual) for ratio, advantage in pairs]
    assert losses.tolist() == pytest.approx(expected)
    (gradient,) = torch.autograd.grad(losses.sum(), ratios)
    for found, ratio, advantage in zip(gradient.tolist(), ratios.tolist(), advantages.tolist(), strict=True):
        outside = ratio > 1 + high if advantage > 0 else ratio < 1 - low or (dual is not None and ratio > dual)
        assert found == pytest.approx(0.0 if outside else -advantage)


@pytest.mark.parametrize("estimator", KLEstimator)
def test_estimates_of_the_kl(estimator: KLEstimator) -> None:
    """k1 and k3 are unbiased: their mean under the student is the KL. The gradient of k2's mean is the KL's."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([-0.5, 0.4, 0.6, -0.2], dtype=torch.float64).log_softmax(-1)
    student = logits.log_softmax(-1)
    rows = kl_estimate(student, teacher, estimator)
    d = teacher - student
    formula = {"k1": -d, "k2": d**2 / 2, "k3": d.exp() - 1 - d}[estimator.name]
    torch.testing.assert_close(rows, formula)
    kl = (student.exp() * (student - teacher)).sum()
    p = student.exp().detach()
    if estimator is KLEstimator.k2:
        (one,) = torch.autograd.grad((p * rows).sum(), logits, retain_graph=True)
        (other,) = torch.autograd.grad(kl, logits)
        torch.testing.assert_close(one, other)
    else:
        torch.testing.assert_close((p * rows).sum(), kl)
    if estimator is KLEstimator.k1:
        (gradient,) = torch.autograd.grad((p * rows).sum(), logits)
        torch.testing.assert_close(gradient, torch.zeros(4, dtype=torch.float64)), "as its documentation says"


@pytest.mark.parametrize("estimator", KLEstimator)
def test_the_estimate_stays_finite(estimator: KLEstimator) -> None:
    student = torch.tensor([-1.0, -1000.0, -0.0], requires_grad=True)
    rows: Tensor = kl_estimate(student, torch.tensor([IMPOSSIBLE, -0.5, 0.0]), estimator)
    assert bool(rows.isfinite().all()) and rows[2] == 0
    assert rows[0].abs() <= math.exp(LARGEST_LOG_RATIO)
    (gradient,) = torch.autograd.grad(rows.sum(), student)
    assert bool(gradient.isfinite().all())
