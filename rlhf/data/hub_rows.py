"""Rows of a dataset on a hub, or of a folder that `datasets.load_dataset` takes."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable
from typing import Any

from rlhf import hub
from rlhf.config.data import HubData
from rlhf.data.raw import RowSource
from rlhf.errors import DataError, one_line

DOWNLOAD = {
    "hf": "run `hf download {name} --repo-type dataset --local-dir DIR` with a network, then use data.name=DIR",
    "ms": "run `modelscope download --dataset {name} --local_dir DIR` with a network, then use data.name=DIR",
}
"""What to do without a network."""


def read_hub(spec: HubData, split: str) -> RowSource:
    """The rows of one split; with `data.streaming=true` they are fetched as they are asked for.

    Raises:
        DataError: the dataset, subset or split can't be loaded, or a column doesn't exist.
    """
    what = f"data.name={spec.name}" + (f" data.subset={spec.subset}" if spec.subset else "") + f", split {split}"
    rows = _load(spec, split, what)
    columns = getattr(rows, "column_names", None)
    if columns is None:  # a stream may know them only once it has read a row
        columns = [column for row in itertools.islice(_fetched(rows, what), 1) for column in row]
    _check_columns(spec, list(columns), what)
    label = f"{spec.name}/{split}"
    return RowSource(what, lambda: ((f"{label}[{i}]", row) for i, row in enumerate(_fetched(rows, what))))


def _load(spec: HubData, split: str, what: str) -> Iterable[dict[str, Any]]:
    on_hub = hub.hub_id(spec.name, "data.name") or hub.HubId("hf", spec.name)
    package = "datasets" if on_hub.scheme == "hf" else "modelscope"
    try:
        with warnings.catch_warnings(), hub.quiet():
            warnings.simplefilter("ignore")
            if on_hub.scheme == "ms":
                from modelscope.msdatasets import MsDataset

                loaded = MsDataset.load(on_hub.name, subset_name=spec.subset, split=split, use_streaming=spec.streaming)
                return getattr(loaded, "ds_instance", loaded)  # its own class wraps one of `datasets`
            import datasets

            return datasets.load_dataset(on_hub.name, spec.subset, split=split, streaming=spec.streaming)
    except ImportError as error:
        raise DataError(f"{what} needs the package {package}: pip install {package} ({one_line(error)})") from error
    except Exception as error:  # offline, no such name, a missing split, a broken file: no common base
        away = f"; {DOWNLOAD[on_hub.scheme].format(name=on_hub.name)}" if isinstance(error, ConnectionError) else ""
        raise DataError(f"{what} can't be loaded: {_short(error)}{away}") from error


def _fetched(rows: Iterable[dict[str, Any]], what: str) -> Iterable[dict[str, Any]]:
    """The rows; a hub that goes away in between is one line."""
    try:
        yield from rows
    except Exception as error:
        raise DataError(f"{what} can't be read on: {_short(error)}") from error


def _check_columns(spec: HubData, columns: list[str], what: str) -> None:
    there = f"the columns are {', '.join(columns)}"
    for key, column in (("data.prompt_column", spec.prompt_column), ("data.response_column", spec.response_column)):
        if column is not None and column not in columns:
            raise DataError(f"{key}={column}: {what} has no such column; {there}")
    if spec.prompt_column is None and not {"messages", "prompt"} & set(columns):
        raise DataError(f"{what} has no column messages or prompt; set data.prompt_column; {there}")


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)[:300]}"
