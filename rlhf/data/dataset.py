"""From `data.*` to the two tables a run needs: rows to train on and rows held out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhf.config.data import DataCommon, FileData, HubData, OnBadRow, ReasoningGymData
from rlhf.data.rows import BadRow, Row, parse_row
from rlhf.data.sources import RawRows, read_files, read_hub, read_reasoning_gym
from rlhf.data.table import PromptTable
from rlhf.data.tokenise import tokenise_rows
from rlhf.errors import DataError
from rlhf.types import Metrics

LISTED = 20
"""Bad rows listed in an error."""


@dataclass(frozen=True)
class Dataset:
    """What a run trains on and what it is evaluated on."""

    train: PromptTable
    held_out: PromptTable
    bad_rows: list[BadRow]
    """Left out under data.on_bad_row=skip; empty otherwise."""
    statistics: Metrics


def load(spec: DataCommon, tokenizer: Any, seed: int, eval_samples: int, eval_needs_response: bool) -> Dataset:
    """Read, check, tokenise and split.

    Args:
        spec: FileData, HubData or ReasoningGymData.
        tokenizer: The student's Hugging Face tokenizer.
        seed: `run.seed`; decides which rows a procedural task makes.
        eval_samples: Rows held out: the first ones of `eval_path` or `eval_split`, else the last ones of all rows.
        eval_needs_response: Held-out rows need a reference response.

    Raises:
        DataError: rows, files or splits that can't be used; the first line says it all, bad rows are listed below it.
    """
    source, train_rows, eval_rows = _open(spec, seed, eval_samples)
    train, bad, total = _table(train_rows, tokenizer, spec)
    held_out = None
    if eval_rows is not None:
        held_out, eval_bad, eval_total = _table(eval_rows, tokenizer, spec)
        bad, total = bad + eval_bad, total + eval_total
    if bad and spec.on_bad_row is OnBadRow.error:
        raise DataError(_bad_rows_message(bad, total))

    skipped = f" after {len(bad)} bad rows were left out" if bad else ""
    if len(train) == 0:
        raise DataError(f"{source} has no rows to train on{skipped}")
    if held_out is None:
        if len(train) <= eval_samples:
            raise DataError(
                f"{source} has {len(train)} rows{skipped}: holding out eval.samples={eval_samples} of them leaves none "
                f"to train on; use eval.samples={len(train) - 1} or less, or more rows"
            )
        border = len(train) - eval_samples
        train, held_out = train.select(range(border)), train.select(range(border, len(train)))
    else:
        if len(held_out) < eval_samples:
            raise DataError(
                f"eval.samples={eval_samples}, but there are only {len(held_out)} held-out rows{skipped}; "
                f"use eval.samples={len(held_out)} or more rows"
            )
        held_out = held_out.select(range(eval_samples))
    if eval_needs_response:
        _require_responses(held_out)
    return Dataset(train, held_out, bad, _statistics(train, held_out, bad))


def _open(spec: DataCommon, seed: int, eval_samples: int) -> tuple[str, RawRows, RawRows | None]:
    """Name of the source, its rows, and the rows of a held-out source of their own (None: hold out the last ones)."""
    if isinstance(spec, ReasoningGymData):
        # One dataset, distinct indices: training and held-out rows are different draws.
        return f"data.task={spec.task}", read_reasoning_gym(spec, spec.size + eval_samples, seed), None
    if isinstance(spec, FileData):
        own = spec.eval_path is not None and eval_samples > 0
        held_out = read_files(spec.eval_path or "", "data.eval_path") if own else None
        return f"data.path={spec.path}", read_files(spec.path, "data.path"), held_out
    if isinstance(spec, HubData):
        own = spec.eval_split is not None and eval_samples > 0
        held_out = read_hub(spec, spec.eval_split or "") if own else None
        return f"data.name={spec.name}", read_hub(spec, spec.split), held_out
    raise AssertionError(f"no reader for {type(spec).__name__}")


def _table(raw_rows: RawRows, tokenizer: Any, spec: DataCommon) -> tuple[PromptTable, list[BadRow], int]:
    """The usable rows, the bad ones in the order of the source, and how many rows there were."""
    rows: list[Row] = []
    bad: dict[str, BadRow] = {}
    order: dict[str, int] = {}
    for index, (where, raw) in enumerate(raw_rows):
        order[where] = index
        row = raw if isinstance(raw, BadRow) else parse_row(raw, where, index)
        if isinstance(row, BadRow):
            bad[where] = row
        else:
            rows.append(row)
    table, refused = tokenise_rows(rows, tokenizer, spec)
    bad |= {row.where: row for row in refused}
    return table, sorted(bad.values(), key=lambda row: order[row.where]), len(order)


def _bad_rows_message(bad: list[BadRow], total: int) -> str:
    first = (
        f"{len(bad)} of {total} rows can't be used, the first is {bad[0]}; "
        "use data.on_bad_row=skip to leave them out, or mend them"
    )
    if len(bad) == 1:
        return first
    more = [f"  ... and {len(bad) - LISTED} more"] if len(bad) > LISTED else []
    return "\n".join([first, *(f"  {row}" for row in bad[:LISTED]), *more])


def _require_responses(held_out: PromptTable) -> None:
    missing = [where for where, length in zip(held_out.wheres, held_out.response_lengths, strict=True) if length == 0]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(held_out)} held-out rows have no reference response, the first is {missing[0]}; "
            "use eval.responses=student, or give these rows a 'response'"
        )


def _statistics(train: PromptTable, held_out: PromptTable, bad: list[BadRow]) -> Metrics:
    prompts = {train.prompt(row).tobytes() for row in range(len(train))}
    seen = sum(held_out.prompt(row).tobytes() in prompts for row in range(len(held_out)))
    return {
        "data/train_rows": float(len(train)),
        "data/held_out_rows": float(len(held_out)),
        "data/held_out_rows_also_in_train": float(seen),
        "data/bad_rows": float(len(bad)),
        "data/truncated_rows": float(train.truncated.sum() + held_out.truncated.sum()),
        "data/prompt_tokens_mean": float(train.lengths.mean()),
        "data/prompt_tokens_max": float(max(train.lengths.max(), held_out.lengths.max(initial=0))),
    }
