"""The source of groups on doubles: who answers which row, what is asked in which order, what is replaced, and what a
resumed run finds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest

from rlhf.algos.advantages import group_advantages
from rlhf.algos.grpo import plan_minibatches
from rlhf.config.algo import GRPO, Advantage, KLEstimator, KLIn, ScaleRewards
from rlhf.config.rollout import VllmRollout
from rlhf.config.run import Eval
from rlhf.config.train import Train
from rlhf.data.cursor import TableCursor
from rlhf.data.table import PromptTable
from rlhf.roles.doubles import Done, DoubleRewarder, doubles
from rlhf.sources.ahead import AheadGroupSource, Background
from rlhf.sources.conversations import Conversations
from rlhf.sources.evaluation import Evaluator
from rlhf.sources.groups import GroupSource
from rlhf.types import Experience, Metrics, Rewards, Sequences
from tests.unit.test_live_source import prompts_in, table_of

ROWS, SIZE = 10, 4


def numbered(rows: int, first: int = 0) -> PromptTable:
    """`table_of`, with a column that says which row it is."""
    table = table_of(rows, first)
    return PromptTable(**{**vars(table), "columns": tuple({"number": number} for number in range(first, first + rows))})


@dataclass
class Bench:
    """A source of groups on doubles: 3 prompts a step, 4 responses each."""

    algo: GRPO = field(default_factory=lambda: GRPO(num_generations=SIZE))
    steps: int = 3
    reward: Callable[[np.ndarray, Mapping[str, Any]], float] | None = None
    rewarded: bool = True
    taught: bool = False
    ahead: bool = False
    samples: int = 12
    """Responses of an optimizer step."""
    eval: Eval = field(default_factory=lambda: Eval(samples=0))
    conversations: Conversations | None = None

    def __post_init__(self) -> None:
        self.trainer, self.scorer, self.engine = doubles()
        self.trainer.needs_scores = False
        self.events = self.trainer.events
        self.rewarder = DoubleRewarder(self.events)
        if self.reward is not None:
            self.rewarder.function = self.reward
        self.reported: list[tuple[int, Metrics]] = []

    def source(self) -> GroupSource:
        scorer = self.scorer if self.taught else None
        rewarder = self.rewarder if self.rewarded else None
        evaluator = Evaluator(
            spec=self.eval,
            train=Train(),
            held_out=numbered(self.eval.samples, first=50),
            trainer=self.trainer,
            scorer=scorer,
            engine=self.engine,
            seed=0,
            total_steps=self.steps,
            report=lambda step, metrics: self.reported.append((step, metrics)),
            rewarder=rewarder,
            conversations=self.conversations,
        )
        fields: dict[str, Any] = dict(
            trainer=self.trainer,
            scorer=scorer,
            engine=self.engine,
            evaluator=evaluator,
            cursor=TableCursor(numbered(ROWS), seed=0, shuffle=True),
            make_minibatches=partial(
                plan_minibatches, algo=self.algo, train=Train(), data_parallel=1, max_new_tokens=8
            ),
            rollout=VllmRollout(max_new_tokens=8),
            micro_batch_tokens=4096,
            batch_samples=self.samples * self.algo.steps_per_generation // self.algo.num_generations,
            steps=self.steps,
            seed=0,
            phase=lambda name: None,
            algo=self.algo,
            rewarder=rewarder,
            conversations=self.conversations,
        )
        return AheadGroupSource(background=Background(), **fields) if self.ahead else GroupSource(**fields)

    def run(self) -> list[Experience]:
        experiences = []
        for experience in self.source():
            experiences.append(experience)
            self.trainer.train(experience).result()
        return experiences

    def calls(self) -> list[str]:
        return [event.call for event in self.events]


def responses_of(experience: Experience) -> list[list[int]]:
    rows = zip(experience.sequences.rows(), experience.sequences.prompt_lengths, strict=True)
    return [tokens[length:].tolist() for tokens, length in rows]


# ---- groups ---------------------------------------------------------------------------------------------------------


def test_each_prompt_gets_a_group_of_different_responses() -> None:
    cursor = TableCursor(numbered(ROWS), seed=0, shuffle=True)
    for experience in Bench().run():
        rows = cursor.take(3).table
        expected = [rows.prompt(row).tolist() for row in range(3) for _ in range(SIZE)]
        assert prompts_in(experience.sequences) == expected
        for group in np.split(np.arange(12), 3):
            assert len({tuple(responses_of(experience)[index]) for index in group}) == SIZE


def test_the_order_of_a_step_with_and_without_a_teacher() -> None:
    bench = Bench(steps=1)
    bench.run()
    assert bench.calls() == ["update", "generate", "sleep", "reward", "train"]
    taught = Bench(GRPO(num_generations=SIZE, kl_coef=0.1), steps=1, taught=True)
    (experience,) = taught.run()
    assert taught.calls() == ["update", "generate", "sleep", "reward", "logprobs", "train"]
    assert experience.minibatches[0].teacher_logprobs is not None
    assert experience.scores is None, "numbers go with the batch"


def test_rewards_and_scores_are_under_way_at_the_same_time() -> None:
    """Both have been asked before either is waited for."""
    bench = Bench(GRPO(num_generations=SIZE, kl_coef=0.1), steps=1, taught=True)
    order: list[str] = []

    class Watched:
        def __init__(self, name: str, future: Any) -> None:
            order.append(f"{name} asked")
            self.name, self.future = name, future

        def result(self) -> Any:
            order.append(f"{self.name} waited for")
            return self.future.result()

    reward, logprobs = bench.rewarder.score, bench.scorer.logprobs
    bench.rewarder.score = lambda *args: Watched("reward", reward(*args))  # type: ignore
    bench.scorer.logprobs = lambda *args: Watched("score", logprobs(*args))  # type: ignore
    bench.run()
    assert order == ["reward asked", "score asked", "reward waited for", "score waited for"]


def test_rewards_become_advantages_of_every_token() -> None:
    bench = Bench()
    for experience in bench.run():
        rewards = np.array([np.mean(np.array(tokens) % 2 == 0) for tokens in responses_of(experience)], np.float32)
        assert experience.rewards is not None and experience.rewards.tolist() == rewards.tolist()
        expected = group_advantages(rewards, SIZE, Advantage.grpo, ScaleRewards.group)
        per_token = np.repeat(expected, experience.sequences.response_lengths)
        (minibatch,) = experience.minibatches
        assert minibatch.advantages is not None and minibatch.advantages.tolist() == per_token.tolist()
        assert experience.metrics["reward/mean"] == pytest.approx(float(rewards.mean()))
        assert experience.metrics["reward/double/mean"] == pytest.approx(float(rewards.mean()))
        assert experience.metrics["reward/zero_variance_share"] == 0
        assert {"time/rollout", "time/reward", "rollout/finished_share"} <= set(experience.metrics)


def test_the_rewarder_gets_the_row_of_each_response() -> None:
    asked: list[int] = []

    def reward(response: np.ndarray, row: Mapping[str, Any]) -> float:
        asked.append(row["number"])
        return float(len(response))

    bench = Bench(steps=1, reward=reward)
    bench.run()
    numbers = TableCursor(numbered(ROWS), seed=0, shuffle=True).take(3).numbers
    assert asked == np.repeat(numbers, SIZE).tolist()


def test_several_optimizer_steps_of_a_generation() -> None:
    bench = Bench(GRPO(num_generations=SIZE, steps_per_generation=3), samples=4, steps=2)
    experiences = bench.run()
    assert [len(experience.minibatches) for experience in experiences] == [3, 3]
    assert [experience.version for experience in experiences] == [0, 3] and bench.trainer.version == 6
    for experience in experiences:
        assert [sorted(one.plan.samples) for one in experience.minibatches] == [
            list(range(start, start + 4)) for start in (0, 4, 8)
        ]


def test_the_penalties_of_the_reward() -> None:
    algo = GRPO(
        num_generations=SIZE,
        kl_coef=0.25,
        kl_in=KLIn.reward,
        kl_estimator=KLEstimator.k1,
        overlong_buffer=4,
        scale_rewards=ScaleRewards.none,
    )
    bench = Bench(algo, steps=1, taught=True)
    (experience,) = bench.run()
    lengths = experience.sequences.response_lengths
    rewards = np.array([np.mean(np.array(tokens) % 2 == 0) for tokens in responses_of(experience)])
    overlong = np.array([min(0.0, (4 - length) / 4) for length in lengths])
    kl = lengths * (-np.log(16) + 2.0)  # the engine's and the scorer's log-probabilities are the same everywhere
    expected = (rewards + overlong - 0.25 * kl).reshape(-1, SIZE)
    expected = (expected - expected.mean(axis=1, keepdims=True)).reshape(-1)
    advantages = experience.minibatches[0].advantages
    assert advantages is not None
    assert advantages.tolist() == pytest.approx(np.repeat(expected, lengths).tolist(), abs=1e-6)
    assert experience.metrics["reward/overlong_penalty"] == pytest.approx(overlong.mean())
    assert experience.metrics["reward/kl"] == pytest.approx(kl.mean())
    assert experience.rewards is not None and experience.rewards.tolist() == pytest.approx(rewards.tolist())


def test_without_rewards_everything_is_learned_from_the_teacher() -> None:
    bench = Bench(GRPO(num_generations=SIZE, teacher_kl_coef=1.0), steps=1, rewarded=False, taught=True)
    (experience,) = bench.run()
    assert bench.calls() == ["update", "generate", "sleep", "logprobs", "train"]
    (minibatch,) = experience.minibatches
    assert minibatch.advantages is not None and not minibatch.advantages.any()
    assert experience.rewards is None and not any(name.startswith("reward/") for name in experience.metrics)


# ---- dynamic sampling -----------------------------------------------------------------------------------------------

DULL = {0, 2, 4, 6, 8}
"""Rows whose responses all get the same reward."""


def of_odd_rows(response: np.ndarray, row: Mapping[str, Any]) -> float:
    return 0.5 if row["number"] in DULL else float(response.sum())


def dynamic(max_resamples: int = 3) -> GRPO:
    return GRPO(num_generations=SIZE, dynamic_sampling=True, max_resamples=max_resamples)


def asked_rows(bench: Bench) -> list[list[int]]:
    """The rows of each generation, from their prompts' first token."""
    asked = [event.what for event in bench.events if event.call == "generate"]
    return [[int(row[0]) - 100 for row in itertools.islice(prompts.rows(), 0, None, SIZE)] for prompts in asked]


def trained_rows(experience: Experience) -> list[int]:
    return [prompt[0] - 100 for prompt in prompts_in(experience.sequences)[::SIZE]]


def test_groups_without_variance_are_replaced_by_further_prompts() -> None:
    bench = Bench(dynamic(9), steps=2, reward=of_odd_rows)
    experiences = bench.run()
    order = TableCursor(numbered(ROWS), seed=0, shuffle=True)
    generations = iter(asked_rows(bench))
    for experience in experiences:
        chosen: list[int] = []
        rounds = 0
        while len(chosen) < 3:
            drawn = order.take(3 - len(chosen)).numbers.tolist()
            assert next(generations) == drawn
            chosen += [row for row in drawn if row not in DULL]
            rounds += 1
        assert trained_rows(experience) == chosen
        assert experience.metrics["rollout/resample_rounds"] == rounds - 1
        assert experience.metrics["rollout/uninformative_groups"] == 0
        assert experience.metrics["data/epoch"] == order.metrics()["data/epoch"]
    assert next(generations, None) is None
    ids = np.concatenate([experience.sequences.sample_ids for experience in experiences])
    assert len(set(ids.tolist())) == len(ids)
    assert [call for call in bench.calls() if call == "sleep"] == ["sleep"] * 2, "once a step, after the last round"


def test_when_the_rounds_are_over_the_first_of_the_others_fill_up() -> None:
    bench = Bench(dynamic(1), steps=1, reward=lambda response, row: 1.0)
    (experience,) = bench.run()
    assert [len(rows) for rows in asked_rows(bench)] == [3, 3]
    assert trained_rows(experience) == asked_rows(bench)[0]
    assert experience.metrics["rollout/uninformative_groups"] == 3
    assert experience.metrics["rollout/prompts_asked"] == 6
    assert experience.metrics["reward/zero_variance_share"] == 1, "of the first round"
    assert experience.metrics["reward/first_round_mean"] == 1
    advantages = experience.minibatches[0].advantages
    assert advantages is not None and not advantages.any()


def test_a_row_that_comes_again_in_the_same_step_gets_other_samples() -> None:
    """Ten rows, up to 30 of them asked in one step: a row of equal rewards would else give the same again."""
    bench = Bench(dynamic(9), steps=1, reward=lambda response, row: 1.0)
    bench.run()
    asked = [event.what for event in bench.events if event.call == "generate"]
    seeds = np.concatenate([prompts.seeds for prompts in asked])
    assert len(seeds) == 120 and len(set(seeds.tolist())) == 120


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("algo", [GRPO(num_generations=SIZE), dynamic()], ids=["plain", "dynamic"])
def test_a_resumed_run_takes_the_rows_that_would_have_come(algo: GRPO, ahead: bool) -> None:
    whole = Bench(algo, steps=4, reward=of_odd_rows, ahead=ahead).run()
    first = Bench(algo, steps=4, reward=of_odd_rows, ahead=ahead)
    source = first.source()
    for experience in source:
        first.trainer.train(experience).result()
        if experience.step == 2:
            break
    if ahead:
        source.background.join()  # type: ignore[attr-defined]
    second = Bench(algo, steps=4, reward=of_odd_rows, ahead=ahead)
    second.trainer.version = first.trainer.version
    resumed = second.source()
    resumed.cursor.load_state_dict(source.position)
    resumed.done = 2
    rest = []
    for experience in resumed:
        rest.append(experience)
        second.trainer.train(experience).result()
    assert [one.step for one in rest] == [3, 4]
    for one, other in zip(rest, whole[2:], strict=True):
        if not ahead:  # else the first one is made again, with newer weights
            assert one.sequences.tokens.tolist() == other.sequences.tokens.tolist()
        assert sorted(set(trained_rows(one))) == sorted(set(trained_rows(other)))


def test_groups_one_step_ahead() -> None:
    bench = Bench(dynamic(9), steps=3, reward=of_odd_rows, ahead=True)
    experiences = bench.run()
    assert [experience.version for experience in experiences] == [0, 0, 1]
    assert [experience.metrics["rollout/staleness"] for experience in experiences] == [0, 1, 1]
    for experience in experiences[1:]:
        metrics = experience.metrics
        assert metrics["ahead/rollout"] >= 0 and metrics["timeline/rollout_start"] <= metrics["timeline/reward_end"]
    apart = Bench(dynamic(9), steps=3, reward=of_odd_rows).run()
    assert [trained_rows(one) for one in experiences] == [trained_rows(one) for one in apart]


# ---- evaluation -----------------------------------------------------------------------------------------------------


def test_held_out_rows_are_rewarded_for_their_greedy_responses() -> None:
    bench = Bench(steps=1, eval=Eval(samples=3))
    bench.run()
    assert [step for step, _ in bench.reported] == [0, 1]
    greedy = [event.what for event in bench.events if event.call == "greedy"]
    rewarded = [event.what for event in bench.events if event.call == "reward"]
    assert [len(prompts) for prompts in greedy] == [3, 3] and len(rewarded) == 3
    for (_, metrics), sequences in zip(bench.reported, (rewarded[0], rewarded[2]), strict=True):
        rewards = [
            np.mean(tokens[length:] % 2 == 0)
            for tokens, length in zip(sequences.rows(), sequences.prompt_lengths, strict=True)
        ]
        assert metrics["eval/reward"] == metrics["eval/reward/double"] == pytest.approx(np.mean(rewards))
        assert "eval/forward_kl" not in metrics, "there is no teacher"


def test_a_function_that_does_not_apply_to_some_rows_and_what_took_too_long() -> None:
    """Calls that were given up while evaluating are the evaluation's, not the next step's."""
    bench = Bench(steps=1, eval=Eval(samples=4))
    told = {"reward/choked": 0.0}
    score = bench.rewarder.score

    def scored(sequences: Sequences, rows: Any) -> Any:
        total = score(sequences, rows).value.total
        odd = np.array([row["number"] % 2 == 1 for row in rows])
        told["reward/choked"] += len(rows)
        return Done(Rewards(total, {"double": total, "odd": np.where(odd, 3, np.nan).astype(np.float32)}))

    def metrics() -> Metrics:
        since, told["reward/choked"] = dict(told), 0.0
        return since

    bench.rewarder.score = scored  # type: ignore
    bench.rewarder.metrics = metrics  # type: ignore
    (experience,) = bench.run()
    for _, found in bench.reported:
        assert (found["eval/reward/odd"], found["eval/reward/odd_applies"]) == (3, 0.5)
        assert found["eval/choked"] == 4 and "eval/reward/double_applies" not in found
    assert experience.metrics["reward/choked"] == 12
    quiet = Bench(steps=1, eval=Eval(samples=4))
    quiet.run()
    assert all("eval/choked" not in found for _, found in quiet.reported)


def test_with_a_teacher_divergences_are_measured_as_well() -> None:
    bench = Bench(GRPO(num_generations=SIZE, kl_coef=0.1), steps=1, taught=True, eval=Eval(samples=3))
    bench.run()
    assert all({"eval/forward_kl", "eval/reward"} <= set(metrics) for _, metrics in bench.reported)
