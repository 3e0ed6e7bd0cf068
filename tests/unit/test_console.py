"""The console, piped and on a terminal of 80 columns."""

import io
import os
import subprocess
import sys

import pytest
import rich.console

from rlhf.loggers.base import MetricLog
from rlhf.loggers.console import HEADER_EVERY, Column, Console

STEP = {
    "train/loss": 0.5,
    "train/divergence": 0.25,
    "train/entropy": 2.125,
    "train/grad_norm": 12.3456,
    "train/lr": 1e-5,
    "train/weight_version": 1,
    "distill/teacher_mass": 0.98,
    "distill/student_mass": 0.97,
    "rollout/response_tokens_mean": 127.6,
    "rollout/logprob_gap_mean": 0.0012,
    "perf/tokens_per_second": 14523.4,
    "time/step": 12.34,
}


def piped(steps=16):
    return Console(steps, rich.console.Console(file=io.StringIO(), force_terminal=False, width=80))


def terminal(steps=16, width=80):
    console = rich.console.Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None, _environ={})
    return Console(steps, console)


def test_the_bar_of_a_resumed_run_starts_where_it_was():
    sink = Console(16, rich.console.Console(file=io.StringIO(), force_terminal=True), first=5)
    assert sink._progress.tasks[0].completed == 5
    sink.close()


def test_jobs_of_a_sweep_print_warnings_only():
    sink = Console(16, rich.console.Console(file=io.StringIO(), force_terminal=False, width=80), brief=True)
    sink.log(0, {"eval/forward_kl": 0.8})
    assert sink._progress.tasks[0].completed == 0
    sink.log(1, STEP)
    assert sink._progress.tasks[0].completed == 1
    sink.warn("look")
    assert lines(sink) == ["warning: look"]


def lines(sink):
    sink.close()
    return sink.console.file.getvalue().splitlines()


def test_piped_lines():
    sink = piped()
    sink.phase("eval")
    sink.log(0, {"eval/forward_kl": 0.8123, "eval/reverse_kl": 1.2})
    sink.phase("train")
    sink.log(1, STEP)
    sink.warn("[bold]not markup[/bold]\nin one line")
    sink.log(2, {"train/loss": float("nan"), "distill/teacher_mass": 1.0, "eval/forward_kl": 0.4})
    sink.summary({"steps": 16})
    assert lines(sink) == [
        "held out, step 0: forward KL 0.8123, reverse KL 1.2000",
        "step  1/16  loss 0.5000  div 0.2500  entropy   2.125  mass t/s 0.98/0.97  gnorm 12.34  lr 1.0e-05  len   128  "
        "tok/s  14523  seconds    12.3  gap 0.0012",
        "warning: [bold]not markup[/bold] in one line",
        "step  2/16  loss    nan  div      -  entropy       -  mass t/s    1.00/-  gnorm     -  lr       -  len     -  "
        "tok/s      -  seconds       -  gap      -",
        "held out, step 2: forward KL 0.4000",
    ]


@pytest.mark.parametrize(
    ("value", "cell"), [(1234.56789, "1234.5"), (123456.7, "123456"), (-0.12345, "-0.123"), (float("inf"), "   inf")]
)
def test_wide_values_keep_the_columns(value, cell):
    sink = piped()
    sink.log(1, {"train/loss": value})
    assert lines(sink) == [f"step  1/16  loss {cell}"]


def test_terminal_shows_each_thing_once_in_80_columns():
    sink = terminal()
    sink.log(0, {"eval/forward_kl": 0.8123})
    for step in range(1, 4):
        sink.phase("rollout")
        sink.log(step, STEP)
    sink.warn("careful")
    sink._progress.refresh()
    output = sink.console.file.getvalue()
    assert "rollout" in output and "step  3/16" in output
    rows = [line.split("\r")[-1] for line in output.splitlines()]
    rows = [line.split("\x1b[2K")[-1] for line in rows]
    header = "step   loss    div entropy  mass t/s gnorm      lr   len  tok/s seconds    gap"
    row = "   2 0.5000 0.2500   2.125 0.98/0.97 12.34 1.0e-05   128  14523    12.3 0.0012"
    assert len(header) == len(row) <= 80
    assert [rows.count(text) for text in (header, row, "warning: careful")] == [1, 1, 1]
    sink.close()


def test_terminal_header_repeats_and_grows():
    sink = terminal(100, width=100)
    for step in range(1, HEADER_EVERY + 2):
        sink.log(step, {"train/loss": 0.5})
    sink.log(50, {"train/loss": 0.5, "train/entropy": 1.0})
    output = "\n".join(lines(sink))
    assert output.count("step    loss") == 3
    assert "step    loss  entropy" in output


def test_metric_log_reaches_the_console():
    sink = piped()
    log = MetricLog([], sink)
    log.phase("train")
    log.log(1, {"train/loss": 1})
    log.warn("careful")
    log.close()
    assert sink.console.file.getvalue() == "step  1/16  loss 1.0000\nwarning: careful\n"


def test_a_reader_that_leaves_does_not_end_the_run():
    code = (
        "from rlhf.loggers.console import Console\n"
        "sink = Console(2)\n"
        "for step in (1, 2): sink.log(step, {'train/loss': 1.0})\n"
        "sink.close()\n"
        "import os; os.write(2, b'went on')"
    )
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run([sys.executable, "-c", code], stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "went on")


def test_a_small_value_is_not_shown_as_zero():
    assert Column("gap", 6, ".4f", ("gap",)).cell({"gap": 3.2e-6}) == "3e-06"
    assert Column("gap", 6, ".4f", ("gap",)).cell({"gap": 0.0}) == "0.0000"
