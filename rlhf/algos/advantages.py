"""Rewards of groups of responses -> advantages. Pure numpy: it runs in the driver. n responses, group after group."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, Float32, Int64

from rlhf.config.algo import Advantage, KLEstimator, ScaleRewards
from rlhf.types import Metrics, Rewards, offsets_of

EPSILON = 1e-4
"""Added to standard deviations."""


def group_advantages(
    rewards: Float[np.ndarray, " n"], group: int, estimator: Advantage, scale: ScaleRewards
) -> Float32[np.ndarray, " n"]:
    """How much better each response is than its group.

    grpo: (r - mean) / (std + 1e-4) (arXiv 2402.03300, section 4.1.2); rloo: K/(K-1) (r - mean), which is r minus the
    mean of the K - 1 others (arXiv 2402.14740). Standard deviations are unbiased ones. A group of equal rewards gets
    exactly 0.

    Args:
        group: responses to a prompt, K.
        scale: what is divided by, under either estimator.
    """
    grouped = np.asarray(rewards, dtype=np.float64).reshape(-1, group)
    centred = grouped - grouped.mean(axis=1, keepdims=True)
    if estimator is Advantage.rloo:
        centred = centred * (group / (group - 1))
    if scale is ScaleRewards.group:
        centred = centred / (grouped.std(axis=1, ddof=1, keepdims=True) + EPSILON)
    elif scale is ScaleRewards.batch:
        centred = centred / (grouped.std(ddof=1) + EPSILON)
    centred[uniform_groups(rewards, group)] = 0.0  # rounding of the mean would be divided by 1e-4
    return centred.reshape(-1).astype(np.float32)


def uniform_groups(rewards: Float[np.ndarray, " n"], group: int) -> Bool[np.ndarray, " g"]:
    """Which groups have one reward for all their responses, and so nothing to say."""
    grouped = np.asarray(rewards).reshape(-1, group)
    return grouped.max(axis=1) == grouped.min(axis=1)


def overlong_penalty(lengths: Int64[np.ndarray, " n"], limit: int, buffer: int) -> Float32[np.ndarray, " n"]:
    """0 up to `limit - buffer` tokens, then along a line to -1 at `limit` (DAPO, arXiv 2503.14476, equation 13).

    Example: limit 16, buffer 4: lengths 12, 14, 16 -> 0, -0.5, -1.
    """
    if buffer == 0:
        return np.zeros(len(lengths), dtype=np.float32)
    return np.clip((limit - buffer - lengths) / buffer, -1.0, 0.0).astype(np.float32)


def kl_penalty(
    logprobs: Float32[np.ndarray, " R"],
    teacher: Float32[np.ndarray, " R"],
    lengths: Int64[np.ndarray, " n"],
    estimator: KLEstimator,
) -> Float32[np.ndarray, " n"]:
    """The estimate of KL(student || teacher) summed over each response, see `rlhf.losses.policy.kl_estimate`."""
    import torch

    from rlhf.losses.policy import kl_estimate

    student, asked = (torch.tensor(values, dtype=torch.float64) for values in (logprobs, teacher))
    rows = kl_estimate(student, asked, estimator).numpy()
    cumulated = np.concatenate([[0.0], np.cumsum(rows)])
    offsets = offsets_of(lengths)
    return (cumulated[offsets[1:]] - cumulated[offsets[:-1]]).astype(np.float32)


def describe_rewards(rewards: Rewards, group: int) -> Metrics:
    """reward/mean, reward/std (unbiased, over all responses), reward/zero_variance_share (of the groups), and
    reward/NAME/mean, reward/NAME/std and reward/NAME_applies of each function, see `describe_functions`."""
    return {
        "reward/mean": float(rewards.total.mean(dtype=np.float64)),
        "reward/std": float(rewards.total.std(ddof=1, dtype=np.float64)),
        "reward/zero_variance_share": float(uniform_groups(rewards.total, group).mean()),
        **describe_functions(rewards, "reward/{}/mean", "reward/{}/std"),
    }


def describe_functions(rewards: Rewards, mean: str, std: str | None = None) -> Metrics:
    """Of each function, over the responses it applies to: the mean, and the unbiased standard deviation; left out where
    there are too few for them. `reward/NAME_applies` is their share, where it isn't 1.

    Args:
        mean: what the mean is called, `{}` being the function, e.g. `reward/{}/mean`.
        std: the same of the standard deviation; None: it isn't told.
    """
    metrics: Metrics = {}
    for name, part in rewards.parts.items():
        values = part[np.isfinite(part)].astype(np.float64)
        if len(values) > 0:
            metrics[mean.format(name)] = float(values.mean())
        if len(values) > 1 and std is not None:
            metrics[std.format(name)] = float(values.std(ddof=1))
        if len(values) < len(part):
            applies = mean.partition("{}")[0] + f"{name}_applies"
            metrics[applies] = len(values) / len(part)
    return metrics


def select_rewards(rewards: Rewards, rows: list[int]) -> Rewards:
    """Those of some of the responses."""
    return Rewards(rewards.total[rows], {name: values[rows] for name, values in rewards.parts.items()})


def join_rewards(parts: list[Rewards]) -> Rewards:
    """Those of all parts, in order."""
    return Rewards(
        np.concatenate([part.total for part in parts]),
        {name: np.concatenate([part.parts[name] for part in parts]) for name in parts[0].parts},
    )
