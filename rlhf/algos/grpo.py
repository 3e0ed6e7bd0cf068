"""Group-relative policy optimisation (arXiv 2402.03300) and its relatives: the objective, and the batches of a
generation. What the advantages are: `rlhf.algos.advantages`.

Which log-probabilities are compared. pi_b: what the engine sampled from, at `rollout.temperature` (its processed
log-probabilities). All others are the trainer's, over the whole vocabulary at the same temperature.

    old_logprobs=sampler    ratio = pi / pi_b
    old_logprobs=trainer    ratio = pi / pi_old, with pi_old before the first optimizer step of the generation;
                            times min(pi_old / pi_b, importance_cap), a constant, where there is a cap;
                            a response's, as the ratio is, under ratio=sequence

top_p, top_k and min_p renormalise pi_b over tokens that the trainer doesn't know, so pi / pi_b would be below 1 from
the start, by a factor that differs from row to row. pi / pi_old has no such factor: both are whole. What remains is
that tokens outside were never tried, and that those inside were tried more often than pi_old would have: the cap
corrects the latter, since pi_b is what truly was sampled from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from rlhf.algos.objective import RowBatch, Totals
from rlhf.batching import plan_batch
from rlhf.config.algo import GRPO, KLEstimator, KLIn, LossMean, Ratio
from rlhf.config.train import Train
from rlhf.losses.fused.losses import token_loss
from rlhf.losses.heads import VocabHead
from rlhf.losses.policy import LARGEST_LOG_RATIO, clipped_surrogate, kl_estimate, log_ratios, mean_log_ratios
from rlhf.types import MiniBatch, Rollouts, Sequences


@dataclass(frozen=True, kw_only=True)
class GRPOObjective:
    """Loss = sum over response tokens of weight * (clipped surrogate * importance + kl_coef * KL estimate).

    Rows of weight 0 (`algo.mask_truncated`) have no part in the loss or in what is reported.
    """

    temperature: float
    """The sampler's, which all log-probabilities are at."""
    recompute_old: bool
    """See the module: `old_logprobs=trainer`."""
    comparable: bool
    """The sampler's distribution is whole, so that the gap to the trainer's can be measured."""
    clip_low: float
    clip_high: float
    clip_dual: float | None = None
    ratio: Ratio = Ratio.token
    importance_cap: float | None = None
    kl_coef: float = 0.0
    """Of the penalty in the loss; one in the reward is in the advantages already."""
    kl_estimator: KLEstimator = KLEstimator.k3
    teacher_kl_coef: float = 0.0

    @classmethod
    def from_spec(cls, algo: GRPO, temperature: float, recompute_old: bool, comparable: bool) -> GRPOObjective:
        return cls(
            temperature=temperature,
            recompute_old=recompute_old,
            comparable=comparable,
            clip_low=algo.clip_low,
            clip_high=algo.upper_clip,
            clip_dual=algo.clip_dual,
            ratio=algo.ratio,
            importance_cap=algo.importance_cap,
            kl_coef=algo.kl_coef if algo.kl_in is KLIn.loss else 0.0,
            kl_estimator=algo.kl_estimator,
            teacher_kl_coef=algo.teacher_kl_coef,
        )

    @property
    def distill(self) -> None:
        """Teachers answer with numbers a token, which come with the batch."""
        return None

    @property
    def old_logprobs_at(self) -> float | None:
        """See `Objective`."""
        return self.temperature if self.recompute_old else None

    def loss(
        self,
        student: VocabHead,
        scores: None,
        batch: RowBatch,
        teacher_head: Callable[[Tensor], VocabHead] | None,
    ) -> tuple[Tensor, Totals]:
        """See `Objective.loss`."""
        held = self._of_responses(student, batch) if self.ratio is Ratio.sequence else None

        def losses_of(rows: slice | Tensor, logprobs: Float[Tensor, " part"]) -> Float[Tensor, " part"]:
            return self._terms(logprobs, _Rows.of(batch, held)[rows]).losses

        loss, rows = token_loss(student, batch.targets, batch.weights, losses_of, self.temperature)
        logprob = rows.logprob
        assert logprob is not None and batch.behaviour_logprobs is not None
        terms = self._terms(logprob, _Rows.of(batch, held))
        counted = (batch.weights > 0).to(rows.loss.device)
        totals = Totals(rows=int(counted.sum()), weighted={"train/loss": float(loss.detach())})
        measured = _Measured(totals, counted)
        measured.mean("train/entropy", rows.entropy)
        measured.mean("policy/logprob", logprob)
        self._measure_ratios(measured, terms.ratios, terms.advantages, logprob - terms.old)
        if terms.importance is not None and self.importance_cap is not None:
            measured.mean("policy/importance_mean", terms.importance)
            measured.largest("policy/importance_max", terms.importance)
            measured.mean("policy/importance_capped_share", terms.importance > self.importance_cap)
        if batch.teacher_logprobs is not None:
            estimate = kl_estimate(logprob, batch.teacher_logprobs, self.kl_estimator)
            measured.mean("policy/teacher_kl", estimate)
        if self.comparable:
            gap = (logprob - batch.behaviour_logprobs).abs()
            measured.mean("rollout/logprob_gap_mean", gap)
            measured.largest("rollout/logprob_gap_max", gap)
        return loss, totals

    def _terms(self, logprobs: Float[Tensor, " part"], rows: _Rows) -> _Terms:
        """The losses of some rows, and what they are made of. A gradient goes to `logprobs` only."""
        old = self._old(logprobs.detach(), rows)
        advantages = rows.advantages
        if self.teacher_kl_coef:
            assert rows.teacher is not None
            advantages = advantages + self.teacher_kl_coef * (rows.teacher - old)
        ratio, importance = log_ratios(logprobs, old), None
        if rows.log_ratio is not None:
            # To each row's own log-probability (GSPO-token, equation 14), see `mean_log_ratios`.
            ratio = rows.log_ratio + (logprobs - logprobs.detach())
        ratios = ratio.exp()
        losses = clipped_surrogate(ratios, advantages, self.clip_low, self.clip_high, self.clip_dual)
        if self.importance_cap is not None:
            away = log_ratios(old, rows.behaviour) if rows.log_importance is None else rows.log_importance
            importance = away.exp()
            losses = losses * importance.clamp(max=self.importance_cap)
        if self.kl_coef:
            assert rows.teacher is not None
            losses = losses + self.kl_coef * kl_estimate(logprobs, rows.teacher, self.kl_estimator)
        return _Terms(losses, ratios.detach(), advantages, importance, old)

    def _old(self, logprobs: Float[Tensor, " part"], rows: _Rows) -> Float[Tensor, " part"]:
        """Log-probabilities before the update."""
        if not self.recompute_old:
            return rows.behaviour
        return logprobs if rows.old is None else rows.old

    @torch.no_grad()
    def _of_responses(self, student: VocabHead, batch: RowBatch) -> tuple[Tensor, Tensor]:
        """Log-ratio and log-importance of each row's response. They take all of its rows, so these are projected once
        more, before the loss."""
        _, now = token_loss(
            student, batch.targets, batch.weights, lambda rows, logprobs: torch.zeros_like(logprobs), self.temperature
        )
        assert now.logprob is not None and batch.behaviour_logprobs is not None and batch.row_counts is not None
        old = self._old(now.logprob, _Rows.of(batch))
        return (
            mean_log_ratios(now.logprob, old, batch.row_counts),
            mean_log_ratios(old, batch.behaviour_logprobs, batch.row_counts),
        )

    def _measure_ratios(self, measured: _Measured, ratios: Tensor, advantages: Tensor, log_ratio: Tensor) -> None:
        """Where the ratios are, and what was clipped: rows whose gradient the clip took."""
        measured.mean("policy/ratio_mean", ratios)
        measured.largest("policy/ratio_max", ratios)
        measured.mean("policy/clip_low_share", (ratios < 1 - self.clip_low) & (advantages < 0))
        measured.mean("policy/clip_high_share", (ratios > 1 + self.clip_high) & (advantages > 0))
        if self.clip_dual is not None:
            measured.mean("policy/clip_dual_share", (ratios > self.clip_dual) & (advantages < 0))
        held = log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
        measured.mean("policy/approx_kl", torch.expm1(held) - held)  # k3 of KL(old || new)


@dataclass(frozen=True)
class _Rows:
    """What the loss knows of some rows."""

    behaviour: Float[Tensor, " part"]
    advantages: Float[Tensor, " part"]
    teacher: Float[Tensor, " part"] | None
    old: Float[Tensor, " part"] | None
    log_ratio: Float[Tensor, " part"] | None = None
    """Of the row's response; None: each row has its own. `log_importance` likewise."""
    log_importance: Float[Tensor, " part"] | None = None

    @classmethod
    def of(cls, batch: RowBatch, held: tuple[Tensor, Tensor] | None = None) -> _Rows:
        assert batch.advantages is not None and batch.behaviour_logprobs is not None
        return cls(
            batch.behaviour_logprobs, batch.advantages, batch.teacher_logprobs, batch.old_logprobs, *(held or ())
        )

    def __getitem__(self, rows: slice | Tensor) -> _Rows:
        def of(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[rows]

        return _Rows(
            self.behaviour[rows],
            self.advantages[rows],
            of(self.teacher),
            of(self.old),
            of(self.log_ratio),
            of(self.log_importance),
        )


@dataclass(frozen=True)
class _Terms:
    """Of some rows."""

    losses: Float[Tensor, " part"]
    ratios: Float[Tensor, " part"]
    advantages: Float[Tensor, " part"]
    importance: Float[Tensor, " part"] | None
    old: Float[Tensor, " part"]


@dataclass(frozen=True)
class _Measured:
    """Writes statistics of the counted rows into totals."""

    totals: Totals
    counted: Bool[Tensor, " rows"]

    def mean(self, name: str, values: Tensor) -> None:
        self.totals.sums[name] = float(values.detach()[self.counted].double().sum())

    def largest(self, name: str, values: Tensor) -> None:
        chosen = values[self.counted]
        if len(chosen):
            self.totals.maxima[name] = float(chosen.max())


def plan_minibatches(
    rollouts: Rollouts, algo: GRPO, train: Train, data_parallel: int, max_new_tokens: int
) -> tuple[MiniBatch, ...]:
    """`algo.steps_per_generation` optimizer steps, each on the next samples in their order. Without advantages yet.

    Args:
        max_new_tokens: most response tokens of a sample, for `algo.loss_mean=constant`.
    """
    minibatches, sequences = [], rollouts.sequences
    counted = np.asarray(rollouts.finished, dtype=bool) | (not algo.mask_truncated)
    for rows in np.array_split(np.arange(len(sequences)), algo.steps_per_generation):
        plan = plan_batch(
            sequences.lengths,
            data_parallel=data_parallel,
            micro_batch_tokens=train.micro_batch_tokens,
            padding_free=train.padding_free,
            pad_multiple=train.pad_multiple,
            rows=rows.tolist(),
        )
        chosen = np.zeros(len(sequences), dtype=bool)
        chosen[rows] = counted[rows]
        minibatches.append(MiniBatch(plan, loss_weights(sequences, chosen, algo.loss_mean, max_new_tokens)))
    return tuple(minibatches)


def loss_weights(
    sequences: Sequences, counted: Bool[np.ndarray, " n"], mean: LossMean, max_new_tokens: int
) -> Float32[np.ndarray, " R"]:
    """One weight a response token, so that the loss of an optimizer step is sum(weight * loss); 0 of other samples.

    Args:
        counted: the samples of the optimizer step that have a part in its loss. If there are none, all weights are 0.
    """
    lengths = sequences.response_lengths
    of_sample = np.zeros(len(sequences))
    samples = int(counted.sum())
    if samples:
        if mean is LossMean.token:
            of_sample[counted] = 1.0 / lengths[counted].sum()
        elif mean is LossMean.sequence:
            of_sample[counted] = 1.0 / (samples * lengths[counted])
        else:
            of_sample[counted] = 1.0 / (samples * max_new_tokens)
    return np.repeat(of_sample, lengths).astype(np.float32)


def by_token(values: Float32[np.ndarray, " n"], sequences: Sequences) -> Float32[np.ndarray, " R"]:
    """One value a sample -> the same for each of its response tokens."""
    return np.repeat(values, sequences.response_lengths).astype(np.float32)
