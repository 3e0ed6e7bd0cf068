"""Rows in files: JSONL, JSON, CSV, Parquet, and folders of `datasets.save_to_disk`. One row at a time where the format
allows it."""

from __future__ import annotations

import csv
import glob
import gzip
import json
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from rlhf.data.raw import RawRows, RowSource
from rlhf.data.rows import BadRow
from rlhf.errors import DataError, one_line

SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"
"""Files that `datasets.save_to_disk` leaves in the folder of one split, or of several."""


def read_files(pattern: str, key: str = "data.path", streaming: bool = False) -> RowSource:
    """The rows of a file, of a folder's files, or of all files a glob matches, in sorted order.

    Args:
        pattern: Path or glob; a glob may mix kinds, a folder may not.
        key: The configuration key that errors name.
        streaming: Refuse the one kind that can't be read a row at a time.

    Raises:
        DataError: no such file, an unknown ending, or a file that isn't what its ending says. At once, before a row
            is asked for, as far as names go.
    """
    name = f"{key}={pattern}"
    path = Path(pattern).expanduser()
    if (path / SAVED_SPLITS).is_file():
        splits = sorted(file.parent.name for file in path.glob(f"*/{SAVED}"))
        raise DataError(f"{name} holds the splits {', '.join(splits)}; name one, e.g. {name.rstrip('/')}/{splits[0]}")
    if (path / SAVED).is_file():
        return RowSource(name, lambda: _readable(_read_saved(path), path, key))
    files = _in_folder(path, name) if path.is_dir() else _matching(path, name)
    unknown = [file for file in files if _kind(file) is None]
    if unknown:
        raise DataError(f"{name}: {unknown[0]} ends in none of {', '.join(READERS)}")
    whole = [file for file in files if _kind(file) == ".json"]
    if streaming and whole:
        raise DataError(
            f"{name}: {whole[0]} is one array, which can't be streamed; use .jsonl, or data.streaming=false"
        )
    return RowSource(name, lambda: (row for file in files for row in _readable(READERS[_kind(file)](file), file, key)))


def _kind(file: Path) -> Any:
    """The ending in READERS, or None."""
    return next((ending for ending in READERS if file.name.lower().endswith(ending)), None)


def _in_folder(folder: Path, name: str) -> list[Path]:
    """The files of the one kind that the folder holds; others (a README) are passed over."""
    try:
        files = sorted(file for file in folder.iterdir() if _kind(file) and file.is_file())
    except OSError as error:
        raise DataError(f"{name} can't be read: {one_line(error)}") from error
    kinds = sorted({_kind(file) for file in files})
    if not kinds:
        raise DataError(f"{name} is a folder without files that end in {', '.join(READERS)}")
    if len(kinds) > 1:
        raise DataError(f"{name} holds {' and '.join(kinds)} files; say which: '{name.rstrip('/')}/*{kinds[0]}'")
    return files


def _matching(path: Path, name: str) -> list[Path]:
    if path.exists() and not path.is_file():
        raise DataError(f"{name} is no regular file")
    matches = [str(path)] if path.is_file() else sorted(glob.glob(str(path), recursive=True))
    files = [Path(match) for match in matches if Path(match).is_file()]
    if not files:
        raise DataError(f"{name}: no such file, and as a glob it matches none")
    return files


def _readable(rows: RawRows, file: Path, key: str) -> RawRows:
    try:
        yield from rows
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{key}: {file} can't be read: {one_line(error)}") from error
    except DataError as error:
        raise DataError(f"{key}: {error}") from error


def _read_jsonl(file: Path) -> RawRows:
    # Binary lines: text mode would also split at other separators, and one wrong byte would end the whole file.
    with gzip.open(file) if file.suffix.lower() == ".gz" else file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{file}:{number}"
            try:
                text = line.decode("utf-8-sig")
                if text.strip():
                    yield where, _parsed(text)
            except json.JSONDecodeError as error:
                yield where, BadRow(where, f"broken JSON: {error.msg} at column {error.colno}")
            except UnicodeDecodeError as error:
                yield where, BadRow(where, f"not UTF-8: {error.reason} at byte {error.start + 1}")
            except RecursionError:
                yield where, BadRow(where, "broken JSON: nested too deeply")
            except ValueError as error:
                yield where, BadRow(where, f"broken JSON: {_shortened(error)}")


def _read_json(file: Path) -> RawRows:
    hint = "a .json file is one array of objects; files with one object a line end in .jsonl"
    try:
        rows = _parsed(file.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise DataError(f"{file}:{error.lineno}: broken JSON: {error.msg} at column {error.colno}; {hint}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8: {error.reason} at byte {error.start + 1}") from error
    except RecursionError as error:
        raise DataError(f"{file}: broken JSON: nested too deeply") from error
    except ValueError as error:
        raise DataError(f"{file}: broken JSON: {_shortened(error)}") from error
    if not isinstance(rows, list):
        raise DataError(f"{file}: {hint}")
    for index, row in enumerate(rows):
        yield f"{file}[{index}]", row


def _parsed(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_refuse_repeated)


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; one of two values under one name would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it names {next(name for name in names if names.count(name) > 1)!r} twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value, write null")


def _shortened(error: ValueError) -> str:
    """Python's words for a number of too many digits end with advice that is of no use here."""
    return one_line(error).partition("; use sys.")[0]


def _read_csv(file: Path) -> RawRows:
    """Every value is a string; an empty one counts as absent."""
    try:
        csv.field_size_limit(sys.maxsize)  # the default, 128 KiB, is shorter than some prompts
        with file.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.reader(lines, strict=True)
            header = next(reader, [])
            if len(set(header)) < len(header):
                raise DataError(f"{file}: the header names a column twice: {', '.join(header)}")
            for values in reader:
                where = f"{file}:{reader.line_num}"
                if values and len(values) != len(header):
                    yield where, BadRow(where, f"{len(values)} values, the header has {len(header)} columns")
                elif values:
                    yield where, {name: value or None for name, value in zip(header, values, strict=True)}
    except csv.Error as error:
        raise DataError(f"{file}:{reader.line_num}: broken CSV: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8: {error.reason} at byte {error.start + 1}") from error


def _read_parquet(file: Path) -> RawRows:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as parquet:
            names = parquet.schema_arrow.names
            if len(set(names)) < len(names):
                raise DataError(f"{file} names a column twice: {', '.join(names)}")
            index = 0
            for batch in parquet.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    yield f"{file}[{index}]", row
                    index += 1
    except (pyarrow.ArrowException, OverflowError, ValueError) as error:  # e.g. a date that Python doesn't have
        raise DataError(f"{file}: not a readable Parquet file: {one_line(error)}") from error


def _read_saved(folder: Path) -> RawRows:
    """Memory-mapped by `datasets`, so one row at a time."""
    try:
        import datasets

        rows = datasets.load_from_disk(str(folder))
    except ImportError as error:
        raise DataError(f"{folder} needs the package datasets: pip install datasets ({one_line(error)})") from error
    except Exception as error:  # a broken or missing file: datasets has no common base
        raise DataError(f"{folder} can't be loaded: {type(error).__name__}: {one_line(error)[:300]}") from error
    for index, row in enumerate(rows):
        yield f"{folder}[{index}]", row


READERS: dict[str, Callable[[Path], RawRows]] = {
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
"""Ending -> reader."""
