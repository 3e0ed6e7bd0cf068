"""Conversations on doubles: whose turn it is, what is whose token, when it ends, and what it is worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from rlhf.algos.advantages import group_advantages
from rlhf.config.algo import GRPO, Advantage, ScaleRewards
from rlhf.config.data import FileData
from rlhf.config.environment import MultiTurn
from rlhf.config.run import Eval
from rlhf.data.cursor import TableCursor
from rlhf.data.turns import TurnMarkup, encode, find_markup
from rlhf.environments import Turn
from rlhf.roles.doubles import Done, DoubleEngine, DoubleEnvironments
from rlhf.sources.conversations import Conversations, turn_seed
from rlhf.sources.privileged import privileged_sequences
from rlhf.sources.steps import describe
from rlhf.types import Prompts, Rollouts, offsets_of, ragged
from tests.unit import test_live_source
from tests.unit.test_group_source import ROWS, SIZE, Bench, numbered
from tests.unit.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.eos_token_id
AROUND = "\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"


def markup_of(tokens: int = 64, turns: int = 3) -> TurnMarkup | None:
    spec = MultiTurn(name="a.b", max_observation_tokens=tokens, max_turns=turns) if turns > 1 else None
    return spec and find_markup(TOKENIZER, FileData(path="x"), spec, [END])


def talk(row: Mapping[str, Any], turn: int, text: str) -> Turn:
    """Depends on what it is told; over where a text has an even length after the first turn."""
    return Turn(f"{len(text)} what is the sum", len(text) / 8, done=turn > 0 and len(text) % 2 == 0)


@dataclass
class Talker(DoubleEngine):
    """Ends its turns half of the time, and gives each token a log-probability of its own."""

    vocabulary: int = 12
    version: int | None = 0

    def generate(self, prompts: Prompts, version: int, greedy: bool = False) -> Done[Rollouts]:
        made = super().generate(prompts, version, greedy).value
        written = np.concatenate(list(made.sequences.continuations()))
        return Done(replace(made, sequences=replace(made.sequences, logprobs=-(written / 100).astype(np.float32))))


def conversations_of(function: Any = talk, turns: int = 3, weight: float = 1.0) -> Conversations:
    return Conversations(
        DoubleEnvironments(function),
        markup_of(turns=turns),
        decode=partial(TOKENIZER.decode, skip_special_tokens=True),
        max_turns=turns,
        reward_weight=weight,
    )


def prompts_of(count: int) -> Prompts:
    rng = np.random.default_rng(0)
    rows = [rng.integers(4, 200, 1 + index % 4).astype(np.int32) for index in range(count)]
    return Prompts(
        np.arange(count) + 50, np.concatenate(rows), offsets_of(list(map(len, rows))), rng.integers(0, 2**31, count)
    )


def replayed(prompt: np.ndarray, seed: int, turns: int) -> tuple[list[int], list[bool], float, int, bool, bool]:
    """One conversation alone, in plain Python: tokens after the prompt, mask, return, turns, done, finished."""
    engine = Talker()
    text, written, worth = prompt.tolist(), [], 0.0
    for turn in range(turns):
        asked = Prompts(np.array([0]), np.array(text, dtype=np.int32), np.array([0, len(text)]), np.array([seed]))
        if turn:
            asked = replace(asked, seeds=np.array([turn_seed(seed, turn)]))
        response = next(engine.generate(asked, 0).value.sequences.continuations()).tolist()
        text, written = text + response, written + [True] * len(response)
        said = talk({}, turn, TOKENIZER.decode(response, skip_special_tokens=True))
        worth += said.reward
        ended = response[-1] == END
        if said.done or turn + 1 == turns or not ended:
            break
        observation = encode(TOKENIZER, AROUND[0] + said.observation + AROUND[1])
        text, written = text + observation, written + [False] * len(observation)
    return text[len(prompt) :], written, worth, turn + 1, said.done, ended


@pytest.mark.parametrize("turns", [1, 2, 4])
def test_conversations_of_a_batch_equal_each_alone(turns: int) -> None:
    prompts = prompts_of(100)
    rollouts = conversations_of(turns=turns).play(Talker(), prompts, [{}] * 100, version=0)
    sequences, episodes = rollouts.sequences, rollouts.episodes
    assert episodes is not None and sequences.logprobs is not None
    logprobs = list(ragged(sequences.response_offsets, sequences.logprobs))
    for index, (prompt, seed) in enumerate(zip(prompts.rows(), prompts.seeds, strict=True)):
        tokens, written, worth, count, done, ended = replayed(prompt, int(seed), turns)
        mask = sequences.masks()[index]
        assert mask is not None and mask.tolist() == written
        assert list(sequences.continuations())[index].tolist() == tokens
        assert list(sequences.rows())[index][: sequences.prompt_lengths[index]].tolist() == prompt.tolist()
        assert sequences.response_lengths[index] == sum(written)
        mine = [-token / 100 for token, own in zip(tokens, written, strict=True) if own]
        assert logprobs[index].tolist() == pytest.approx(mine)
        assert episodes.returns[index] == pytest.approx(worth)
        assert (episodes.turns[index], episodes.done[index], rollouts.finished[index]) == (count, done, ended)
    if turns == 4:  # every way to end has happened
        assert {1, 2, 3, 4} == set(episodes.turns.tolist())
        assert episodes.done.any() and (rollouts.finished & ~episodes.done).any() and not rollouts.finished.all()


def test_a_conversation_does_not_depend_on_the_others_or_their_order() -> None:
    prompts, order = prompts_of(12), [7, 2, 11, 0]
    whole = conversations_of().play(Talker(), prompts, [{}] * 12, 0).select(order)
    rows = list(prompts.rows())
    part = Prompts(
        prompts.sample_ids[order],
        np.concatenate([rows[row] for row in order]),
        offsets_of([len(rows[row]) for row in order]),
        prompts.seeds[order],
    )
    alone = conversations_of().play(Talker(), part, [{}] * 4, 0)
    for name, values in vars(whole.sequences).items():
        assert np.array_equal(values, getattr(alone.sequences, name)), name
    assert whole.episodes is not None and alone.episodes is not None
    for name, values in vars(whole.episodes).items():
        assert np.array_equal(values, getattr(alone.episodes, name)), name
    seeds = {turn_seed(int(seed), turn) for seed in prompts.seeds for turn in range(4)}
    assert len(seeds) == 48 and turn_seed(5, 0) == 5


def test_each_turn_is_one_batch_of_those_that_go_on() -> None:
    def over_at(row: Mapping[str, Any], turn: int, text: str) -> Turn:
        return Turn("go on", done=turn == row["turns"])

    conversations, engine = conversations_of(over_at), Talker(max_new_tokens=200)
    rows = [{"turns": index % 3} for index in range(9)]
    rollouts = conversations.play(engine, prompts_of(9), rows, 0)
    assert [len(event.what) for event in engine.events] == [9, 6, 3]
    assert isinstance(conversations.environments, DoubleEnvironments) and not conversations.environments.turns
    assert rollouts.episodes is not None and rollouts.episodes.turns.tolist() == [1, 2, 3] * 3
    assert [len(turns) for turns in rollouts.sequences.turns()] == [1, 3, 5] * 3
    asked = [list(event.what.rows()) for event in engine.events]
    first, second = list(rollouts.sequences.turns())[1][:2]
    prompt = list(prompts_of(9).rows())[1]
    assert asked[1][0].tolist() == [*prompt, *first, *second], "what the model wrote comes back as it was"


def test_a_long_observation_is_cut_and_counted() -> None:
    conversations = replace(
        conversations_of(lambda row, turn, text: Turn("what is the sum " * 20)), markup=markup_of(tokens=30)
    )
    rollouts = conversations.play(Talker(max_new_tokens=200), prompts_of(5), [{}] * 5, 0)
    for turns in rollouts.sequences.turns():
        assert 20 <= len(turns[1]) <= 30 and TOKENIZER.decode(turns[1]).endswith(AROUND[1])
    metrics = describe(rollouts)
    assert metrics["environment/cut_observations"] == 10 and metrics["environment/turns_mean"] == 3
    assert metrics["environment/done_share"] == 0
    observed = [len(turns[1]) + len(turns[3]) for turns in rollouts.sequences.turns()]
    assert metrics["environment/observation_tokens_mean"] == pytest.approx(np.mean(observed))


# ---- in the sources -------------------------------------------------------------------------------------------------


def played(functions: bool, weight: float = 1.0, **bench: Any) -> tuple[Bench, list[Any]]:
    made = Bench(rewarded=functions, conversations=conversations_of(weight=weight), **bench)
    made.engine.vocabulary = 12
    return made, made.run()


@pytest.mark.parametrize("functions", [True, False])
def test_returns_and_functions_become_advantages_of_the_models_tokens(functions: bool) -> None:
    bench, experiences = played(functions, weight=0.5)
    for experience in experiences:
        sequences = experience.sequences
        turns = list(sequences.turns())
        returns = [sum(len(TOKENIZER.decode(turn, skip_special_tokens=True)) / 8 for turn in one[::2]) for one in turns]
        last = [float(np.mean(one[-1] % 2 == 0)) if functions else 0.0 for one in turns]
        expected = np.array(last) + 0.5 * np.array(returns)
        assert experience.rewards.tolist() == pytest.approx(expected.tolist())
        assert experience.metrics["reward/environment/mean"] == pytest.approx(np.mean(returns))
        assert ("reward/double/mean" in experience.metrics) == functions
        advantages = group_advantages(experience.rewards, SIZE, Advantage.grpo, ScaleRewards.group)
        (minibatch,) = experience.minibatches
        written = [sum(map(len, one[::2])) for one in turns]
        assert sequences.written.sum() == sum(written) == len(minibatch.weights) < len(sequences.written)
        assert minibatch.advantages.tolist() == np.repeat(advantages, written).tolist()
        assert minibatch.weights.sum() == pytest.approx(1)
    assert bench.calls().count("train") == 3


def test_further_prompts_are_conversations_too() -> None:
    algo = GRPO(num_generations=SIZE, dynamic_sampling=True, max_resamples=2)
    rare = conversations_of(lambda row, turn, text: Turn("again", reward=float("3" in text or row["number"] % 3 == 0)))
    bench = Bench(algo=algo, rewarded=False, conversations=rare)
    bench.engine.vocabulary = 40
    for experience in bench.run():
        assert experience.sequences.written is not None and len(experience.sequences) == 12
        assert experience.metrics["rollout/resample_rounds"] >= 1


def test_a_resumed_run_has_the_same_conversations() -> None:
    """What a step samples depends on seed, step, row, sample and turn alone, and no environment outlives its step."""
    _, whole = played(functions=False)
    again = Bench(rewarded=False, conversations=conversations_of())
    again.engine.vocabulary = 12
    source = again.source()
    source.done, again.trainer.version = 2, 2
    source.cursor.take(6)
    (resumed,) = list(source)
    for name, values in vars(whole[2].sequences).items():
        assert np.array_equal(values, getattr(resumed.sequences, name)), name


def test_a_step_ahead_makes_the_same_conversations() -> None:
    _, plain = played(functions=False)
    _, ahead = played(functions=False, ahead=True)
    assert np.array_equal(plain[0].sequences.tokens, ahead[0].sequences.tokens)
    assert [one.version for one in ahead] == [0, 0, 1] and all(one.sequences.written is not None for one in ahead)


def test_held_out_conversations_are_greedy_and_rewarded() -> None:
    bench, _ = played(functions=True, eval=Eval(samples=4))
    (step, metrics), (last, _) = bench.reported
    assert (step, last) == (0, 3)
    assert metrics["eval/reward"] == pytest.approx(metrics["eval/reward/double"] + metrics["eval/reward/environment"])
    assert bench.calls().count("greedy") >= 2


def test_distillation_on_conversations() -> None:
    """The teacher is asked about the model's tokens of the same text, privileged or not."""
    bench = test_live_source.Bench(steps=2, eval=Eval(samples=0))
    bench.engine.vocabulary = 12
    bench.scorer.begins = True
    source = bench.source()
    source.conversations = conversations_of()
    for experience in source:
        bench.trainer.train(experience).result()  # refuses another number of rows than were scored
        assert experience.sequences.written is not None and not experience.sequences.written.all()
        assert experience.rewards is not None and experience.metrics["environment/turns_mean"] > 1
    assert "begin" not in [event.call for event in bench.events]
    sequences = experience.sequences
    table = TableCursor(numbered(ROWS), seed=0, shuffle=True).take(4).table
    own = replace(table, teacher_tokens=np.arange(9, dtype=np.int32), teacher_offsets=np.array([0, 0, 9, 9, 9]))
    privileged = privileged_sequences(sequences, own)
    assert privileged is not None and privileged.prompt_lengths[1] == 9
    assert np.array_equal(privileged.written, sequences.written)
    assert np.array_equal(privileged.response_lengths, sequences.response_lengths)
