"""Divergences against the textbook formula in float64, written here and sharing no code with ours."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf.config.distill import Tail
from rlhf.errors import ConfigError, MisalignedScores
from rlhf.losses.divergence import (
    TAIL_FLOOR,
    forward_and_reverse_kl,
    full_divergence,
    full_rows,
    generalised_jsd,
    log_probs,
    topk_divergence,
    topk_rows,
)
from rlhf.losses.heads import VocabHead
from rlhf.losses.rows import TopKScores

BETAS = [0, 0.1, 0.5, 0.9, 1]
TEMPERATURES = [0.7, 1, 2]
ROWS, VOCABULARY = 4, 20


def textbook(student, teacher, beta):
    """JSD_beta of probabilities, with 0 log 0 = 0."""
    mixture = beta * teacher + (1 - beta) * student
    if beta == 0:
        return torch.special.xlogy(teacher, teacher / student).sum(-1)
    if beta == 1:
        return torch.special.xlogy(student, student / teacher).sum(-1)
    to_teacher = torch.special.xlogy(teacher, teacher / mixture).sum(-1)
    to_student = torch.special.xlogy(student, student / mixture).sum(-1)
    return beta * to_teacher + (1 - beta) * to_student


def textbook_topk(logits, teacher_logits, beta, temperature, k, tail):
    """From the logits of both sides; `None` as tail is the whole vocabulary."""
    student, teacher = torch.softmax(logits / temperature, -1), torch.softmax(teacher_logits / temperature, -1)
    if tail is None:
        return textbook(student, teacher, beta)
    ids = teacher_logits.argsort(-1, descending=True)[:, :k]
    outside = torch.ones_like(teacher).scatter(1, ids, 0.0)
    sides = []
    for probability in (student, teacher):
        inside = probability.gather(1, ids)
        if tail is Tail.renormalise:
            inside = inside / inside.sum(-1, keepdim=True)
        if tail is Tail.bucket and k < probability.shape[1]:
            inside = torch.cat([inside, (probability * outside).sum(-1, keepdim=True)], -1)
        sides.append(inside)
    return textbook(*sides, beta)


def random_logits(seed, rows=ROWS, vocabulary=VOCABULARY, spread=2.0):
    return spread * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def scores_of(teacher_logits, k, temperature=1.0):
    """What a teacher returns."""
    every = teacher_logits.log_softmax(-1)
    logprobs, ids = every.topk(k)
    normaliser = None if temperature == 1 else (every / temperature).logsumexp(-1).float()
    return TopKScores(ids.int(), logprobs.float(), normaliser)


def head_of(logits):
    """A head with exactly these logits."""
    return VocabHead(logits, torch.eye(logits.shape[1], dtype=logits.dtype))


def value_and_gradient(loss_of, logits):
    leaf = logits.clone().requires_grad_()
    loss = loss_of(leaf)
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    return loss.detach(), gradient


# ---- value and gradient


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("k", [1, 8, VOCABULARY])
@pytest.mark.parametrize("tail", Tail)
def test_topk_is_the_textbook_formula(beta, temperature, k, tail):
    logits, teacher_logits = random_logits(1), random_logits(2)
    scores = scores_of(teacher_logits, k, temperature)
    loss, gradient = value_and_gradient(
        lambda x: topk_divergence(head_of(x), scores, beta, temperature, tail).loss, logits
    )
    expected_loss, expected_gradient = value_and_gradient(
        lambda x: textbook_topk(x, teacher_logits.double(), beta, temperature, k, tail), logits.double()
    )
    torch.testing.assert_close(loss, expected_loss.float(), rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(gradient, expected_gradient.float(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_full_vocabulary_is_the_textbook_formula(beta, temperature):
    logits, teacher_logits = random_logits(1), random_logits(2)
    loss, gradient = value_and_gradient(
        lambda x: full_divergence(head_of(x), head_of(teacher_logits), beta, temperature).loss, logits
    )
    expected_loss, expected_gradient = value_and_gradient(
        lambda x: textbook_topk(x, teacher_logits.double(), beta, temperature, None, None), logits.double()
    )
    torch.testing.assert_close(loss, expected_loss.float(), rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(gradient, expected_gradient.float(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("tail", Tail)
def test_whole_vocabulary_as_top_k_is_the_full_divergence(beta, temperature, tail):
    # Spread 15: peaked rows, where a bucket made of rounding would show.
    logits, teacher_logits = random_logits(3, spread=15.0), random_logits(4, spread=15.0)
    scores = scores_of(teacher_logits, VOCABULARY, temperature)
    loss, gradient = value_and_gradient(lambda x: topk_rows(x, scores, beta, temperature, tail), logits)
    full_loss, full_gradient = value_and_gradient(lambda x: full_rows(x, teacher_logits, beta, temperature), logits)
    torch.testing.assert_close(loss, full_loss, rtol=1e-5, atol=1e-6)
    # fp32 log-probabilities near -100 are stored to 4e-6, and the temperature divides that.
    torch.testing.assert_close(gradient, full_gradient, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("tail", Tail)
def test_gradcheck_topk(beta, tail):
    scores = scores_of(random_logits(6, rows=2, vocabulary=7), 3, temperature=1.5)
    hidden = random_logits(5, rows=2, vocabulary=4).double().requires_grad_()
    weight = random_logits(7, rows=7, vocabulary=4).double().requires_grad_()

    def loss(hidden, weight):
        head = VocabHead(hidden, weight, scale=0.7, softcap=5.0)
        return topk_divergence(head, scores, beta, 1.5, tail, chunk_rows=1).loss

    assert torch.autograd.gradcheck(loss, (hidden, weight))


@pytest.mark.parametrize("beta", BETAS)
def test_gradcheck_full_and_peaked_bucket(beta):
    logits = random_logits(5, rows=2, vocabulary=7).double().requires_grad_()
    teacher_logits = random_logits(6, rows=2, vocabulary=7).double()
    assert torch.autograd.gradcheck(lambda x: full_rows(x, teacher_logits, beta, 0.8), (logits,))
    peaked = scores_of(40 * teacher_logits, 2)
    assert torch.autograd.gradcheck(lambda x: topk_rows(x, peaked, beta, 1.0, Tail.bucket), (logits,))


@pytest.mark.parametrize("beta", BETAS)
def test_gradcheck_of_both_sides_of_the_divergence(beta):
    student = random_logits(1).double().log_softmax(-1).requires_grad_()
    teacher = random_logits(2).double().log_softmax(-1).requires_grad_()
    assert torch.autograd.gradcheck(lambda s, t: generalised_jsd(s, t, beta), (student, teacher))
    assert torch.autograd.gradcheck(lambda s, t: generalised_jsd(s, t, beta, normalised=False), (student, teacher))


def test_limits_are_the_two_kls_and_the_middle_is_symmetric():
    student, teacher = random_logits(1).log_softmax(-1), random_logits(2).log_softmax(-1)
    forward = torch.nn.functional.kl_div(student, teacher, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(generalised_jsd(student, teacher, 0), forward)
    torch.testing.assert_close(generalised_jsd(teacher, student, 1), forward)
    torch.testing.assert_close(generalised_jsd(student, teacher, 0.3), generalised_jsd(teacher, student, 0.7))
    # JSD_beta / beta tends to the forward KL.
    small_beta = generalised_jsd(student.double(), teacher.double(), 1e-6) / 1e-6
    torch.testing.assert_close(small_beta.float(), forward, rtol=1e-3, atol=0)


def test_unnormalised_rows_are_summed_as_they_are():
    student, teacher = torch.tensor([[0.5, 0.2]]).log(), torch.tensor([[0.3, 0.1]]).log()
    expected = 0.3 * math.log(0.3 / 0.5) + 0.1 * math.log(0.1 / 0.2)
    assert expected < 0
    assert generalised_jsd(student, teacher, 0, normalised=False).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("lead", [0.0, 12.0, 16.0])
@pytest.mark.parametrize("offset", [0.0, 200.0])
def test_log_probs_are_normalised_over_a_large_vocabulary(lead, offset):
    """`torch.log_softmax` on the CPU misses by 1e-4 here: many small outcomes beside a large one."""
    logits = random_logits(11, rows=2, vocabulary=150_000, spread=0.5)
    logits[:, 7] += lead
    logits = logits + offset
    torch.testing.assert_close(log_probs(logits).double(), logits.double().log_softmax(-1), rtol=0, atol=3e-6)
    for beta in (0, 0.5, 1):
        loss, gradient = value_and_gradient(
            lambda x, beta=beta: topk_rows(x, scores_exact(logits), beta, 1.0, Tail.bucket), logits
        )
        assert loss.min() > -1e-7 and loss.max() < 1e-6
        assert gradient.abs().max() < 5e-6


def scores_exact(logits):
    logprobs, ids = logits.double().log_softmax(-1).topk(64)
    return TopKScores(ids, logprobs.float())


# ---- the same distribution, peaked distributions, impossible outcomes


@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0, 200.0])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("temperature", [1, 2])
def test_student_equal_to_teacher_has_no_loss_and_no_gradient(spread, beta, temperature):
    logits = random_logits(8, rows=16, spread=spread)
    losses = {"full": lambda x: full_rows(x, logits, beta, temperature)}
    for tail in Tail:
        for k in (1, 8):
            scores = scores_of(logits, k, temperature)
            losses[f"{tail} {k}"] = lambda x, s=scores, t=tail: topk_rows(x, s, beta, temperature, t)
    for name, loss_of in losses.items():
        loss, gradient = value_and_gradient(loss_of, logits)
        assert loss.abs().max() < 1e-6, name
        if (
            "drop" not in name or 0 < beta < 1
        ):  # drop's KLs aren't smallest at the teacher; that is why it isn't the default
            assert gradient.abs().max() < 3e-6, name


def peaked_pairs(gap):
    """A teacher certain of token 0; students that agree, are flat, are certain of another token, or rather sure."""
    teacher = -0.01 * torch.arange(VOCABULARY).repeat(4, 1)  # no ties: the top 8 are tokens 0 to 7
    teacher[:, 0] = gap
    student = torch.zeros(4, VOCABULARY)
    student[0] = teacher[0]
    student[2, 5] = gap
    student[3, 0] = 5.0
    return student, teacher


@pytest.mark.parametrize("gap", [10.0, 15.0, 30.0, 100.0, 200.0])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("temperature", [0.7, 1])
def test_peaked_teacher_is_finite_and_never_negative(gap, beta, temperature):
    logits, teacher_logits = peaked_pairs(gap)
    losses = {"full": lambda x: full_rows(x, teacher_logits, beta, temperature)}
    for tail in (Tail.bucket, Tail.renormalise):
        for k in (1, 8):
            scores = scores_of(teacher_logits, k, temperature)
            losses[f"{tail} {k}"] = lambda x, s=scores, t=tail: topk_rows(x, s, beta, temperature, t)
    for name, loss_of in losses.items():
        loss, gradient = value_and_gradient(loss_of, logits)
        assert loss.isfinite().all() and gradient.isfinite().all(), name
        assert (loss >= -1e-7).all(), (name, loss)
        assert loss[0] < 1e-6, name
        if "renormalise" not in name:
            assert (loss[1:3] > 0.05).all(), (name, loss)


@pytest.mark.parametrize("gap", [30.0, 100.0])
@pytest.mark.parametrize("beta", [0, 0.1, 0.5, 0.9])
def test_floored_bucket_stays_close_to_the_exact_one(gap, beta):
    logits, teacher_logits = peaked_pairs(gap)
    loss, gradient = value_and_gradient(
        lambda x: topk_rows(x, scores_of(teacher_logits, 8), beta, 1.0, Tail.bucket), logits
    )
    expected_loss, expected_gradient = value_and_gradient(
        lambda x: textbook_topk(x, teacher_logits.double(), beta, 1.0, 8, Tail.bucket), logits.double()
    )
    torch.testing.assert_close(loss, expected_loss.float(), rtol=0, atol=1e-3)
    torch.testing.assert_close(gradient, expected_gradient.float(), rtol=0, atol=1e-4)


def test_peaked_teacher_in_reverse_charges_the_tail_by_the_floor():
    """Exact reverse KL has no bound in the gap; ours is bounded, and still pushes the student out of the tail."""
    student = torch.zeros(3, VOCABULARY)
    student[:, 8:] = torch.tensor([[-5.0], [0.0], [5.0]])  # ever more mass outside the top 8
    _, teacher_logits = peaked_pairs(100.0)
    scores = scores_of(teacher_logits[:3], 8)
    only_tail = student.clone()
    only_tail[:, :8] = -50.0
    loss = topk_rows(only_tail, scores, 1, 1.0, Tail.bucket)
    torch.testing.assert_close(loss, torch.full((3,), -math.log(TAIL_FLOOR)), rtol=1e-4, atol=1e-4)
    # A student that shares its mass between the teacher's token and the tail.
    student[:, 1:8] = -50.0
    loss, gradient = value_and_gradient(lambda x: topk_rows(x, scores, 1, 1.0, Tail.bucket), student)
    assert (loss.diff() > 0).all()
    assert (gradient[:, 0] < 0).all() and (gradient[:, 8:] > 0).all()


@pytest.mark.parametrize("beta", BETAS)
def test_bucket_is_continuous_where_the_floor_begins(beta):
    logits = random_logits(9, rows=1)

    def at(tail_mass):
        scores = TopKScores(torch.tensor([[3]]), torch.tensor([[math.log1p(-tail_mass)]], dtype=torch.float64), None)
        return topk_rows(logits.double(), scores, beta, 1.0, Tail.bucket).item()

    assert at(TAIL_FLOOR * (1 - 1e-4)) == pytest.approx(at(TAIL_FLOOR * (1 + 1e-4)), abs=2e-4)
    assert at(1e-30) == pytest.approx(at(0.0), abs=1e-9)


@pytest.mark.parametrize("beta", BETAS)
def test_bucket_keeps_a_small_student_tail_that_subtraction_would_lose(beta):
    """Tail probability e^-25: 1 - sum(p) is 0 or rounding in fp32, the complement's logsumexp is right."""
    logits = torch.full((1, VOCABULARY), -25.0)
    logits[0, 0] = 0.0
    teacher_logits = random_logits(10, rows=1)
    teacher_logits[0, 0] = 4.0
    loss, gradient = value_and_gradient(
        lambda x: topk_rows(x, scores_of(teacher_logits, 1), beta, 1.0, Tail.bucket), logits
    )
    expected_loss, expected_gradient = value_and_gradient(
        lambda x: textbook_topk(x, teacher_logits.double(), beta, 1.0, 1, Tail.bucket), logits.double()
    )
    torch.testing.assert_close(loss, expected_loss.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("fill", [-math.inf, -1e9, torch.finfo(torch.float32).min])
def test_outcomes_impossible_on_both_sides_change_nothing(beta, fill):
    logits, teacher_logits = random_logits(1), random_logits(2)
    masked, masked_teacher = torch.full((2, ROWS, VOCABULARY + 3), fill)
    masked[:, :VOCABULARY], masked_teacher[:, :VOCABULARY] = logits, teacher_logits
    plain_loss, plain_gradient = value_and_gradient(lambda x: full_rows(x, teacher_logits, beta, 1.0), logits)
    loss, gradient = value_and_gradient(lambda x: full_rows(x, masked_teacher, beta, 1.0), masked)
    torch.testing.assert_close(loss, plain_loss)
    torch.testing.assert_close(gradient[:, :VOCABULARY], plain_gradient)
    assert gradient[:, VOCABULARY:].eq(0).all()
    for tail in Tail:
        scores = scores_of(masked_teacher, 8)
        plain_loss, _ = value_and_gradient(lambda x, s=scores, t=tail: topk_rows(x, s, beta, 1.0, t), logits)
        loss, gradient = value_and_gradient(lambda x, s=scores, t=tail: topk_rows(x, s, beta, 1.0, t), masked)
        torch.testing.assert_close(loss, plain_loss)
        assert gradient[:, VOCABULARY:].eq(0).all()


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("normalised", [True, False])
def test_masked_log_probabilities_contribute_exactly_zero(beta, normalised):
    masked = torch.full((ROWS, 2), -math.inf)
    student, teacher = random_logits(1).log_softmax(-1), random_logits(2).log_softmax(-1)
    plain, _ = value_and_gradient(lambda s: generalised_jsd(s, teacher, beta, normalised), student)
    wide, gradient = value_and_gradient(
        lambda s: generalised_jsd(s, torch.cat([masked, teacher], 1), beta, normalised), torch.cat([masked, student], 1)
    )
    torch.testing.assert_close(wide, plain)
    assert gradient[:, :2].eq(0).all()
    both, gradient = value_and_gradient(lambda s: generalised_jsd(s, masked, beta, normalised), masked)
    assert both.eq(0).all() and gradient.eq(0).all()


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("side", ["student", "teacher"])
def test_outcome_impossible_on_one_side(beta, side):
    """Exact where the textbook is finite; where it isn't, impossible counts as e^-100 and the student leaves it."""
    logits, teacher_logits = random_logits(1), random_logits(2)
    (logits if side == "student" else teacher_logits)[:, 4] = -math.inf
    loss, gradient = value_and_gradient(lambda x: full_rows(x, teacher_logits, beta, 1.0), logits)
    assert loss.isfinite().all() and gradient.isfinite().all() and (loss > 0).all()
    expected = textbook_topk(logits.double(), teacher_logits.double(), beta, 1.0, None, None)
    infinite = (beta == 0 and side == "student") or (beta == 1 and side == "teacher")
    assert expected.isinf().all() == infinite
    if not infinite:
        torch.testing.assert_close(loss, expected.float(), rtol=1e-5, atol=1e-6)
    if infinite:
        almost = [x.double().softmax(-1).clamp(min=math.exp(-100)) for x in (logits, teacher_logits)]
        torch.testing.assert_close(loss, textbook(*almost, beta).float(), rtol=1e-5, atol=1e-6)
    if side == "teacher" and infinite:
        assert (gradient[:, 4] > 0).all(), "mass on the impossible token is pushed down"
    if side == "student":
        assert gradient[:, 4].eq(0).all()


@pytest.mark.parametrize("beta", [0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("tail", [Tail.bucket, Tail.renormalise])
def test_whole_vocabulary_with_an_outcome_the_teacher_finds_impossible(beta, tail):
    """At k = V it isn't a place left unused: the student's mass there counts, as in the full divergence."""
    logits, teacher_logits = random_logits(1), random_logits(2)
    teacher_logits[:, 4] = -math.inf
    scores = scores_of(teacher_logits, VOCABULARY)
    loss, gradient = value_and_gradient(lambda x: topk_rows(x, scores, beta, 1.0, tail), logits)
    full_loss, full_gradient = value_and_gradient(lambda x: full_rows(x, teacher_logits, beta, 1.0), logits)
    torch.testing.assert_close(loss, full_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, full_gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("tail", Tail)
@pytest.mark.parametrize("filler", [-1, 3, VOCABULARY])
def test_unused_places_of_the_top_k_change_nothing(beta, tail, filler):
    logits, used = random_logits(1), scores_of(random_logits(2), 5)
    padded = TopKScores(
        torch.cat([used.ids, torch.full((ROWS, 2), filler, dtype=torch.int32)], 1),
        torch.cat([used.logprobs, torch.full((ROWS, 2), -math.inf)], 1),
    )
    loss, gradient = value_and_gradient(lambda x: topk_rows(x, used, beta, 1.0, tail), logits)
    padded_loss, padded_gradient = value_and_gradient(lambda x: topk_rows(x, padded, beta, 1.0, tail), logits)
    torch.testing.assert_close(padded_loss, loss)
    torch.testing.assert_close(padded_gradient, gradient)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("tail", Tail)
def test_rows_with_no_usable_place_have_no_nan(beta, tail):
    empty = TopKScores(torch.full((ROWS, 3), -1), torch.full((ROWS, 3), -math.inf))
    loss, gradient = value_and_gradient(lambda x: topk_rows(x, empty, beta, 1.0, tail), random_logits(1))
    assert loss.abs().max() < 1e-6 and gradient.abs().max() < 1e-6


# ---- vocabularies, temperature, chunks, dtypes


@pytest.mark.parametrize("beta", BETAS)
def test_padded_vocabularies_are_compared_over_the_shared_part(beta):
    generator = torch.Generator().manual_seed(0)
    hidden, teacher_hidden = torch.randn(2, ROWS, 6, generator=generator)
    weight, teacher_weight = torch.randn(24, 6, generator=generator), torch.randn(32, 6, generator=generator)
    exact = full_divergence(VocabHead(hidden, weight[:20]), VocabHead(teacher_hidden, teacher_weight[:20]), beta, 1.0)
    padded = full_divergence(
        VocabHead(hidden, weight, vocab_size=20), VocabHead(teacher_hidden, teacher_weight), beta, 1.0
    )
    torch.testing.assert_close(padded.loss, exact.loss)
    torch.testing.assert_close(padded.entropy, exact.entropy)
    longer_student = full_divergence(
        VocabHead(hidden, weight), VocabHead(teacher_hidden, teacher_weight, vocab_size=20), beta, 1.0
    )
    torch.testing.assert_close(longer_student.loss, exact.loss)


@pytest.mark.parametrize("tail", Tail)
def test_teacher_tokens_beyond_the_students_vocabulary_belong_to_the_tail(tail):
    logits, teacher_logits = random_logits(1), random_logits(2, vocabulary=VOCABULARY + 1)
    teacher_logits[:, VOCABULARY] = 3.0
    scores = scores_of(teacher_logits, 6)
    assert (scores.ids == VOCABULARY).any(1).all()
    inside = scores.ids < VOCABULARY
    without = TopKScores(scores.ids[inside].reshape(ROWS, 5), scores.logprobs[inside].reshape(ROWS, 5))
    torch.testing.assert_close(topk_rows(logits, scores, 0.5, 1.0, tail), topk_rows(logits, without, 0.5, 1.0, tail))


@pytest.mark.parametrize("tail", [Tail.bucket, Tail.drop])
def test_temperature_without_the_normaliser_is_refused(tail):
    scores = scores_of(random_logits(2), 4)
    with pytest.raises(ConfigError, match=rf"distill\.temperature=2\.0 with distill\.tail={tail.name}"):
        topk_divergence(head_of(random_logits(1)), scores, 0.5, 2.0, tail)


def test_renormalise_needs_no_normaliser():
    logits, teacher_logits = random_logits(1), random_logits(2)
    torch.testing.assert_close(
        topk_rows(logits, scores_of(teacher_logits, 4), 0.5, 2.0, Tail.renormalise).double(),
        textbook_topk(logits.double(), teacher_logits.double(), 0.5, 2.0, 4, Tail.renormalise),
        rtol=1e-5,
        atol=1e-6,
    )


def big_pair(rows=11):
    generator = torch.Generator().manual_seed(3)
    student = VocabHead(torch.randn(rows, 6, generator=generator), torch.randn(20, 6, generator=generator))
    teacher = VocabHead(torch.randn(rows, 8, generator=generator), torch.randn(20, 8, generator=generator))
    student.hidden.requires_grad_()
    student.weight.requires_grad_()
    return student, teacher


def divergences(student, teacher, chunk_rows):
    targets = torch.arange(len(student)) % 20
    scores = scores_of(teacher.logits(), 5, temperature=2.0)
    full = full_divergence(student, teacher, 0.3, 2.0, targets, 0.7, chunk_rows)
    return [full, *(topk_divergence(student, scores, 0.3, 2.0, tail, targets, 0.7, chunk_rows) for tail in Tail)]


@pytest.mark.parametrize("chunk_rows", [1, 4, 11, 512])
def test_chunking_changes_neither_losses_nor_gradients(chunk_rows):
    student, teacher = big_pair()
    weights = torch.linspace(0.1, 1.0, 11)
    for whole, chunked in zip(
        divergences(student, teacher, 11), divergences(student, teacher, chunk_rows), strict=True
    ):
        for name in ("loss", "entropy", "teacher_mass", "student_mass", "logprob"):
            torch.testing.assert_close(getattr(chunked, name), getattr(whole, name), rtol=1e-6, atol=1e-7)
        parameters = (student.hidden, student.weight)
        expected = torch.autograd.grad((whole.loss * weights).sum(), parameters)
        found = torch.autograd.grad((chunked.loss * weights).sum(), parameters)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_chunks_keep_no_logits_for_backward():
    student, teacher = big_pair()
    kept: list[int] = []

    def remember(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        full_divergence(student, teacher, 0.5, 1.0, chunk_rows=4)
    assert max(kept, default=0) <= student.hidden.numel() + student.weight.numel()
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        full_divergence(student, teacher, 0.5, 1.0, chunk_rows=11)
    assert max(kept) == 11 * 20


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(rows):
    student, teacher = big_pair(rows)
    for result in divergences(student, teacher, 512):
        for name in ("loss", "entropy", "teacher_mass", "student_mass", "logprob"):
            assert getattr(result, name).shape == (rows,)
        gradients = torch.autograd.grad(result.loss.sum(), (student.hidden, student.weight))
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert (gradients[1].abs().sum() > 0) == (rows == 1)
    forward, reverse = forward_and_reverse_kl(student, teacher)
    assert forward.shape == reverse.shape == (rows,)


@pytest.mark.parametrize("beta", BETAS)
def test_bf16_heads_are_close_to_fp32(beta):
    student, teacher = big_pair()
    low_student = VocabHead(student.hidden.detach().bfloat16().requires_grad_(), student.weight.detach().bfloat16())
    low_teacher = VocabHead(teacher.hidden.bfloat16(), teacher.weight.bfloat16())
    # Everything after the bf16 logits is fp32: the same as fp32 arithmetic on those logits.
    low = full_divergence(low_student, low_teacher, beta, 1.0)
    assert low.loss.dtype == torch.float32
    torch.testing.assert_close(low.loss, full_rows(low_student.logits(), low_teacher.logits(), beta, 1.0))
    high = full_divergence(student, teacher, beta, 1.0)
    torch.testing.assert_close(low.loss, high.loss, rtol=0.1, atol=0.02)
    (low_gradient,) = torch.autograd.grad(low.loss.sum(), low_student.hidden)
    (high_gradient,) = torch.autograd.grad(high.loss.sum(), student.hidden)
    assert (low_gradient.float() - high_gradient).norm() < 0.05 * high_gradient.norm()
    scores = scores_of(teacher.logits(), 5)
    torch.testing.assert_close(
        topk_divergence(low_student, scores, beta, 1.0, Tail.bucket).loss,
        topk_divergence(student, scores, beta, 1.0, Tail.bucket).loss,
        rtol=0.1,
        atol=0.02,
    )


# ---- statistics, evaluation, alignment


def test_statistics_are_of_temperature_one_and_detached():
    student, teacher = big_pair()
    probability = student.logits().detach().double().softmax(-1)
    teacher_probability = teacher.logits().double().softmax(-1)
    ids = teacher_probability.topk(5).indices
    targets = torch.arange(11) % 20
    full, *topks = divergences(student, teacher, 4)
    for result in (full, *topks):
        assert result.loss.requires_grad
        others = (result.entropy, result.teacher_mass, result.student_mass, result.logprob)
        assert not any(value.requires_grad for value in others)
        torch.testing.assert_close(
            result.entropy.double(), torch.special.entr(probability).sum(-1), rtol=1e-5, atol=1e-6
        )
        expected = (student.logits().detach().double() / 0.7).log_softmax(-1).gather(1, targets[:, None])[:, 0]
        torch.testing.assert_close(result.logprob.double(), expected, rtol=1e-5, atol=1e-5)
    assert full.teacher_mass.eq(1).all() and full.student_mass.eq(1).all()
    for result in topks:
        torch.testing.assert_close(
            result.student_mass.double(), probability.gather(1, ids).sum(-1), rtol=1e-5, atol=1e-6
        )
        expected = teacher_probability.gather(1, ids).sum(-1)
        torch.testing.assert_close(result.teacher_mass.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sampler_temperature", [0.0, 1.0])
def test_greedy_logprobs_are_at_temperature_one(sampler_temperature):
    student, teacher = big_pair()
    targets = torch.arange(11, dtype=torch.int32) % 20
    result = full_divergence(student, teacher, 0.5, 1.0, targets, sampler_temperature)
    expected = student.logits().detach().log_softmax(-1)[torch.arange(11), targets.long()]
    torch.testing.assert_close(result.logprob, expected)


def test_no_targets_no_logprob():
    student, teacher = big_pair()
    assert full_divergence(student, teacher, 0.5, 1.0, chunk_rows=4).logprob is None


def test_only_the_student_gets_a_gradient():
    student, teacher = big_pair()
    teacher.weight.requires_grad_()
    full_divergence(student, teacher, 0.5, 1.0).loss.sum().backward()
    assert teacher.weight.grad is None
    assert student.weight.grad is not None


@pytest.mark.parametrize("chunk_rows", [4, 512])
def test_forward_and_reverse_kl(chunk_rows):
    student, teacher = big_pair()
    forward, reverse = forward_and_reverse_kl(student, teacher, chunk_rows)
    assert not forward.requires_grad and not reverse.requires_grad
    probability, teacher_probability = (
        student.logits().detach().double().softmax(-1),
        teacher.logits().double().softmax(-1),
    )
    torch.testing.assert_close(forward.double(), textbook(probability, teacher_probability, 0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(reverse.double(), textbook(probability, teacher_probability, 1), rtol=1e-5, atol=1e-6)


def test_other_number_of_rows_is_refused():
    student, teacher = big_pair()
    with pytest.raises(MisalignedScores, match="scored 3 rows but the student has 11"):
        full_divergence(student, teacher.select(slice(3)), 0.5, 1.0)
    with pytest.raises(MisalignedScores, match="scored 2 rows but the student has 11"):
        topk_divergence(student, scores_of(random_logits(1, rows=2), 3), 0.5, 1.0, Tail.bucket)
    with pytest.raises(MisalignedScores):
        forward_and_reverse_kl(student, teacher.select(slice(3)))
