"""What a run tells a person: of its data before it starts, and of its outcome."""

from __future__ import annotations

import sys
from pathlib import Path

from rlhf.backends.megatron.adapters import parameters
from rlhf.checkpoint import Checkpoints
from rlhf.config.run import Run
from rlhf.errors import RlhfError, counted
from rlhf.loggers.base import MetricLog
from rlhf.preflight import Inputs
from rlhf.report import summary as report
from rlhf.report.plot import plot_run
from rlhf.resume import BAD_ROWS
from rlhf.sources.evaluation import Evaluator


def publish(
    summary: report.RunSummary, run: Run, inputs: Inputs, folder: Path, log: MetricLog, sweep: bool = False
) -> None:
    """The outcome: in every sink, in files, and on the terminal (of a job of a sweep in one line)."""
    report.write(summary, folder)
    resumed = {} if summary.resumed_from is None else {"resumed_from": summary.resumed_from}
    trained, every = parameters(inputs.architecture, inputs.adapter)
    size = {"parameters": every, "trained_parameters": trained, "trained_share": trained / every}
    log.summary({**summary.eval_after, "steps": summary.steps, "seconds": summary.seconds, **size, **resumed})
    log.close()
    if run.logger.jsonl:
        try:
            plot_run(folder)
        except RlhfError as error:  # the run itself is done and saved
            print(f"warning: no curves.svg: {error}", file=sys.stderr)
    if run.logger.console and sweep:
        print(f"  {report.line(summary)}", flush=True)
    elif run.logger.console:
        import rich.console

        report.show(summary, rich.console.Console(highlight=False))


def report_data(inputs: Inputs, folder: Path, log: MetricLog) -> None:
    """Say what became of the rows; list the bad ones in a file."""
    statistics, bad_rows = inputs.dataset.statistics, inputs.dataset.bad_rows
    log.log(0, statistics)
    for warning in inputs.warnings:
        log.warn(warning)
    if bad_rows:
        listing = folder / BAD_ROWS
        listing.write_text("".join(f"{row}\n" for row in bad_rows), encoding="utf-8")
        log.warn(
            f"{counted(len(bad_rows), 'row')} left out (data.on_bad_row=skip), listed in {report.shown_path(listing)}; "
            f"the first: {bad_rows[0]}"
        )
    if cut := statistics.get("data/truncated_rows"):
        log.warn(f"{cut:.0f} prompts were cut to data.max_length tokens (data.truncation=left)")
    if repeated := statistics.get("data/held_out_rows_also_in_train"):
        log.warn(f"{repeated:.0f} held-out prompts are among the training prompts, too")


def describe_data(inputs: Inputs) -> str:
    """One line about the rows."""
    numbers = {name.removeprefix("data/"): f"{value:.0f}" for name, value in inputs.dataset.statistics.items()}
    if "train_rows" not in numbers:
        return f"data: a stream of rows to train on, {numbers['held_out_rows']} held out"
    return (
        f"data: {numbers['train_rows']} rows to train on, {numbers['held_out_rows']} held out, prompts of "
        f"{numbers['prompt_tokens_mean']} tokens on average, {numbers['prompt_tokens_max']} at most"
    )


def decoded_sample(inputs: Inputs, evaluator: Evaluator) -> report.Sample | None:
    """The first held-out prompt with the completions before and after; text only here, for a person."""
    if not evaluator.samples:
        return None
    decode = inputs.tokenizer.decode
    first, last = min(evaluator.samples), max(evaluator.samples)
    return {
        "prompt": decode(inputs.dataset.held_out.prompt(0), skip_special_tokens=True),
        "before": decode(evaluator.samples[first], skip_special_tokens=True),
        "after": decode(evaluator.samples[last], skip_special_tokens=True),
    }


def saved_text(checkpoints: Checkpoints) -> str:
    """What of the run is on disk."""
    found = checkpoints.on_disk()
    if not found:
        if checkpoints.save_every:
            return "no checkpoint was complete yet"
        return "no checkpoint was saved (run.save_every writes them on the way)"
    return f"saved: {', '.join(map(report.shown_path, found))}"
