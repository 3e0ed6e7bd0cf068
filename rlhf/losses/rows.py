"""What goes into a divergence and what comes out of it, row by row. Row t is about token t + 1 (`rlhf.batching`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TopKScores:
    """The teacher's k most likely tokens at each row. Sliceable and joinable: scores are stored a sample at a time.

    Example: k=2, two rows, T=1: ids `[[7, 3], [1, 0]]`, logprobs `[[-0.1, -2.5], [-0.7, -0.8]]`, log_normaliser None.
    """

    ids: Int[Tensor, "rows k"]
    """Distinct within a row. A slot is unused if its id is outside the student's vocabulary or its logprob is -inf."""
    logprobs: Float32[Tensor, "rows k"]
    """At temperature 1, normalised over the teacher's whole vocabulary, whatever `distill.temperature` is."""
    log_normaliser: Float32[Tensor, " rows"] | None = None
    """logsumexp over the vocabulary of log-probability / temperature, so that log-probabilities at that temperature are
    `logprobs / temperature - log_normaliser`. None: temperature 1 (where it is zero), or a teacher that can't tell."""

    def __len__(self) -> int:
        return self.ids.shape[0]

    def __getitem__(self, rows: slice | Int[Tensor, " chosen"]) -> TopKScores:
        # Cloned: a view keeps the whole batch alive, and pickles all of it.
        normaliser = None if self.log_normaliser is None else self.log_normaliser[rows].clone()
        return TopKScores(self.ids[rows].clone(), self.logprobs[rows].clone(), normaliser)

    @classmethod
    def concat(cls, parts: Sequence[TopKScores]) -> TopKScores:
        """The rows of all parts, in order; either all of them have a log_normaliser or none has."""
        normalisers = [part.log_normaliser for part in parts if part.log_normaliser is not None]
        assert len(normalisers) in (0, len(parts)), "scores with and without a log_normaliser can't be joined"
        return TopKScores(
            torch.cat([part.ids for part in parts]),
            torch.cat([part.logprobs for part in parts]),
            torch.cat(normalisers) if normalisers else None,
        )


@dataclass(frozen=True, eq=False)
class RowLosses:
    """One value a row. Only `loss` carries a gradient."""

    loss: Float[Tensor, " rows"]
    """The divergence at `distill.temperature`; neither weighted nor multiplied by the squared temperature."""
    entropy: Float[Tensor, " rows"]
    """Of the student's distribution at temperature 1, in nats."""
    teacher_mass: Float[Tensor, " rows"]
    """The teacher's probability inside its top k, at temperature 1; 1 for the whole vocabulary."""
    student_mass: Float[Tensor, " rows"]
    """The student's probability of the same tokens, at temperature 1; falls when the student flees into the tail."""
    logprob: Float[Tensor, " rows"] | None
    """The student's log-probability of the targets at the sampler's temperature; None when no targets were given."""

    @staticmethod
    def concat(parts: Sequence[RowLosses]) -> RowLosses:
        logprobs = [part.logprob for part in parts if part.logprob is not None]
        return RowLosses(
            torch.cat([part.loss for part in parts]),
            torch.cat([part.entropy for part in parts]),
            torch.cat([part.teacher_mass for part in parts]),
            torch.cat([part.student_mass for part in parts]),
            torch.cat(logprobs) if logprobs else None,
        )

    def spread_out(self, rows: Int[Tensor, " chosen"], count: int) -> RowLosses:
        """At these rows of `count`; zero at all others."""

        def at_rows(values: Tensor) -> Tensor:
            return values.new_zeros(count).index_put((rows,), values)

        return RowLosses(
            at_rows(self.loss),
            at_rows(self.entropy),
            at_rows(self.teacher_mass),
            at_rows(self.student_mass),
            None if self.logprob is None else at_rows(self.logprob),
        )
