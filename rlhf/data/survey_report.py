"""What `python -m rlhf.data` prints about one source of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import rich.console
import rich.table
from rich.text import Text

from rlhf.batching import describe_plans, plan_batch
from rlhf.config.data import Truncation
from rlhf.config.rollout import NoRollout
from rlhf.data.stream import Survey
from rlhf.errors import ConfigError

BINS = 8
BAR = 40
"""Characters of the longest bar of the histogram."""
QUANTILES = {"5 %": 0.05, "median": 0.5, "95 %": 0.95, "99 %": 0.99, "longest": 1.0}


def show(found: Survey, sections: dict[str, Any], console: rich.console.Console) -> None:
    """Counts, lengths, a batch, and the bad rows by reason.

    Args:
        sections: `data`, `eval`, `train` and `rollout` of the configuration.
    """
    prompts, responses = np.asarray(found.prompt_lengths), np.asarray(found.response_lengths)
    console.print(f"{len(prompts)} rows can be used, {found.bad.count} can't")
    if len(prompts):
        console.print(_lengths(prompts, responses[responses > 0]))
        console.print("prompts by tokens:")
        for line in histogram(prompts):
            console.print(f"  {line}")
        for line in [*_cuts(found, responses, sections), _batch(prompts, sections)]:
            console.print(Text(line), soft_wrap=True)
    for line in found.bad.lines():
        console.print(Text(f"  {line}"), soft_wrap=True)


def _lengths(prompts: np.ndarray, responses: np.ndarray) -> rich.table.Table:
    table = rich.table.Table("tokens", box=None, pad_edge=False)
    for title in ("rows", "mean", *QUANTILES):
        table.add_column(title, justify="right", min_width=7)
    for name, values in (("prompts", prompts), ("responses", responses)):
        numbers = [values.mean(), *np.quantile(values, list(QUANTILES.values()))] if len(values) else []
        table.add_row(name, str(len(values)), *(f"{number:.0f}" for number in numbers))
    return table


def histogram(lengths: np.ndarray) -> list[str]:
    """A line for each of at most BINS equal ranges of lengths, e.g. `   1-  64  120 ########`."""
    low, high = int(lengths.min()), int(lengths.max())
    width = -(-(high - low + 1) // BINS)
    starts = range(low, high + 1, width)
    counts = np.bincount((lengths - low) // width, minlength=len(starts))
    digits, most = len(str(high)), int(counts.max())
    return [
        f"{start:>{digits}}-{min(start + width - 1, high):>{digits}}  {count:>{len(str(most))}} "
        f"{'#' * round(BAR * count / most)}".rstrip()
        for start, count in zip(starts, counts, strict=True)
    ]


def _cuts(found: Survey, responses: np.ndarray, sections: dict[str, Any]) -> list[str]:
    """What is cut at the lengths of the configuration."""
    data, most = sections["data"], sections["eval"].max_response_tokens
    lines = []
    if found.teacher_prompts:
        lines.append(f"{found.teacher_prompts} rows have a teacher_prompt")
    if data.truncation is Truncation.left:
        lines.append(f"{found.truncated} prompts are cut to data.max_length={data.max_length} tokens")
    if cut := int((responses > most).sum()):
        lines.append(f"{cut} responses are longer than eval.max_response_tokens={most}, and cut for evaluation")
    return lines


def _batch(prompts: np.ndarray, sections: dict[str, Any]) -> str:
    """How a batch of these prompts would be packed, if every response were as long as it may be."""
    train, rollout = sections["train"], sections["rollout"]
    key, new = "rollout.max_new_tokens", getattr(rollout, "max_new_tokens", None)
    if isinstance(rollout, NoRollout):
        key, new = "data.max_response_length", sections["data"].max_response_length
    lengths = np.random.default_rng(0).choice(prompts, train.global_batch_samples) + new
    try:
        plan = plan_batch(
            lengths,
            data_parallel=train.gpus // train.tensor_parallel,
            micro_batch_tokens=train.micro_batch_tokens,
            padding_free=train.padding_free,
        )
    except ConfigError as error:
        return f"no batch can be made: {error}"
    numbers = describe_plans([plan], lengths)
    return (
        f"a batch of train.global_batch_samples={len(lengths)} with responses of {key}={new}: about "
        f"{numbers['batch/tokens']:.0f} tokens in {numbers['batch/micro_batches']:.0f} micro-batches of at most "
        f"train.micro_batch_tokens={train.micro_batch_tokens}, {numbers['batch/padding_share']:.0%} padding"
    )
