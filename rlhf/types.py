"""What moves between roles: frozen, packed, and typed. No Python object per token anywhere.

Shapes: n = samples, T = tokens of all samples together, R = response tokens of all samples together, which are
those the model wrote; C = all tokens after the prompts together: R and the observations between a conversation's turns.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64

Metrics = dict[str, float]
"""Name -> value. Names are `group/name`, e.g. `train/loss`, `time/rollout`."""


def ragged(offsets: Int64[np.ndarray, " n+1"], values: np.ndarray) -> Iterator[np.ndarray]:
    """The rows of a packed array, as views."""
    for start, stop in itertools.pairwise(offsets):
        yield values[start:stop]


def offsets_of(lengths: Any) -> Int64[np.ndarray, " n+1"]:
    """Lengths -> start offsets, with the total at the end."""
    return np.concatenate([[0], np.cumsum(np.asarray(lengths, dtype=np.int64))]).astype(np.int64)


@dataclass(frozen=True)
class Prompts:
    """What the engine is asked to continue: token ids, never text.

    Example: two prompts `[5, 6]` and `[7]` have tokens `[5, 6, 7]` and offsets `[0, 2, 3]`.
    """

    sample_ids: Int64[np.ndarray, " n"]
    """Unique within a run; joins rollouts, scores and weights."""
    tokens: Int32[np.ndarray, " T"]
    offsets: Int64[np.ndarray, " n+1"]
    seeds: Int64[np.ndarray, " n"]
    """One sampler seed a request, so that results don't depend on request order or replica count."""

    def __len__(self) -> int:
        return len(self.sample_ids)

    def rows(self) -> Iterator[Int32[np.ndarray, " t"]]:
        return ragged(self.offsets, self.tokens)


@dataclass(frozen=True)
class Sequences:
    """Prompts with their responses, packed end to end.

    Example: prompt `[5, 6]` + response `[8, 9]` and prompt `[7]` + response `[4]` have tokens `[5, 6, 8, 9, 7, 4]`,
    offsets `[0, 4, 6]`, prompt_lengths `[2, 1]`, and (if an engine made them) logprobs of `8, 9, 4`.

    A conversation goes on after its first response: model tokens `8, 9`, an observation `3`, model tokens `4` have
    written `[True, True, False, True]`. Its response tokens are `8, 9, 4`: what is scored, weighed and trained on.
    """

    sample_ids: Int64[np.ndarray, " n"]
    tokens: Int32[np.ndarray, " T"]
    offsets: Int64[np.ndarray, " n+1"]
    prompt_lengths: Int32[np.ndarray, " n"]
    logprobs: Float32[np.ndarray, " R"] | None = None
    """Log-probability of each response token under the distribution it was sampled from; None for off-policy responses,
    the dataset's and those that a teacher writes."""
    written: Bool[np.ndarray, " C"] | None = None
    """Which tokens after the prompts are the model's; the others are observations. None: all are."""

    @classmethod
    def join(
        cls,
        sample_ids: Int64[np.ndarray, " n"],
        prompts: Iterable[Int32[np.ndarray, " p"]],
        responses: Sequence[Int32[np.ndarray, " c"]],
        logprobs: Sequence[Float32[np.ndarray, " r"]] | None = None,
        written: Sequence[Bool[np.ndarray, " c"]] | None = None,
    ) -> Sequences:
        """Pack one prompt, what follows it, and what belongs to that (if there is any) a sample."""
        prompts = list(prompts)
        rows = [np.concatenate(pair) for pair in zip(prompts, responses, strict=True)]
        return cls(
            sample_ids=sample_ids,
            tokens=np.concatenate(rows),
            offsets=offsets_of([len(row) for row in rows]),
            prompt_lengths=np.array([len(prompt) for prompt in prompts], dtype=np.int32),
            logprobs=None if logprobs is None else np.concatenate(logprobs),
            written=None if written is None else np.concatenate(written),
        )

    def __len__(self) -> int:
        return len(self.sample_ids)

    @property
    def lengths(self) -> Int64[np.ndarray, " n"]:
        return np.diff(self.offsets)

    @property
    def continuation_lengths(self) -> Int64[np.ndarray, " n"]:
        """Tokens after each prompt, observations included."""
        return self.lengths - self.prompt_lengths

    @property
    def response_lengths(self) -> Int64[np.ndarray, " n"]:
        """Tokens that the model wrote."""
        if self.written is None:
            return self.continuation_lengths
        return np.diff(offsets_of(self.written)[offsets_of(self.continuation_lengths)])

    @property
    def response_offsets(self) -> Int64[np.ndarray, " n+1"]:
        """Where each sample's response rows start in a packed array of R rows (logprobs, weights, scores)."""
        return offsets_of(self.response_lengths)

    def rows(self) -> Iterator[Int32[np.ndarray, " t"]]:
        return ragged(self.offsets, self.tokens)

    def continuations(self) -> Iterator[Int32[np.ndarray, " c"]]:
        """What follows each prompt, observations included."""
        for tokens, length in zip(self.rows(), self.prompt_lengths, strict=True):
            yield tokens[length:]

    def masks(self) -> list[Bool[np.ndarray, " c"] | None]:
        """`written` of each sample; None where all tokens after the prompt are the model's."""
        if self.written is None:
            return [None] * len(self)
        return list(ragged(offsets_of(self.continuation_lengths), self.written))

    def turns(self) -> Iterator[list[Int32[np.ndarray, " t"]]]:
        """What follows each prompt, turn by turn: the model's, an observation, the model's, ... The model has the last
        one."""
        for tokens, mask in zip(self.continuations(), self.masks(), strict=True):
            if mask is None:
                yield [tokens]
            else:
                yield np.split(tokens, np.flatnonzero(mask[1:] != mask[:-1]) + 1)

    def select(self, rows: Iterable[int]) -> Sequences:
        """Some of the samples, in this order; at least one."""
        chosen, every_row = list(rows), list(self.rows())
        logprobs = None
        if self.logprobs is not None:
            every_part = list(ragged(self.response_offsets, self.logprobs))
            logprobs = np.concatenate([every_part[row] for row in chosen])
        written = None
        if self.written is not None:
            every_mask = list(ragged(offsets_of(self.continuation_lengths), self.written))
            written = np.concatenate([every_mask[row] for row in chosen])
        return Sequences(
            sample_ids=self.sample_ids[chosen],
            tokens=np.concatenate([every_row[row] for row in chosen]),
            offsets=offsets_of(self.lengths[chosen]),
            prompt_lengths=self.prompt_lengths[chosen],
            logprobs=logprobs,
            written=written,
        )


@dataclass(frozen=True)
class Episodes:
    """What an environment made of n conversations."""

    returns: Float32[np.ndarray, " n"]
    """The sum of the rewards of all turns."""
    turns: Int32[np.ndarray, " n"]
    """Of the model; at least one."""
    done: Bool[np.ndarray, " n"]
    """The environment ended it, rather than a limit."""
    cut: Int32[np.ndarray, " n"]
    """Observations that were cut to environment.max_observation_tokens."""

    def select(self, rows: Sequence[int]) -> Episodes:
        """Some of them, in this order."""
        return Episodes(**{name: values[list(rows)] for name, values in vars(self).items()})

    @staticmethod
    def join(parts: Sequence[Episodes]) -> Episodes:
        """Those of all parts, in order."""
        return Episodes(**{name: np.concatenate([vars(part)[name] for part in parts]) for name in vars(parts[0])})


@dataclass(frozen=True)
class Rollouts:
    """What the engine generated, and which weights it used."""

    version: int
    sequences: Sequences
    finished: np.ndarray
    """[n] bool: the response (of a conversation its last turn) ended by itself, by a stop token, rather than at the
    length limit."""
    episodes: Episodes | None = None
    """Of conversations with an environment; None without one."""

    def select(self, rows: Iterable[int]) -> Rollouts:
        """Some of the samples, in this order; at least one."""
        chosen = list(rows)
        episodes = None if self.episodes is None else self.episodes.select(chosen)
        return Rollouts(self.version, self.sequences.select(chosen), self.finished[chosen], episodes)


ROW = "data row"
"""Column in which a row carries its own name (`file.jsonl:12`) for messages; no parameter can be called so."""


@dataclass(frozen=True)
class Rewards:
    """What the reward functions say about n responses."""

    total: Float32[np.ndarray, " n"]
    """The weighted sum of `parts`, over the functions that apply to the response; always finite."""
    parts: Mapping[str, Float32[np.ndarray, " n"]]
    """Each function's own rewards, by its name, not weighted. NaN where a function doesn't apply."""


@dataclass(frozen=True)
class MicroBatchPlan:
    """Which samples one forward pass takes, in packing order."""

    rows: tuple[int, ...]
    """Indices into the `Sequences` the plan was made for."""
    tokens: int
    """Tokens with padding."""


@dataclass(frozen=True)
class BatchPlan:
    """Immutable: sample -> data-parallel rank -> micro-batch -> position. Made once a step, from lengths alone.

    `ranks[r]` holds the micro-batches of data-parallel rank r. Their number may differ between ranks, which meet only
    when gradients are summed.
    """

    ranks: tuple[tuple[MicroBatchPlan, ...], ...]
    padding_free: bool
    """True: each micro-batch is one packed sequence. False: one row a sample, padded to the longest."""
    pad_multiple: int

    @property
    def samples(self) -> tuple[int, ...]:
        return tuple(row for rank in self.ranks for micro in rank for row in micro.rows)


@dataclass(frozen=True)
class MiniBatch:
    """One optimizer step: the plan and one weight a response token, normalised over the whole step."""

    plan: BatchPlan
    weights: Float32[np.ndarray, " R"]
    target_weights: Float32[np.ndarray, " R"] | None = None
    """Weights of each response token's cross entropy, which is added to the loss; None: it isn't."""
    advantages: Float32[np.ndarray, " R"] | None = None
    """How much better than expected each response token was, for a policy loss; None where there is none."""
    teacher_logprobs: Float32[np.ndarray, " R"] | None = None
    """The teacher's log-probability of each response token at the sampler's temperature; None: it wasn't asked."""
    old_logprobs: Float32[np.ndarray, " R"] | None = None
    """The trainer's own, before the first optimizer step of the generation. Only the rows of its plan count.
    None: they aren't needed, or this is that first step."""


@dataclass(frozen=True)
class Experience:
    """Everything the trainer needs for the optimizer steps of one generation."""

    step: int
    version: int
    """The weight version that generated the responses."""
    sequences: Sequences
    minibatches: tuple[MiniBatch, ...]
    scores: Any = None
    """What the scorer answered, for the trainer: references by data-parallel rank; None if the trainer has them."""
    rewards: Float32[np.ndarray, " n"] | None = None
    """Each response's, to be written down; None where there are none."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the source measured: seconds by phase, response lengths, ..."""


@dataclass(frozen=True)
class Bucket:
    """A few named weights on their way from the trainer to the engine, in Hugging Face names and shapes."""

    version: int
    """How many optimizer steps made these weights."""
    names: tuple[str, ...]
    arrays: tuple[Any, ...]
    """Host copies as numpy arrays (bfloat16, which numpy lacks, as uint16 bits); between processes that share a GPU
    `SharedTensor`s: then nothing is copied, and the trainer must not change its weights before they are loaded; or
    `Pushed`: their shapes, while the weights themselves come over a collective."""
    dtypes: tuple[str, ...]
    """The true number format of each array."""
