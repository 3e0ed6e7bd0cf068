"""Responses that the student didn't write: the rows' own, or the teacher's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rlhf.roles.protocols import Engine
from rlhf.sources.requests import prompts_of, reference_sequences
from rlhf.sources.steps import Batch, Timed, describe
from rlhf.types import Metrics, Rollouts, Sequences

TEACHER_VERSION = 0
"""Of the teacher's weights, which never change."""


class OffPolicy(Protocol):
    """Where the responses of off-policy steps come from."""

    def responses(self, batch: Batch, version: int, timed: Timed) -> tuple[Rollouts, Metrics]:
        """One a row, without log-probabilities, which is how the objective knows them.

        Args:
            version: of the trainer's weights, which have no part in the responses.
        """
        ...


@dataclass(frozen=True)
class ReferenceResponses(OffPolicy):
    """The rows' own. Every row must have one, which is checked when the rows are read."""

    max_response_tokens: int
    """Longer ones are cut; `finished` are those that weren't."""

    def responses(self, batch: Batch, version: int, timed: Timed) -> tuple[Rollouts, Metrics]:
        table = batch.draw.table
        sequences = reference_sequences(table, self.max_response_tokens, batch.step)
        rollouts = Rollouts(version, sequences, table.response_lengths <= self.max_response_tokens)
        return rollouts, describe(rollouts)


@dataclass(frozen=True)
class TeachersResponses(OffPolicy):
    """What the teacher writes at that moment (algo.seq_kd=true; Kim & Rush, arXiv 1606.07947, section 3.2, with samples
    or greedy decoding instead of beam search). It reads its own prompt (`teacher_prompt`) where a row has one."""

    teacher: Engine
    """Holds the teacher's weights, as version `TEACHER_VERSION`."""
    seed: int

    def responses(self, batch: Batch, version: int, timed: Timed) -> tuple[Rollouts, Metrics]:
        draw = batch.draw
        rows = range(len(draw.table))
        with timed("rollout"):
            asked = prompts_of(draw.table, rows, seed=self.seed, step=batch.step, numbers=draw.numbers, of_teacher=True)
            written = self.teacher.generate(asked, TEACHER_VERSION).result()
        answers = zip(written.sequences.rows(), written.sequences.prompt_lengths, strict=True)
        sequences = Sequences.join(
            written.sequences.sample_ids,
            [draw.table.prompt(row) for row in rows],
            [tokens[length:] for tokens, length in answers],
        )
        rollouts = Rollouts(version, sequences, written.finished)
        return rollouts, describe(rollouts)
