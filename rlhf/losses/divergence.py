"""Divergences between a teacher's and a student's next-token distributions, one loss a row.

    JSD_beta(T||S) = beta*KL(T||M) + (1-beta)*KL(S||M),  M = beta*T + (1-beta)*S

(GKD, arXiv 2306.13649, equation 1). Special-cased: beta=0 is KL(T||S) (forward), beta=1 is KL(S||T) (reverse).

Layers, from the inside out: `generalised_jsd` on log-probabilities; `topk_rows` and `full_rows` on dense logits;
`topk_divergence`, `full_divergence` and `forward_and_reverse_kl` on heads, a chunk of rows at a time.

Under tensor parallelism a rank has the logits of its own tokens only: a `Shard` says which, and sums, maxima and
look-ups over the vocabulary go through it. Losses and statistics are then the same on every rank.

Arithmetic is fp32 (float64 stays float64). Minus infinity is replaced before any arithmetic, never met as `0 * inf`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlhf.config.distill import Tail
from rlhf.errors import ConfigError, MisalignedScores
from rlhf.losses.heads import VocabHead, at_least_float32, shared_shard
from rlhf.losses.rows import RowLosses, TopKScores
from rlhf.losses.shard import Shard

CHUNK_ROWS = 512
"""Rows projected at a time: one fp32 copy of 512 x 151,936 logits is 311 MB, and a chunk holds about five."""

LOG_ZERO = -1e6
"""Log-probabilities from here down are impossible outcomes. Finite, so that a product with probability zero is zero."""

IMPOSSIBLE = -100.0
"""What log Q counts as in KL(P||Q) where Q = 0 < P and the KL is infinite: below nearly every fp32 probability.

Leaving such an outcome out instead would make it a refuge: reverse KL would then push the student's mass into it.
"""

TAIL_FLOOR = 32 * torch.finfo(torch.float32).eps
"""3.8e-6: the teacher's tail is 1 minus the sum of k rounded probabilities, and below this it is mostly rounding."""


Result = TypeVar("Result")

TermsOf = Callable[[Tensor, Tensor], Tensor]
"""(student's, teacher's log-probabilities) -> each outcome's share of a row's loss; all [rows, n]."""

# ---- on log-probabilities


def log_probs(
    logits: Float[Tensor, "rows n"], temperature: float = 1.0, shard: Shard | None = None
) -> Float[Tensor, "rows n"]:
    """log softmax(logits / temperature), of the columns given; over the whole vocabulary if they are a `shard` of it.

    Not `torch.log_softmax`: on the CPU it adds exp(logit - max) one by one in fp32, and beside a likely token 150,000
    others round away (log-probabilities wrong by 1e-4). `logsumexp` adds in pairs.
    """
    shard = shard or Shard(logits.shape[1])
    scaled = logits if temperature == 1 else logits / temperature
    # The maximum first: at logits around 200 the normaliser alone would round to 1e-5.
    shifted = scaled - shard.max(scaled)
    return shifted - shard.spread(shard.logsumexp(shifted))[:, None]


def generalised_jsd(
    student_logprobs: Float[Tensor, "rows n"],
    teacher_logprobs: Float[Tensor, "rows n"],
    beta: float,
    normalised: bool = True,
) -> Float[Tensor, " rows"]:
    """`JSD_beta(T||S)` a row (GKD, arXiv 2306.13649, equation 1); beta=0: KL(T||S), beta=1: KL(S||T).

    Args:
        normalised: both sides have the same mass in every row. The KLs are then summed as `p*log(p/q) - p + q`, which
            has the same sum and gradient but no negative term, so rounding can't make a row negative. False:
            `p*log(p/q)` as it is, which may be negative. For 0 < beta < 1 both are the same: the extra terms cancel
            outcome by outcome.

    An outcome that is -inf on both sides contributes exactly 0, in value and in gradient. -inf on one side is exact
    wherever the divergence is finite; where it isn't (KL(P||Q) at Q = 0 < P), log Q counts as `IMPOSSIBLE`.
    """
    student = at_least_float32(student_logprobs).clamp(min=LOG_ZERO)
    teacher = at_least_float32(teacher_logprobs).clamp(min=LOG_ZERO)
    if beta == 0:
        return _kl(teacher, student, normalised)
    if beta == 1:
        return _kl(student, teacher, normalised)
    # log M relative to each side, not log M itself: near T = S the difference of two large logs would only be rounding.
    log_ratio = student - teacher
    log_m_over_teacher = _log_mixture(math.log(beta), math.log1p(-beta), log_ratio)
    log_m_over_student = _log_mixture(math.log1p(-beta), math.log(beta), -log_ratio)
    terms = beta * teacher.exp() * log_m_over_teacher + (1 - beta) * student.exp() * log_m_over_student
    return -terms.sum(dim=-1)


def _log_mixture(log_weight: float, log_other_weight: float, log_ratio: Tensor) -> Tensor:
    """log(weight + other_weight * exp(log_ratio)), elementwise."""
    return torch.logaddexp(torch.full_like(log_ratio, log_weight), log_ratio + log_other_weight)


def _kl(p: Float[Tensor, "rows n"], q: Float[Tensor, "rows n"], normalised: bool) -> Float[Tensor, " rows"]:
    """KL(P||Q) a row, of log-probabilities that are finite: `LOG_ZERO` stands for -inf."""
    terms = p.exp() * (p - q.masked_fill(q <= LOG_ZERO, IMPOSSIBLE))
    if normalised:
        terms = terms - p.exp() + q.exp()
    return terms.sum(dim=-1)


# ---- on dense logits


def topk_rows(
    logits: Float[Tensor, "rows n"],
    teacher: TopKScores,
    beta: float,
    temperature: float,
    tail: Tail,
    shard: Shard | None = None,
) -> Float[Tensor, " rows"]:
    """The divergence over the teacher's top k, a row. Without `shard` the logits are those of the whole vocabulary.

    The mass outside the k tokens:

    - `renormalise`: both sides are softmaxed over the k tokens, exact at any temperature.
    - `bucket`: it is one more outcome on both sides. At k = V there is none, and the result is `full_rows`. Where the
      teacher's tail is below `TAIL_FLOOR`, what is missing to the floor is added to the tails of *both* sides. So the
      masses stay equal, and the divergence is zero at S = T, never negative, and smooth in the student. A unit of
      student tail then costs reverse KL at most log(1/TAIL_FLOOR) = 12.5 nats instead of infinity. The tail never
      leaves the loss: without it reverse KL is lowest where the student flees into it (PR verl#5041).
    - `drop`: the k terms as they are, each with its full normaliser; may be negative (verl#7856).

    A slot the teacher has left unused (see `TopKScores.ids`) belongs to the tail.

    Raises:
        ConfigError: bucket or drop at another temperature than 1, and the teacher gave no log_normaliser.
    """
    shard = shard or Shard(logits.shape[1])
    slots = topk_slots(teacher, shard.vocabulary)
    if tail is Tail.renormalise:
        return topk_outcomes(shard.at(logits, slots.ids) / temperature, None, teacher, slots, beta, temperature, tail)
    every_student_logprob = log_probs(logits, temperature, shard)
    student = shard.at(every_student_logprob, slots.ids)
    if tail is Tail.drop or slots.everything:
        return topk_outcomes(student, None, teacher, slots, beta, temperature, tail)
    # By logsumexp over the complement: once the student is peaked, 1 - sum(p) would be nothing but rounding.
    inside = shard.contains(slots.ids, slots.alive, logits.shape[1])
    student_tail = shard.logsumexp(every_student_logprob.masked_fill(inside, 2 * LOG_ZERO))
    return topk_outcomes(student, student_tail, teacher, slots, beta, temperature, tail)


def topk_outcomes(
    student: Float[Tensor, "rows k"],
    student_tail: Float[Tensor, " rows"] | None,
    teacher: TopKScores,
    slots: Slots,
    beta: float,
    temperature: float,
    tail: Tail,
    terms_of: TermsOf | None = None,
) -> Float[Tensor, " rows"]:
    """`topk_rows`, of what it needs to know of the student.

    Args:
        student: log-probabilities of the teacher's tokens at the temperature; `renormalise` takes logits as well. What
            stands in slots that aren't kept doesn't matter.
        student_tail: log-probability of all other tokens; for `bucket`, unless k = V.
        terms_of: another loss than the divergence that beta chooses.

    Raises:
        ConfigError: see `topk_rows`.
    """
    if tail is Tail.renormalise:
        # The lowest finite number, not -inf: a row with nothing left is then uniform on both sides instead of NaN.
        lowest = torch.finfo(student.dtype).min
        student = student.clamp(min=lowest).masked_fill(~slots.kept, lowest)
        raw_teacher = teacher.logprobs.to(student.dtype) / temperature
        raw_teacher = raw_teacher.clamp(min=lowest).masked_fill(~slots.kept, lowest)
        return _row_losses(log_probs(student), log_probs(raw_teacher), beta, terms_of)

    student = student.masked_fill(~slots.kept, 2 * LOG_ZERO)
    teacher_logprobs = _teacher_logprobs(teacher, temperature, tail).to(student.dtype)
    teacher_logprobs = teacher_logprobs.masked_fill(~slots.alive, 2 * LOG_ZERO)
    if tail is Tail.drop:
        return _row_losses(student, teacher_logprobs, beta, terms_of, normalised=False)
    if slots.everything:
        return _row_losses(student, teacher_logprobs, beta, terms_of)
    assert student_tail is not None
    teacher_tail = -torch.expm1(teacher_logprobs.logsumexp(-1).clamp(max=0.0))
    missing = (TAIL_FLOOR - teacher_tail).clamp(min=0.0)
    student_tail = torch.logaddexp(student_tail, missing.log().clamp(min=2 * LOG_ZERO))
    teacher_tail = teacher_tail.clamp(min=TAIL_FLOOR).log()
    return _row_losses(
        torch.cat([student, student_tail[:, None]], dim=-1),
        torch.cat([teacher_logprobs, teacher_tail[:, None]], dim=-1),
        beta,
        terms_of,
    )


def _row_losses(
    student: Float[Tensor, "rows n"],
    teacher: Float[Tensor, "rows n"],
    beta: float,
    terms_of: TermsOf | None,
    normalised: bool = True,
) -> Float[Tensor, " rows"]:
    if terms_of is None:
        return generalised_jsd(student, teacher, beta, normalised)
    return terms_of(student.clamp(min=LOG_ZERO), teacher.clamp(min=LOG_ZERO)).sum(-1)


def full_rows(
    logits: Float[Tensor, "rows n"],
    teacher_logits: Float[Tensor, "rows m"],
    beta: float,
    temperature: float,
    shard: Shard | None = None,
    terms_of: TermsOf | None = None,
) -> Float[Tensor, " rows"]:
    """The divergence over the whole vocabulary, a row; of two padded vocabularies, over the part that both have.

    Args:
        shard: the part of the shared vocabulary that the columns of both are; None: the columns are all of it.
    """
    shard = shard or Shard(min(logits.shape[1], teacher_logits.shape[1]))
    student = log_probs(shard.restrict(logits), temperature, shard)
    teacher = log_probs(shard.restrict(teacher_logits), temperature, shard)
    if terms_of is not None:  # which may see padding as outcomes
        columns = shard.columns(student.shape[1])
        student, teacher = student[:, :columns], teacher[:, :columns]
    return shard.add(_row_losses(student, teacher, beta, terms_of))


@dataclass(frozen=True, eq=False)
class Slots:
    """What the slots of a teacher's top k hold."""

    ids: Int[Tensor, "rows k"]
    """Of tokens of the vocabulary, so that they can be gathered."""
    kept: Bool[Tensor, "rows k"]
    """Outcomes of the divergence; other slots belong to the tail."""
    alive: Bool[Tensor, "rows k"]
    """Tokens that the teacher finds possible."""
    everything: bool
    """k = V: there is no tail."""

    def __getitem__(self, rows: slice) -> Slots:
        return Slots(self.ids[rows], self.kept[rows], self.alive[rows], self.everything)


def topk_slots(teacher: TopKScores, vocabulary: int) -> Slots:
    ids = teacher.ids.long()
    valid = (ids >= 0) & (ids < vocabulary)
    alive = valid & (teacher.logprobs > LOG_ZERO)
    everything = ids.shape[1] == vocabulary
    # With every token at hand an impossible one is an outcome like the others, as in `full_rows`.
    return Slots(ids.masked_fill(~valid, 0), valid if everything else alive, alive, everything)


def _teacher_logprobs(teacher: TopKScores, temperature: float, tail: Tail) -> Float[Tensor, "rows k"]:
    """The teacher's log-probabilities at the temperature, normalised over its whole vocabulary."""
    if temperature == 1:
        return teacher.logprobs
    if teacher.log_normaliser is None:
        raise ConfigError(
            f"distill.temperature={temperature} with distill.tail={tail.name} needs the teacher's normaliser at that "
            "temperature, which this teacher doesn't return; write distill.tail=renormalise or distill.temperature=1"
        )
    return teacher.logprobs / temperature - teacher.log_normaliser[:, None]


# ---- what is measured beside the loss


@torch.no_grad()
def _measured(
    loss: Float[Tensor, " rows"],
    logits: Float[Tensor, "rows n"],
    teacher: TopKScores | None,
    targets: Int[Tensor, " rows"] | None,
    sampler_temperature: float,
    shard: Shard,
) -> RowLosses:
    """The loss with the statistics of the same logits, so that the head is applied once."""
    logprobs = log_probs(logits, shard=shard)
    entropy = -shard.add((logprobs.exp() * logprobs.clamp(min=LOG_ZERO)).sum(-1))
    teacher_mass = student_mass = torch.ones_like(entropy)
    if teacher is not None:
        slots = topk_slots(teacher, shard.vocabulary)
        teacher_mass = mass(teacher.logprobs.to(logits.dtype), slots.alive)
        student_mass = mass(shard.at(logprobs, slots.ids), slots.alive)
    logprob = None
    if targets is not None:
        # Greedy sampling has no distribution; its log-probs are reported at temperature 1, as the engine does.
        at = logprobs if sampler_temperature in (0, 1) else log_probs(logits, sampler_temperature, shard)
        logprob = shard.at(at, targets.long()[:, None])[:, 0]
    return RowLosses(loss, entropy, teacher_mass, student_mass, logprob)


def mass(logprobs: Float[Tensor, "rows k"], counted: Bool[Tensor, "rows k"]) -> Float[Tensor, " rows"]:
    """Probability of the counted tokens. Rounding can lift a sum of k probabilities just above 1."""
    return logprobs.exp().masked_fill(~counted, 0.0).sum(-1).clamp(max=1.0)


# ---- on heads


def topk_divergence(
    student: VocabHead,
    teacher: TopKScores,
    beta: float,
    temperature: float,
    tail: Tail,
    targets: Int[Tensor, " rows"] | None = None,
    sampler_temperature: float = 1.0,
    chunk_rows: int = CHUNK_ROWS,
) -> RowLosses:
    """`topk_rows` of a head, with the statistics of `RowLosses`. Only the student's head gets a gradient.

    Args:
        targets: the sampled tokens, for `RowLosses.logprob`.
        sampler_temperature: `rollout.temperature`, which `RowLosses.logprob` is at; 0 (greedy) reads as 1.
        chunk_rows: rows projected at a time; see `in_chunks`.

    Raises:
        ConfigError: see `topk_rows` and `VocabHead.logits`.
        MisalignedScores: the scores don't have one row for each of the student's.
    """
    require_rows(student, len(teacher))

    def chunk(rows: slice) -> RowLosses:
        logits, scores = student.select(rows).logits(), teacher[rows]
        loss = topk_rows(logits, scores, beta, temperature, tail, student.shard)
        return _measured(loss, logits, scores, _rows_of(targets, rows), sampler_temperature, student.shard)

    return RowLosses.concat(in_chunks(chunk, len(student), chunk_rows))


def full_divergence(
    student: VocabHead,
    teacher: VocabHead,
    beta: float,
    temperature: float,
    targets: Int[Tensor, " rows"] | None = None,
    sampler_temperature: float = 1.0,
    chunk_rows: int = CHUNK_ROWS,
    terms_of: TermsOf | None = None,
) -> RowLosses:
    """`full_rows` of two heads, with the statistics of `RowLosses`. Only the student's head gets a gradient.

    Arguments and errors are those of `topk_divergence`.
    """
    require_rows(student, len(teacher))
    shared = shared_shard(student, teacher)

    def chunk(rows: slice) -> RowLosses:
        logits = student.select(rows).logits()
        with torch.no_grad():
            teacher_logits = teacher.select(rows).logits()
        loss = full_rows(logits, teacher_logits, beta, temperature, shared, terms_of)
        return _measured(loss, logits, None, _rows_of(targets, rows), sampler_temperature, student.shard)

    return RowLosses.concat(in_chunks(chunk, len(student), chunk_rows))


@torch.no_grad()
def forward_and_reverse_kl(
    student: VocabHead, teacher: VocabHead, chunk_rows: int = CHUNK_ROWS
) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
    """KL(T||S) and KL(S||T) a row over the whole vocabulary at temperature 1: what runs are compared by. No gradient.

    Raises:
        MisalignedScores: the heads have different numbers of rows.
    """
    require_rows(student, len(teacher))
    shared = shared_shard(student, teacher)

    def chunk(rows: slice) -> tuple[Tensor, Tensor]:
        logits, teacher_logits = student.select(rows).logits(), teacher.select(rows).logits()
        forward = full_rows(logits, teacher_logits, 0.0, 1.0, shared)
        return forward, full_rows(logits, teacher_logits, 1.0, 1.0, shared)

    forward, reverse = zip(*in_chunks(chunk, len(student), chunk_rows), strict=True)
    return torch.cat(forward), torch.cat(reverse)


def in_chunks(of_rows: Callable[[slice], Result], rows: int, chunk_rows: int) -> list[Result]:
    """`of_rows` of each slice of rows; of one empty slice when there are none, so that the graph still has the head.

    Memory: with several chunks, nothing of a chunk outlives its forward pass but the result; backward projects the
    chunk again. So the peak is one chunk's logits, for one more matmul with the head. Rows don't see each other, so the
    loss doesn't depend on chunking; the head's gradient is a sum over chunks, taken in the weight's dtype.
    """
    slices = [slice(start, start + chunk_rows) for start in range(0, max(rows, 1), chunk_rows)]
    if len(slices) == 1 or not torch.is_grad_enabled():
        return [of_rows(rows) for rows in slices]
    return [checkpoint(of_rows, rows, use_reentrant=False, preserve_rng_state=False) for rows in slices]


def _rows_of(values: Tensor | None, rows: slice) -> Tensor | None:
    return None if values is None else values[rows]


def require_rows(student: VocabHead, scored: int) -> None:
    if len(student) != scored:
        raise MisalignedScores(f"the teacher scored {scored} rows but the student has {len(student)}")
