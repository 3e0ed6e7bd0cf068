"""Rollouts one step ahead, on doubles: what is made with which weights, what overlaps, and how failures come out."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlhf.checkpoint import Checkpoints
from rlhf.config.run import Eval
from rlhf.errors import RoleDied
from rlhf.loggers.base import MetricLog
from rlhf.loop import run_steps
from rlhf.roles.doubles import DoubleScorer
from rlhf.sources.ahead import AheadSource, Background
from rlhf.sources.live import LiveSource
from rlhf.types import Experience, MiniBatch, Prompts, Rollouts, Sequences
from tests.unit.test_live_source import Bench, tokens_of
from tests.unit.test_loop import Recorder


class AheadBench(Bench):
    """The same bench under `placement.max_staleness=1`."""

    def source(self, report=None, phase=None) -> LiveSource:
        self.background = Background()
        return AheadSource(**vars(super().source(report, phase)), background=self.background)


def run(bench: Bench, folder: Path) -> list[dict[str, float]]:
    """The whole run, as `rlhf.execute` makes it -> the metrics of its steps."""
    recorder = Recorder()
    log = MetricLog([recorder])
    run_steps(bench.source(report=log.log), bench.trainer, Checkpoints(bench.trainer, folder, 0), log, 1.0)
    return [metrics for _, metrics in recorder.logged if "time/step" in metrics]


def test_responses_are_one_step_older_from_the_second_on() -> None:
    bench = AheadBench(steps=4)
    experiences = bench.run()
    assert [experience.step for experience in experiences] == [1, 2, 3, 4]
    assert [experience.version for experience in experiences] == [0, 0, 1, 2] == bench.versions("generate")
    assert [experience.metrics["rollout/staleness"] for experience in experiences] == [0, 1, 1, 1]
    assert [experience.metrics["rollout/weight_version"] for experience in experiences] == [0, 0, 1, 2]
    assert bench.versions("update") == [0, 1, 2, 3, 4], "each version once, the first one whole"


def test_the_rows_of_each_step_and_the_first_batch_are_the_same() -> None:
    ahead, live = AheadBench(steps=3).run(), Bench(steps=3).run()
    for one, other in zip(ahead, live, strict=True):
        assert one.sequences.sample_ids.tolist() == other.sequences.sample_ids.tolist()
        assert one.sequences.prompt_lengths.tolist() == other.sequences.prompt_lengths.tolist()
        assert one.metrics["data/epoch"] == other.metrics["data/epoch"]
    assert ahead[0].sequences.tokens.tolist() == live[0].sequences.tokens.tolist()
    assert ahead[2].sequences.tokens.tolist() != live[2].sequences.tokens.tolist()
    assert tokens_of(seed=3) == tokens_of(seed=3)


@pytest.mark.parametrize(("every", "due"), [(0, [0, 5]), (2, [0, 2, 4, 5]), (1, [0, 1, 2, 3, 4, 5])])
def test_evaluation_sees_the_weights_of_its_step(every: int, due: list[int]) -> None:
    bench = AheadBench(steps=5, eval=Eval(samples=3, every=every))
    bench.run()
    assert [step for step, _ in bench.reported] == due
    assert bench.versions("evaluate") == bench.versions("greedy") == due
    assert [metrics["eval/forward_kl"] for _, metrics in bench.reported] == [1 / (1 + step) for step in due]


class Later:
    """A future whose work began when it was asked for, and takes `seconds`."""

    def __init__(self, value: Any, seconds: float) -> None:
        self.value, self.due = value, time.perf_counter() + seconds

    def result(self) -> Any:
        time.sleep(max(0.0, self.due - time.perf_counter()))
        return self.value


def slow(method: Callable[..., Any], seconds: float) -> Callable[..., Later]:
    return lambda *args, **kwargs: Later(method(*args, **kwargs).result(), seconds)


ROLLOUT, TRAIN = 1.0, 0.7
"""Seconds; long, so that a busy machine adds little to them."""


def slow_run(bench: Bench, folder: Path) -> tuple[list[dict[str, float]], float]:
    """Metrics, and seconds a step over all steps but the first."""
    bench.trainer.metrics = {"time/train": TRAIN}
    bench.engine.generate = slow(bench.engine.generate, ROLLOUT)  # type: ignore[method-assign]
    bench.trainer.train = slow(bench.trainer.train, TRAIN)  # type: ignore[method-assign]
    started = time.perf_counter()
    metrics = run(bench, folder)
    return metrics, (time.perf_counter() - started - ROLLOUT) / bench.steps


def test_a_step_takes_as_long_as_the_longer_of_its_halves(tmp_path: Path) -> None:
    metrics, seconds = slow_run(AheadBench(steps=3, eval=Eval(samples=0)), tmp_path)
    assert seconds <= 1.1 * max(ROLLOUT, TRAIN)
    for one, following in itertools.pairwise(metrics):
        begins, ends = one["timeline/train_start"], one["timeline/train_start"] + TRAIN
        assert following["timeline/rollout_start"] < ends and following["timeline/rollout_end"] > begins
        assert following["time/step"] == pytest.approx(max(ROLLOUT, TRAIN), rel=0.1), "what the step itself took"
        assert following["timeline/rollout_end"] <= following["timeline/score_start"] <= following["timeline/score_end"]
    _, seconds = slow_run(Bench(steps=2, eval=Eval(samples=0)), tmp_path)
    assert seconds > 1.1 * max(ROLLOUT, TRAIN), "without it they add up"


class BusyTeacher(DoubleScorer):
    """Works on what was begun, one after the other, while others do something else; `score` waits for the rest."""

    due = 0.0

    def begin(self, sequences: Sequences) -> None:
        super().begin(sequences)
        self.due = max(self.due, time.perf_counter()) + SCORE * len(sequences)

    def score(self, sequences: Sequences, minibatches: tuple[MiniBatch, ...]) -> Any:
        return Later(super().score(sequences, minibatches).result(), self.due - time.perf_counter())


SCORE, FINISH = 0.2, 0.3
"""Seconds a sample takes: a teacher that is faster than the engine has one of them left when it is done."""


@pytest.mark.parametrize("kind", [Bench, AheadBench])
def test_a_teacher_of_its_own_scores_while_others_are_generated(kind: type, tmp_path: Path) -> None:
    """The rows are those of a run in which it waits; of its seconds, those of the last sample remain."""
    bench, waits = kind(steps=2, eval=Eval(samples=0)), kind(steps=2, eval=Eval(samples=0))
    stream = bench.engine.stream

    def one_by_one(prompts: Prompts, version: int) -> Iterator[Rollouts]:
        for part in stream(prompts, version):
            time.sleep(FINISH)
            yield part

    bench.engine.stream = one_by_one  # type: ignore[method-assign]
    bench.scorer = BusyTeacher(bench.scorer.events, bench.scorer.scored, begins=True)
    found = bench.run()
    for mine, expected in zip(found, waits.run(), strict=True):
        assert mine.sequences.tokens.tolist() == expected.sequences.tokens.tolist()
        assert mine.sequences.sample_ids.tolist() == expected.sequences.sample_ids.tolist()
        assert mine.metrics["score/head_start"] == pytest.approx(3 * FINISH, abs=0.15)
        ahead = "ahead/score" in mine.metrics
        assert mine.metrics["ahead/score" if ahead else "time/score"] == pytest.approx(SCORE, abs=0.1)
        assert mine.metrics["ahead/rollout" if ahead else "time/rollout"] == pytest.approx(4 * FINISH, abs=0.15)
    calls = [event.call for event in bench.events if event.call in ("begin", "score")]
    assert calls == (["begin"] * 4 + ["score"]) * 2


def test_a_failure_ahead_comes_out_of_the_next_step_as_it_is() -> None:
    bench = AheadBench(steps=4)
    generate = bench.engine.generate

    def dies(prompts, version, greedy=False):
        if version == 1 and not greedy:
            raise RoleDied("the engine process ended unexpectedly")
        return generate(prompts, version, greedy)

    bench.engine.generate = dies  # type: ignore[method-assign]
    with pytest.raises(RoleDied, match=r"^the engine process ended unexpectedly$"):
        bench.run()
    assert bench.versions("train") == [1, 2]


def test_an_interrupted_step_leaves_the_thread_to_its_roles() -> None:
    """Ctrl-C comes out at once; the thread ends when what it waits for does."""
    bench = AheadBench(steps=3, eval=Eval(samples=0))
    gone = threading.Event()
    generate = bench.engine.generate

    class UntilGone:
        def __init__(self, value: Any) -> None:
            self.value = value

        def result(self) -> Any:
            if threading.current_thread() is not threading.main_thread():
                assert gone.wait(10)
                raise RoleDied("the engine process ended unexpectedly")
            return self.value

    bench.engine.generate = lambda *args: UntilGone(generate(*args).result())  # type: ignore
    experiences = iter(bench.source())
    assert isinstance(next(experiences), Experience)
    with pytest.raises(KeyboardInterrupt):
        experiences.throw(KeyboardInterrupt)  # type: ignore[attr-defined]
    gone.set()
    bench.background.join()
    assert threading.active_count() == 1 or not any(t.name == "rollouts ahead" for t in threading.enumerate())


def test_the_background_does_one_job_at_a_time() -> None:
    background, order = Background(), []

    def job(name: str) -> str:
        time.sleep(0.01)
        order.append(name)
        return name

    futures = [background.start(partial(job, name)) for name in "ab"]
    assert [future.result() for future in futures] == order == ["a", "b"]
