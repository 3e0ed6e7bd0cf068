"""What the fused losses do with a block of raw logits: losses, measurements, and gradients in their place.

`FullRows` is of two models and the whole vocabulary, `SelectedRows` of a few tokens, with the rest as one outcome; both
are a `projection.RowLoss`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf.losses.divergence import LOG_ZERO
from rlhf.losses.fused.kernels_torch import EXCLUDED, RowStatistics, Transform
from rlhf.losses.fused.projection import gradient_dtype, in_tiles, kernels_for, project
from rlhf.losses.heads import VocabHead, shared_shard
from rlhf.losses.rows import RowLosses
from rlhf.losses.shard import Shard

SelectedLoss = Callable[[slice, Float[Tensor, "part k"], Float[Tensor, " part"]], Float[Tensor, " part"]]
"""(rows, log-probabilities of the selected tokens, that of all others) -> losses. Differentiated by torch."""


@dataclass
class Measured:
    """Entropy at temperature 1, and the log-probability of the targets at the sampler's, of rows as they come."""

    targets: Int[Tensor, " rows"] | None
    sampler_temperature: float
    log_z: list[Tensor] = field(default_factory=list)
    """At temperature 1, as is what follows."""
    mean_logits: list[Tensor] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)

    @property
    def target_temperature(self) -> float:
        """Greedy sampling has no distribution; its log-probs are reported at temperature 1, as the engine does."""
        return self.sampler_temperature or 1.0

    def rows(self, losses: Tensor, teacher_mass: Tensor, student_mass: Tensor) -> RowLosses:
        return RowLosses(
            losses,
            joined(self.log_z, losses) - joined(self.mean_logits, losses),
            teacher_mass,
            student_mass,
            None if self.targets is None else joined(self.logprobs, losses),
        )


def joined(parts: list[Tensor], like: Tensor) -> Tensor:
    """There may be no rows at all."""
    return torch.cat(parts) if parts else like.new_zeros(0)


@dataclass
class FullRows:
    """`RowLoss` over the whole vocabulary."""

    student: VocabHead
    teacher: VocabHead
    beta: float
    temperature: float
    measured: Measured
    bounded: bool = True

    def __post_init__(self) -> None:
        head = self.student
        self.shard = shared_shard(self.student, self.teacher)
        self.own_shard = head.shard
        self.transform, self.teacher_transform = Transform.of(head), Transform.of(self.teacher)
        self.kernels = kernels_for(head.hidden.device)
        self.steepness = steepness(head, self.temperature, self.beta)
        self.buffer: Tensor | None = None
        self.seen: list[tuple[Tensor, ...]] = []

    def __call__(self, rows: slice, raw: Tensor, weights: Tensor | None) -> None:
        kernels, shard, t = self.kernels, self.shard, self.temperature
        transforms, columns = (self.transform, self.teacher_transform), shard.columns(raw.shape[1])
        other = self._teacher_raw(rows, raw)
        of_x, of_y = kernels.statistics(
            raw, self.transform, columns, t, other, self.teacher_transform, gaps=self.beta in (0, 1)
        )
        of_x, of_y = of_x.joined(shard.group), of_y.joined(shard.group)
        self._measure(rows, raw, of_x)
        log_z = of_x.log_z, of_y.log_z
        mean = None
        if self.beta == 0:
            self.seen.append((of_y.mean_gap, *log_z))
        elif self.beta == 1:
            mean = of_x.mean_gap
            self.seen.append((mean, *reversed(log_z)))
        else:
            moments = kernels.mixture_moments(raw, other, *transforms, columns, t, self.beta, *log_z)
            mean, of_teacher = moments if shard.group is None else shard.add(torch.stack(moments))
            self.seen.append((mean, of_teacher))
        if weights is not None:
            kernels.divergence_gradient_(raw, other, *transforms, columns, t, self.beta, *log_z, mean, weights)

    def losses(self) -> Tensor:
        """See `projection.RowLoss`. From what was seen of all rows: a few small kernels, not a few for each part."""
        if not self.seen:
            return no_losses(self.student)
        terms = [torch.cat(parts) for parts in zip(*self.seen, strict=True)]
        if self.beta in (0, 1):
            mean_gap, log_z_of_the_other, log_z = terms
            loss = mean_gap - log_z + log_z_of_the_other
        else:
            mean, of_teacher = terms
            loss = torch.lerp(mean, of_teacher, self.beta)
        return loss.clamp(min=0.0)  # rounding, where both distributions are the same

    def _teacher_raw(self, rows: slice, raw: Tensor) -> Tensor:
        """In a buffer that all parts use."""
        if self.buffer is None:
            columns = self.teacher.weight.shape[0]
            self.buffer = self.teacher.weight.new_empty(len(raw), in_tiles(columns))[:, :columns]
        other = self.buffer[: len(raw)]
        project(other, self.teacher.hidden[rows], self.teacher.weight)
        return other

    def _measure(self, rows: slice, raw: Tensor, at_temperature: RowStatistics) -> None:
        """Before gradients take the logits' place. Of all the student's tokens, which may be more than both have."""
        measured, shard = self.measured, self.own_shard
        known = {self.temperature: at_temperature} if shard.vocabulary == self.shard.vocabulary else {}

        def at(temperature: float) -> RowStatistics:
            if temperature not in known:
                of_x, _ = self.kernels.statistics(raw, self.transform, shard.columns(raw.shape[1]), temperature)
                known[temperature] = of_x.joined(shard.group)
            return known[temperature]

        at_1 = at(1.0)
        assert at_1.mean is not None
        measured.log_z.append(at_1.log_z)
        measured.mean_logits.append(at_1.mean)
        if measured.targets is not None:
            logit = _logits_at(raw, self.transform, measured.targets[rows].long()[:, None], shard)[0][:, 0]
            t = measured.target_temperature
            measured.logprobs.append(logit / t - at(t).log_z)


@dataclass
class SelectedRows:
    """`RowLoss` of a few tokens a row and of the rest of the probability, which is one outcome.

    A logit of the rest gets g_rest p_j/p_rest - G p_j, with G the sum of all gradients by log-probabilities: as cheap
    as the gradient of a softmax.
    """

    student: VocabHead
    ids: Int[Tensor, "rows k"]
    kept: Tensor
    """Which of them are tokens; [rows, k] bool."""
    loss_of: SelectedLoss
    temperature: float
    measured: Measured
    bounded: bool
    steepness: float = 1.0
    """See `projection.RowLoss`."""

    def __post_init__(self) -> None:
        self.transform = Transform.of(self.student)
        self.kernels = kernels_for(self.student.hidden.device)
        self._logprobs_at_1: list[Tensor] = []
        self._losses: list[Tensor] = []

    @property
    def logprobs_at_1(self) -> Tensor:
        """Of the selected tokens, at temperature 1."""
        return torch.cat(self._logprobs_at_1 or [self.student.hidden.new_zeros(0, self.ids.shape[1])])

    def losses(self) -> Tensor:
        """See `projection.RowLoss`."""
        return torch.cat(self._losses) if self._losses else no_losses(self.student)

    def __call__(self, rows: slice, raw: Tensor, weights: Tensor | None) -> None:
        shard, t = self.student.shard, self.temperature
        columns, width = shard.columns(raw.shape[1]), raw.shape[1]
        ids, kept = self.ids[rows], self.kept[rows]
        logits, slopes, place = _logits_at(raw, self.transform, ids, shard)
        measured = self.measured
        target = None
        if measured.targets is not None:
            target = _logits_at(raw, self.transform, measured.targets[rows].long()[:, None], shard)[0][:, 0]
        # The column beyond the vocabulary takes what is not here or not kept. It is there: see `projection`.
        place = place.masked_fill(~kept, width)
        wider = raw.as_strided((raw.shape[0], width + 1), raw.stride())
        wider.scatter_(1, place, EXCLUDED)
        known: dict[float, tuple[Tensor, Tensor, Tensor]] = {}

        def at(temperature: float) -> tuple[Tensor, Tensor, Tensor]:
            """(logsumexp of the rest, of everything, expected logit) at a temperature."""
            if temperature not in known:
                rest, _ = self.kernels.statistics(raw, self.transform, columns, temperature)
                rest = rest.joined(shard.group)
                inside = (logits / temperature).masked_fill(~kept, LOG_ZERO)
                log_rest = rest.log_z.clamp(min=LOG_ZERO)
                log_z = torch.logaddexp(log_rest, inside.logsumexp(-1))
                assert rest.mean is not None
                p, p_rest = (inside - log_z[:, None]).exp(), (log_rest - log_z).exp()
                mean = p_rest * rest.mean + (p * inside.clamp(min=EXCLUDED)).sum(-1)
                known[temperature] = log_rest, log_z, mean
            return known[temperature]

        _, log_z_1, mean_1 = at(1.0)
        measured.log_z.append(log_z_1)
        measured.mean_logits.append(mean_1)
        self._logprobs_at_1.append(logits - log_z_1[:, None])
        if target is not None:
            measured.logprobs.append(target / measured.target_temperature - at(measured.target_temperature)[1])
        log_rest, log_z, _ = at(t)
        with torch.set_grad_enabled(weights is not None):
            logprobs = (logits / t - log_z[:, None]).requires_grad_()
            log_p_rest = (log_rest - log_z).requires_grad_()
            loss = self.loss_of(rows, logprobs, log_p_rest)
            if weights is not None:
                wanted = torch.autograd.grad(
                    (weights * loss).sum(), (logprobs, log_p_rest), allow_unused=True, materialize_grads=True
                )
        if weights is not None:
            of_logprobs, of_rest = wanted
            of_logprobs = of_logprobs.masked_fill(~kept, 0.0)
            every = of_logprobs.sum(-1) + of_rest
            into = gradient_dtype(raw.dtype, self.bounded)
            self.kernels.softmax_gradient_(
                raw, self.transform, columns, t, of_rest, log_rest, -every, log_z, raw.view(into)
            )
            of_logits = (of_logprobs - every[:, None] * logprobs.detach().exp()) * slopes / t
            wider.view(into).scatter_(1, place, of_logits.masked_fill(~kept, 0.0).to(into))
        self._losses.append(loss.detach())


def steepness(head: VocabHead, temperature: float, beta: float) -> float:
    """See `projection.RowLoss`. Reverse KL's log-ratios grow with the logits, too."""
    of_logits = max(1.0, abs(head.scale) / temperature)
    return of_logits**2 if beta == 1 else of_logits


def no_losses(head: VocabHead) -> Float[Tensor, " 0"]:
    """Of no rows."""
    return head.hidden.new_zeros(0, dtype=torch.promote_types(head.weight.dtype, torch.float32))


def _logits_at(
    raw: Tensor, transform: Transform, ids: Int[Tensor, "rows k"], shard: Shard
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of tokens at temperature 1, their slopes, and the columns they are in: one beyond for those elsewhere."""
    column = ids - shard.start
    here = (column >= 0) & (column < raw.shape[1])
    column = column.masked_fill(~here, 0)
    values = raw.gather(1, column)
    values = values if values.dtype == torch.float64 else values.float()
    logits, slopes = transform(values, None if transform.bias is None else transform.bias[column])
    logits = shard.add(logits.masked_fill(~here, 0.0))
    return logits, slopes, column.masked_fill(~here, raw.shape[1])
