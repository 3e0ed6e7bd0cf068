"""Conversations: the model's turns and what an environment answers, turn by turn, for a whole batch at once.

prompts ► generate ► environment.step ► (append the observation) ► generate ► ... until done, or a limit

Token in, token out: what the model wrote goes back into the engine as it came out.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from jaxtyping import Bool, Float32, Int32

from rlhf.roles.protocols import Engine, Environments, Future, Turn
from rlhf.types import Episodes, Prompts, Rewards, Rollouts, Sequences, offsets_of, ragged


class Markup(Protocol):
    """See `rlhf.data.turns.TurnMarkup`."""

    @property
    def end(self) -> int: ...

    def observation(self, text: str) -> tuple[Int32[np.ndarray, " o"], bool]: ...


def turn_seed(seed: int, turn: int) -> int:
    """The sampler seed of a conversation's turn. The seed of its first is the request's own, which depends on seed,
    step, row and sample alone; so do those of the others, and on the turn."""
    if turn == 0:
        return seed
    digest = hashlib.blake2b(struct.pack("<2q", seed, turn), digest_size=8, person=b"turn").digest()
    return int.from_bytes(digest, "little") & 0x7FFF_FFFF


@dataclass
class Conversation:
    """One, as it grows."""

    tokens: list[Int32[np.ndarray, " t"]]
    """The prompt, the model's first turn, an observation, the model's second turn, ..."""
    logprobs: list[Float32[np.ndarray, " r"]]
    """Of each turn of the model."""
    reward: float = 0.0
    done: bool = False
    finished: bool = False
    """The last turn ended by itself."""
    cut: int = 0

    @property
    def written(self) -> Bool[np.ndarray, " c"]:
        return np.concatenate([np.full(len(part), index % 2 == 0) for index, part in enumerate(self.tokens[1:])])


@dataclass(frozen=True)
class Conversations:
    """Has the model and the environments talk."""

    environments: Environments
    markup: Markup | None
    """None where `max_turns` is 1."""
    decode: Callable[[Any], str]
    """Token ids -> text without special tokens."""
    max_turns: int
    reward_weight: float

    def play(
        self,
        engine: Engine,
        prompts: Prompts,
        rows: Sequence[Mapping[str, Any]],
        version: int,
        greedy: bool = False,
    ) -> Rollouts:
        """A conversation a prompt. Each turn of all that go on is one batch of the engine.

        A conversation ends when the environment says so, after `max_turns`, and after a turn that didn't end as the
        chat template ends one (most often since it was cut at the length limit), which nothing can be appended to.

        Args:
            rows: the columns of each prompt's row.

        Raises:
            EnvironmentFailed: an environment failed; the message names the row.
        """
        assert len(rows) == len(prompts), "a row a prompt"
        conversations = [Conversation([prompt], []) for prompt in prompts.rows()]
        self.environments.reset(rows, prompts.seeds.tolist()).result()
        going_on = list(range(len(prompts)))
        for turn in range(self.max_turns):
            asked = self._asked(prompts, [conversations[index] for index in going_on], going_on, turn)
            answered = engine.generate(asked, version, greedy).result()
            responses = list(answered.sequences.continuations())
            assert answered.sequences.logprobs is not None
            logprobs = ragged(answered.sequences.response_offsets, answered.sequences.logprobs)
            said = self.environments.step(going_on, list(map(self.decode, responses))).result()
            ended = []
            for index, response, part, finished, given in zip(
                going_on, responses, logprobs, answered.finished, said, strict=True
            ):
                one = conversations[index]
                one.tokens.append(response)
                one.logprobs.append(part)
                one.reward += given.reward
                one.done, one.finished = given.done, bool(finished)
                if not self._goes_on(one, response, turn, given):
                    ended.append(index)
            self.environments.end(ended).result()
            going_on = [index for index in going_on if index not in set(ended)]
            if not going_on:
                break
        return _rollouts(prompts, conversations, version)

    def _asked(self, prompts: Prompts, conversations: list[Conversation], indices: list[int], turn: int) -> Prompts:
        texts = [np.concatenate(one.tokens) for one in conversations]
        return Prompts(
            sample_ids=prompts.sample_ids[indices],
            tokens=np.concatenate(texts),
            offsets=offsets_of([len(text) for text in texts]),
            seeds=np.array([turn_seed(int(prompts.seeds[index]), turn) for index in indices], dtype=np.int64),
        )

    def _goes_on(self, one: Conversation, response: Int32[np.ndarray, " r"], turn: int, given: Turn) -> bool:
        """Whether the model gets another turn; then the observation is appended."""
        if given.done or turn + 1 == self.max_turns:
            return False
        assert self.markup is not None
        if response[-1] != self.markup.end:
            return False
        observation, cut = self.markup.observation(given.observation)
        one.tokens.append(observation)
        one.cut += int(cut)
        return True


def _rollouts(prompts: Prompts, conversations: list[Conversation], version: int) -> Rollouts:
    """Packed, in the order of the prompts."""
    return Rollouts(
        version=version,
        sequences=Sequences.join(
            prompts.sample_ids,
            prompts.rows(),
            [np.concatenate(one.tokens[1:]) for one in conversations],
            [np.concatenate(one.logprobs) for one in conversations],
            [one.written for one in conversations],
        ),
        finished=np.array([one.finished for one in conversations]),
        episodes=Episodes(
            returns=np.array([one.reward for one in conversations], dtype=np.float32),
            turns=np.array([len(one.logprobs) for one in conversations], dtype=np.int32),
            done=np.array([one.done for one in conversations]),
            cut=np.array([one.cut for one in conversations], dtype=np.int32),
        ),
    )


def sampled(
    engine: Engine,
    conversations: Conversations | None,
    prompts: Prompts,
    rows: Sequence[Mapping[str, Any]],
    version: int,
    greedy: bool = False,
) -> Rollouts:
    """What the student says to each prompt: a conversation, or one response where there is no environment."""
    if conversations is None:
        return engine.generate(prompts, version, greedy).result()
    return conversations.play(engine, prompts, rows, version, greedy)


# ---- rewards --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WithReturns:
    """A future of rewards: those of the functions, if there are any, and the environment's as a part called so."""

    functions: Future[Rewards] | None
    episodes: Episodes
    weight: float

    def result(self) -> Rewards:
        """See `Future`."""
        own = Rewards(self.weight * self.episodes.returns, {"environment": self.episodes.returns})
        if self.functions is None:
            return own
        given = self.functions.result()
        return replace(given, total=given.total + own.total, parts={**given.parts, **own.parts})


def rewarded(
    functions: Future[Rewards] | None, rollouts: Rollouts, conversations: Conversations | None
) -> Future[Rewards] | None:
    """What responses are worth, once the reward functions have said what they think; None where nobody says."""
    if conversations is None or rollouts.episodes is None:
        return functions
    if functions is None and conversations.reward_weight == 0:
        return None
    return WithReturns(functions, rollouts.episodes, conversations.reward_weight)
