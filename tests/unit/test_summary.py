"""The summary, its file, the plot, and `python -m rlhf.report`."""

import io
import json
from dataclasses import replace
from xml.etree import ElementTree

import matplotlib.figure  # noqa: F401  here, so that no test counts the seconds of this import
import pytest
import rich.console

from rlhf.loggers.jsonl import Jsonl
from rlhf.loggers.jsonl import read as read_metrics
from rlhf.report.__main__ import main
from rlhf.report.plot import plot_run
from rlhf.report.summary import RunSummary, line, read, show, write


def summary_of(run_dir):
    return RunSummary(
        name="gkd_small",
        directory=run_dir,
        steps=6,
        seconds=192.0,
        phases={"step": 180.0, "sync": 18.0, "rollout": 90.0, "train": 54.0},
        eval_before={"eval/forward_kl": 0.8, "eval/reverse_kl": 1.2},
        eval_after={"eval/forward_kl": 0.4, "eval/reverse_kl": 1.5},
        sample={"prompt": "Capital of France?", "before": "um \x1b[31m" + "the " * 200, "after": "Paris.\nIt is."},
        held_out_rows=16,
        checkpoint=run_dir / "checkpoints" / "final",
        saved=[run_dir / "checkpoints" / "step_3"],
        bad_rows=2,
        roles=["trainer: 2 x cpu"],
        versions={"rlhf": "0.1.0", "torch": "2.13.0"},
    )


def shown(summary, width=80):
    console = rich.console.Console(file=io.StringIO(), force_terminal=False, width=width)
    show(summary, console)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def with_metrics(run_dir):
    sink = Jsonl(run_dir)
    sink.log(0, {"eval/forward_kl": 0.8})
    sink.log(1, {"train/loss": 0.5, "train/divergence": 0.4, "time/rollout": 3.0, "time/train": 2.0})
    sink.log(2, {"train/loss": float("nan"), "train/divergence": 0.3, "time/rollout": 3.0})
    sink.close()


def test_written_and_read_back(tmp_path):
    summary = summary_of(tmp_path)
    summary.eval_after["eval/forward_kl"] = float("nan")
    path = write(summary, tmp_path)
    content = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert content["eval_after"]["eval/forward_kl"] is None
    assert content["checkpoint"] == str(tmp_path / "checkpoints" / "final")
    assert read(tmp_path).sample == summary.sample


def test_one_line_for_a_job_of_a_sweep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    summary = summary_of(tmp_path / "multirun" / "0")
    assert line(summary) == "6 steps in 3 min 12 s; forward KL 0.8000 -> 0.4000; multirun/0"
    summary = replace(summary, eval_before={}, eval_after={"eval/accuracy": 0.5}, rewards={"reward/mean": 0.25})
    assert line(summary) == "6 steps in 3 min 12 s; accuracy 0.5000; reward 0.2500; multirun/0"


def test_a_resumed_run_says_so_and_the_best_checkpoint_is_listed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    summary = summary_of(tmp_path)
    summary.resumed_from = 2
    summary.start_seconds = 61.0
    for key, noted in (("eval/forward_kl", "forward KL"), ("eval/reward", "reward")):
        summary.best = {"path": str(tmp_path / "checkpoints" / "best"), "step": 4, key: 0.35}
        write(summary, tmp_path)
        lines = shown(read(tmp_path))
        assert lines[1] == (
            "Run gkd_small: 6 steps in 3 min 12 s, 30.0 s a step, after 1 min 1 s to start, resumed from step 2"
        )
        assert f"  best         checkpoints/best (step 4, {noted} 0.3500)" in lines


def test_shown_at_80_columns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "outputs" / "gkd_small"
    run_dir.mkdir(parents=True)
    with_metrics(run_dir)
    clipped = ["          " + " ".join(["the"] * 17)] * 4
    assert shown(summary_of(run_dir)) == [
        "",
        "Run gkd_small: 6 steps in 3 min 12 s, 30.0 s a step",
        "",
        "Held-out divergence from the teacher, 16 rows",
        "                before     after     ratio",
        "  forward KL    0.8000    0.4000     0.500",
        "  reverse KL    1.2000    1.5000     1.250",
        "",
        "A held-out prompt, before and after",
        "  prompt  Capital of France?",
        r"  before  um \x1b[31mthe " + " ".join(["the"] * 13),
        *clipped,
        "          " + " ".join(["the"] * 16) + " ...",
        "  after   Paris.",
        "          It is.",
        "",
        "Seconds by phase",
        "               seconds     share",
        "  rollout         90.0       47%",
        "  train           54.0       28%",
        "  sync            18.0        9%",
        "  other           30.0       16%",
        "",
        "Roles",
        "  trainer: 2 x cpu",
        "",
        "Files",
        "  run          outputs/gkd_small",
        "  metrics      outputs/gkd_small/metrics.jsonl",
        "  checkpoint   outputs/gkd_small/checkpoints/step_3",
        "  final        outputs/gkd_small/checkpoints/final",
        "",
        "Versions",
        "  rlhf 0.1.0, torch 2.13.0",
        "",
        "2 bad rows were left out of the data.",
    ]


def test_shown_with_little(tmp_path):
    summary = RunSummary(name="x", directory=tmp_path, steps=0, seconds=1.5, eval_before={"eval/forward_kl": 0.0})
    lines = shown(summary)
    assert lines[1] == "Run x: 0 steps in 1.5 s"
    assert "  forward KL    0.0000         -         -" in lines
    assert not any("reverse" in line or "Roles" in line for line in lines)


def test_long_paths_stay_on_one_line(tmp_path):
    lines = shown(summary_of(tmp_path / ("long" * 30)))
    assert any(line.endswith(f"/{'long' * 30}/checkpoints/final") for line in lines)


def test_plot_is_small_readable_svg(tmp_path):
    with_metrics(tmp_path)
    path = plot_run(tmp_path)
    text = path.read_text()
    assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    for label in ("train/loss", "train/divergence", "eval/forward_kl", "rollout", "seconds", "step"):
        assert f">{label}</text>" in text
    assert len(text) < 100_000
    plot_run(tmp_path)
    assert path.read_text() == text  # nothing of the clock in it


def test_report_command(tmp_path, capsys):
    with_metrics(tmp_path)
    write(summary_of(tmp_path / "where it was"), tmp_path)
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "forward KL" in out and str(tmp_path / "curves.svg") in out and "where it was\n" not in out


def test_report_command_errors(tmp_path, capsys):
    def error(path):
        assert main([str(path)]) == 1
        out = capsys.readouterr()
        assert out.out == "" and out.err.startswith("error: ") and out.err.count("\n") == 1
        return out.err

    assert "no folder" in error(tmp_path / "nowhere")
    assert "no summary.json" in error(tmp_path)
    (tmp_path / "summary.json").write_text("{}")
    assert "isn't a summary" in error(tmp_path)
    write(summary_of(tmp_path), tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    assert "nothing to plot" in error(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "train/loss": "\xff"}\n')
    assert "line 1: not a line of metrics" in error(tmp_path)


def test_report_of_wrong_types_is_one_line(tmp_path, capsys):
    write(summary_of(tmp_path), tmp_path)
    content = json.loads((tmp_path / "summary.json").read_text())
    (tmp_path / "summary.json").write_text(json.dumps({**content, "seconds": "long"}))
    assert main([str(tmp_path)]) == 1
    assert "isn't a summary of this version" in capsys.readouterr().err


def test_report_without_metrics(tmp_path, capsys):
    """A run with logger.jsonl=false has its summary all the same."""
    write(summary_of(tmp_path), tmp_path)
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "forward KL" in out and "curves.svg" not in out


def test_report_of_a_run_that_has_not_ended(tmp_path, capsys):
    with_metrics(tmp_path)
    (tmp_path / "checkpoints" / "step_2").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".step_3.unfinished-1").mkdir()
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    steps = read_metrics(tmp_path)
    seconds = sum(metrics.get("time/step", 0) for metrics in steps.values())
    assert f"(not ended): {max(steps)} steps in {seconds:.1f} s" in out
    assert "checkpoints/step_2" in out and "unfinished" not in out and "curves.svg" in out
