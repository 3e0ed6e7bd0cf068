"""The GRPO objective against a dense formula with autograd, its weights, and the optimizer steps of a generation."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf.algos.grpo import GRPOObjective, by_token, loss_weights, plan_minibatches
from rlhf.algos.objective import RowBatch, Totals
from rlhf.config.algo import GRPO, KLEstimator, KLIn, LossMean, Ratio
from rlhf.config.train import Train
from rlhf.errors import ConfigError
from rlhf.losses.heads import VocabHead
from rlhf.types import Rollouts, Sequences, offsets_of

COUNTS = (4, 1, 3)
"""Rows of three responses; the last one is masked."""
ROWS, VOCABULARY, TEMPERATURE = sum(COUNTS), 12, 0.7


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def student() -> VocabHead:
    return VocabHead(random(ROWS, 6, seed=0).requires_grad_(), random(VOCABULARY, 6, seed=1))


def own_logprobs(head: VocabHead, targets: Tensor) -> Tensor:
    logits = head.hidden @ head.weight.T / TEMPERATURE
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def batch_of() -> RowBatch:
    """Ratios on both sides of every clip, under either kind of old log-probabilities."""
    targets = torch.arange(ROWS) % VOCABULARY
    own = own_logprobs(student(), targets).detach()
    per_response = [torch.full((count,), value) for count, value in zip(COUNTS, (0.07, 0.2, 0.0), strict=True)]
    return RowBatch(
        weights=torch.cat(per_response).double(),
        targets=targets,
        behaviour_logprobs=own - torch.tensor([0.5, -0.4, 0.05, -0.02, 1.5, 0.3, -2.0, 0.1], dtype=torch.float64),
        advantages=torch.tensor([1.2] * 4 + [-0.8] + [0.5] * 3, dtype=torch.float64),
        teacher_logprobs=own + random(ROWS, seed=3),
        old_logprobs=own - torch.tensor([-0.3, 0.45, 0.01, 0.0, -0.6, 0.2, 0.0, 0.9], dtype=torch.float64),
        row_counts=COUNTS,
    )


def objective_of(**fields: object) -> GRPOObjective:
    given = dict(temperature=TEMPERATURE, recompute_old=False, comparable=True, clip_low=0.2, clip_high=0.3)
    return GRPOObjective(**{**given, **fields})  # type: ignore[arg-type]


def dense_loss(objective: GRPOObjective, head: VocabHead, batch: RowBatch) -> Tensor:
    """The sum over tokens, one at a time, in words of the papers."""
    new = own_logprobs(head, batch.targets)
    old = batch.old_logprobs if objective.recompute_old else batch.behaviour_logprobs
    assert old is not None and batch.advantages is not None and batch.behaviour_logprobs is not None
    assert batch.teacher_logprobs is not None
    loss = torch.zeros((), dtype=torch.float64)
    start = 0
    for count in COUNTS:
        rows = range(start, start + count)
        start += count
        of_response = (new - old)[rows.start : rows.stop].mean().exp()
        for row in rows:
            advantage = float(batch.advantages[row])
            advantage += objective.teacher_kl_coef * float(batch.teacher_logprobs[row] - old[row])
            ratio = (new - old)[row].exp() if objective.ratio is Ratio.token else of_response
            surrogate = torch.minimum(
                ratio * advantage, ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high) * advantage
            )
            if objective.clip_dual is not None and advantage < 0:
                surrogate = surrogate.clamp(min=objective.clip_dual * advantage)
            if objective.importance_cap is not None:
                away = old - batch.behaviour_logprobs
                of_row = away[row] if objective.ratio is Ratio.token else away[rows.start : rows.stop].mean()
                surrogate = surrogate * min(float(of_row.exp()), objective.importance_cap)
            d = batch.teacher_logprobs[row] - new[row]
            kl = {"k1": -d, "k2": d**2 / 2, "k3": d.exp() - d - 1}[objective.kl_estimator.name]
            loss = loss + batch.weights[row] * (objective.kl_coef * kl - surrogate)
    return loss


CASES: dict[str, dict[str, object]] = {
    "plain": {},
    "dual": dict(clip_dual=1.4),
    "gspo": dict(ratio=Ratio.sequence, clip_low=0.02, clip_high=0.03),
    "trainer": dict(recompute_old=True),
    "trainer-capped": dict(recompute_old=True, importance_cap=1.1, clip_dual=1.5),
    "gspo-trainer": dict(ratio=Ratio.sequence, recompute_old=True, importance_cap=0.9),
    "k1": dict(kl_coef=0.3, kl_estimator=KLEstimator.k1),
    "k2": dict(kl_coef=0.3, kl_estimator=KLEstimator.k2),
    "k3": dict(kl_coef=0.3, kl_estimator=KLEstimator.k3, ratio=Ratio.sequence),
    "distillation": dict(teacher_kl_coef=0.5),
    "distillation-trainer": dict(teacher_kl_coef=0.5, recompute_old=True),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_the_dense_formula(case: str) -> None:
    objective, batch, head = objective_of(**CASES[case]), batch_of(), student()
    loss, totals = objective.loss(head, None, batch, None)
    dense = student()
    expected = dense_loss(objective, dense, batch)
    torch.testing.assert_close(loss, expected)
    assert totals.weighted == {"train/loss": pytest.approx(expected.item())}
    loss.backward()
    expected.backward()
    assert head.hidden.grad is not None and dense.hidden.grad is not None
    torch.testing.assert_close(head.hidden.grad, dense.hidden.grad)
    assert bool((head.hidden.grad[:5].abs().sum(-1) > 0).any()), "something is learned"
    assert not head.hidden.grad[5:].any(), "nothing of the masked response"


def test_in_the_first_step_the_old_log_probabilities_are_the_steps_own() -> None:
    """Ratios are 1, the gradient is the plain policy gradient."""
    objective, batch, head = objective_of(recompute_old=True), replace(batch_of(), old_logprobs=None), student()
    loss, totals = objective.loss(head, None, batch, None)
    loss.backward()
    dense = student()
    assert batch.advantages is not None
    (-(batch.weights * batch.advantages * own_logprobs(dense, batch.targets)).sum()).backward()
    assert head.hidden.grad is not None and dense.hidden.grad is not None
    torch.testing.assert_close(head.hidden.grad, dense.hidden.grad)
    means = totals.means()
    assert (means["policy/ratio_mean"], means["policy/ratio_max"], means["policy/approx_kl"]) == (1, 1, 0)


def test_masked_rows_may_hold_anything() -> None:
    batch, head = batch_of(), student()
    objective = objective_of(kl_coef=0.1, recompute_old=True, importance_cap=2.0)
    expected, _ = objective.loss(head, None, batch, None)
    hurt = {}
    for name in ("behaviour_logprobs", "advantages", "teacher_logprobs", "old_logprobs"):
        values = getattr(batch, name).clone()
        values[5:] = torch.tensor([float("inf"), float("nan"), -float("inf")], dtype=torch.float64)
        hurt[name] = values
    other = student()
    loss, totals = objective.loss(other, None, replace(batch, **hurt), None)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert other.hidden.grad is not None and bool(other.hidden.grad.isfinite().all())
    assert all(np.isfinite(value) for value in totals.means().values())


def test_what_is_reported() -> None:
    objective, batch, head = objective_of(clip_dual=1.4), batch_of(), student()
    _, totals = objective.loss(head, None, batch, None)
    own = own_logprobs(head, batch.targets).detach()[:5]
    assert batch.behaviour_logprobs is not None and batch.teacher_logprobs is not None
    offsets = own - batch.behaviour_logprobs[:5]
    d = batch.teacher_logprobs[:5] - own
    p = (head.hidden @ head.weight.T).softmax(-1).detach()[:5]
    assert totals.rows == 5, "masked rows aren't counted"
    assert totals.means() == {
        "train/loss": totals.weighted["train/loss"],
        "train/entropy": pytest.approx(float(-(p * p.log()).sum(-1).mean())),
        "policy/logprob": pytest.approx(float(own.mean())),
        "policy/ratio_mean": pytest.approx(float(offsets.exp().mean())),
        "policy/ratio_max": pytest.approx(float(offsets.exp().max())),
        "policy/clip_low_share": 0.0,
        "policy/clip_high_share": 0.2,
        "policy/clip_dual_share": 0.2,
        "policy/approx_kl": pytest.approx(float((offsets.exp() - 1 - offsets).mean())),
        "policy/teacher_kl": pytest.approx(float((d.exp() - 1 - d).mean())),
        "rollout/logprob_gap_mean": pytest.approx(float(offsets.abs().mean())),
        "rollout/logprob_gap_max": pytest.approx(1.5),
    }
    _, cut = objective_of(recompute_old=True, comparable=False, importance_cap=1.1).loss(head, None, batch, None)
    assert not any(name.startswith("rollout/") for name in cut.means())
    assert batch.old_logprobs is not None
    importance = (batch.old_logprobs - batch.behaviour_logprobs)[:5].exp()
    assert cut.means()["policy/importance_mean"] == pytest.approx(float(importance.mean()))
    assert cut.means()["policy/importance_max"] == pytest.approx(float(importance.max()))
    assert cut.means()["policy/importance_capped_share"] == pytest.approx(float((importance > 1.1).double().mean()))


@pytest.mark.parametrize("case", ["plain", "k3", "trainer-capped", "distillation"])
def test_micro_batches_add_up_to_one_batch(case: str) -> None:
    objective, batch, head = objective_of(**CASES[case]), batch_of(), student()
    whole_loss, whole = objective.loss(head, None, batch, None)
    losses, parts, start = [], [], 0
    for count in (*COUNTS, 0):
        rows = slice(start, start + count)
        start += count
        fields = {name: getattr(batch, name)[rows] for name in vars(batch) if isinstance(getattr(batch, name), Tensor)}
        loss, totals = objective.loss(head.select(rows), None, replace(batch, **fields, row_counts=(count,)), None)
        losses.append(loss)
        parts.append(totals)
    added = functools.reduce(Totals.__add__, parts, Totals())
    torch.testing.assert_close(torch.stack(losses).sum(), whole_loss)
    assert added.means() == {name: pytest.approx(value) for name, value in whole.means().items()}


def test_the_objective_is_the_configurations() -> None:
    algo = GRPO(clip_low=0.1, clip_high=0.4, clip_dual=2.0, kl_coef=0.2, kl_estimator=KLEstimator.k2)
    objective = GRPOObjective.from_spec(algo, 0.5, recompute_old=True, comparable=False)
    assert (objective.clip_low, objective.clip_high, objective.clip_dual) == (0.1, 0.4, 2.0)
    assert (objective.kl_coef, objective.kl_estimator, objective.old_logprobs_at) == (0.2, KLEstimator.k2, 0.5)
    in_reward = GRPOObjective.from_spec(replace(algo, kl_in=KLIn.reward, clip_high=None), 0.5, False, True)
    assert (in_reward.kl_coef, in_reward.clip_high, in_reward.old_logprobs_at) == (0.0, 0.1, None)


# ---- weights and optimizer steps ------------------------------------------------------------------------------------


def rollouts_of(lengths: list[tuple[int, int]], finished: list[bool] | None = None) -> Rollouts:
    total = [prompt + response for prompt, response in lengths]
    responses = sum(response for _, response in lengths)
    sequences = Sequences(
        sample_ids=np.arange(len(lengths)),
        tokens=np.ones(sum(total), dtype=np.int32),
        offsets=offsets_of(total),
        prompt_lengths=np.array([prompt for prompt, _ in lengths], dtype=np.int32),
        logprobs=np.zeros(responses, dtype=np.float32),
    )
    return Rollouts(0, sequences, np.array([True] * len(lengths) if finished is None else finished))


def test_denominators_as_weights() -> None:
    sequences = rollouts_of([(2, 4), (1, 1), (3, 2), (1, 3)]).sequences
    counted = np.array([True, False, True, False])
    for mean, of_each in {
        LossMean.token: [1 / 6, 0, 1 / 6, 0],
        LossMean.sequence: [1 / 8, 0, 1 / 4, 0],
        LossMean.constant: [1 / 20, 0, 1 / 20, 0],
    }.items():
        expected = [weight for weight, length in zip(of_each, (4, 1, 2, 3), strict=True) for _ in range(length)]
        assert loss_weights(sequences, counted, mean, max_new_tokens=10).tolist() == pytest.approx(expected)
        assert not loss_weights(sequences, np.zeros(4, dtype=bool), mean, 10).any(), "nothing is divided by nothing"
    assert by_token(np.array([1, 2, 3, 4], np.float32), sequences).tolist() == [1, 1, 1, 1, 2, 3, 3, 4, 4, 4]


@pytest.mark.parametrize("padding_free", [True, False])
def test_optimizer_steps_take_the_next_samples(padding_free: bool) -> None:
    rollouts = rollouts_of([(2, 3), (1, 5), (4, 1), (2, 2), (3, 3), (1, 1), (2, 6), (1, 2)])
    train = Train(global_batch_samples=4, micro_batch_tokens=12, padding_free=padding_free)
    first, second = plan_minibatches(rollouts, GRPO(num_generations=4, steps_per_generation=2), train, 2, 8)
    for minibatch, rows, tokens in ((first, [0, 1, 2, 3], 11), (second, [4, 5, 6, 7], 12)):
        assert sorted(minibatch.plan.samples) == rows and len(minibatch.plan.ranks) == 2
        assert all(micro.tokens <= 12 for rank in minibatch.plan.ranks for micro in rank)
        assert minibatch.plan.padding_free is padding_free
        assert minibatch.weights.sum() == pytest.approx(1) and np.count_nonzero(minibatch.weights) == tokens
    assert not (first.weights * second.weights).any()


def test_truncated_responses_can_be_masked() -> None:
    rollouts = rollouts_of([(2, 3), (1, 5), (4, 1), (2, 2)], finished=[True, False, True, True])
    (kept,) = plan_minibatches(rollouts, GRPO(mask_truncated=True), Train(), 1, 5)
    assert np.count_nonzero(kept.weights) == 6 and not kept.weights[3:8].any()
    assert kept.weights.sum() == pytest.approx(1)
    (every,) = plan_minibatches(rollouts, GRPO(), Train(), 1, 5)
    assert np.count_nonzero(every.weights) == 11


def test_a_step_of_fewer_samples_than_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="a batch of 1 samples can't feed 2"):
        plan_minibatches(rollouts_of([(1, 1), (1, 1)]), GRPO(steps_per_generation=2), Train(), 2, 5)
