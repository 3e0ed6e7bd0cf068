"""In-process doubles of the roles: no model, no process, no torch. For tests, and for whoever writes a new source.

They keep the rules that real roles keep: an engine that holds other weights refuses to generate, a trainer refuses
samples the teacher hasn't scored. A call does its work, or fails, at once; the future it returns is done already.

    trainer, scorer, engine = doubles()
    ...                                       # run a source or the loop on them
    [event.call for event in trainer.events]  # ["update", "generate", "score", "train", "update"]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float32

from rlhf.errors import MisalignedScores, StaleWeights
from rlhf.roles.protocols import Engine, Rewarder, Scorer, Trainer
from rlhf.types import BatchPlan, Bucket, Experience, Metrics, MiniBatch, Prompts, Rewards, Rollouts, Sequences

T = TypeVar("T")

WEIGHTS = ("model.embed_tokens.weight", "model.norm.weight")
"""The model of the doubles."""


@dataclass(frozen=True)
class Done(Generic[T]):
    """A future whose result is there."""

    value: T

    def result(self) -> T:
        return self.value


class Event(NamedTuple):
    """One call of a role that went well."""

    call: str
    """update, generate, greedy, sleep, begin, score, logprobs, reward, train, evaluate, save, save_state or
    load_state."""
    version: int | None
    """Of the weights the role held after the call; None for the teacher and the rewarder, who have none that change."""
    what: Any
    """The call's first argument (of an update: the buckets)."""


@dataclass
class DoubleTrainer(Trainer):
    """Counts versions. Asserts that the batch it is given is whole."""

    events: list[Event] = field(default_factory=list)
    scored: dict[int, int] = field(default_factory=dict)
    """Sample id -> response rows the teacher has scored; shared with the scorer, until they are trained on."""
    needs_scores: bool = True
    """Whether samples without scores are refused. Not where a policy loss has advantages instead."""
    data_parallel: int = 1
    version: int = 0
    metrics: Metrics = field(default_factory=lambda: {"train/loss": 1.0, "time/train": 0.25})
    """What `train` reports."""

    def train(self, experience: Experience) -> Done[Metrics]:
        """One version a minibatch.

        Raises:
            MisalignedScores: a sample has no teacher scores, or another number of rows.
        """
        sequences = experience.sequences
        rows = sequences.response_lengths
        trained: set[int] = set()
        for minibatch in experience.minibatches:
            assert len(minibatch.weights) == rows.sum(), "one weight a response row"
            assert len(minibatch.plan.ranks) == self.data_parallel, "a plan for as many ranks as there are"
            samples = minibatch.plan.samples
            assert len(set(samples)) == len(samples), "a plan takes a sample once"
            trained |= set(samples)
            for sample in samples:
                sample_id = int(sequences.sample_ids[sample])
                if self.needs_scores and self.scored.get(sample_id) != rows[sample]:
                    held = f"{self.scored[sample_id]} rows" if sample_id in self.scored else "none"
                    raise MisalignedScores(
                        f"sample {sample_id} needs {rows[sample]} rows of teacher scores, there are {held}"
                    )
        assert trained == set(range(len(sequences))), "every sample is in a plan"
        self.version += len(experience.minibatches)
        for sample_id in sequences.sample_ids:
            self.scored.pop(int(sample_id), None)
        self.events.append(Event("train", self.version, experience))
        return Done(self.metrics)

    def evaluate(
        self,
        sequences: Sequences,
        plan: BatchPlan,
        teacher: tuple[Sequences, BatchPlan] | None = None,
        hidden: Any = None,
    ) -> Done[Metrics]:
        """The forward KL falls with every optimizer step."""
        assert sorted(plan.samples) == list(range(len(sequences))), "every sample is in the plan once"
        self.events.append(Event("evaluate", self.version, sequences))
        return Done({"eval/forward_kl": 1.0 / (1 + self.version), "eval/reverse_kl": 2.0 / (1 + self.version)})

    def buckets(self, dtype: str) -> Iterator[Bucket]:
        """Two buckets of the weights as they are now, even if they are fetched after another step."""
        weight = np.full(2, self.version, dtype=np.float32)
        return iter([Bucket(self.version, (name,), (weight,), (dtype,)) for name in WEIGHTS])

    def save(self, folder: Path) -> Done[None]:
        """A folder with the version in it."""
        folder.mkdir(parents=True)
        (folder / "version.txt").write_text(str(self.version), encoding="utf-8")
        self.events.append(Event("save", self.version, folder))
        return Done(None)

    def save_state(self, folder: Path) -> Done[int]:
        """The version is all there is to it."""
        folder.mkdir(parents=True)
        (folder / "rank_0.pt").write_text(str(self.version), encoding="utf-8")
        self.events.append(Event("save_state", self.version, folder))
        return Done(1)

    def load_state(self, folder: Path) -> None:
        self.version = int((folder / "rank_0.pt").read_text(encoding="utf-8"))
        self.events.append(Event("load_state", self.version, folder))


@dataclass
class DoubleScorer(Scorer):
    """Remembers which rows it was asked about."""

    events: list[Event] = field(default_factory=list)
    scored: dict[int, int] = field(default_factory=dict)
    """See `DoubleTrainer.scored`."""
    logprob: float = -2.0
    """Of every token."""

    def score(self, sequences: Sequences, minibatches: tuple[MiniBatch, ...]) -> Done[None]:
        rows = sequences.response_lengths
        for minibatch in minibatches:
            for sample in minibatch.plan.samples:
                self.scored[int(sequences.sample_ids[sample])] = int(rows[sample])
        self.events.append(Event("score", None, sequences))
        return Done(None)

    begins: bool = False

    def begin(self, sequences: Sequences) -> None:
        """Nothing but the event."""
        self.events.append(Event("begin", None, sequences))

    def logprobs(
        self, sequences: Sequences, minibatches: tuple[MiniBatch, ...], temperature: float
    ) -> Done[Float32[np.ndarray, " R"]]:
        """The same for every token."""
        samples = sorted(sample for minibatch in minibatches for sample in minibatch.plan.samples)
        assert samples == list(range(len(sequences))), "every sample is in a plan once"
        self.events.append(Event("logprobs", None, sequences))
        return Done(np.full(int(sequences.response_lengths.sum()), self.logprob, dtype=np.float32))

    def hidden_rows(self, sequences: Sequences, plan: BatchPlan) -> Done[None]:
        """The trainer needs none."""
        return Done(None)


def even_share(response: np.ndarray, row: Mapping[str, Any]) -> float:
    """The share of even tokens."""
    return float(np.mean(response % 2 == 0))


@dataclass
class DoubleRewarder(Rewarder):
    """Any function of a response's tokens and its row."""

    events: list[Event] = field(default_factory=list)
    function: Callable[[np.ndarray, Mapping[str, Any]], float] = even_share

    def score(self, sequences: Sequences, rows: Sequence[Mapping[str, Any]]) -> Done[Rewards]:
        """One reward function, called `double`."""
        responses = [tokens[length:] for tokens, length in zip(sequences.rows(), sequences.prompt_lengths, strict=True)]
        given = [self.function(response, row) for response, row in zip(responses, rows, strict=True)]
        total = np.array(given, dtype=np.float32)
        self.events.append(Event("reward", None, sequences))
        return Done(Rewards(total, {"double": total}))

    def metrics(self) -> Metrics:
        """Nothing."""
        return {}

    def close(self) -> None:
        """Nothing runs."""


@dataclass
class DoubleEngine(Engine):
    """Uniform random tokens up to a stop token. A response depends on weight version, prompt and seed, nothing else."""

    events: list[Event] = field(default_factory=list)
    max_new_tokens: int = 8
    vocabulary: int = 16
    stop_token: int = 2
    version: int | None = None
    """Of the weights held; None before the first update and after one that failed."""

    def update_weights(self, buckets: Iterable[Bucket]) -> Done[int]:
        """Take a full set of weights.

        Raises:
            StaleWeights: buckets of different versions, or not all of them.
        """
        self.version = arriving = None
        received: list[Bucket] = []
        for bucket in buckets:
            if arriving not in (None, bucket.version):
                raise StaleWeights(f"one update mixes weights of versions {arriving} and {bucket.version}")
            arriving = bucket.version
            received.append(bucket)
        missing = set(WEIGHTS).difference(*(bucket.names for bucket in received))
        if missing or arriving is None:
            raise StaleWeights(
                f"the update to weights of version {arriving} lacks {len(missing)} of {len(WEIGHTS)} tensors, "
                f"the first is {min(missing)}"
            )
        self.version = arriving
        self.events.append(Event("update", self.version, received))
        return Done(self.version)

    def generate(self, prompts: Prompts, version: int, greedy: bool = False) -> Done[Rollouts]:
        """Continue every prompt; greedy ones don't depend on the seed.

        Raises:
            StaleWeights: the engine holds another version.
        """
        if version != self.version:
            raise StaleWeights(f"asked to generate with weights of version {version}, the engine holds {self.version}")
        responses = [
            self._response([version, *prompt.tolist(), *([] if greedy else [int(seed)])])
            for prompt, seed in zip(prompts.rows(), prompts.seeds, strict=True)
        ]
        logprobs = [np.full(len(response), -np.log(self.vocabulary), dtype=np.float32) for response in responses]
        sequences = Sequences.join(prompts.sample_ids, prompts.rows(), responses, logprobs)
        self.events.append(Event("greedy" if greedy else "generate", version, prompts))
        return Done(Rollouts(version, sequences, np.array([row[-1] == self.stop_token for row in responses])))

    def stream(self, prompts: Prompts, version: int) -> Iterator[Rollouts]:
        """One by one, the last one first."""
        whole = self.generate(prompts, version).result()
        for row in reversed(range(len(prompts))):
            yield whole.select([row])

    def sleep(self) -> Done[None]:
        """Nothing but the event, as on CPU."""
        self.events.append(Event("sleep", self.version or 0, None))
        return Done(None)

    def _response(self, entropy: list[int]) -> np.ndarray:
        tokens = np.random.default_rng(entropy).integers(0, self.vocabulary, self.max_new_tokens).astype(np.int32)
        stops = np.flatnonzero(tokens == self.stop_token)
        return tokens[: stops[0] + 1] if len(stops) else tokens


def doubles(data_parallel: int = 1) -> tuple[DoubleTrainer, DoubleScorer, DoubleEngine]:
    """One of each, with one list of events and the scores where the trainer finds them."""
    trainer = DoubleTrainer(data_parallel=data_parallel)
    scorer = DoubleScorer(trainer.events, trainer.scored)
    return trainer, scorer, DoubleEngine(trainer.events)
