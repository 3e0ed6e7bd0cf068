"""The dataset and the mixed source on doubles, and what a teacher with prompts of its own is asked."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf.batching import pack, plan_batch, plan_on_ranks, response_rows
from rlhf.config.algo import GKD
from rlhf.config.placement import Separate
from rlhf.config.rollout import NoRollout, VllmRollout
from rlhf.config.run import Eval
from rlhf.config.teacher import StandaloneTeacher
from rlhf.config.train import Train
from rlhf.data.cursor import TableCursor
from rlhf.data.table import PromptTable
from rlhf.errors import ConfigError
from rlhf.roles.doubles import DoubleEngine
from rlhf.sources.ahead import AheadSource, Background
from rlhf.sources.build import source_of
from rlhf.sources.dataset import DatasetSource
from rlhf.sources.live import LiveSource
from rlhf.sources.mixed import MixedSource, on_policy
from rlhf.sources.offpolicy import TEACHER_VERSION, ReferenceResponses, TeachersResponses
from rlhf.sources.privileged import privileged_sequences
from rlhf.sources.requests import reference_sequences
from rlhf.types import Experience
from tests.unit.test_execute import run_of as run_of_config
from tests.unit.test_live_source import Bench, table_of

STEPS = 12


def run_of(kind: type, bench: Bench, **fields: Any) -> list[Experience]:
    """Train on everything `kind` yields, from the same rows as `bench`'s live source."""
    live = bench.source()
    common = {field.name: getattr(live, field.name) for field in dataclasses.fields(live)}
    if kind is DatasetSource:
        del common["engine"], common["rollout"], common["conversations"]
        common["evaluator"].engine = None
    experiences = []
    for experience in kind(**common, **fields):
        experiences.append(experience)
        bench.trainer.train(experience).result()
    return experiences


def tokens_of(experiences: list[Experience]) -> list[list[int]]:
    return [experience.sequences.tokens.tolist() for experience in experiences]


def calls_of(bench: Bench) -> list[str]:
    return [event.call for event in bench.events]


def measured(experiences: list[Experience]) -> list[dict[str, float]]:
    return [
        {name: value for name, value in experience.metrics.items() if not name.startswith("time/")}
        for experience in experiences
    ]


# ---- off-policy -----------------------------------------------------------------------------------------------------


def test_reference_responses_need_no_engine() -> None:
    bench = Bench(steps=2)
    experiences = run_of(DatasetSource, bench, off_policy=ReferenceResponses(99))
    assert calls_of(bench) == ["evaluate", "score", "train", "score", "train", "evaluate"]
    assert bench.phases == ["eval", "score", "train", "eval", "score", "train", "eval"]
    assert [step for step, _ in bench.reported] == [0, 2] and bench.evaluator.samples == {}
    cursor = TableCursor(table_of(10), seed=0, shuffle=True)
    for step, experience in enumerate(experiences, start=1):
        expected = reference_sequences(cursor.take(4).table, 99)
        assert experience.sequences.tokens.tolist() == expected.tokens.tolist()
        assert experience.sequences.sample_ids.tolist() == [4 * step + i for i in range(4)]
        assert experience.sequences.logprobs is None and experience.version == step - 1
        assert not {"time/sync", "time/rollout", "rollout/weight_version"} & set(experience.metrics)
        assert experience.metrics["rollout/finished_share"] == 1


def test_long_reference_responses_are_cut_and_counted() -> None:
    (experience,) = run_of(DatasetSource, Bench(steps=1), off_policy=ReferenceResponses(2))
    assert experience.sequences.response_lengths.tolist() == [2] * 4
    assert experience.metrics["rollout/finished_share"] == 0


# ---- mixed ----------------------------------------------------------------------------------------------------------


def test_all_on_policy_equals_the_live_source_step_by_step() -> None:
    live, mixed = Bench(steps=STEPS), Bench(steps=STEPS)
    expected = run_of(LiveSource, live)
    found = run_of(MixedSource, mixed, lmbda=1.0, off_policy=ReferenceResponses(99))
    assert tokens_of(found) == tokens_of(expected) and calls_of(mixed) == calls_of(live)
    assert measured(found) == [{**metrics, "rollout/on_policy": 1.0} for metrics in measured(expected)]


def test_never_on_policy_equals_the_dataset_source_step_by_step() -> None:
    pure, mixed = Bench(steps=STEPS, eval=Eval(samples=0)), Bench(steps=STEPS, eval=Eval(samples=0))
    expected = run_of(DatasetSource, pure, off_policy=ReferenceResponses(2))
    found = run_of(MixedSource, mixed, lmbda=0.0, off_policy=ReferenceResponses(2))
    assert tokens_of(found) == tokens_of(expected)
    assert [call for call in calls_of(mixed) if call != "sleep"] == calls_of(pure)
    assert measured(found) == [{**metrics, "rollout/on_policy": 0.0} for metrics in measured(expected)]


def test_each_step_of_a_mix_is_that_of_one_of_the_pure_sources() -> None:
    """Rows, sampler seeds and sample ids included; weights go to the engine for on-policy steps and evaluation."""
    quiet = Eval(samples=3)
    bench = Bench(steps=STEPS, eval=quiet)
    found = run_of(MixedSource, bench, lmbda=0.5, off_policy=ReferenceResponses(99))
    chosen = [on_policy(0.5, 0, step) for step in range(1, STEPS + 1)]
    assert 2 <= sum(chosen) <= STEPS - 2
    live = run_of(LiveSource, Bench(steps=STEPS, eval=quiet))
    dataset = run_of(DatasetSource, Bench(steps=STEPS, eval=quiet), off_policy=ReferenceResponses(99))
    for step, (mine, own, reference, sampled) in enumerate(zip(found, live, dataset, chosen, strict=True), start=1):
        expected = own if sampled else reference
        assert mine.sequences.tokens.tolist() == expected.sequences.tokens.tolist(), step
        assert mine.sequences.sample_ids.tolist() == expected.sequences.sample_ids.tolist()
        assert (mine.sequences.logprobs is None) is not sampled
        assert mine.metrics["rollout/on_policy"] == sampled and ("time/sync" in mine.metrics) is (sampled or step == 1)
    assert {"sleep"} <= set(calls_of(bench)[: calls_of(bench).index("train")]), "the engine is asleep while training"
    assert bench.versions("update") == sorted({0, STEPS} | {step for step, sampled in enumerate(chosen) if sampled})


def test_the_draw_depends_on_seed_and_step_alone() -> None:
    draws = [[on_policy(0.3, seed, step) for step in range(1000)] for seed in (0, 1)]
    assert draws[0] != draws[1]
    assert all(0.25 < sum(draw) / 1000 < 0.35 for draw in draws)
    assert [step for step in range(8) if on_policy(0.3, 0, step)] == [
        step for step in range(8) if on_policy(0.6, 0, step) and on_policy(0.3, 0, step)
    ], "a larger share keeps the on-policy steps of a smaller one"
    assert all(on_policy(1.0, 0, step) and not on_policy(0.0, 0, step) for step in range(100))


@pytest.mark.parametrize(
    ("lmbda", "rollout", "kind"),
    [
        (None, VllmRollout(), LiveSource),
        (1.0, VllmRollout(), LiveSource),
        (0.5, VllmRollout(), MixedSource),
        (0.0, VllmRollout(), DatasetSource),
        (None, NoRollout(), DatasetSource),
    ],
)
def test_the_configuration_chooses_the_source(lmbda: float | None, rollout: Any, kind: type, tmp_path: Path) -> None:
    live = Bench().source()
    fields = {field.name: getattr(live, field.name) for field in dataclasses.fields(live)}
    engine = fields.pop("engine")
    del fields["rollout"]
    run = run_of_config(tmp_path, algo=GKD(lmbda=lmbda), rollout=rollout)
    assert type(source_of(run, engine, Background(), **fields)) is kind


def test_one_step_ahead_is_a_source_of_its_own(tmp_path: Path) -> None:
    live = Bench().source()
    fields = {field.name: getattr(live, field.name) for field in dataclasses.fields(live)}
    engine = fields.pop("engine")
    del fields["rollout"]
    run = run_of_config(tmp_path, placement=Separate(max_staleness=1))
    assert type(source_of(run, engine, Background(), **fields)) is AheadSource


# ---- what the teacher writes ----------------------------------------------------------------------------------------


def test_the_teacher_writes_after_its_own_prompts_and_the_student_reads_it_after_its_own() -> None:
    """The doubles' responses depend on version, prompt and seed alone, so what was asked shows in them."""
    bench, writer = Bench(steps=3, eval=Eval(samples=0)), DoubleEngine(version=TEACHER_VERSION)
    table = privileged_table(10, {row: [row] * 30 for row in range(0, 10, 2)})
    live = bench.source()
    live.cursor = TableCursor(table, 0, True)
    common = {field.name: getattr(live, field.name) for field in dataclasses.fields(live)}
    del common["engine"], common["rollout"], common["conversations"]
    common["evaluator"].engine = None
    cursor = TableCursor(table, 0, True)
    for experience in DatasetSource(**common, off_policy=TeachersResponses(writer, seed=0)):
        bench.trainer.train(experience).result()
        drawn = cursor.take(4)
        asked = writer.events[-1].what
        expected = writer.generate(asked, TEACHER_VERSION).result().sequences
        sequences = experience.sequences
        assert sequences.logprobs is None and experience.version == experience.step - 1
        assert sequences.sample_ids.tolist() == expected.sample_ids.tolist()
        for row, (mine, theirs) in enumerate(zip(sequences.rows(), expected.rows(), strict=True)):
            own = drawn.table.teacher_prompt(row)
            read = drawn.table.prompt(row) if own is None else own
            length = len(drawn.table.prompt(row))
            assert mine[:length].tolist() == drawn.table.prompt(row).tolist()
            assert theirs[: len(read)].tolist() == read.tolist()
            assert mine[length:].tolist() == theirs[len(read) :].tolist()
        assert "time/rollout" in experience.metrics and "time/sync" not in experience.metrics
    assert {event.call for event in bench.events} == {"score", "train"}


@pytest.mark.parametrize(("lmbda", "kind"), [(0.5, MixedSource), (0.0, DatasetSource)])
def test_off_policy_steps_ask_the_teacher_where_it_writes(lmbda: float, kind: type, tmp_path: Path) -> None:
    bench, writer = Bench(steps=STEPS, eval=Eval(samples=0)), DoubleEngine(version=TEACHER_VERSION)
    live = bench.source()
    fields = {field.name: getattr(live, field.name) for field in dataclasses.fields(live)}
    engine = fields.pop("engine")
    del fields["rollout"]
    run = run_of_config(tmp_path, algo=GKD(lmbda=lmbda, seq_kd=True), teacher=StandaloneTeacher())
    source = source_of(run, engine, Background(), writer, **fields)
    assert type(source) is kind
    for experience in source:
        bench.trainer.train(experience).result()
    off_policy = [step for step in range(1, STEPS + 1) if not on_policy(lmbda, 0, step)]
    assert len(writer.events) == len(off_policy) > 0


# ---- what the teacher reads -----------------------------------------------------------------------------------------


def privileged_table(rows: int, own: dict[int, list[int]]) -> PromptTable:
    table = table_of(rows)
    prompts = [np.array(own[row], dtype=np.int32) if row in own else np.zeros(0, dtype=np.int32) for row in range(rows)]
    return dataclasses.replace(
        table,
        teacher_tokens=np.concatenate(prompts),
        teacher_offsets=np.concatenate([[0], np.cumsum([len(prompt) for prompt in prompts])]),
    )


def test_the_teacher_reads_its_own_prompts_before_the_same_responses() -> None:
    table = privileged_table(3, {1: [7, 8, 9, 10, 11]})
    student = reference_sequences(table, 99)
    teacher = privileged_sequences(student, table)
    assert teacher is not None
    assert [row.tolist() for row in teacher.rows()] == [
        [100, 200, 201, 2],
        [7, 8, 9, 10, 11, 201, 202, 2],
        [102, 102, 102, 202, 203, 2],
    ]
    assert teacher.sample_ids is student.sample_ids
    assert teacher.response_offsets.tolist() == student.response_offsets.tolist()
    assert privileged_sequences(student, table_of(3)) is None
    selected = table.select([1, 0])
    assert selected.teacher_prompt(0).tolist() == [7, 8, 9, 10, 11] and selected.teacher_prompt(1) is None


def test_its_plan_keeps_samples_on_their_ranks_and_rows_in_their_places() -> None:
    table = privileged_table(6, {0: [1] * 20, 4: [2] * 9, 5: [3]})
    student = reference_sequences(table, 99)
    teacher = privileged_sequences(student, table)
    assert teacher is not None
    plan = plan_batch(student.lengths, data_parallel=2, micro_batch_tokens=40, pad_multiple=2)
    own = plan_on_ranks(plan, teacher.lengths, 26)
    assert (own.padding_free, own.pad_multiple) == (plan.padding_free, 2)
    for mine, students in zip(own.ranks, plan.ranks, strict=True):
        assert sorted(row for micro in mine for row in micro.rows) == sorted(row for m in students for row in m.rows)
        assert all(micro.tokens <= 26 for micro in mine)
    assert sum(map(len, own.ranks)) > sum(map(len, plan.ranks))
    for rank in own.ranks:
        for micro in rank:
            laid_out = pack(teacher, micro, padding_free=True, pad_multiple=2)
            for row, start in zip(micro.rows, laid_out.cu_seqlens, strict=False):
                scoring = start + response_rows(int(teacher.lengths[row]), int(teacher.prompt_lengths[row]))
                predicted = laid_out.tokens[0, scoring + 1].tolist()
                assert predicted == table.response(row).tolist()
    with pytest.raises(
        ConfigError, match=r"24 tokens, as the teacher reads it, doesn't fit train\.micro_batch_tokens=23"
    ):
        plan_on_ranks(plan, teacher.lengths, 23)


def test_scores_are_asked_with_the_teachers_prompts_and_training_gets_the_students() -> None:
    bench = Bench(steps=2, train=Train(micro_batch_tokens=60), eval=Eval(samples=2))
    source = bench.source()
    table = privileged_table(10, {row: [row] * 30 for row in range(0, 10, 2)})
    source.cursor = TableCursor(table, 0, True)
    asked = []
    source.scorer.score = lambda sequences, minibatches, score=source.scorer.score: (
        asked.append((sequences, minibatches)) or score(sequences, minibatches)
    )
    for experience in source:
        bench.trainer.train(experience).result()
        sequences, minibatches = asked[-1]
        assert sequences.response_lengths.tolist() == experience.sequences.response_lengths.tolist()
        longer = sequences.prompt_lengths != experience.sequences.prompt_lengths
        assert sequences.prompt_lengths[longer].tolist() == [30] * longer.sum()
        assert experience.metrics["batch/privileged_share"] == longer.mean() > 0
        assert minibatches[0].weights is experience.minibatches[0].weights
        assert len(minibatches[0].plan.ranks[0]) > len(experience.minibatches[0].plan.ranks[0]) == 1
