"""Where rows come from: files, the Hugging Face hub, reasoning-gym. Readers yield (where, raw row or BadRow)."""

from __future__ import annotations

import contextlib
import difflib
import glob
import io
import json
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rlhf.config.data import HubData, ReasoningGymData
from rlhf.data.rows import BadRow
from rlhf.errors import DataError, one_line

RawRows = Iterator[tuple[str, Any]]


def read_files(pattern: str, key: str = "data.path") -> RawRows:
    """The rows of a file, or of all files a glob matches in sorted order.

    Args:
        pattern: Path or glob of .jsonl, .json or .parquet files; kinds may be mixed.
        key: The configuration key that errors name.

    Raises:
        DataError: no such file, an unknown ending, or a file that isn't what its ending says. At once, before a row
            is asked for, as far as names go.
    """
    path = Path(pattern).expanduser()
    if path.is_dir():
        raise DataError(f"{key}={pattern} is a folder; name its files, e.g. {key}='{pattern.rstrip('/')}/*.jsonl'")
    matches = [str(path)] if path.is_file() else sorted(glob.glob(str(path), recursive=True))
    files = [Path(name) for name in matches if Path(name).is_file()]
    if not files:
        raise DataError(f"{key}={pattern}: no such file, and as a glob it matches none")
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet}
    unknown = [file for file in files if file.suffix not in readers]
    if unknown:
        raise DataError(f"{key}={pattern}: {unknown[0]} ends in none of .jsonl, .json, .parquet")
    return (row for file in files for row in _readable(readers[file.suffix](file), file, key))


def _readable(rows: RawRows, file: Path, key: str) -> RawRows:
    try:
        yield from rows
    except OSError as error:
        raise DataError(f"{key}: {file} can't be read: {one_line(error)}") from error
    except DataError as error:
        raise DataError(f"{key}: {error}") from error


def _read_jsonl(file: Path) -> RawRows:
    # Binary lines: text mode would also split at other separators, and one wrong byte would end the whole file.
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{file}:{number}"
            try:
                text = line.decode("utf-8-sig")
                if text.strip():
                    yield where, json.loads(text)
            except json.JSONDecodeError as error:
                yield where, BadRow(where, f"broken JSON: {error.msg} at column {error.colno}")
            except UnicodeDecodeError as error:
                yield where, BadRow(where, f"not UTF-8: {error.reason} at byte {error.start + 1}")
            except RecursionError:
                yield where, BadRow(where, "broken JSON: nested too deeply")


def _read_json(file: Path) -> RawRows:
    try:
        rows = json.loads(file.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise DataError(
            f"{file}:{error.lineno}: broken JSON: {error.msg} at column {error.colno}; "
            "a .json file is one array of objects; files with one object a line end in .jsonl"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8: {error.reason} at byte {error.start + 1}") from error
    if not isinstance(rows, list):
        raise DataError(f"{file}: a .json file is one array of objects; files with one object a line end in .jsonl")
    for index, row in enumerate(rows):
        yield f"{file}[{index}]", row


def _read_parquet(file: Path) -> RawRows:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as parquet:
            index = 0
            for batch in parquet.iter_batches():
                for row in batch.to_pylist():
                    yield f"{file}[{index}]", row
                    index += 1
    except pyarrow.ArrowException as error:
        raise DataError(f"{file}: not a readable Parquet file: {one_line(error)}") from error


def read_hub(spec: HubData, split: str) -> RawRows:
    """The rows of one split of a hub dataset, or of a folder that `datasets.load_dataset` takes.

    `prompt_column` and `response_column` stand in for `messages`/`prompt` and `response`.

    Raises:
        DataError: the dataset, subset or split can't be loaded, or a column doesn't exist.
    """
    what = f"data.name={spec.name}" + (f" data.subset={spec.subset}" if spec.subset else "") + f", split {split}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import datasets

            rows = datasets.load_dataset(spec.name, spec.subset, split=split)
    except ImportError as error:
        raise DataError(f"{what} needs the package datasets: pip install datasets ({one_line(error)})") from error
    except Exception as error:  # offline, no such name, a missing split, a broken file: datasets has no common base
        raise DataError(f"{what} can't be loaded: {type(error).__name__}: {one_line(error)[:300]}") from error
    columns = rows.column_names
    there = f"the columns are {', '.join(columns)}"
    for key, column in (("data.prompt_column", spec.prompt_column), ("data.response_column", spec.response_column)):
        if column is not None and column not in columns:
            raise DataError(f"{key}={column}: {what} has no such column; {there}")
    if spec.prompt_column is None and not {"messages", "prompt"} & set(columns):
        raise DataError(f"{what} has no column messages or prompt; set data.prompt_column; {there}")
    return ((f"{spec.name}/{split}[{index}]", _renamed(row, spec)) for index, row in enumerate(rows))


def _renamed(row: dict[str, Any], spec: HubData) -> dict[str, Any]:
    """The chosen columns under the names rows know; they displace columns that had these names before."""
    row = dict(row)
    if spec.response_column is not None:
        row["response"] = row.pop(spec.response_column)
    if spec.prompt_column is not None:
        prompt = row.pop(spec.prompt_column)
        row.pop("messages", None)
        row["prompt"] = prompt
    return row


def read_reasoning_gym(spec: ReasoningGymData, count: int, seed: int) -> RawRows:
    """`count` rows of a reasoning-gym task, the same ones for the same seed.

    The reference response is the task's worked solution (`answer_cot`) where it has one, else its answer. The columns
    `task` and `entry` are what a verifier needs: `reasoning_gym.get_score_answer_fn(task)(answer, entry)`.

    Raises:
        DataError: the task doesn't exist, doesn't take the options, or fails.
    """
    reserved = sorted({"size", "seed"} & set(spec.options))
    if reserved:
        raise DataError(f"data.options can't set {' or '.join(reserved)}; use data.size and run.seed")
    # Entry i is drawn from seed + i: neighbouring run seeds would share almost all rows, so spread them out.
    task_seed = int(np.random.SeedSequence(seed).generate_state(1)[0] >> 1)
    with _contained(task_seed):
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise DataError("data=reasoning_gym needs the package reasoning-gym: pip install reasoning-gym") from error
        if spec.task not in DATASETS:
            close = difflib.get_close_matches(spec.task, DATASETS, n=5, cutoff=0.5)
            hint = f"close matches: {', '.join(close)}" if close else f"there are {', '.join(sorted(DATASETS))}"
            raise DataError(f"data.task={spec.task} is no task of reasoning-gym; {hint}")
        try:
            task = reasoning_gym.create_dataset(spec.task, size=count, seed=task_seed, **spec.options)
        except Exception as error:
            raise DataError(
                f"data.task={spec.task} doesn't take data.options={dict(spec.options)}: {one_line(error)}"
            ) from error
        entries = []
        for index in range(count):
            try:
                entries.append(task[index])
            except Exception as error:
                raise DataError(f"data.task={spec.task} failed to make row {index}: {one_line(error)}") from error
    return ((f"{spec.task}[{i}]", _exercise(spec.task, entry)) for i, entry in enumerate(entries))


def _exercise(task: str, entry: dict[str, Any]) -> dict[str, Any]:
    solution = entry["metadata"].get("answer_cot") or entry["answer"]
    response = None if solution is None else str(solution)
    return {"prompt": entry["question"], "response": response, "task": task, "entry": entry}


@contextlib.contextmanager
def _contained(seed: int) -> Iterator[None]:
    """Keep a task's habits to itself: warnings on import, dots on stdout, and draws from the global generators."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
