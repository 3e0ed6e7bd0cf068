"""The table and the file at the end of a sweep."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import rich.console

from rlhf.sweep import Job, show, write


def jobs_in(folder: Path) -> list[Job]:
    """Two that are done, the second better, one that failed, one interrupted."""
    jobs = [
        Job(number, [f"algo.beta={beta}", "+recipes=demo", "run.steps=4"], folder / str(number))
        for number, beta in enumerate(["0", "0.5", "9", "1"])
    ]
    for job, kl in zip(jobs, (0.75, 0.5), strict=False):
        job.folder.mkdir()
        summary = {"eval_after": {"eval/forward_kl": kl, "eval/reverse_kl": 1.25}, "steps": 4, "seconds": 61.04}
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
