"""The source of algo=grpo: several responses to each prompt, their rewards, and what the teacher says about them.

sync weights ► (evaluate) ► generate ► reward, and score at the same time ► advantages ► Experience
                               ▲           │
                               └───────────┘ algo.dynamic_sampling: further prompts for groups of equal rewards
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float32

from rlhf.algos.advantages import (
    describe_rewards,
    group_advantages,
    join_rewards,
    kl_penalty,
    overlong_penalty,
    select_rewards,
    uniform_groups,
)
from rlhf.algos.grpo import by_token
from rlhf.batching import describe_plans
from rlhf.config.algo import GRPO, KLIn
from rlhf.data.cursor import Draw
from rlhf.data.table import PromptTable, concatenate
from rlhf.roles.protocols import Future, Rewarder
from rlhf.roles.replicas import merge
from rlhf.sources.conversations import rewarded, sampled
from rlhf.sources.live import LiveSource
from rlhf.sources.privileged import as_the_teacher_reads, privileged_share
from rlhf.sources.requests import prompts_of
from rlhf.sources.steps import Batch, Timed, describe
from rlhf.types import Experience, Metrics, MiniBatch, Rewards, Rollouts, Sequences


@dataclass(frozen=True)
class Groups:
    """Responses, group after group, and the row that each of them answers."""

    rollouts: Rollouts
    table: PromptTable

    def select(self, responses: list[int]) -> Groups:
        return Groups(self.rollouts.select(responses), self.table.select(responses))

    @staticmethod
    def join(parts: list[Groups]) -> Groups:
        return Groups(merge([part.rollouts for part in parts]), concatenate([part.table for part in parts]))


@dataclass
class Requests:
    """What a step has asked the engine for already."""

    made: int = 0
    occurrences: dict[int, int] = field(default_factory=dict)
    """Row number -> requests."""


@dataclass(kw_only=True)
class GroupSource(LiveSource):
    """`batch_samples` prompts a step, `algo.num_generations` responses to each. Advantages are made here, in the
    driver, from rewards; what depends on the trainer's own log-probabilities is made there."""

    algo: GRPO
    rewarder: Rewarder | None
    """None: everything is learned from the teacher."""

    def make(self, batch: Batch, version: int, timed: Timed) -> tuple[Batch, Experience]:
        """Responses, rewards and scores. Rewards are waited for while the teacher works, unless they decide which
        responses it is asked about."""
        if self.algo.dynamic_sampling:
            batch, groups, rewards, described = self._informative(batch, version, timed)
            self.engine.sleep().result()
            asked = None
        else:
            groups = self._sample(batch.draw, batch.step, Requests(), version, timed)
            self.engine.sleep().result()
            asked, rewards, described = self._reward(groups), None, {}
        sequences = groups.rollouts.sequences
        minibatches = self.make_minibatches(groups.rollouts)
        scored = self._score(groups, minibatches)
        if asked is not None:
            with timed("reward"):
                rewards = asked.result()
        teacher = None
        if scored is not None:
            with timed("score"):
                teacher = scored.result()
        advantages, of_rewards = self._advantages(sequences, rewards, teacher)
        per_token = by_token(advantages, sequences)
        return batch, Experience(
            step=batch.step,
            version=groups.rollouts.version,
            sequences=sequences,
            minibatches=tuple(replace(one, advantages=per_token, teacher_logprobs=teacher) for one in minibatches),
            rewards=None if rewards is None else rewards.total,
            metrics={
                **batch.metrics,
                **describe(groups.rollouts),
                "rollout/weight_version": float(groups.rollouts.version),
                **of_rewards,
                **({} if self.rewarder is None else self.rewarder.metrics()),
                **described,
                **describe_plans([minibatch.plan for minibatch in minibatches], sequences.lengths),
                **({} if teacher is None else {"batch/privileged_share": privileged_share(groups.table)}),
            },
        )

    # ---- responses --------------------------------------------------------------------------------------------------

    def _sample(self, draw: Draw, step: int, asked: Requests, version: int, timed: Timed) -> Groups:
        """A group of responses to each row of a draw."""
        rows = np.repeat(np.arange(len(draw.table)), self.algo.num_generations)
        table = draw.table.select(rows)
        with timed("rollout"):
            prompts = prompts_of(
                table,
                range(len(rows)),
                seed=self.seed,
                step=step,
                numbers=draw.numbers[rows],
                occurrences=asked.occurrences,
            )
            first = step * self._most_requests + asked.made
            asked.made += len(rows)
            prompts = replace(prompts, sample_ids=np.arange(first, first + len(rows), dtype=np.int64))
            return Groups(sampled(self.engine, self.conversations, prompts, table.columns, version), table)

    @property
    def _most_requests(self) -> int:
        """Of a step."""
        rounds = 1 + self.algo.max_resamples if self.algo.dynamic_sampling else 1
        return self.batch_samples * self.algo.num_generations * rounds

    def _informative(self, batch: Batch, version: int, timed: Timed) -> tuple[Batch, Groups, Rewards, Metrics]:
        """Groups whose rewards differ (DAPO, arXiv 2503.14476, section 3.2). Each round asks as many further prompts as
        groups are missing; when the rounds are over, the first of the others fill up."""
        size, draw, asked = self.algo.num_generations, batch.draw, Requests()
        chosen: list[tuple[Groups, Rewards]] = []
        spare: list[tuple[Groups, Rewards]] = []
        missing, rounds = self.batch_samples, 0
        described: Metrics = {}
        while True:
            groups = self._sample(draw, batch.step, asked, version, timed)
            with timed("reward"):
                answer = self._reward(groups)
                assert answer is not None, "checked when the configuration was composed"
                rewards = answer.result()
            uniform = uniform_groups(rewards.total, size)
            for group in range(len(uniform)):
                responses = list(range(group * size, (group + 1) * size))
                part = groups.select(responses), select_rewards(rewards, responses)
                (spare if uniform[group] else chosen).append(part)
            missing -= int((~uniform).sum())
            if rounds == 0:  # the prompts as they come; what is chosen of them has other means
                described["reward/zero_variance_share"] = float(uniform.mean())
                described["reward/first_round_mean"] = float(rewards.total.mean())
            if missing == 0 or rounds == self.algo.max_resamples:
                break
            rounds += 1
            draw = self.cursor.take(missing)
            batch = replace(batch, metrics=self.cursor.metrics(), position=self.cursor.state_dict())
        chosen += spare[:missing]
        described |= {
            "rollout/resample_rounds": float(rounds),
            "rollout/prompts_asked": asked.made / size,
            "rollout/uninformative_groups": float(missing),
        }
        joined = Groups.join([part for part, _ in chosen])
        return batch, joined, join_rewards([part for _, part in chosen]), described

    # ---- rewards and scores -----------------------------------------------------------------------------------------

    def _reward(self, groups: Groups) -> Future[Rewards] | None:
        of_functions = None
        if self.rewarder is not None:
            of_functions = self.rewarder.score(groups.rollouts.sequences, groups.table.columns)
        return rewarded(of_functions, groups.rollouts, self.conversations)

    def _score(self, groups: Groups, minibatches: tuple[MiniBatch, ...]) -> Future[Float32[np.ndarray, " R"]] | None:
        """The teacher's log-probabilities, on their way."""
        if not self.algo.asks_teacher:
            return None
        assert self.scorer is not None, "checked when the configuration was composed"
        sequences = groups.rollouts.sequences
        asked = as_the_teacher_reads(sequences, minibatches, groups.table, self.micro_batch_tokens)
        return self.scorer.logprobs(*asked, self.rollout.temperature)

    def _advantages(
        self, sequences: Sequences, rewards: Rewards | None, teacher: Float32[np.ndarray, " R"] | None
    ) -> tuple[Float32[np.ndarray, " n"], Metrics]:
        """One a response, and what there is to say about the rewards. Without rewards they are 0."""
        algo, lengths = self.algo, sequences.response_lengths
        if rewards is None:
            return np.zeros(len(sequences), dtype=np.float32), {}
        metrics = describe_rewards(rewards, algo.num_generations)
        totals = np.asarray(rewards.total, dtype=np.float64)
        if algo.overlong_buffer:
            penalty = overlong_penalty(lengths, self.rollout.max_new_tokens, algo.overlong_buffer)
            totals = totals + penalty
            metrics["reward/overlong_penalty"] = float(penalty.mean())
        if algo.kl_coef and algo.kl_in is KLIn.reward:
            assert teacher is not None and sequences.logprobs is not None
            divergence = kl_penalty(sequences.logprobs, teacher, lengths, algo.kl_estimator)
            totals = totals - algo.kl_coef * divergence
            metrics["reward/kl"] = float(divergence.mean())
        advantages = group_advantages(totals, algo.num_generations, algo.advantage, algo.scale)
        return advantages, {**metrics, "reward/advantage_max": float(np.abs(advantages).max())}
