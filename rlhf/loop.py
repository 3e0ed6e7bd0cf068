"""The training loop. It has no modes: what differs between runs is in the source and in the roles.

source ──Experience──► trainer.train ──metrics──► log
  ▲                        │
  └──────── weights ◄──────┘          (the source syncs before it generates)
"""

from __future__ import annotations

from collections.abc import Iterable

from rlhf.checkpoint import Checkpoints
from rlhf.loggers.base import MetricLog
from rlhf.roles.protocols import Trainer
from rlhf.types import Experience, Metrics


def run_steps(
    source: Iterable[Experience], trainer: Trainer, checkpoints: Checkpoints, log: MetricLog, largest_gap: float
) -> None:
    """Train on every experience of the source.

    Args:
        largest_gap: mean log-probability gap between sampler and trainer above which the person is warned.
    """
    for experience in source:
        metrics = {**experience.metrics, **trainer.train(experience).result()}
        metrics |= speed(experience, metrics)
        log.log(experience.step, metrics)  # before saving: what goes on from the checkpoint finds the step logged
        if saved := checkpoints.after_step(experience.step):
            log.log(experience.step, saved)
        gap = metrics.get("rollout/logprob_gap_mean", 0.0)
        if not gap <= largest_gap:  # not a number is the worst gap
            log.warn(
                f"step {experience.step}: sampler and trainer disagree by {gap:.2g} nats a token on average, above "
                f"rollout.logprob_gap_warning={largest_gap:g}"
            )


def speed(experience: Experience, metrics: Metrics) -> Metrics:
    """Seconds of a step, which is the sum of its phases (evaluation and saving aside), and tokens a second over it."""
    seconds = sum(value for name, value in metrics.items() if name.startswith("time/"))
    return {
        "time/step": seconds,
        "perf/tokens_per_second": len(experience.sequences.tokens) / seconds,
        "perf/response_tokens_per_second": float(experience.sequences.response_lengths.sum()) / seconds,
    }
