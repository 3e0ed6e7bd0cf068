"""The loop on doubles: what is logged, when it warns, when it saves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rlhf.checkpoint import Checkpoints
from rlhf.config.run import Eval
from rlhf.errors import RoleDied
from rlhf.loggers.base import MetricLog
from rlhf.loop import run_steps, speed
from rlhf.roles.doubles import Done, DoubleTrainer
from rlhf.types import Experience, Metrics, Sequences
from tests.unit.test_live_source import Bench


class Recorder:
    """A sink that keeps everything, in order."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, Metrics]] = []

    def log(self, step: int, metrics: Metrics) -> None:
        self.logged.append((step, metrics))

    def summary(self, values: dict[str, object]) -> None: ...

    def close(self) -> None: ...


def run(
    bench: Bench, folder: Path, *, save_every: int = 0, largest_gap: float = 0.1
) -> tuple[list[tuple[int, Metrics]], Checkpoints]:
    """The whole run, as `rlhf.execute` makes it."""
    recorder = Recorder()
    log = MetricLog([recorder])
    checkpoints = Checkpoints(bench.trainer, folder / "checkpoints", save_every)
    run_steps(bench.source(report=log.log), bench.trainer, checkpoints, log, largest_gap)
    return recorder.logged, checkpoints


def test_the_order_of_a_run(tmp_path: Path) -> None:
    bench = Bench(steps=2)
    run(bench, tmp_path, save_every=1)
    assert [event.call for event in bench.events] == [
        *("update", "greedy", "evaluate", "generate", "sleep", "score", "train", "save"),
        *("update", "generate", "sleep", "score", "train", "save"),
        *("update", "greedy", "evaluate"),
    ]


def test_every_step_is_logged_once_between_the_evaluations(tmp_path: Path) -> None:
    logged, _ = run(Bench(steps=4, eval=Eval(samples=2, every=2)), tmp_path)
    assert [(step, "eval/forward_kl" in metrics) for step, metrics in logged] == [
        (0, True),
        (1, False),
        (2, False),
        (2, True),
        (3, False),
        (4, False),
        (4, True),
    ]


def test_what_is_logged_each_step(tmp_path: Path) -> None:
    logged, _ = run(Bench(steps=3, eval=Eval(samples=0)), tmp_path)
    assert [step for step, _ in logged] == [1, 2, 3]
    for _, metrics in logged:
        assert set(metrics) == {
            *("time/sync", "time/rollout", "time/score", "time/train", "time/step"),
            *("perf/tokens_per_second", "perf/response_tokens_per_second"),
            *("rollout/response_tokens_mean", "rollout/response_tokens_max", "rollout/prompt_tokens_mean"),
            *("rollout/finished_share", "rollout/weight_version", "train/loss", "data/epoch"),
            *("batch/tokens", "batch/padding_share", "batch/micro_batches", "batch/rank_imbalance"),
            "batch/privileged_share",
        }
    assert [metrics["rollout/weight_version"] for _, metrics in logged] == [0, 1, 2]


def test_speed() -> None:
    sequences = Sequences(
        sample_ids=np.arange(2),
        tokens=np.arange(9, dtype=np.int32),
        offsets=np.array([0, 4, 9]),
        prompt_lengths=np.array([3, 1], dtype=np.int32),
    )
    metrics = {"time/rollout": 1.5, "time/train": 0.5, "train/loss": 7.0}
    assert speed(Experience(1, 0, sequences, ()), metrics) == {
        "time/step": 2.0,
        "perf/tokens_per_second": 4.5,
        "perf/response_tokens_per_second": 2.5,
    }


def test_the_seconds_of_a_step_are_its_phases_without_evaluation_and_saving(tmp_path: Path) -> None:
    logged, _ = run(Bench(steps=2, eval=Eval(samples=2, every=1)), tmp_path, save_every=1)
    steps = [metrics for _, metrics in logged if "time/step" in metrics]
    assert len(steps) == 2
    saves = [(step, metrics) for step, metrics in logged if "time/save" in metrics]
    assert [step for step, _ in saves] == [1, 2] and all(metrics["time/save"] > 0 for _, metrics in saves)
    for metrics in steps:
        assert "time/save" not in metrics
        phases = [metrics[f"time/{name}"] for name in ("sync", "rollout", "score", "train")]
        assert metrics["time/step"] == pytest.approx(sum(phases))


@pytest.mark.parametrize(
    ("gap", "shown"), [(0.25, "0.25"), (1234.0, "1.2e+03"), (float("nan"), "nan"), (0.1, None), (0.01, None)]
)
def test_a_gap_between_sampler_and_trainer_warns(
    gap: float, shown: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = Bench(steps=2, eval=Eval(samples=0))
    bench.trainer.metrics = {"rollout/logprob_gap_mean": gap}
    run(bench, tmp_path, largest_gap=0.1)
    expected = "".join(
        f"warning: step {step}: sampler and trainer disagree by {shown} nats a token on average, above "
        "rollout.logprob_gap_warning=0.1\n"
        for step in (1, 2)
    )
    assert capsys.readouterr().err == (expected if shown else "")


def test_without_a_gap_to_compare_there_is_no_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(Bench(steps=1), tmp_path, largest_gap=1e-9)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("save_every", "steps"), [(0, []), (2, [2, 4]), (5, [5]), (9, [])])
def test_checkpoints_hold_the_weights_after_their_step(save_every: int, steps: list[int], tmp_path: Path) -> None:
    _, checkpoints = run(Bench(steps=5, eval=Eval(samples=0)), tmp_path, save_every=save_every)
    folder = tmp_path / "checkpoints"
    assert checkpoints.saved == [folder / f"step_{step}" for step in steps]
    assert [(path / "version.txt").read_text() for path in checkpoints.saved] == [str(step) for step in steps]
    final = checkpoints.finish()
    assert final == folder / "final" == checkpoints.saved[-1]
    assert (final / "version.txt").read_text() == "5"


class DiesAtStep2(DoubleTrainer):
    def train(self, experience: Experience) -> Done[Metrics]:
        if experience.step == 2:
            raise RoleDied("the trainer process ended unexpectedly")
        return super().train(experience)


def test_a_step_that_fails_is_neither_logged_nor_saved(tmp_path: Path) -> None:
    bench = Bench(steps=3, eval=Eval(samples=0))
    bench.trainer = DiesAtStep2(bench.events, bench.scorer.scored)
    recorder = Recorder()
    checkpoints = Checkpoints(bench.trainer, tmp_path, save_every=1)
    with pytest.raises(RoleDied):
        run_steps(bench.source(), bench.trainer, checkpoints, MetricLog([recorder]), 0.1)
    assert {step for step, _ in recorder.logged} == {1}
    assert checkpoints.saved == [tmp_path / "step_1"]


class Late:
    """A future that says when it is waited for."""

    def __init__(self, value: object, waited: Callable[[], None]) -> None:
        self.value, self.waited = value, waited

    def result(self) -> object:
        self.waited()
        return self.value


def test_every_future_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A role in another process reports its failures there, and nowhere else."""
    bench = Bench(steps=2)
    asked, waited = [], []
    roles = [(bench.trainer, "train"), (bench.trainer, "evaluate"), (bench.trainer, "save")]
    roles += [(bench.scorer, "score"), (bench.engine, "update_weights"), (bench.engine, "generate")]

    def late(name: str, method: Callable) -> Callable:
        def call(*args, **kwargs):
            asked.append(name)
            return Late(method(*args, **kwargs).result(), lambda: waited.append(name))

        return call

    for role, name in roles:
        monkeypatch.setattr(role, name, late(name, getattr(role, name)))
    run(bench, tmp_path, save_every=1)[1].finish()
    assert waited == asked and set(asked) == {name for _, name in roles}
