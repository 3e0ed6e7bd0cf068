"""A sweep: the table and the file at its end, and whose Ray its jobs use."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rich.console
from omegaconf import OmegaConf

from rlhf.backends import cluster
from rlhf.backends.keep import KEEPER, Kept
from rlhf.config.cluster import Cluster, Device
from rlhf.errors import ClusterError
from rlhf.sweep import Job, SweepCallback, failures, show, write


def jobs_in(folder: Path) -> list[Job]:
    """Two that are done, the second better, one that failed, one interrupted."""
    jobs = [
        Job(number, [f"algo.beta={beta}", "+recipes=demo", "run.steps=4"], folder / str(number))
        for number, beta in enumerate(["0", "0.5", "9", "1"])
    ]
    for job, kl in zip(jobs, (0.75, 0.5), strict=False):
        job.folder.mkdir()
        summary = {"eval_after": {"eval/forward_kl": kl, "eval/reverse_kl": 1.25}, "rewards": {}, "steps": 4}
        summary["seconds"] = 61.04
        (job.folder / "summary.json").write_text(json.dumps(summary))
        job.ended()
    jobs[2].error = "algo.beta must be in [0, 1], got 9"
    return jobs


def test_every_key_and_result_is_in_the_file(tmp_path: Path) -> None:
    jobs = jobs_in(tmp_path)
    rows = list(csv.DictReader(write(jobs, tmp_path).read_text().splitlines()))
    assert [row["status"] for row in rows] == ["done", "done", "failed", "interrupted"]
    assert [row["algo.beta"] for row in rows] == ["0", "0.5", "9", "1"]
    assert {(row["recipes"], row["run.steps"]) for row in rows} == {("demo", "4")}
    assert [row["eval/forward_kl"] for row in rows] == ["0.75", "0.5", "", ""]
    assert (rows[0]["seconds"], rows[0]["folder"]) == ("61.0", str(tmp_path / "0"))
    assert rows[2]["error"] == "algo.beta must be in [0, 1], got 9"


def test_the_best_comes_first_and_only_what_differs_is_shown(tmp_path: Path) -> None:
    jobs = jobs_in(tmp_path)
    out = io.StringIO()
    show(jobs, tmp_path / "summary.csv", rich.console.Console(file=out, width=80))
    title, *lines = out.getvalue().strip().splitlines()
    assert title.startswith("Sweep: 4 jobs, 2 of them without a result; ") and title.endswith("summary.csv")
    assert [line.split() for line in lines] == [
        ["job", "algo.beta", "forward_kl", "reverse_kl", "seconds"],
        ["1", "0.5", "0.5", "1.25", "61"],
        ["0", "0", "0.75", "1.25", "61"],
        ["2", "9", "failed"],
        ["3", "1", "interrupted"],
    ]


def test_with_rewards_the_highest_comes_first(tmp_path: Path) -> None:
    jobs = [Job(number, [f"algo.kl_coef={number}"], tmp_path / str(number)) for number in range(3)]
    for job, reward in zip(jobs, (0.25, 0.75, 0.5), strict=True):
        job.folder.mkdir()
        summary = {"eval_after": {"eval/reward": reward, "eval/forward_kl": reward}, "steps": 4, "seconds": 1.0}
        (job.folder / "summary.json").write_text(json.dumps(summary))
        job.ended()
    out = io.StringIO()
    show(jobs, tmp_path / "summary.csv", rich.console.Console(file=out, width=80))
    _, *lines = out.getvalue().strip().splitlines()
    assert [line.split()[:4] for line in lines] == [
        ["job", "algo.kl_coef", "reward", "forward_kl"],
        ["1", "1", "0.75", "0.75"],
        ["2", "2", "0.5", "0.5"],
        ["0", "0", "0.25", "0.25"],
    ]


def test_values_in_brackets_are_shown(tmp_path: Path) -> None:
    jobs = [
        Job(n, [f"reward.functions=[{one}]"], tmp_path, finished=True) for n, one in enumerate(("format", "length"))
    ]
    out = io.StringIO()
    show(jobs, tmp_path, rich.console.Console(file=out, width=80))
    assert "[format]" in out.getvalue() and "[length]" in out.getvalue()


def test_held_out_rewards_and_those_of_training_have_titles_of_their_own(tmp_path: Path) -> None:
    jobs = [Job(0, ["train.lr=1"], tmp_path, finished=True, results={"eval/reward": 0.25, "reward/mean": 0.5})]
    out = io.StringIO()
    show(jobs, tmp_path, rich.console.Console(file=out, width=80))
    title, row = out.getvalue().strip().splitlines()[1:]
    assert re.split(r"\s{2,}", title.strip()) == ["job", "reward", "train reward"]
    assert row.split() == ["0", "0.25", "0.5"]


def test_failures_are_named(tmp_path: Path) -> None:
    jobs = jobs_in(tmp_path)
    assert failures(jobs) == "1 of 4 jobs failed: job 2 (algo.beta=9 +recipes=demo run.steps=4)"
    assert failures(jobs[:2]) is None


def test_without_a_teacher_the_highest_accuracy_or_reward_is_the_best(tmp_path: Path) -> None:
    for measured in ({"eval/accuracy": (0.25, 0.5, 0.4)}, {"reward/mean": (-1.0, 0.5, 0.4)}):
        ((name, values),) = measured.items()
        jobs = [Job(number, [f"train.lr={number}"], tmp_path, finished=True) for number in range(3)]
        for job, value in zip(jobs, values, strict=True):
            job.results = {name: value}
        out = io.StringIO()
        show(jobs, tmp_path, rich.console.Console(file=out, width=80))
        title, *rows = out.getvalue().strip().splitlines()[1:]
        expected = ["accuracy"] if name.startswith("eval") else ["train", "reward"]
        assert title.split() == ["job", "train.lr", *expected]
        assert [row.split()[0] for row in rows] == ["1", "2", "0"]


# ---- one Ray ---------------------------------------------------------------------------------------------------------


class DoubleRay:
    """Counts what is done to Ray. A daemon is a child process as long as one that was started runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.resources: dict[str, float] = {}
        self.alive = False
        self.groups = 0
        node = {"bundles_to_node_id": {number: "node" for number in range(9)}}
        monkeypatch.setattr(cluster, "ray", self)
        monkeypatch.setattr(cluster, "placement_group", self.placement_group)
        monkeypatch.setattr(cluster, "placement_group_table", lambda group: node)
        monkeypatch.setattr(cluster, "remove_placement_group", self.remove)
        monkeypatch.setattr(cluster, "raylet_processes", lambda: [])
        monkeypatch.setattr(cluster, "still_runs", lambda spec: self.alive)
        monkeypatch.setattr(cluster, "check_answers", lambda address: None)

    def is_initialized(self) -> bool:
        return bool(self.resources)

    def init(self, address: str, resources: dict[str, float] | None = None, **more: Any) -> None:
        assert not self.resources, "a second ray.init in one process raises"
        self.calls.append(f"init {address}")
        self.resources, self.alive = resources or {"slot": 4}, True

    def shutdown(self) -> None:
        self.calls.append("shutdown")
        self.resources, self.alive = {}, False

    def cluster_resources(self) -> dict[str, float]:
        return self.resources

    def placement_group(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        assert self.groups == 0, "the last job's devices have been given back"
        self.groups += 1
        return SimpleNamespace(wait=lambda seconds: True)

    def remove(self, group: Any) -> None:
        self.groups -= 1


@pytest.fixture
def double_ray(monkeypatch: pytest.MonkeyPatch) -> DoubleRay:
    return DoubleRay(monkeypatch)


def job(spec: Cluster | None = None, devices: int = 1) -> None:
    cluster.RayCluster(spec or Cluster(), devices).close()


def in_a_sweep(*jobs: Callable[[], None]) -> None:
    callback = SweepCallback()
    callback.on_multirun_start(OmegaConf.create())
    for each in jobs:
        each()
    callback.on_multirun_end(OmegaConf.create())
    assert KEEPER.kept is None and not KEEPER.keeping


def test_a_single_run_starts_ray_and_ends_it(double_ray: DoubleRay) -> None:
    job()
    job()
    assert double_ray.calls == ["init local", "shutdown"] * 2


def test_the_jobs_of_a_sweep_share_one_ray(double_ray: DoubleRay) -> None:
    in_a_sweep(lambda: job(devices=2), job, lambda: job(Cluster(threads=1), devices=2))
    assert double_ray.calls == ["init local", "shutdown"] and double_ray.groups == 0
    in_a_sweep()
    assert len(double_ray.calls) == 2, "no job needed one"


def test_a_ray_that_runs_elsewhere_is_only_left(double_ray: DoubleRay) -> None:
    """`ray.shutdown` ends what this process started, and detaches from what it didn't."""
    attached = Cluster(address="auto")
    in_a_sweep(lambda: job(attached), lambda: job(Cluster(address="auto", threads=1), devices=3))
    assert double_ray.calls == ["init auto", "shutdown"]


def test_a_job_that_fails_leaves_ray_to_the_next(double_ray: DoubleRay) -> None:
    def fails() -> None:
        with pytest.raises(ClusterError, match="the run needs 5 device"):
            job(Cluster(address="auto"), devices=5)

    in_a_sweep(fails, lambda: job(Cluster(address="auto")))
    assert double_ray.calls == ["init auto", "shutdown"]


def test_a_job_that_needs_another_ray_gets_it(double_ray: DoubleRay) -> None:
    in_a_sweep(job, lambda: job(devices=2), lambda: job(Cluster(object_store_gb=1.0), devices=2))
    assert double_ray.calls == ["init local", "shutdown"] * 3
    assert not Kept(Cluster(), 2).fits(Cluster(address="auto"), 1) and Kept(Cluster(), 2).fits(Cluster(), 1)
    on_gpus = Cluster(device=Device.cuda)
    assert Kept(on_gpus, 1).fits(on_gpus, 8), "Ray counts GPUs itself"


def test_a_ray_that_died_is_started_again(double_ray: DoubleRay) -> None:
    def died() -> None:
        double_ray.alive = False

    in_a_sweep(job, died, job)
    assert double_ray.calls == ["init local", "shutdown"] * 2
