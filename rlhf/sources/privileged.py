"""What the teacher reads: a row's own `teacher_prompt`, where it has one, before the same response tokens.

Its sequences are longer than the student's, so it packs them into micro-batches of its own. Samples, ranks and response
rows stay the same, so its scores are where the student's rows look for them.
"""

from __future__ import annotations

from dataclasses import replace

from rlhf.batching import plan_on_ranks
from rlhf.data.table import PromptTable
from rlhf.types import MiniBatch, Sequences


def privileged_sequences(sequences: Sequences, table: PromptTable) -> Sequences | None:
    """The same responses (and observations) after the teacher's prompts; a row without one keeps its own prompt.

    Args:
        table: the rows the sequences were made of, in the same order.

    Returns:
        None where no row has a prompt for the teacher alone.
    """
    assert len(sequences) == len(table), "one sequence a row"
    if len(table.teacher_tokens) == 0:
        return None
    prompts = []
    for row, tokens in enumerate(sequences.rows()):
        own = table.teacher_prompt(row)
        prompts.append(tokens[: sequences.prompt_lengths[row]] if own is None else own)
    written = None if sequences.written is None else [sequences.written]
    return Sequences.join(sequences.sample_ids, prompts, list(sequences.continuations()), written=written)


def as_the_teacher_reads(
    sequences: Sequences, minibatches: tuple[MiniBatch, ...], table: PromptTable, micro_batch_tokens: int
) -> tuple[Sequences, tuple[MiniBatch, ...]]:
    """Arguments of `Scorer.score`."""
    privileged = privileged_sequences(sequences, table)
    if privileged is None:
        return sequences, minibatches
    plans = [plan_on_ranks(minibatch.plan, privileged.lengths, micro_batch_tokens) for minibatch in minibatches]
    return privileged, tuple(replace(one, plan=plan) for one, plan in zip(minibatches, plans, strict=True))


def privileged_share(table: PromptTable) -> float:
    """Share of the rows with a prompt for the teacher alone."""
    return float((table.teacher_lengths > 0).mean())
