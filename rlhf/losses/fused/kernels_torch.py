"""The row kernels of the fused losses in plain torch: for CPUs, and the reference of the Triton ones.

A kernel works on a block of raw logits `x`, `[rows, n]`: what the matmul with a head gave. `Transform` makes logits of
them. `y` is the other model's block. Columns from `columns` on are padding, and a raw logit of `EXCLUDED` or less is no
outcome; both get no probability and no gradient.

Over a vocabulary that ranks share, `statistics` and `mixture_moments` are of the own columns; `RowStatistics.joined`
and a sum put them together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from rlhf.losses.heads import VocabHead, at_least_float32

EXCLUDED = -60000.0
"""Finite also in float16, and exact there."""
GROUP = 128
"""Columns of which `top` looks at the largest first."""
TINY = 1e-37
"""Keeps the logarithm of a probability that underflowed finite; it is multiplied by that zero."""


@dataclass(frozen=True)
class Transform:
    """From raw logits to logits: `softcap(scale * (x + bias)) / temperature`."""

    scale: float = 1.0
    softcap: float | None = None
    bias: Float[Tensor, " n"] | None = None

    @classmethod
    def of(cls, head: VocabHead) -> Transform:
        return cls(head.scale, head.softcap, None if head.bias is None else head.bias.detach())

    def __call__(self, raw: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Logits at temperature 1, and their derivative by the raw ones."""
        z = (raw if bias is None else raw + bias.to(raw.dtype)) * self.scale
        if self.softcap is None:
            return z, torch.full_like(z, self.scale)
        tanh = torch.tanh(z / self.softcap)
        return self.softcap * tanh, self.scale * (1 - tanh.square())


@dataclass
class RowStatistics:
    """Of each row's logits z at a temperature, over the columns at hand; fp32 (fp64 of fp64)."""

    log_z: Float[Tensor, " rows"]
    """logsumexp; very low where there are no columns."""
    mean: Float[Tensor, " rows"] | None
    """The expected z; of x only."""
    mean_gap: Float[Tensor, " rows"] | None = None
    """The expected z - (the other model's z)."""

    def joined(self, group: Any | None) -> RowStatistics:
        """Of all ranks' columns together."""
        if group is None:
            return self
        largest = self.log_z.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        own = (self.log_z - largest).exp()
        expected = [torch.zeros_like(own) if one is None else one for one in (self.mean, self.mean_gap)]
        total, mean, gap = sums = torch.stack([own, *(own * one for one in expected)])
        dist.all_reduce(sums, group=group)
        return RowStatistics(
            largest + total.log(),
            None if self.mean is None else mean / total,
            None if self.mean_gap is None else gap / total,
        )


def statistics(
    x: Float[Tensor, "rows n"],
    transform: Transform,
    columns: int,
    temperature: float = 1.0,
    y: Float[Tensor, "rows n"] | None = None,
    transform_y: Transform | None = None,
    gaps: bool = False,
) -> tuple[RowStatistics, RowStatistics | None]:
    """Of `x`, and of `y` if there is one; with gaps if they are asked for."""
    z, kept, _ = _logits(x, transform, columns, temperature)
    if y is None:
        return _of(z, kept, None), None
    assert transform_y is not None
    u, kept_u, _ = _logits(y, transform_y, columns, temperature)
    return _of(z, kept, z - u if gaps else None), _of(u, kept_u, u - z if gaps else None)


def _of(z: Tensor, kept: Tensor, gap: Tensor | None) -> RowStatistics:
    largest = z.amax(-1) if z.shape[1] else z.new_full(z.shape[:1], EXCLUDED)
    weight = (z - largest[:, None]).exp() * kept
    total = weight.sum(-1).clamp(min=TINY)
    return RowStatistics(
        largest + total.log(),
        (weight * z).sum(-1) / total,
        None if gap is None else (weight * gap).sum(-1) / total,
    )


def top(x: Float[Tensor, "rows n"], transform: Transform, columns: int, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits of each row at temperature 1, largest first, and their columns; both `[rows, k]`.

    Args:
        x: of a buffer whose rows are a multiple of `GROUP` long, and `EXCLUDED` from `columns` on.
    """
    logits, _ = transform(
        at_least_float32(x[:, :columns]), None if transform.bias is None else transform.bias[:columns]
    )
    return logits.topk(k)


def mixture_moments(
    x: Float[Tensor, "rows n"],
    y: Float[Tensor, "rows n"],
    transform: Transform,
    transform_y: Transform,
    columns: int,
    temperature: float,
    beta: float,
    log_zx: Float[Tensor, " rows"],
    log_zy: Float[Tensor, " rows"],
) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
    """sum p log(p / m) and sum q log(q / m) with p, q the distributions of x and y and m = beta q + (1 - beta) p."""
    z, _, _ = _logits(x, transform, columns, temperature)
    u, _, _ = _logits(y, transform_y, columns, temperature)
    log_p, log_q = z - log_zx[:, None], u - log_zy[:, None]
    p, q = log_p.exp(), log_q.exp()
    log_m = _log_mixture(p, q, beta)
    return (p * (log_p - log_m)).sum(-1), (q * (log_q - log_m)).sum(-1)


def divergence_gradient_(
    x: Float[Tensor, "rows n"],
    y: Float[Tensor, "rows n"],
    transform: Transform,
    transform_y: Transform,
    columns: int,
    temperature: float,
    beta: float,
    log_zx: Float[Tensor, " rows"],
    log_zy: Float[Tensor, " rows"],
    mean: Float[Tensor, " rows"] | None,
    weights: Float[Tensor, " rows"],
) -> None:
    """x becomes the gradient of the weighted divergence by x.

    Args:
        mean: for beta=1 the mean gap of x's statistics, and for 0 < beta < 1 KL(p||m): sums of the very terms that they
            are subtracted from here, so that they cancel where the gradient vanishes. Not used for beta=0.
    """
    z, _, slope = _logits(x, transform, columns, temperature)
    u, _, _ = _logits(y, transform_y, columns, temperature)
    log_p = z - log_zx[:, None]
    p, q = log_p.exp(), (u - log_zy[:, None]).exp()
    if beta == 0:
        gradient = p - q
    elif beta == 1:
        assert mean is not None
        gradient = p * (z - u - mean[:, None])
    else:
        assert mean is not None
        gradient = (1 - beta) * p * (log_p - _log_mixture(p, q, beta) - mean[:, None])
    x[:, columns:] = 0
    x[:, :columns] = (gradient * slope * (weights / temperature)[:, None]).to(x.dtype)


def softmax_gradient_(
    x: Float[Tensor, "rows n"],
    transform: Transform,
    columns: int,
    temperature: float,
    a: Float[Tensor, " rows"],
    log_u: Float[Tensor, " rows"],
    b: Float[Tensor, " rows"],
    log_v: Float[Tensor, " rows"],
    out: Float[Tensor, "rows n"],
) -> None:
    """x becomes `(a exp(z - log_u) + b exp(z - log_v)) dz/dx`; zero where it is excluded.

    Args:
        out: the same memory as x, read as another format of the same size.
    """
    z, kept, slope = _logits(x, transform, columns, temperature)
    gradient = a[:, None] * (z - log_u[:, None]).exp() + b[:, None] * (z - log_v[:, None]).exp()
    out[:, columns:] = 0
    out[:, :columns] = (gradient * kept * slope / temperature).to(out.dtype)


def cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype)


def _logits(raw: Tensor, transform: Transform, columns: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits at the temperature, which are outcomes, and the derivative of the logits at temperature 1."""
    raw = raw[:, :columns]
    kept = raw > EXCLUDED
    raw = raw if raw.dtype == torch.float64 else raw.float()
    z, slope = transform(raw, None if transform.bias is None else transform.bias[:columns])
    return (z / temperature).masked_fill(~kept, EXCLUDED), kept, slope


def _log_mixture(p: Tensor, q: Tensor, beta: float) -> Tensor:
    return (beta * q + (1 - beta) * p).clamp(min=TINY).log()
