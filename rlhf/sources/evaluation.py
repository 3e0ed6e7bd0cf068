"""Held-out evaluation: divergence from the teacher, rewards, and one sample completion to look at."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from rlhf.algos.advantages import describe_functions
from rlhf.batching import plan_batch, plan_on_ranks
from rlhf.config.run import Eval, EvalResponses
from rlhf.config.train import Train
from rlhf.data.table import PromptTable
from rlhf.roles.protocols import Engine, Rewarder, Scorer, Trainer
from rlhf.sources.conversations import Conversations, rewarded, sampled
from rlhf.sources.privileged import privileged_sequences
from rlhf.sources.requests import prompts_of, reference_sequences
from rlhf.types import Metrics, Sequences


@dataclass
class Evaluator:
    """Measures the trainer's weights, which the engine holds, too, if there is one. Called by the source, between sync
    and generation.

    The teacher reads a row's own `teacher_prompt`, where it has one, as in training: what is measured is how far the
    student is from the teacher that knows more.
    """

    spec: Eval
    train: Train
    held_out: PromptTable
    trainer: Trainer
    scorer: Scorer | None
    """None without a teacher: no divergences are measured."""
    engine: Engine | None
    """None: no sample completions, and reference responses only."""
    seed: int
    total_steps: int
    report: Callable[[int, Metrics], None]
    """Called with the step and its metrics."""
    solves: Callable[[np.ndarray, int], bool] | None = None
    """Whether a completion, as token ids, solves the exercise of a held-out row; None: nobody can tell."""
    rewarder: Rewarder | None = None
    """Rewards greedy completions of the held-out rows: eval/reward, and eval/reward/NAME of each function (the
    mean over those that it applies to, and eval/reward/NAME_applies)."""
    conversations: Conversations | None = None
    """None: a completion is one response. Otherwise the environment's rewards are eval/reward/environment."""
    results: dict[int, Metrics] = field(default_factory=dict)
    samples: dict[int, np.ndarray] = field(default_factory=dict)
    """Step -> token ids of the greedy completion of the first held-out prompt."""

    def due(self, step: int) -> bool:
        """Step 0 is before the first; it and the last step always are. What an earlier part of the run did isn't."""
        first_or_last = step in (0, self.total_steps)
        on_the_way = self.spec.every > 0 and step % self.spec.every == 0
        return self.spec.samples > 0 and (first_or_last or on_the_way) and step not in self.results

    def after_step(self, step: int, version: int) -> None:
        """Evaluate if it is due."""
        if not self.due(step):
            return
        started = time.perf_counter()
        found = {} if self.engine is None else self._complete(self.engine, step, version)
        if self.scorer is not None:
            found = {**self._divergences(self.scorer, version), **found}
        self.results[step] = found
        self.report(step, {**found, "time/eval": time.perf_counter() - started})

    def _divergences(self, scorer: Scorer, version: int) -> Metrics:
        """From the teacher, over the whole vocabulary."""
        sequences = self._sequences(version)
        plan = plan_batch(
            sequences.lengths,
            data_parallel=self.trainer.data_parallel,
            micro_batch_tokens=self.train.micro_batch_tokens,
            padding_free=self.train.padding_free,
            pad_multiple=self.train.pad_multiple,
        )
        privileged = privileged_sequences(sequences, self.held_out)
        teacher = None
        if privileged is not None:
            teacher = (privileged, plan_on_ranks(plan, privileged.lengths, self.train.micro_batch_tokens))
        hidden = scorer.hidden_rows(*(teacher or (sequences, plan))).result()
        return self.trainer.evaluate(sequences, plan, teacher, hidden).result()

    def _complete(self, engine: Engine, step: int, version: int) -> Metrics:
        """Greedy completions: of the first row, to look at; of all rows, where it can be told how good they are."""
        told = self.solves is not None or self.rewarder is not None or self.conversations is not None
        rows = range(len(self.held_out) if told else 1)
        prompts = prompts_of(self.held_out, rows, seed=self.seed, step=0)
        columns = self.held_out.columns[: len(rows)]
        rollouts = sampled(engine, self.conversations, prompts, columns, version, greedy=True)
        sequences = rollouts.sequences
        self.samples[step] = next(sequences.continuations())
        completions = [turns[-1] for turns in sequences.turns()]
        found: Metrics = {}
        of_functions = None if self.rewarder is None else self.rewarder.score(sequences, columns)
        asked = rewarded(of_functions, rollouts, self.conversations)
        if asked is not None:
            rewards = asked.result()
            found["eval/reward"] = float(np.mean(rewards.total, dtype=np.float64))
            found |= describe_functions(rewards, "eval/reward/{}")
        if self.rewarder is not None and (choked := self.rewarder.metrics().get("reward/choked")):
            found["eval/choked"] = choked  # taken here, it isn't the next step's
        if self.solves is not None:
            solved = [self.solves(completion, row) for row, completion in zip(rows, completions, strict=True)]
            found["eval/accuracy"] = float(np.mean(solved))
        return found

    def _sequences(self, version: int) -> Sequences:
        if self.spec.responses is EvalResponses.dataset:
            return reference_sequences(self.held_out, self.spec.max_response_tokens)
        assert self.engine is not None, "checked when the configuration was composed"
        prompts = prompts_of(self.held_out, range(len(self.held_out)), seed=self.seed, step=0)
        return sampled(self.engine, self.conversations, prompts, self.held_out.columns, version).sequences
