"""The live source on doubles: what happens in which order, with which weights, and what depends on the seed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from rlhf.algos.gkd import make_minibatches
from rlhf.config.rollout import VllmRollout
from rlhf.config.run import Eval, EvalResponses
from rlhf.config.train import DType, Train
from rlhf.data.cursor import TableCursor
from rlhf.data.table import PromptTable, pack
from rlhf.errors import MisalignedScores, StaleWeights
from rlhf.roles.doubles import WEIGHTS, Done, DoubleEngine, DoubleScorer, DoubleTrainer, doubles
from rlhf.sources.evaluation import Evaluator
from rlhf.sources.live import LiveSource
from rlhf.sources.requests import prompts_of, reference_sequences, request_seed
from rlhf.sources.steps import describe
from rlhf.types import BatchPlan, Bucket, Experience, Metrics, MicroBatchPlan, MiniBatch, Prompts, Rollouts, Sequences


def table_of(rows: int, first: int = 0) -> PromptTable:
    """Row i: a prompt of 1 to 3 tokens that start with its number, a response of 3 tokens."""
    numbers = range(first, first + rows)
    return pack(
        [np.array([100 + i] * (1 + i % 3), dtype=np.int32) for i in numbers],
        [np.array([200 + i, 201 + i, 2], dtype=np.int32) for i in numbers],
        truncated=[False] * rows,
        wheres=[f"row {i}" for i in numbers],
        columns=[{}] * rows,
    )


@dataclass
class Bench:
    """A live source on doubles. `reported` and `phases` are what it tells the log."""

    steps: int = 3
    seed: int = 0
    batch_samples: int = 4
    eval: Eval = field(default_factory=lambda: Eval(samples=3))
    train: Train = field(default_factory=Train)
    rollout: VllmRollout = field(default_factory=VllmRollout)
    shuffle: bool = True

    def __post_init__(self) -> None:
        self.trainer, self.scorer, self.engine = doubles()
        self.events = self.trainer.events
        self.reported: list[tuple[int, Metrics]] = []
        self.phases: list[str] = []

    def source(self, report=None, phase=None) -> LiveSource:
        self.evaluator = Evaluator(
            spec=self.eval,
            train=self.train,
            held_out=table_of(self.eval.samples, first=50),
            trainer=self.trainer,
            scorer=self.scorer,
            engine=self.engine,
            seed=self.seed,
            total_steps=self.steps,
            report=report or (lambda step, metrics: self.reported.append((step, metrics))),
        )
        return LiveSource(
            trainer=self.trainer,
            scorer=self.scorer,
            engine=self.engine,
            evaluator=self.evaluator,
            cursor=TableCursor(table_of(10), self.seed, self.shuffle),
            make_minibatches=lambda rollouts: make_minibatches(rollouts.sequences, self.train, 1),
            rollout=self.rollout,
            micro_batch_tokens=self.train.micro_batch_tokens,
            batch_samples=self.batch_samples,
            steps=self.steps,
            seed=self.seed,
            phase=phase or self.phases.append,
        )

    def run(self) -> list[Experience]:
        """Train on everything, as the loop does."""
        experiences = []
        for experience in self.source():
            experiences.append(experience)
            self.trainer.train(experience).result()
        return experiences

    def versions(self, call: str) -> list[int | None]:
        return [event.version for event in self.events if event.call == call]


# ---- order and versions ---------------------------------------------------------------------------------------------


def test_every_step_syncs_evaluates_generates_scores_and_trains() -> None:
    bench = Bench(steps=2)
    experiences = bench.run()
    assert [event.call for event in bench.events] == [
        *("update", "greedy", "evaluate", "generate", "sleep", "score", "train"),
        *("update", "generate", "sleep", "score", "train"),
        *("update", "greedy", "evaluate"),
    ]
    assert [experience.step for experience in experiences] == [1, 2]
    one_step = ["sync", "eval", "rollout", "score", "train"]
    assert bench.phases == [*one_step, *one_step, "sync", "eval"]
    # what was generated is what is scored and trained on
    scored = [event.what for event in bench.events if event.call == "score"]
    assert all(one is other.sequences for one, other in zip(scored, experiences, strict=True))


def test_weights_go_to_the_engine_before_each_generation_and_after_the_last_step() -> None:
    bench = Bench(steps=3)
    experiences = bench.run()
    assert bench.versions("update") == [0, 1, 2, 3]
    assert bench.versions("generate") == [0, 1, 2] == [experience.version for experience in experiences]
    assert bench.versions("train") == [1, 2, 3]
    assert [experience.metrics["rollout/weight_version"] for experience in experiences] == [0, 1, 2]


def test_the_version_counts_optimizer_steps_not_generations() -> None:
    bench = Bench(steps=2)
    source = bench.source()

    def two_halves(rollouts: Rollouts) -> tuple[MiniBatch, ...]:
        weights = np.ones(int(rollouts.sequences.response_lengths.sum()), dtype=np.float32)
        halves = [(0, 1), (2, 3)]
        return tuple(MiniBatch(BatchPlan(((MicroBatchPlan(half, 99),),), True, 1), weights) for half in halves)

    source.make_minibatches = two_halves
    for experience in source:
        assert experience.version == bench.trainer.version == bench.engine.version
        bench.trainer.train(experience).result()
    assert bench.versions("generate") == [0, 2] and bench.versions("update") == [0, 2, 4]


def test_weights_travel_in_the_rollouts_dtype() -> None:
    bench = Bench(steps=1, rollout=VllmRollout(dtype=DType.bfloat16))
    bench.run()
    buckets = [bucket for event in bench.events if event.call == "update" for bucket in event.what]
    assert len(buckets) == 4 and {bucket.dtypes for bucket in buckets} == {("bfloat16",)}


class KeepsOldWeights(DoubleEngine):
    """Takes the first update only; says so, or claims to have taken the others as well."""

    honest = True

    def update_weights(self, buckets):
        if self.version is None:
            return super().update_weights(buckets)
        arrived = list(buckets)[-1].version
        return Done(self.version if self.honest else arrived)


@pytest.mark.parametrize("honest", [True, False])
@pytest.mark.parametrize("every", [0, 1])
def test_an_engine_that_misses_an_update_is_found_out(honest: bool, every: int) -> None:
    bench = Bench(eval=Eval(samples=2, every=every))
    bench.engine = KeepsOldWeights(bench.events)
    bench.engine.honest = honest
    with pytest.raises(StaleWeights, match="asked to generate with weights of version 1, the engine holds 0"):
        bench.run()
    assert bench.versions("train") == [1], "nothing is trained on what old weights made"


# ---- evaluation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "samples", "due"), [(0, 3, [0, 5]), (2, 3, [0, 2, 4, 5]), (5, 3, [0, 5]), (1, 1, [0, 1, 2, 3, 4, 5])]
)
def test_evaluated_before_the_first_step_after_the_last_and_on_the_way(every: int, samples: int, due: list) -> None:
    bench = Bench(steps=5, eval=Eval(samples=samples, every=every))
    bench.run()
    assert [step for step, _ in bench.reported] == due
    assert bench.versions("evaluate") == bench.versions("greedy") == due  # one optimizer step a step
    assert all(metrics.pop("time/eval") >= 0 for _, metrics in bench.reported)
    assert bench.reported == list(bench.evaluator.results.items())
    assert [metrics["eval/forward_kl"] for _, metrics in bench.reported] == [1 / (1 + step) for step in due]
    assert list(bench.evaluator.samples) == due


def test_no_held_out_rows_no_evaluation() -> None:
    bench = Bench(eval=Eval(samples=0))
    bench.run()
    assert bench.reported == [] and "greedy" not in {event.call for event in bench.events}


def test_evaluated_on_reference_responses_cut_to_length() -> None:
    bench = Bench(eval=Eval(samples=3, max_response_tokens=2))
    bench.run()
    for event in bench.events:
        if event.call == "evaluate":
            assert event.what.tokens.tolist() == [150, 150, 150, 250, 251, 151, 251, 252, 152, 152, 252, 253]
            assert event.what.prompt_lengths.tolist() == [3, 1, 2] and event.what.logprobs is None


def test_evaluated_on_the_students_own_responses() -> None:
    bench = Bench(steps=2, eval=Eval(samples=3, responses=EvalResponses.student))
    bench.run()
    evaluated = [event.what for event in bench.events if event.call == "evaluate"]
    asked = [event.what for event in bench.events if event.call == "generate"]
    assert [len(prompts) for prompts in asked] == [3, 4, 4, 3]
    assert asked[0].seeds.tolist() == asked[-1].seeds.tolist(), "before and after differ by weights alone"
    assert all(sequences.logprobs is not None for sequences in evaluated)
    assert evaluated[0].tokens.tolist() != evaluated[1].tokens.tolist()
    trained = np.concatenate([prompts.seeds for prompts in asked[1:-1]])
    assert not set(trained) & set(asked[0].seeds)


def test_the_sample_to_look_at_is_the_greedy_response_alone() -> None:
    bench = Bench(steps=1)
    bench.run()
    engine = DoubleEngine(version=1)
    prompt = prompts_of(table_of(1, first=50), [0], seed=99, step=9)
    expected = engine.generate(prompt, 1, greedy=True).result().sequences.tokens[3:]
    assert bench.evaluator.samples[1].tolist() == expected.tolist()


# ---- what a batch holds ---------------------------------------------------------------------------------------------


def tokens_of(**settings) -> list[list[int]]:
    return [experience.sequences.tokens.tolist() for experience in Bench(**settings).run()]


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others() -> None:
    assert tokens_of(seed=3) == tokens_of(seed=3)
    assert all(one != other for one, other in zip(tokens_of(seed=3), tokens_of(seed=4), strict=True))
    # without shuffling the prompts are the same, the samples are not
    in_order, other = (Bench(seed=seed, shuffle=False).run() for seed in (3, 4))
    for one, two in zip(in_order, other, strict=True):
        assert prompts_in(one.sequences) == prompts_in(two.sequences)
        assert one.sequences.tokens.tolist() != two.sequences.tokens.tolist()


def prompts_in(sequences: Sequences) -> list[list[int]]:
    return [row[:n].tolist() for row, n in zip(sequences.rows(), sequences.prompt_lengths, strict=True)]


def test_evaluation_does_not_change_what_is_trained_on() -> None:
    often = Eval(samples=3, every=1, responses=EvalResponses.student)
    assert tokens_of(eval=Eval(samples=0)) == tokens_of(eval=often)


def test_rows_come_in_the_cursors_order_across_epochs() -> None:
    cursor = TableCursor(table_of(10), seed=5, shuffle=True)
    for experience in Bench(seed=5).run():
        table = cursor.take(4).table
        assert prompts_in(experience.sequences) == [table.prompt(row).tolist() for row in range(4)]


def test_sample_ids_are_unique_across_steps() -> None:
    ids = np.concatenate([experience.sequences.sample_ids for experience in Bench(steps=4).run()])
    assert len(set(ids)) == len(ids) == 16


def test_what_is_measured_of_a_step() -> None:
    for experience in Bench().run():
        sequences = experience.sequences
        assert set(experience.metrics) == {
            *("time/sync", "time/rollout", "time/score"),
            *("rollout/response_tokens_mean", "rollout/response_tokens_max", "rollout/prompt_tokens_mean"),
            *("rollout/finished_share", "rollout/weight_version", "rollout/staleness", "data/epoch"),
            *("batch/tokens", "batch/padding_share", "batch/micro_batches", "batch/rank_imbalance"),
            "batch/privileged_share",
        }
        assert experience.metrics["data/epoch"] == pytest.approx(0.4 * experience.step)
        assert experience.metrics["batch/tokens"] == len(sequences.tokens)
        assert all(experience.metrics[name] > 0 for name in experience.metrics if name.startswith("time/"))
        assert experience.metrics["rollout/staleness"] == 0
        assert experience.metrics["rollout/response_tokens_max"] == sequences.response_lengths.max()


def test_description_of_rollouts() -> None:
    sequences = Sequences(
        sample_ids=np.arange(2),
        tokens=np.arange(9, dtype=np.int32),
        offsets=np.array([0, 4, 9]),
        prompt_lengths=np.array([3, 1], dtype=np.int32),
    )
    assert describe(Rollouts(7, sequences, np.array([True, False]))) == {
        "rollout/response_tokens_mean": 2.5,
        "rollout/response_tokens_max": 4.0,
        "rollout/prompt_tokens_mean": 2.0,
        "rollout/finished_share": 0.5,
    }


# ---- requests -------------------------------------------------------------------------------------------------------


def test_request_seeds_depend_on_seed_step_row_and_sample_alone() -> None:
    assert request_seed(0, 1, 2, 3) == 842985185, "the same on every machine and in every version"
    seeds = [request_seed(*key) for key in np.ndindex(4, 4, 4, 4)]
    assert len(set(seeds)) == 256 and min(seeds) >= 0 and max(seeds) < 2**31


def test_request_seeds_do_not_depend_on_the_order_of_the_batch() -> None:
    table = table_of(10)
    one, other = prompts_of(table, [4, 7, 1], seed=0, step=3), prompts_of(table, [1, 4], seed=0, step=3)
    assert other.seeds.tolist() == [one.seeds[2], one.seeds[0]]
    assert not set(prompts_of(table, [4, 7, 1], seed=0, step=4).seeds) & set(one.seeds)


def test_a_row_that_comes_twice_gets_two_seeds() -> None:
    prompts = prompts_of(table_of(3), np.array([1, 0, 1]), seed=0, step=1)
    assert [row.tolist() for row in prompts.rows()] == [[101, 101], [100], [101, 101]]
    assert len(set(prompts.seeds)) == 3
    assert prompts.seeds[2] == request_seed(0, 1, 1, 1)
    assert prompts.sample_ids.tolist() == [3, 4, 5]


def test_reference_sequences() -> None:
    sequences = reference_sequences(table_of(2), max_response_tokens=99)
    assert [row.tolist() for row in sequences.rows()] == [[100, 200, 201, 2], [101, 101, 201, 202, 2]]
    assert (sequences.prompt_lengths.tolist(), sequences.response_lengths.tolist()) == ([1, 2], [3, 3])


# ---- the doubles keep the rules -------------------------------------------------------------------------------------


def bucket(version: int, name: str) -> Bucket:
    return Bucket(version, (name,), (np.zeros(2, dtype=np.float32),), ("float32",))


def three_prompts(order: tuple[int, ...] = (0, 1, 2)) -> Prompts:
    return prompts_of(table_of(3), order, seed=0, step=1)


def test_the_engine_refuses_incomplete_mixed_and_stale_weights() -> None:
    engine = DoubleEngine()
    with pytest.raises(StaleWeights, match="version 0, the engine holds None"):
        engine.generate(three_prompts(), 0)
    first, second = WEIGHTS
    assert engine.update_weights([bucket(3, first), bucket(3, second)]).result() == 3
    with pytest.raises(StaleWeights, match="asked to generate with weights of version 4, the engine holds 3"):
        engine.generate(three_prompts(), 4)
    for buckets, message in [
        ([bucket(5, first), bucket(6, second)], "one update mixes weights of versions 5 and 6"),
        ([bucket(7, first)], f"weights of version 7 lacks 1 of 2 tensors, the first is {second}"),
        ([], f"weights of version None lacks 2 of 2 tensors, the first is {first}"),
    ]:
        with pytest.raises(StaleWeights, match=message):
            engine.update_weights(buckets)
        with pytest.raises(StaleWeights, match="the engine holds None"):
            engine.generate(three_prompts(), 3)


def responses_of(engine: DoubleEngine, prompts: Prompts, greedy: bool = False) -> list[list[int]]:
    assert engine.version is not None
    sequences = engine.generate(prompts, engine.version, greedy).result().sequences
    return [row[n:].tolist() for row, n in zip(sequences.rows(), sequences.prompt_lengths, strict=True)]


def test_the_engines_responses_follow_weights_prompt_and_seed_not_order() -> None:
    engine = DoubleEngine(version=1)
    first = responses_of(engine, three_prompts())
    assert responses_of(engine, three_prompts((2, 0, 1))) == [first[2], first[0], first[1]]
    assert responses_of(engine, prompts_of(table_of(3), (0, 1, 2), seed=1, step=1)) != first
    assert responses_of(DoubleEngine(version=2), three_prompts()) != first
    greedy = responses_of(engine, three_prompts(), greedy=True)
    assert responses_of(engine, prompts_of(table_of(3), (0, 1, 2), seed=1, step=1), greedy=True) == greedy


def test_the_engine_stops_at_the_stop_token_or_the_limit() -> None:
    rollouts = DoubleEngine(version=0).generate(prompts_of(table_of(30), range(30), seed=0, step=1), 0).result()
    sequences = rollouts.sequences
    assert sequences.logprobs is not None and len(sequences.logprobs) == sequences.response_lengths.sum()
    assert 0 < rollouts.finished.sum() < 30
    for row, n, finished in zip(sequences.rows(), sequences.prompt_lengths, rollouts.finished, strict=True):
        response = row[n:].tolist()
        assert response.index(2) == len(response) - 1 if finished else len(response) == 8 and 2 not in response


def test_the_trainer_refuses_samples_without_scores_and_partial_batches() -> None:
    experience = Bench(steps=1).run()[0]
    with pytest.raises(MisalignedScores, match=r"sample 4 needs \d rows of teacher scores, there are none"):
        DoubleTrainer().train(experience)
    trainer, scorer, _ = doubles()
    scorer.score(experience.sequences, experience.minibatches)
    trainer.scored[5] += 1
    with pytest.raises(MisalignedScores, match=r"sample 5 needs \d rows .* there are \d rows"):
        trainer.train(experience)

    plan, weights = experience.minibatches[0].plan, experience.minibatches[0].weights
    for minibatch, message in [
        (MiniBatch(plan, weights[1:]), "one weight a response row"),
        (MiniBatch(BatchPlan(plan.ranks * 2, True, 1), weights), "as many ranks"),
        (MiniBatch(BatchPlan((plan.ranks[0] * 2,), True, 1), weights), "takes a sample once"),
        (MiniBatch(BatchPlan(((MicroBatchPlan((0, 1), 9),),), True, 1), weights), "every sample is in a plan"),
    ]:
        trainer, scorer = DoubleTrainer(), DoubleScorer()
        scorer.scored = trainer.scored
        scorer.score(experience.sequences, experience.minibatches)
        broken = Experience(1, 0, experience.sequences, (minibatch,))
        with pytest.raises(AssertionError, match=message):
            trainer.train(broken)
        assert trainer.version == 0


def test_the_trainers_buckets_are_those_of_the_moment_they_were_asked_for() -> None:
    trainer = DoubleTrainer()
    buckets = trainer.buckets("float32")
    trainer.version = 1
    assert [(one.version, one.names) for one in buckets] == [(0, (name,)) for name in WEIGHTS]


def test_accuracy_is_the_share_of_held_out_rows_that_are_solved() -> None:
    """Every row is completed greedily, in order; the first completion is the one to look at."""
    bench = Bench(steps=1)
    source = bench.source()
    asked: list[tuple[int, list[int]]] = []

    def solves(tokens: np.ndarray, row: int) -> bool:
        asked.append((row, tokens.tolist()))
        return row != 1

    bench.evaluator.solves = solves
    for experience in source:
        bench.trainer.train(experience).result()
    assert [row for row, _ in asked] == [0, 1, 2] * 2
    assert [metrics["eval/accuracy"] for _, metrics in bench.reported] == [2 / 3, 2 / 3]
    assert bench.evaluator.samples[0].tolist() == asked[0][1]
    greedy = [event.what for event in bench.events if event.call == "greedy"]
    assert [list(map(list, prompts.rows())) for prompts in greedy] == [
        [table_of(3, first=50).prompt(row).tolist() for row in range(3)]
    ] * 2
