"""From `data.*` to what a run needs: rows to train on and rows held out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlhf.config.data import DataCommon, FileData, HubData, OnBadRow, PluginData, ReasoningGymData, RowsData
from rlhf.data.bad_rows import BadRows
from rlhf.data.cursor import Cursor, StreamCursor, TableCursor
from rlhf.data.exercises import read_reasoning_gym
from rlhf.data.files import read_files
from rlhf.data.hub_rows import read_hub
from rlhf.data.plugin_rows import read_plugin
from rlhf.data.raw import RowSource
from rlhf.data.read import read_chunks
from rlhf.data.rows import NOTHING_MORE, BadRow, Needs
from rlhf.data.stream import NO_RESPONSE, RowStream, first_rows, require_usable, survey
from rlhf.data.table import PromptTable, concatenate
from rlhf.data.tokenise import check_refusals
from rlhf.errors import DataError, counted
from rlhf.types import Metrics


@dataclass(frozen=True)
class Dataset:
    """What a run trains on and what it is evaluated on."""

    train: PromptTable | RowStream
    held_out: PromptTable
    bad_rows: list[BadRow]
    """Left out under data.on_bad_row=skip, as far as they are known before training; empty otherwise."""
    statistics: Metrics

    @property
    def train_rows(self) -> int | None:
        """Usable rows to train on; None for a stream that wasn't read through."""
        return self.train.rows if isinstance(self.train, RowStream) else len(self.train)

    def train_column_names(self) -> tuple[frozenset[str], bool]:
        """Of the rows to train on, besides what is tokenised; and whether there are no others, which isn't known of a
        stream that wasn't read through: then those of its first rows."""
        if isinstance(self.train, PromptTable):
            return self.train.column_names, True
        if self.train.column_names is not None:
            return self.train.column_names, True
        return self.train.first_column_names(), False

    def cursor(self, seed: int, shuffle: bool, on_bad_row: Callable[[BadRow], None]) -> Cursor:
        """At the first row. `on_bad_row` is told the rows that are left out while training."""
        if isinstance(self.train, RowStream):
            return StreamCursor(self.train, seed, shuffle, on_bad_row)
        return TableCursor(self.train, seed, shuffle)


def load(
    spec: DataCommon,
    tokenizer: Any,
    seed: int,
    eval_samples: int,
    eval_needs_response: bool,
    needs: Needs = NOTHING_MORE,
) -> Dataset:
    """Read, check, tokenise and split.

    Args:
        spec: FileData, HubData or ReasoningGymData.
        tokenizer: The student's Hugging Face tokenizer.
        seed: `run.seed`; decides which rows a procedural task makes.
        eval_samples: Rows held out: the first ones of `eval_path` or `eval_split`, else the last ones of all rows (of
            a stream, the first ones).
        eval_needs_response: Held-out rows need a reference response. Under on_bad_row=skip those that have none are
            passed over.
        needs: What every row must have besides a prompt; one that lacks it is a bad row.

    Raises:
        DataError: rows, files or splits that can't be used; the first line says it all, bad rows are listed below it.
    """
    source, eval_source = open_sources(spec, seed, eval_samples)
    need = eval_needs_response
    if isinstance(spec, RowsData) and spec.streaming:
        return _load_stream(spec, source, eval_source, tokenizer, eval_samples, need, needs)
    train, bad = _table(source, tokenizer, spec, needs)
    if eval_source is None:
        _stop_at(bad, len(train) + len(bad), spec)
        _require_rows(train, source, bad)
        train, held_out = _split(train, source, eval_samples, need, spec, bad)
    else:
        held_out, eval_bad = _table(eval_source, tokenizer, spec, replace(needs, response=False))
        bad += eval_bad
        _stop_at(bad, len(train) + len(held_out) + len(bad), spec)
        _require_rows(train, source, bad)
        if need and spec.on_bad_row is OnBadRow.skip:
            lacking = [held_out.wheres[row] for row in np.flatnonzero(held_out.response_lengths == 0)]
            bad += [BadRow(where, NO_RESPONSE) for where in lacking]
            held_out = held_out.select(np.flatnonzero(held_out.response_lengths))
        _require_held_out(len(held_out), eval_samples, bad)
        held_out = held_out.select(range(eval_samples))
    if need:
        _require_responses(held_out)
    return Dataset(train, held_out, bad, _statistics(train, held_out, bad))


def open_sources(spec: DataCommon, seed: int, eval_samples: int) -> tuple[RowSource, RowSource | None]:
    """The rows, and those of a held-out source of their own (None: hold out some of the rows)."""
    if isinstance(spec, ReasoningGymData):
        # One dataset, distinct indices: training and held-out rows are different draws.
        return read_reasoning_gym(spec, spec.size + eval_samples, seed), None
    if isinstance(spec, FileData):
        own = spec.eval_path is not None and eval_samples > 0
        held_out = read_files(spec.eval_path or "", "data.eval_path", spec.streaming) if own else None
        return read_files(spec.path, "data.path", spec.streaming), held_out
    if isinstance(spec, HubData):
        own = spec.eval_split is not None and eval_samples > 0
        return read_hub(spec, spec.split), read_hub(spec, spec.eval_split or "") if own else None
    if isinstance(spec, PluginData):
        own = spec.eval_function is not None and eval_samples > 0
        held_out = read_plugin(spec.eval_function or "", "data.eval_function", spec) if own else None
        return read_plugin(spec.function, "data.function", spec), held_out
    raise AssertionError(f"no reader for {type(spec).__name__}")


def _load_stream(
    spec: RowsData,
    source: RowSource,
    eval_source: RowSource | None,
    tokenizer: Any,
    eval_samples: int,
    need_response: bool,
    needs: Needs,
) -> Dataset:
    """Hold out the first rows. Under on_bad_row=error read everything once, so that no bad row ends the run later."""
    of_held_out = needs if eval_source is None else replace(needs, response=False)
    held_out, bad, read = first_rows(eval_source or source, eval_samples, tokenizer, spec, need_response, of_held_out)
    skip = read if eval_source is None else 0
    rows = names = None
    statistics: Metrics = {}
    if spec.on_bad_row is OnBadRow.error:
        found = survey(source, tokenizer, spec, BadRows(), needs, skip)
        names = frozenset(found.column_names)
        found.bad.add(row for row in bad if eval_source is not None or row.reason == NO_RESPONSE)
        if found.bad.count:
            raise DataError(bad_rows_message(found.bad, found.rows + (read if eval_source is not None else 0)))
        rows = len(found.prompt_lengths) - skip
        statistics = {
            "data/train_rows": float(rows),
            "data/truncated_rows": float(found.truncated),
            "data/prompt_tokens_mean": float(np.mean(found.prompt_lengths or [0])),
            "data/prompt_tokens_max": float(max(found.prompt_lengths, default=0)),
            "data/teacher_prompt_rows": float(found.teacher_prompts),
        }
    _require_held_out(len(held_out), eval_samples, bad)
    stream = RowStream(source, tokenizer, spec, skip, rows, needs, names)
    require_usable(stream)
    statistics |= {"data/held_out_rows": float(len(held_out)), "data/bad_rows": float(len(bad))}
    return Dataset(stream, held_out, bad, statistics)


def _table(source: RowSource, tokenizer: Any, spec: DataCommon, needs: Needs) -> tuple[PromptTable, list[BadRow]]:
    """The usable rows, and the bad ones in the order of the source."""
    chunks = list(read_chunks(source, tokenizer, spec, needs))
    table = concatenate([chunk.table for chunk in chunks])
    check_refusals(len(table), [row for chunk in chunks for row in chunk.refused], tokenizer)
    return table, [row for chunk in chunks for row in chunk.bad]


def _split(
    table: PromptTable, source: RowSource, eval_samples: int, need_response: bool, spec: DataCommon, bad: list[BadRow]
) -> tuple[PromptTable, PromptTable]:
    """The last rows are held out. Under on_bad_row=skip, the last ones that have what evaluation needs."""
    if len(table) <= eval_samples:
        raise DataError(
            f"{source.name} has {len(table)} rows{_skipped(bad)}: holding out eval.samples={eval_samples} of them "
            "leaves none to train on; use a smaller eval.samples (0: no evaluation), or more rows"
        )
    candidates = np.arange(len(table))
    if need_response and spec.on_bad_row is OnBadRow.skip:
        candidates = np.flatnonzero(table.response_lengths)
        if len(candidates) < eval_samples:
            raise DataError(
                f"{source.name}: only {len(candidates)} rows have the reference response that eval.responses=dataset "
                f"needs; use eval.samples={len(candidates)}, or eval.responses=student"
            )
    held_out = candidates[len(candidates) - eval_samples :]
    return table.select(np.setdiff1d(np.arange(len(table)), held_out)), table.select(held_out)


def _stop_at(bad: list[BadRow], total: int, spec: DataCommon) -> None:
    if bad and spec.on_bad_row is OnBadRow.error:
        raise DataError(bad_rows_message(BadRows().add(bad), total))


def bad_rows_message(bad: BadRows, total: int) -> str:
    """One line for the first, and a line a group if there are more."""
    first = f"{bad.count} of {total} rows can't be used, the first is {bad.first}"
    if bad.count < total:
        first += "; use data.on_bad_row=skip to leave them out, or mend them"
    return first if bad.count == 1 else "\n".join([first, *(f"  {line}" for line in bad.lines())])


def _require_rows(train: PromptTable, source: RowSource, bad: list[BadRow]) -> None:
    if len(train) == 0:
        reason = f" ({BadRows().add(bad).lines()[0]})" if bad else ""
        raise DataError(f"{source.name} has no rows to train on{_skipped(bad)}{reason}")


def _require_held_out(rows: int, eval_samples: int, bad: list[BadRow]) -> None:
    if rows < eval_samples:
        raise DataError(
            f"eval.samples={eval_samples}, but there are only {rows} held-out rows{_skipped(bad)}; "
            f"use eval.samples={rows} or more rows"
        )


def _skipped(bad: list[BadRow]) -> str:
    return f" after {counted(len(bad), 'bad row')} left out" if bad else ""


def _require_responses(held_out: PromptTable) -> None:
    missing = [where for where, length in zip(held_out.wheres, held_out.response_lengths, strict=True) if length == 0]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(held_out)} held-out rows have no reference response, the first is {missing[0]}; "
            "use eval.responses=student, give these rows a 'response', or pass over them with data.on_bad_row=skip"
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
        "data/teacher_prompt_rows": float((train.teacher_lengths > 0).sum()),
    }
